"""The time limits of the queue: when a gang's pause, its place at the front, the others' turn and its patience end."""

from dataclasses import dataclass

from iris_ray.model.jobs import Gang, Job
from iris_ray.state.events import TaskUnschedulableEvent

HOPES_FOR_MORE_S = 30.0
"""A gang that can use more groups waits for those that are about to be free in its first seconds in the queue only."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Tells which time limits have passed.

    Attributes:
        now: seconds on the clock of the events.
        backfill_bound_s: for how many seconds jobs that came later may pass a waiting gang.
    """

    now: float
    backfill_bound_s: float

    def seconds_paused(self, gang: Gang) -> float:
        """Return for how many more seconds the gang is not tried after a failed launch; at most 0 if it is tried."""
        return gang.not_before - self.now

    def is_starving(self, gang: Gang) -> bool:
        """Return whether the gang has waited longer than the backfill bound."""
        return self.now - gang.waiting_since > self.backfill_bound_s

    def hopes_for_more(self, gang: Gang) -> bool:
        """Return whether the gang has come into the queue, or its pause has ended, only a moment ago."""
        return self.now <= max(gang.waiting_since, gang.not_before) + HOPES_FOR_MORE_S

    def is_returning(self, job: Job) -> bool:
        """Return whether the job's gang ran a moment ago. It then comes first, so that a lost host costs no turn."""
        return self.now < job.gangs[0].returning_until and job.spec.coscheduling is not None and not job.yields

    def timed_out(self, job: Job) -> TaskUnschedulableEvent | None:
        """Return the event that ends a job of which nothing ran within its ``scheduling_timeout``, or None."""
        timeout = job.spec.scheduling_timeout
        if timeout is None or job.started or self.now - job.submitted_at <= timeout:
            return None
        why = f"it did not get to run within its scheduling_timeout of {timeout:g} s"
        return TaskUnschedulableEvent(job.spec.job_id, next(iter(job.pending)), why)
