"""Groups of jobs that start together or not at all, and end together.

Once all jobs of a group are submitted and none awaits another job, the first job represents them all in the queue
(`Job.members`), as the group's leader. One event assigns hosts to all of them. After that, each restarts independently.

If a job of the group ends without success, all others are ended. Once the main jobs have succeeded, the rest are ended.
"""

import heapq

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.state.attempt_ends import AttemptEnds
from iris_ray.state.instructions import Change
from iris_ray.state.job_table import JobTable

COMPLETE_S = 300.0
"""Seconds from the submission of one of a group's jobs within which the next one must be submitted."""
MOST_OF_AN_ERROR = 300
"""The number of characters that are quoted of another job's error."""


class JobGroups:
    """Puts complete groups into the queue, and ends groups as a whole."""

    def __init__(self, table: JobTable, ends: AttemptEnds) -> None:
        self._table = table
        self._ends = ends
        self._due: list[tuple[float, str]] = []  # a heap: deadlines of incomplete groups, each with one of the jobs

    # -- before the start ------------------------------------------------------------------------------------------

    def require_equal(self, spec: JobSpec) -> None:
        """Refuse a job that is inconsistent with the submitted jobs of its group.

        Raises:
            IllegalTransitionError: its group, user, team or band differs.
        """
        if spec.group is not None and (why := self.mismatch(spec)) is not None:
            raise IllegalTransitionError(why)

    def mismatch(self, spec: JobSpec) -> str | None:
        """Return why a job is inconsistent with the unfinished jobs of its group, or None."""
        assert spec.group is not None
        for job_id in spec.group.job_ids.values():
            other = self._table.jobs.get(job_id)
            if other is not None and not other.state.finished and _common(other.spec) != _common(spec):
                return f"job {spec.job_id} and {job_id} of group {spec.group.name} differ in group, user, team or band"
        return None

    def settle(self, job: Job, change: Change) -> None:
        """Hold back a job whose group is incomplete, or let the complete group enter the queue.

        If the group has ended in the meantime, the job ends.
        """
        if not job.forms_group or job.state.finished:
            return
        assert job.spec.group is not None
        self._table.hold_back(job)
        known = self._known(job)
        if (over := next((one for one in known if one.state.finished), None)) is not None:
            self._ends.end_job(job, _because_of(over, job), change)
        elif len(known) < len(job.spec.group.members):
            heapq.heappush(self._due, (job.submitted_at + COMPLETE_S, job.spec.job_id))
        elif not any(one.awaits for one in known):
            known[0].members = tuple(known)
            self._table.enters(*known, now=change.now)

    def started(self, leader: Job) -> None:
        """Record that all jobs of a group have hosts."""
        leader.members = ()

    def time_passed(self, change: Change) -> None:
        """End groups whose jobs were not all submitted in time."""
        while self._due and self._due[0][0] <= change.now:
            _, job_id = heapq.heappop(self._due)
            job = self._table.jobs.get(job_id)
            if job is None or not job.forms_group or job.state.finished:
                continue
            assert job.spec.group is not None
            if max(one.submitted_at for one in self._known(job)) + COMPLETE_S > change.now:
                continue  # the latest of its jobs has a deadline of its own
            if missing := [name for name, one in job.spec.group.members if one not in self._table.jobs]:
                reason = f"{', '.join(missing)} of its group {job.spec.group.name} was not submitted in time"
                self._ends.end_job(job, reason, change)

    def is_submitted_again(self, spec: JobSpec) -> bool:
        """Return whether a job's group has ended before its start, and another pool now submits it again.

        So an import can be repeated that was interrupted, or of which a job was refused.
        """
        job = self._table.jobs.get(spec.job_id)
        return (
            job is not None
            and job.state.finished
            and job.forms_group
            and job.spec.owner != spec.owner
            and (job.spec.group, job.spec.user) == (spec.group, spec.user)
        )

    def begin_again(self, spec: JobSpec) -> None:
        """Forget the ended jobs of a group that is submitted again."""
        if self.is_submitted_again(spec):
            for job in self._known(self._table.jobs[spec.job_id]):
                if job.state.finished:
                    self._table.remove(job.spec.job_id)

    # -- the end ---------------------------------------------------------------------------------------------------

    def ended(self, job: Job, change: Change) -> None:
        """End the other jobs of the group if this one ended without success or was the last of the main jobs."""
        if (group := job.spec.group) is None:
            return
        job.members = ()
        others = [one for one in self._known(job) if not one.state.finished]
        if job.over is not JobState.SUCCEEDED:
            for other in others:
                self._ends.end_job(other, _because_of(job, other), change)
        elif not any(group.name_of(one.spec.job_id) in group.main for one in others):
            for other in others:
                reason = f"the main jobs of its group {group.name} have succeeded: {', '.join(group.main)}"
                self._ends.end_job(other, reason, change)

    def _known(self, job: Job) -> list[Job]:
        """Return the submitted jobs of a job's group that are not forgotten, in the group's order."""
        assert job.spec.group is not None
        return [one for _, i in job.spec.group.members if (one := self._table.jobs.get(i)) is not None]

    def check(self) -> None:
        """Raise AssertionError if only a part of a group has started or waits. For tests."""
        for job_id, job in self._table.jobs.items():
            if job.spec.group is None:
                continue
            known = self._known(job)
            live = [one for one in known if not one.state.finished]
            assert len({one.forms_group for one in live}) <= 1, f"the group of {job_id} has started in part"
            for one in live:
                assert one.forms_group or all(gang.attempt for gang in one.gangs), f"{job_id} has started in part"
            if not live or not live[0].forms_group:
                continue
            complete = len(live) == len(job.spec.group.members) and not any(one.awaits for one in live)
            assert live[0].members == (tuple(live) if complete else ()), f"who stands for the group of {job_id}?"
            assert not any(one.members or one.promise for one in live[1:]), f"only the first of {job_id}'s group stands"


def _common(spec: JobSpec) -> tuple[object, ...]:
    return spec.group, spec.user, spec.team, spec.priority


def _because_of(job: Job, other: Job) -> str:
    """Return the reason for which another job of the group ends after a job that ended without success."""
    assert other.spec.group is not None
    name = other.spec.group.name_of(job.spec.job_id)
    return f"{name} of its group {other.spec.group.name} {how_it_ended(job)}"


def how_it_ended(job: Job) -> str:
    """Return an ended job's state and the beginning of its error, as a predicate."""
    why = f": {job.error[:MOST_OF_AN_ERROR]}" if job.error else ""
    return f"has ended as {job.state.value.replace('_', ' ')}{why}"
