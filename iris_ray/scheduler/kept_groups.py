"""Which groups are kept for a gang that waits, so that other jobs can't pass it for ever."""

from itertools import islice

from iris_ray.model.jobs import Gang, Job
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.deadlines import Deadlines
from iris_ray.scheduler.placement import best_free, buckets_for, num_groups
from iris_ray.scheduler.plan import Plan
from iris_ray.state.fleet import Fleet
from iris_ray.state.groups import Group


def keep_groups(
    job: Job, gang: Gang, available: Availability, fleet: Fleet, deadlines: Deadlines, plan: Plan
) -> tuple[str, ...]:
    """Keep groups for a gang that is starving or returning, and return their names. Other gangs get none.

    Free groups are kept first, then those closest to being free. A starving gang keeps as few groups as it can use, and
    only one such gang among those that compete. A returning gang keeps as many as it had if there are so many; groups
    count that are suspected to be lost.
    """
    returning = deadlines.is_returning(job)
    if not (returning or deadlines.is_starving(gang)):
        return ()
    buckets, wanted = buckets_for(job, available), num_groups(job)
    exist = sum(available.suitable(bucket, later=returning) for bucket in buckets)
    needed = wanted[0]
    if returning:
        needed = max([needed, *(count for count in wanted if count <= min(exist, len(gang.groups)))])
    if exist < needed or not (returning or not available.is_any_kept(buckets)):
        return ()
    names = best_free(needed, available, buckets, fleet.held_by(job.spec.owner))
    others = (name for name in available.closest_to_free(buckets) if not _is_kept(available.group(name), plan))
    names += islice(others, needed - len(names))
    for name in names:
        for worker in available.group(name).workers:
            plan.keep(worker, job.spec.job_id)
    return tuple(names)


def _is_kept(group: Group, plan: Plan) -> bool:
    return not plan.kept.keys().isdisjoint(group.node_ids)
