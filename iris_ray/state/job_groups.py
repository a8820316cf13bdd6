"""Groups of jobs that start together or not at all, and end as one.

Until a group starts, its first job stands for all in the queue (`Job.members`), once all of them are submitted and none
awaits another job. One event gives all of them their hosts. From then on each restarts by itself.

A group ends as a whole: if one of its jobs ends without success, the others are ended; if the main ones have succeeded,
so are the rest.
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
"""Seconds after the submission of its first job by which all jobs of a group must be there, or it ends."""
MOST_OF_AN_ERROR = 300
"""The limit for the quoted error of another job, in characters."""


class JobGroups:
    """Has groups enter the queue once they are complete, and ends them as a whole."""

    def __init__(self, table: JobTable, ends: AttemptEnds) -> None:
        self._table = table
        self._ends = ends
        self._due: list[tuple[float, str]] = []  # a heap: deadlines of incomplete groups, with a job of each

    # -- before the start ------------------------------------------------------------------------------------------

    def require_equal(self, spec: JobSpec) -> None:
        """Refuse a job that does not fit the jobs of its group that are there.

        Raises:
            IllegalTransitionError: it says something else of the group, or is of another user, team or band.
        """
        if spec.group is not None and (why := self.mismatch(spec)) is not None:
            raise IllegalTransitionError(why)

    def mismatch(self, spec: JobSpec) -> str | None:
        """Return why a job does not fit the jobs of its group that are there, or None."""
        assert spec.group is not None
        for job_id in spec.group.job_ids.values():
            if (other := self._table.jobs.get(job_id)) is not None and _common(other.spec) != _common(spec):
                return f"job {spec.job_id} and {job_id} of group {spec.group.name} differ in group, user, team or band"
        return None

    def settle(self, job: Job, change: Change) -> None:
        """Hold a job back whose group is incomplete, or let the complete group enter the queue.

        A job whose group has ended meanwhile ends.
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
        """Note that all jobs of a group have hosts."""
        leader.members = ()

    def time_passed(self, change: Change) -> None:
        """End groups of which some jobs were not submitted in time."""
        while self._due and self._due[0][0] <= change.now:
            _, job_id = heapq.heappop(self._due)
            job = self._table.jobs.get(job_id)
            if job is None or not job.forms_group or job.state.finished:
                continue
            assert job.spec.group is not None
            if missing := [name for name, one in job.spec.group.members if one not in self._table.jobs]:
                reason = f"{', '.join(missing)} of its group {job.spec.group.name} was not submitted in time"
                self._ends.end_job(job, reason, change)

    # -- the end ---------------------------------------------------------------------------------------------------

    def ended(self, job: Job, change: Change) -> None:
        """End the others if a job of a group has failed or was ended, or if it was the last of the main ones."""
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
        """Return the jobs of a group that were submitted and are not forgotten, in the group's order."""
        assert job.spec.group is not None
        return [one for _, i in job.spec.group.members if (one := self._table.jobs.get(i)) is not None]

    def check(self) -> None:
        """Raise AssertionError if a group has started in part, or waits without some of its jobs. For tests."""
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
    """Return why another job of its group ends with a job that has ended without success."""
    assert other.spec.group is not None
    name, why = other.spec.group.name_of(job.spec.job_id), f": {job.error[:MOST_OF_AN_ERROR]}" if job.error else ""
    state = job.state.value.replace("_", " ")
    return f"{name} of its group {other.spec.group.name} has ended as {state}{why}"
