"""Jobs that can't be planned, because of a defect of iris_ray: they pause, so that all others are planned."""

from collections.abc import Callable, Iterable, Sequence

from iris_ray.model.jobs import Job
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason

LEFT_OUT_S = 600.0
"""How long a job is left out of plans before it is tried again."""


class UnplannableJobs:
    """Leaves jobs out of plans for a while, and says why."""

    def __init__(self) -> None:
        self._left_out: dict[str, tuple[float, str]] = {}  # job id → until when, in seconds, and why

    def without(self, pending: Iterable[Job], now: float) -> list[Job]:
        """Return the jobs that are not left out. What is over by now is forgotten."""
        pending = list(pending)
        waiting = {job.spec.job_id for job in pending} if self._left_out else ()
        self._left_out = {i: why for i, why in self._left_out.items() if i in waiting and why[0] > now}
        return [job for job in pending if job.spec.job_id not in self._left_out]

    def leave_out(self, job: Job, error: Exception, now: float) -> None:
        """Leave a job out for `LEFT_OUT_S`."""
        job_id = job.spec.job_id
        why = (
            f"iris_ray can't place it, by a defect of iris_ray ({type(error).__name__}: {str(error)[:500]}); other jobs"
            f" go on. The Controller's log has more: please report it. To end the job: iris-ray cancel {job_id}"
        )
        self._left_out[job_id] = now + LEFT_OUT_S, why

    def reasons(self, pending: Iterable[Job], now: float) -> dict[str, PendingReason]:
        """Return why these jobs wait, as far as they are left out."""
        return {
            job.spec.job_id: PendingReason(
                job.spec.job_id, PendingKind.PAUSED, job.requirement, (1,), pause=(until - now, why)
            )
            for job in (pending if self._left_out else ())
            for until, why in [self._left_out.get(job.spec.job_id, (0.0, ""))]
            if why
        }

    @property
    def job_ids(self) -> dict[str, str]:
        """Return why each job is left out, by its id."""
        return {job_id: why for job_id, (_, why) in self._left_out.items()}


def unplannable(jobs: Sequence[Job], plan: Callable[[Sequence[Job]], object]) -> list[tuple[Job, Exception]]:
    """Return jobs without which there may be a plan, each with the error of the plan that has shown it.

    One such job costs about as much as two more plans of all jobs: the halves are tried, then their halves, and so on.

    Args:
        jobs: at least one.
        plan: makes a plan of some jobs; raises an error if one of them can't be planned.
    """
    try:
        plan(jobs)
    except Exception as error:
        if len(jobs) == 1:
            return [(jobs[0], error)]
        middle = len(jobs) // 2
        found = [*unplannable(jobs[:middle], plan), *unplannable(jobs[middle:], plan)]
        return found or [(job, error) for job in jobs[middle:]]  # each half can be planned, but not both together
    return []
