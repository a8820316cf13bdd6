"""Which groups a gang gets: all that it needs, or none."""

from collections.abc import Iterable, Mapping

from iris_ray.model.jobs import Gang, Job
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evaluation import LARGER
from iris_ray.scheduler.plan import Plan
from iris_ray.state.events import AssignedEvent, GangAssignedEvent, TaskAssignedEvent


def num_groups(job: Job) -> tuple[int, ...]:
    """Return the numbers of groups that a gang of the job can use, ascending."""
    return job.spec.coscheduling.num_groups if job.spec.coscheduling else (1,)


def buckets_for(job: Job, available: Availability) -> tuple[int, ...]:
    """Return the buckets in which to look for groups, the preferred one first.

    A gang gets parts of larger slices only if there are too few slices of the right size, those in use included.
    """
    candidates, bucket = available.candidates, _equal_bucket(job, available)
    exist = candidates.suitable[bucket] + candidates.temporarily_unsuitable[bucket]
    if candidates.requirement.whole_groups or exist >= num_groups(job)[0]:
        return (bucket,)
    return bucket, LARGER


def choose(job: Job, available: Availability, buckets: tuple[int, ...], own: Iterable[str]) -> list[str]:
    """Return the names of the groups to take: as many as can run now, or none if it is better to wait.

    It is better to wait if the gang can use more groups, and enough of them are about to be free.
    """
    wanted = num_groups(job)
    free = sum(map(available.free, buckets))
    soon = sum(map(available.free_soon, buckets))
    fitting = [count for count in wanted if count <= free]
    if not fitting or (soon and any(free < count <= free + soon for count in wanted)):
        return []
    return best_free(fitting[-1], available, buckets, own)


def best_free(count: int, available: Availability, buckets: Iterable[int], own: Iterable[str]) -> list[str]:
    """Return the names of the best free groups, at most ``count``."""
    names: list[str] = []
    for bucket in buckets:
        names += available.best(bucket, min(count - len(names), available.free(bucket)), own)
    return names


def assign(
    job: Job, gang: Gang, available: Availability, names: list[str], plan: Plan
) -> tuple[AssignedEvent, Mapping[str, float]]:
    """Take the groups from the plan. Return the event that assigns them to the gang, and the resources it takes."""
    spec, requirement = job.spec, job.requirement
    granted: dict[str, float] = {}
    names = sorted(names)
    groups = [available.members(name) for name in names]
    for worker in (worker for group in groups for worker in group):
        demand = requirement.demand(worker)
        plan.take(worker, demand, spec.job_id)
        for resource, amount in demand.items():
            granted[resource] = granted.get(resource, 0.0) + amount
    if spec.coscheduling is None:
        ((worker,),) = groups
        return TaskAssignedEvent(spec.job_id, gang.tasks[0].index, worker.node_id), granted
    node_ids = tuple(tuple(worker.node_id for worker in group) for group in groups)
    return GangAssignedEvent(spec.job_id, tuple(names), node_ids), granted


def _equal_bucket(job: Job, available: Availability) -> int:
    """Return the bucket of equal groups to use: of the sizes with enough groups, the one with the most free groups."""
    candidates = available.candidates
    if not candidates.requirement.whole_groups:
        return candidates.requirement.replicas
    suitable, least = candidates.suitable, num_groups(job)[0]
    return max(
        (size for size in suitable if size != LARGER),
        key=lambda size: (suitable[size] >= least, available.free(size), suitable[size], size),
        default=candidates.requirement.replicas,
    )
