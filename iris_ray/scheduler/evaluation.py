"""Evaluates a group of workers for a requirement: free, in use or unsuitable, and why.

`evaluate` runs the steps in `_STEPS`. Each step either rejects the group, which ends the evaluation, or adds to the
findings. A group that passes all steps is free.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from heapq import nsmallest

from iris_ray.model.constraints import TAINT_PREFIX, AttributeValue, Constraint
from iris_ray.model.requirement import BYTES_PER_GB, Requirement
from iris_ray.model.workers import GPU, TPU, TPU_VM_COUNT, UNCONFIRMED_S, Resources, Worker, accelerators
from iris_ray.state.groups import Group

LARGER = 0
"""The bucket of slices of which a gang takes only a part."""

Rank = tuple[int, float, int, int, str]
"""Sort key of free groups, best first: unmet preferences (0 in an evaluation), chips and GPUs that may idle, 1 if an
owner keeps actors there (negative if it is the job's), hosts left over (for parts of slices, `Group.splits`), name."""

Excluded = tuple[int | str, int]
"""A constraint (by position) or a taint (by name), and the number of workers that it excludes."""


class Status(Enum):
    FREE = "free"
    IN_USE = "in use"  # it would be free without tasks on it
    UNSUITABLE = "unsuitable"


@dataclass(slots=True)
class Evaluation:
    """The result of evaluating a group for a requirement.

    Attributes:
        status: whether a gang can use the group now, later or not at all.
        bucket: the number of hosts that a gang takes of the group; `LARGER` if it takes only a part of a slice. A gang
            takes groups of one bucket, so that its slices are equal, and of `LARGER` if the others are too few.
        rank: the group's sort key among the free groups; None if it is not free.
        eligible: the workers that suit the requirement, whether in use or not.
        later: the eligible workers, and those excluded only for temporary reasons: foreign use of chips, or suspicion.
            Empty if the group is unsuitable for another reason.
        usable: the eligible workers with room for a task; None if these are all members of the group.
        hosts_missing: the number of hosts that the group lacks to be free.
        shortfall: the sum over these hosts of the missing share of a task's needs; 1 for a host that lacks everything.
        free_soon: whether the group will be free once the ends of all ended attempts are confirmed.
        obstacle: why the group is not free, for people.
        used_by: ids of the jobs that use the group; only if the obstacle was requested.
        excluded: the number of workers that each constraint or taint excludes. Workers that could never run such a task
            don't count.
        is_incomparable: whether a constraint can't be evaluated on some member.
        recheck_at: when time alone may change the evaluation; seconds on the caller's clock.
        rejected: the group if it is unsuitable, which it stays, for the same reason, until its members change or until
            ``recheck_at``.
    """

    status: Status
    bucket: int
    rank: Rank | None = None
    eligible: tuple[Worker, ...] = ()
    later: tuple[Worker, ...] = ()
    usable: tuple[Worker, ...] | None = None
    hosts_missing: int = 0
    shortfall: float = 0.0
    free_soon: bool = False
    obstacle: str = ""
    used_by: tuple[str, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    is_incomparable: bool = False
    recheck_at: float | None = None
    rejected: Group | None = field(default=None, compare=False)


def evaluate(group: Group, need: Requirement, held: bool, now: float, in_words: bool = True) -> Evaluation:
    """Evaluate a group for a requirement.

    A slice is unsuitable if any of its hosts is missing or takes no new tasks, since it fails as a whole. Other groups
    need enough suitable members.

    Args:
        group, need: the workers and the requirement.
        held: whether an owner keeps actors on the group.
        now: seconds on the clock of the events.
        in_words: whether to name the jobs that use the group.
    """
    tasks = group.size if need.whole_groups else need.replicas
    bucket = tasks if not group.is_slice or group.size == tasks else LARGER
    if not group.has_issues and group.size >= tasks and _suits_at_first_sight(group, need):
        if _all_have_room(group, need):
            rank = _rank(group, need, held, len(group.workers) - tasks)
            return Evaluation(Status.FREE, bucket, rank, group.workers, group.workers)
        if not need.resources:
            found = _Findings(group, need, tasks, bucket, now, in_words, eligible=group.workers, later=group.workers)
            return _check_occupancy(found) or _free(found, held)
    found = _Findings(group, need, tasks, bucket, now, in_words)
    for step in _STEPS:
        rejection = step(found)
        if rejection is not None:
            return rejection
    return _free(found, held)


def _suits_at_first_sight(group: Group, need: Requirement) -> bool:
    """Return whether all members satisfy all constraints by shared attributes, so that only their room matters."""
    attributes = group.workers[0].attributes
    try:
        for constraint in need.constraints:
            if not group.shares(constraint.key) or not constraint.matches(attributes):
                return False
    except TypeError:
        return False
    return True


# -- the steps ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Findings:
    """The findings of the steps so far; for the other fields, see `Evaluation`.

    Attributes:
        tasks: the number of hosts that a gang takes of the group.
        in_words: whether to name the jobs that use the group.
        unfit: node_id → why the worker can't take a task, as text or as the constraint that it fails.
        unfit_for_now: node_id → a temporary reason.
        all_have_room: whether every member has room for a task.
    """

    group: Group
    need: Requirement
    tasks: int
    bucket: int
    now: float
    in_words: bool
    unfit: dict[str, str | Constraint] = field(default_factory=dict)
    unfit_for_now: dict[str, str | Constraint] = field(default_factory=dict)
    excluded: list[Excluded] = field(default_factory=list)
    recheck_at: float | None = None
    all_have_room: bool = False
    eligible: tuple[Worker, ...] = ()
    later: tuple[Worker, ...] = ()
    usable: tuple[Worker, ...] = ()

    def unsuitable(self, hosts_missing: int, obstacle: str) -> Evaluation:
        """Return a rejection."""
        return Evaluation(
            Status.UNSUITABLE,
            self.bucket,
            later=self.later,
            hosts_missing=hosts_missing,
            obstacle=obstacle,
            excluded=tuple(self.excluded),
            recheck_at=self.recheck_at,
            rejected=self.group,
        )


def _check_constraints(found: _Findings) -> Evaluation | None:
    """Reject a group if no worker satisfies all constraints, or if a constraint can't be evaluated."""
    unfit = found.unfit
    for position, constraint in enumerate(found.need.constraints):
        try:
            failing = _failing(constraint, found.group)
        except TypeError as error:
            found.excluded.clear()
            return replace(
                found.unsuitable(found.tasks, f"{constraint} can't be evaluated: {error}"), is_incomparable=True
            )
        if unfit:
            failing = [node_id for node_id in failing if node_id not in unfit]
        if failing:
            _note_excluded(found, position, failing)
            unfit.update(dict.fromkeys(failing, constraint))
    return found.unsuitable(0, "") if len(unfit) == len(found.group.workers) else None


def _check_taints(found: _Findings) -> Evaluation | None:
    """Exclude workers with a taint that the job does not tolerate. Never rejects."""
    for taint in found.group.taints:
        if taint not in found.need.tolerated:
            tainted = [w for w in found.group.workers if taint in w.attributes and w.node_id not in found.unfit]
            _note_excluded(found, taint, [worker.node_id for worker in tainted])
            name = taint.removeprefix(TAINT_PREFIX)
            found.unfit.update({w.node_id: f"{w.name} is tainted: {name} ({w.attributes[taint]})" for w in tainted})
    return None


def _check_completeness(found: _Findings) -> Evaluation | None:
    """Reject an incomplete slice."""
    group = found.group
    if group.defect is None:
        return None
    return found.unsuitable(abs(group.size - len(group.workers)) or 1, group.defect)


def _check_size(found: _Findings) -> Evaluation | None:
    """Reject a group with fewer hosts than the gang needs of it."""
    size, tasks = found.group.size, found.tasks
    if size >= tasks:
        return None
    return found.unsuitable(tasks - size, f"has {_hosts(size)}, the job needs {tasks}")


def _check_health(found: _Findings) -> Evaluation | None:
    """Exclude unhealthy workers. `_check_enough_workers` rejects."""
    found.unfit.update(found.group.unhealthy)
    return None


def _check_capacity(found: _Findings) -> Evaluation | None:
    """Exclude workers that are too small for a task even when idle. `_check_enough_workers` rejects."""
    group, need = found.group, found.need
    found.all_have_room = _all_have_room(group, need)
    if found.all_have_room or not need.resources:
        return None
    large_enough: Resources | None = None
    for worker in group.workers:
        if worker.resources == large_enough:
            continue  # hosts of a group are usually equal, and a comparison is cheap
        too_small = _too_small(worker, need)
        if too_small is None:
            large_enough = worker.resources
        elif worker.node_id not in found.unfit:
            found.unfit[worker.node_id] = too_small
    return None


def _check_foreign_use(found: _Findings) -> Evaluation | None:
    """Exclude workers whose chips a foreign process uses, if the tasks need chips. `_check_enough_workers` rejects."""
    if found.need.chips:
        found.unfit_for_now.update(found.group.foreign_use)
    return None


def _check_suspicion(found: _Findings) -> Evaluation | None:
    """Exclude workers that may be lost until the suspicion ends. `_check_enough_workers` rejects."""
    suspects = [worker for worker in found.group.suspected if found.now < worker.suspected_until]
    if suspects:
        found.recheck_at = min(worker.suspected_until for worker in suspects)
        found.unfit_for_now.update({w.node_id: f"{w.name} may be lost ({w.suspected})" for w in suspects})
    return None


def _check_enough_workers(found: _Findings) -> Evaluation | None:
    """Reject a slice with any worker that takes no new tasks, or another group with too few eligible workers."""
    group, tasks = found.group, found.tasks
    unfit = found.unfit | found.unfit_for_now if found.unfit_for_now else found.unfit
    left = len(group.workers) - len(unfit)
    impaired = group.is_slice and (group.unhealthy or found.unfit_for_now)
    if len(group.workers) - len(found.unfit) >= tasks and not (group.is_slice and group.unhealthy):
        found.later = _without(found.unfit, group.workers)
    if impaired or left < tasks:
        reasons = {**group.unhealthy, **unfit} if impaired else unfit
        return found.unsuitable(len(unfit) if impaired else tasks - left, _first_in_words(reasons, group))
    found.eligible = _without(unfit, group.workers)
    return None


def _check_occupancy(found: _Findings) -> Evaluation | None:
    """Reject a group with too few eligible workers that have room for a task."""
    eligible, need, tasks = found.eligible, found.need, found.tasks
    if found.all_have_room:
        found.usable = eligible
        return None
    if need.resources:
        usable, full = list[Worker](), list[Worker]()
        for worker in eligible:
            (usable if need.has_room(worker) else full).append(worker)
    else:  # otherwise all would have room
        usable = [worker for worker in eligible if worker.chips_idle]
        full = [worker for worker in eligible if not worker.chips_idle]
    if len(usable) >= tasks:
        found.usable = tuple(usable) if full else eligible
        return None
    passing = [end for w in full if w.ending for at in w.ending.values() if found.now < (end := at + UNCONFIRMED_S)]
    used_by: tuple[str, ...] = ()
    free_soon, obstacle = False, "in use"
    if found.in_words:
        used_by = tuple(dict.fromkeys(attempt.job_id for worker in full for _, attempt in worker.occupants))
        free_soon = bool(passing) and sum(need.has_room(w, soon=found.now) for w in eligible) >= tasks
        obstacle = _use_in_words(full, len(found.group.workers), used_by, free_soon)
    return Evaluation(
        Status.IN_USE,
        found.bucket,
        eligible=eligible,
        later=found.later,
        hosts_missing=(missing := tasks - len(eligible) + len(full)),
        shortfall=sum(nsmallest(missing, map(need.shortfall, full))) if need.resources else missing,
        free_soon=free_soon,
        obstacle=obstacle,
        used_by=used_by,
        excluded=tuple(found.excluded),
        recheck_at=min(filter(None, (*passing, found.recheck_at)), default=None),
    )


_STEPS: tuple[Callable[[_Findings], Evaluation | None], ...] = (
    _check_constraints,
    _check_taints,
    _check_completeness,
    _check_size,
    _check_health,
    _check_capacity,
    _check_foreign_use,
    _check_suspicion,
    _check_enough_workers,
    _check_occupancy,
)


def _free(found: _Findings, held: bool) -> Evaluation:
    """Return the evaluation of a group that has passed all steps."""
    group, usable = found.group, found.usable
    return Evaluation(
        Status.FREE,
        found.bucket,
        _rank(group, found.need, held, len(usable) - found.tasks),
        found.eligible,
        found.later,
        None if len(usable) == len(group.workers) else usable,
        excluded=tuple(found.excluded),
        recheck_at=found.recheck_at,
    )


def unmet(preferences: Sequence[Constraint], group: Group) -> int:
    """Return the number of preferences that some member of a group does not satisfy."""
    return sum(not _prefers(preference, group) for preference in preferences)


def _prefers(preference: Constraint, group: Group) -> bool:
    members = group.workers[:1] if group.shares(preference.key) else group.workers
    try:
        return all(preference.matches(worker.attributes) for worker in members)
    except TypeError:
        return False  # a preference that can't be evaluated is unmet


# -- helpers of the steps ----------------------------------------------------------------------------------------------


def _rank(group: Group, need: Requirement, held: bool, hosts_left: int) -> Rank:
    first = group.workers[0]
    if group.shape is not None:
        hosts_left = group.splits
    elif need.group_by is None and need.chips:
        hosts_left = hosts_left_idle(first)
    return (
        0,
        0.0 if need.chips else accelerators(first.resources),
        int(held),
        hosts_left,
        group.name,
    )


def _failing(constraint: Constraint, group: Group) -> Sequence[str]:
    """Return the node ids of the members that don't satisfy a constraint."""
    if not group.shares(constraint.key):
        return [worker.node_id for worker in group.workers if not constraint.matches(worker.attributes)]
    return () if constraint.matches(group.workers[0].attributes) else group.node_ids


def _note_excluded(found: _Findings, by: int | str, node_ids: Collection[str]) -> None:
    """Count the workers that a constraint or taint excludes, except those that could never run a task of the job.

    Such a worker is a head without CPUs, or any host without chips if the tasks need chips.
    """
    workers, count = found.group.workers, len(node_ids)
    if not found.group.is_slice:  # all hosts of a slice have chips
        if count < len(workers):
            among = set(node_ids)
            workers = tuple([worker for worker in workers if worker.node_id in among])
        for worker in workers:
            has = worker.resources
            if not has.get(TPU) and (found.need.chips or not (has.get("CPU") or has.get(GPU))):
                count -= 1
    if count:
        found.excluded.append((by, count))


def _first_in_words(reasons: Mapping[str, str | Constraint], group: Group) -> str:
    """Return the first reason for which a worker can't take a task."""
    for node_id, why in reasons.items():
        if isinstance(why, str):
            return why
        name = next(worker.name for worker in group.workers if worker.node_id == node_id)
        return f"{name} fails {why}"
    return ""


def _without(unfit: Collection[str], workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
    return tuple(worker for worker in workers if worker.node_id not in unfit) if unfit else workers


def _all_have_room(group: Group, need: Requirement) -> bool:
    """Return whether every member has room for a task."""
    return (not need.chips or group.chips_idle) and (not need.resources or need.fits_into(group.room))


def _too_small(worker: Worker, need: Requirement) -> str | None:
    for resource, amount in need.resources:
        have = worker.resources.get(resource, 0.0)
        if have < amount:
            has, needs = _in_words(resource, have), _in_words(resource, amount)
            return f"{worker.name} has {has} {resource}, a task needs {needs}"
    return None


def _in_words(resource: str, amount: float) -> str:
    return f"{amount / BYTES_PER_GB:,.12g} GB" if resource == "memory" else f"{amount:,.12g}"


def _use_in_words(full: Sequence[Worker], hosts: int, used_by: tuple[str, ...], free_soon: bool) -> str:
    how_many = f"{len(full)} of {_hosts(hosts)} " if len(full) < hosts else ""
    users = [f"{', '.join(used_by[:3])}{', …' if len(used_by) > 3 else ''}"] if used_by else []
    if any(worker.elsewhere for worker in full):
        users.append("work outside iris_ray")
    who = " and ".join(users)
    return f"{how_many}{'about to be freed' if free_soon else 'in use'} by {who}"


def hosts_left_idle(worker: Worker) -> int:
    """Return the number of other hosts in the worker's slice that a single task with chips would leave idle."""
    size = worker.attributes.get(TPU_VM_COUNT, AttributeValue(1)).value
    return int(size) - 1 if isinstance(size, int) else 0


def _hosts(number: int) -> str:
    return f"{number} host" if number == 1 else f"{number} hosts"
