"""Notes when attempts of coscheduled jobs hold chips and run; `iris_ray.goodput` works out what that time went into."""

from iris_ray.goodput.measure import measure, settle
from iris_ray.goodput.totals import Totals
from iris_ray.goodput.user_times import ForgottenJob
from iris_ray.model.jobs import Allocation, Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.workers import TPU


def assigned(job: Job, allocation: Allocation, now: float) -> None:
    """Note that an attempt of a job got its hosts. Earlier attempts are settled, so that few are kept."""
    if job.spec.coscheduling:
        job.times.assigned(job.attempt, sum(demand.get(TPU, 0.0) for _, _, demand in allocation), now)
        settle(job.times, job.submitted_at)


def began(job: Job, now: float) -> None:
    """Note that user code of a job's attempt runs."""
    if job.spec.coscheduling:
        job.times.began(now)


def attempt_ended(job: Job, now: float) -> None:
    """Note that a job's attempt is over."""
    if job.spec.coscheduling:
        job.times.ended(now)


def job_ended(job: Job, now: float) -> None:
    """Note that a job is over."""
    job.times.ended_at = now
    job.times.succeeded = job.over is JobState.SUCCEEDED


def is_measured(job: Job) -> bool:
    """Return whether it is told of a job what its time went into: of gangs, but for those that only hold slices."""
    return job.spec.coscheduling is not None and job.spec.spare_for is None


def forgotten(job: Job) -> list[ForgottenJob]:
    """Return what is to be remembered of a finished job that is forgotten; nothing of one that is not measured."""
    if job.times.ended_at is None or not is_measured(job):
        return []
    ended_at = job.times.ended_at
    return [ForgottenJob(job.spec.user, ended_at, Totals.of(measure(job.times, job.submitted_at, ended_at)))]
