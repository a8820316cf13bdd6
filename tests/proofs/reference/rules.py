"""What suits a job: hosts, and groups of hosts. Each function quotes its rule from the documentation."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iris_ray.model.constraints import Constraint
from iris_ray.model.job_spec import SparePurpose
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU, TPU_NAME, TPU_VM_COUNT, Worker, accelerators, rounded
from iris_ray.state.controller_state import ControllerState
from iris_ray.state.quarantine import avoided_by

HOUR_S = 3600.0
JUST_ENDING_S = 30.0


@dataclass(frozen=True)
class Place:
    """A group of hosts, such as a slice, on which some gang of a job could run once they are idle."""

    name: object
    workers: tuple[Worker, ...]
    members: tuple[Worker, ...]
    size: int
    is_part: bool


def satisfies(constraint: Constraint, worker: Worker) -> bool | None:
    """ "The operators GT, GE, LT and LE compare numbers only". None: the host's value can't be compared."""
    try:
        return constraint.matches(worker.attributes)
    except TypeError:
        return None


def suits(job: Job, worker: Worker) -> bool:
    """ "Conditions that every host must satisfy"; "a taint keeps jobs away from a host unless they tolerate the taint";
    "drain: a host that takes nothing new".
    """
    return (
        all(satisfies(one, worker) is True for one in job.requirement.constraints)
        and job.requirement.tolerated.issuperset(worker.taints)
        and worker.draining is None
        and not worker.duplicate
        and not (worker.slice_name and worker.host_index is None)
        and all(worker.resources.get(resource, 0.0) >= need for resource, need in job.requirement.resources)
    )


def is_complete(workers: Sequence[Worker]) -> bool:
    """ "The slice takes no jobs until it is complete": it has each of its numbers once, and no host is draining."""
    counts = {count.value for worker in workers if (count := worker.attributes.get(TPU_VM_COUNT))} or {len(workers)}
    numbers = [worker.host_index for worker in workers]
    is_sound = all(worker.draining is None for worker in workers)
    return is_sound and len(counts) == 1 and sorted(map(str, numbers)) == sorted(map(str, range(int(str(*counts)))))


def places(job: Job, state: ControllerState) -> Iterator[Place]:
    """ "A group is a set of hosts with the same value of one attribute"; "iris_ray allocates whole slices only"."""
    config, members = job.spec.coscheduling, dict[object, list[Worker]]()
    for worker in state.fleet.workers.values():
        key = worker.node_id if config is None else worker.attributes.get(config.group_by)
        if config is not None and config.group_by == TPU_NAME:
            key = worker.slice_name
        if key is not None:
            members.setdefault(key, []).append(worker)
    for name, workers in members.items():
        is_slice = config is not None and config.group_by == TPU_NAME
        if is_slice and not is_complete(workers):
            continue
        size = len(workers) if job.requirement.whole_groups else job.requirement.replicas
        fit = tuple(worker for worker in workers if suits(job, worker))
        if len(fit) >= size and not (is_slice and job.requirement.whole_groups and len(fit) < len(workers)):
            yield Place(name, fit, tuple(workers), size, is_slice and size < len(workers))


def is_suspected(worker: Worker, now: float) -> bool:
    """A host that did not answer gets no new tasks for a while."""
    return worker.suspected is not None and now < worker.suspected_until


def has_room(job: Job, worker: Worker, taken: dict[str, float], idle: bool = False) -> bool:
    """ "Each task takes all chips of its host, since libtpu allows only one gang on a host". ``idle``: once it is."""
    free = worker.resources if idle else worker.free
    left = {resource: rounded(amount - taken.get(resource, 0.0)) for resource, amount in free.items()}
    if job.requirement.chips and (left.get(TPU) != worker.resources.get(TPU) or (worker.foreign and not idle)):
        return False
    return all(left.get(resource, 0.0) >= need for resource, need in job.requirement.resources)


def chips_on(job: Job, worker: Worker) -> float:
    """The chips and GPUs of a task, which its user's limit counts."""
    return accelerators(job.requirement.demand(worker))


def preferred(job: Job, worker: Worker) -> int:
    """ "Hosts that satisfy more of them are preferred"."""
    return sum(satisfies(one, worker) is True for one in job.requirement.preferences)


def avoids(job: Job, worker: Worker, state: ControllerState, now: float) -> bool:
    """ "A failure counts against one user on one host"; after a failed launch a job avoids its hosts."""
    return worker.node_id in (*avoided_by(job, now), *state.fleet.avoided_by(job.spec.user, now))


# -- the order ---------------------------------------------------------------------------------------------------------


def comes_last(job: Job) -> bool:
    """ "Jobs grow and get spare slices only after every waiting job"; a job that yields comes last, too."""
    spare = job.spec.spare_for
    return job.yields or (spare is not None and spare.purpose is not SparePurpose.REPLACEMENT)


def bound_of(job: Job, bound: float) -> float:
    """ "After ten minutes, and in PRODUCTION at once"."""
    return 0.0 if job.spec.priority is PriorityBand.PRODUCTION else bound


def is_returning(job: Job, gang: Gang, now: float) -> bool:
    """ "A gang that has run and whose attempt has just ended comes first in its own band. Independent tasks don't"."""
    return job.spec.coscheduling is not None and not job.yields and now < gang.returning_until


def is_timed_out(job: Job, now: float) -> bool:
    """ "Give the job up if none of its tasks has run after this time", counted from its entry into the queue."""
    limit = job.spec.scheduling_timeout
    return limit is not None and not job.started and now >= max(job.submitted_at, job.ready_at) + limit


def can_never_be_compared(job: Job, state: ControllerState, grouped: bool) -> bool:
    """ "If no host that satisfies the other constraints has a comparable value, a job that has never run ends as
    UNSCHEDULABLE". A host without the attribute says nothing. ``grouped``: of the hosts in groups that it can use only.
    """
    config = job.spec.coscheduling
    hosts = [w for w in state.fleet.workers.values() if not grouped or not config or config.group_by in w.attributes]
    for one in (one for one in job.requirement.constraints if one.orders):
        others = [other for other in job.requirement.constraints if other is not one]
        these = [w for w in hosts if one.key in w.attributes and all(satisfies(o, w) is not False for o in others)]
        if {satisfies(one, worker) for worker in these} == {None} and not job.started:
            return True
    return False


# -- expectations ------------------------------------------------------------------------------------------------------


def free_in(worker: Worker, state: ControllerState, now: float) -> tuple[float, float]:
    """ "iris_ray expects a running attempt to run for as long again as it has run so far, but not beyond its own
    max_runtime". The least and the most that this may mean, in seconds from now: of an attempt that has not begun, or
    has ended without a confirmation, the documentation says nothing.
    """
    least = most = 0.0
    for occupant in worker.occupants:
        job = state.jobs.get(occupant[1].job_id)
        gang = job.gangs[occupant[1].gang] if job is not None else None
        if job is None or gang is None or occupant in worker.ending or gang.running_since == math.inf:
            most = math.inf
            continue
        left = job.began_at + (job.spec.max_runtime or math.inf) - now
        expected = max(0.0, min(now - gang.running_since, left))
        least, most = max(least, expected), max(most, expected)
    return least, math.inf if worker.foreign or worker.elsewhere else most
