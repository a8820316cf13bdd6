"""Notes when attempts of coscheduled jobs hold chips and run; `iris_ray.goodput` works out what that time went into."""

from iris_ray.goodput.measure import settle
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
