"""Jobs that can't be planned, because of a defect of iris_ray: they pause, so that all others are planned."""

from collections.abc import Callable, Iterable, Sequence

from iris_ray.model.containment import SetAside, by_a_defect, others_go_on
from iris_ray.model.jobs import Job
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason

LEFT_OUT_S = 600.0
"""How long a job is left out of plans before it is tried again."""


class UnplannableJobs:
    """Leaves jobs out of plans for a while, and says why.

    Attributes:
        jobs: those that are left out, by id.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, SetAside] = {}

    def without(self, pending: Iterable[Job], now: float) -> list[Job]:
        """Return the jobs that are not left out. What is over by now is forgotten."""
        pending = list(pending)
        waiting = {job.spec.job_id for job in pending} if self.jobs else ()
        self.jobs = {name: one for name, one in self.jobs.items() if name in waiting and now < (one.until or 0.0)}
        return [job for job in pending if job.spec.job_id not in self.jobs]

    def leave_out(self, job: Job, error: Exception, now: float) -> None:
        """Leave a job out for `LEFT_OUT_S`."""
        job_id = job.spec.job_id
        why = (
            f"iris_ray can't place it, {by_a_defect(error)}. {others_go_on('jobs', 'Controller')}. To end the job:"
            f" iris-ray cancel {job_id}"
        )
        self.jobs[job_id] = SetAside(job_id, why, since=now, until=now + LEFT_OUT_S)

    def reasons(self, pending: Iterable[Job], now: float) -> dict[str, PendingReason]:
        """Return why these jobs wait, as far as they are left out."""
        return {
            job.spec.job_id: PendingReason(
                job.spec.job_id, PendingKind.PAUSED, job.requirement, (1,), pause=(one.until - now, one.why)
            )
            for job in (pending if self.jobs else ())
            if (one := self.jobs.get(job.spec.job_id)) is not None and one.until is not None
        }


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
