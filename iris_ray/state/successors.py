"""Successors: jobs that enter the queue only after other jobs (``after=``).

Plans don't include such a job. `Job.awaits` has its unmet conditions. A condition that was met is not checked again, so
a predecessor may be forgotten. A job with a condition that can no longer be met ends, as do the jobs that await its
success.
"""

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import STARTED, SUCCEEDED
from iris_ray.state.attempt_ends import AttemptEnds
from iris_ray.state.instructions import Change
from iris_ray.state.job_groups import JobGroups, how_it_ended
from iris_ray.state.job_table import JobTable


class Successors:
    """Tracks which jobs await which other jobs, and lets them enter the queue or end."""

    def __init__(self, table: JobTable, ends: AttemptEnds, groups: JobGroups) -> None:
        self._table = table
        self._ends = ends
        self._groups = groups
        self._of: dict[str, dict[str, None]] = {}  # job id → ids of the jobs that await its end
        self._of_start: dict[str, dict[str, None]] = {}  # job id → ids of the jobs that await its start

    def require_known(self, spec: JobSpec) -> None:
        """Refuse a job with an unknown predecessor.

        Raises:
            IllegalTransitionError: a predecessor is unknown.
        """
        for before in spec.after:
            if before not in self._table.jobs:
                raise IllegalTransitionError(f"job {spec.job_id} comes after {before}, and there is no such job")

    def submitted(self, job: Job, change: Change) -> None:
        """Hold a new job back until its predecessors meet its conditions."""
        if job.spec.after:
            job.awaits = dict(job.spec.after)
            self._await(job, change)

    def restored(self, job: Job, change: Change) -> None:
        """Hold back a restored job that awaits others. Its predecessors are restored first."""
        if job.awaits and not job.state.finished:
            self._await(job, change)

    def started(self, job: Job, change: Change) -> None:
        """Let the jobs that await the start of this job enter the queue."""
        self._settle(self._of_start, job, change)

    def ended(self, job: Job, change: Change) -> None:
        """Let the jobs that await this job's end enter the queue, or end them. The job itself awaits nothing any more.

        Jobs that end here are added to the change's finished jobs, so that their own successors are settled as well.
        """
        for before in job.awaits:
            self._forget_wait(before, job.spec.job_id)
        job.awaits = {}
        self._settle(self._of_start, job, change)
        self._settle(self._of, job, change)

    def _settle(self, of: dict[str, dict[str, None]], job: Job, change: Change) -> None:
        if of:
            for job_id in list(of.get(job.spec.job_id, ())):
                self._look(self._table.jobs[job_id], job.spec.job_id, change)

    def _await(self, job: Job, change: Change) -> None:
        self._table.hold_back(job)
        for before, wanted in job.awaits.items():
            (self._of_start if wanted == STARTED else self._of).setdefault(before, {})[job.spec.job_id] = None
        for before in list(job.awaits):
            self._look(job, before, change)

    def _look(self, job: Job, before: str, change: Change) -> None:
        """Check a job's condition on one predecessor."""
        if job.state.finished or before not in job.awaits:
            return
        wanted, other = job.awaits[before], self._table.jobs.get(before)
        if other is None:
            self._ends.never_runs(job, f"it comes after {before}, which the cluster has forgotten", change)
        elif _has_happened(other, wanted):
            del job.awaits[before]
            self._forget_wait(before, job.spec.job_id)
            self._table.changed(job.spec.job_id)
            if not job.awaits and job.forms_group:
                self._groups.settle(job, change)
            elif not job.awaits:
                self._table.enters(job, now=change.now)
        elif other.state.finished:
            reason = f"it was to run once {before} had {wanted}, and that {how_it_ended(other)}"
            self._ends.never_runs(job, reason, change)

    def _forget_wait(self, before: str, job_id: str) -> None:
        for of in (self._of, self._of_start):
            if (waiting := of.get(before)) is not None:
                waiting.pop(job_id, None)
                if not waiting:
                    del of[before]

    def check(self) -> None:
        """Raise AssertionError if the index disagrees with the jobs. For tests."""
        jobs = self._table.jobs
        both = [*self._of.items(), *self._of_start.items()]
        of = {(before, job_id) for before, waiting in both for job_id in waiting}
        assert of == {(before, job_id) for job_id, job in jobs.items() for before in job.awaits}, "successors are off"
        for before, job_id in of:
            other, wanted = jobs[before], jobs[job_id].awaits[before]
            assert not other.state.finished, f"{job_id} awaits {before}, which is over"
            assert not _has_happened(other, wanted), f"{job_id} waits until {before} has {wanted}, which it has"


def _has_happened(job: Job, wanted: str) -> bool:
    if wanted == SUCCEEDED:
        return job.state is JobState.SUCCEEDED
    return job.started if wanted == STARTED else job.state.finished
