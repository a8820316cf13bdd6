"""Whether a host that registers again is still the host on which its tasks were placed."""

from collections.abc import Mapping
from dataclasses import replace

from iris_ray.model.jobs import Job
from iris_ray.model.workers import Worker
from iris_ray.state.groups import Grouping


def another_host(known: Worker, now: Worker, jobs: Mapping[str, Job]) -> str | None:
    """Return why a host is not the one any more on which its tasks were placed; None if it still is.

    Then it is as if the old host were lost: a gang can't go on in two slices, nor a task on chips that are not there.

    Args:
        known: the host with its occupants, as it registered before.
        now: the same, as it registers now.
        jobs: the jobs of all occupants, by id.
    """
    for resource, held in known.held.items():  # in whole units: a sum of fractions may exceed what there is
        if held > (has := now.resources.get(resource, 0.0)):
            return f"the host came back with {has:g} of {resource}, of which its tasks hold {held:g}"
    for group_by in {_group_by(jobs[attempt.job_id]) for _, attempt in known.occupants} - {None}:
        grouping = Grouping(group_by)
        was, is_now = grouping.name_of(known), grouping.name_of(now)
        if was != is_now:
            return f"the host came back in {group_by} {is_now}; it was in {was}"
    return None


def with_what_is_known(now: Worker, known: Worker) -> Worker:
    """Return the host with what was said of the old one: a drain is of the machine, whatever its slice is called."""
    return replace(
        now,
        draining=known.draining,
        notice=known.notice,
        final=known.final,
        suspected=known.suspected,
        suspected_until=known.suspected_until,
    )


def _group_by(job: Job) -> str | None:
    return job.spec.coscheduling.group_by if job.spec.coscheduling else None
