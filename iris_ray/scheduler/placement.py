"""Which groups a gang gets: all that it needs, or none."""

from collections.abc import Iterable, Mapping

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.workers import TPU
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evaluation import LARGER
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.state.events import AssignedEvent, GangAssignedEvent, TaskAssignedEvent


def num_groups(job: Job) -> tuple[int, ...]:
    """Return the numbers of groups that a gang of the job can use, ascending."""
    return job.spec.coscheduling.num_groups if job.spec.coscheduling else (1,)


def buckets_for(job: Job, available: Availability) -> tuple[int, ...]:
    """Return the buckets in which to look for groups, the preferred one first.

    A gang gets parts of larger slices only if there are too few slices of the right size, those in use included.
    """
    requirement, bucket = available.requirement, _equal_bucket(job, available)
    if requirement.whole_groups or requirement.group_by is None:
        return (bucket,)
    exist = available.suitable(bucket, later=True)
    return (bucket,) if exist >= num_groups(job)[0] else (bucket, LARGER)


def choose(
    job: Job, available: Availability, own: Iterable[str], wanted: tuple[int, ...], hopes_for_more: bool
) -> tuple[list[str], int]:
    """Return the names of the groups to take: as many as can run now, or none if it is better to wait.

    It may be better to wait if the gang can use more groups, and enough of them are about to be free.

    Args:
        job: whose gang it is.
        available: where to look.
        own: slices where the job's owner keeps actors; they are preferred.
        wanted: the numbers of groups that would do, ascending.
        hopes_for_more: whether to wait for groups that are about to be free.

    Returns:
        The names, the best first, and how many groups are free, but no more than the gang can use.
    """
    buckets: tuple[int, ...] = (_equal_bucket(job, available),)
    names = best_free(wanted[-1], available, buckets, own)
    if len(names) < wanted[0]:
        buckets = buckets_for(job, available)
        names += best_free(wanted[-1] - len(names), available, buckets[1:], own)
    free = len(names)
    fitting = [count for count in wanted if count <= free]
    if not fitting:
        return [], free
    soon = sum(map(available.free_soon, buckets)) if hopes_for_more and free < wanted[-1] else 0
    if soon and any(free < count <= free + soon for count in wanted):
        return [], free
    return names[: fitting[-1]], free


def best_free(count: int, available: Availability, buckets: Iterable[int], own: Iterable[str]) -> list[str]:
    """Return the names of the best free groups, at most ``count``."""
    names: list[str] = []
    for bucket in buckets:
        names += available.best(bucket, count - len(names), own)
    return names


def assign(
    job: Job, gang: Gang, available: Availability, names: list[str], plan: Plan
) -> tuple[AssignedEvent, Mapping[str, float]]:
    """Take the groups from the plan. Return the event that assigns them to the gang, and the resources it takes."""
    spec, requirement = job.spec, job.requirement
    granted: dict[str, float] = {}
    demands: dict[float, dict[str, float]] = {}  # by a host's chips
    names = sorted(names)
    groups = [available.members(name) for name in names]
    for worker in (worker for group in groups for worker in group):
        chips = worker.resources.get(TPU, 0.0)
        demand = demands.get(chips) or demands.setdefault(chips, requirement.demand(worker))
        plan.take(worker, demand, spec.job_id)
        for resource, amount in demand.items():
            granted[resource] = granted.get(resource, 0.0) + amount
    if spec.coscheduling is None:
        ((worker,),) = groups
        return TaskAssignedEvent(spec.job_id, gang.tasks[0].index, worker.node_id), granted
    node_ids = tuple(tuple(worker.node_id for worker in group) for group in groups)
    return GangAssignedEvent(spec.job_id, tuple(names), node_ids), granted


def hosts_of(assignment: AssignedEvent) -> tuple[str, ...]:
    """Return the node ids of the hosts that an event assigns."""
    if isinstance(assignment, TaskAssignedEvent):
        return (assignment.node_id,)
    return tuple(node_id for group in assignment.groups for node_id in group)


def _equal_bucket(job: Job, available: Availability) -> int:
    """Return the bucket of equal groups to use: of the sizes with enough groups, the one with the most free groups."""
    requirement, least = available.requirement, num_groups(job)[0]
    if not requirement.whole_groups:
        return requirement.replicas
    sizes = (+available.candidates.suitable.buckets).keys() - {LARGER}
    if len(sizes) < 2:
        return next(iter(sizes), requirement.replicas)
    suitable = {size: available.suitable(size) for size in sizes}
    return max(sizes, key=lambda size: (suitable[size] >= least, available.free(size), suitable[size], size))
