"""Enforces ``max_runtime``, a job's own time limit."""

import heapq
import math

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.state.attempt_ends import AttemptEnds
from iris_ray.state.instructions import Change
from iris_ray.state.job_table import JobTable
from iris_ray.state.spares import GangNotices

RUNTIME_NOTICE_S = 60.0
"""Seconds between the notice that a job's time is nearly over and its end; at most half the job's time limit."""


class RuntimeLimits:
    """Ends jobs whose ``max_runtime`` is over, after a notice to their tasks."""

    def __init__(self, table: JobTable, notices: GangNotices, ends: AttemptEnds) -> None:
        self._table = table
        self._notices = notices
        self._ends = ends
        self._due: list[tuple[float, str]] = []  # a heap: the time of the next check, and the job

    def began(self, job: Job) -> None:
        """Record that a job's first task runs, or that such a job was restored."""
        if job.ends_at < math.inf and not job.state.finished:
            heapq.heappush(self._due, (_notice_at(job), job.spec.job_id))

    def placed(self, job: Job, gang: Gang, change: Change) -> None:
        """Give a gang that has just got hosts the notice, if the job's time is nearly over."""
        if change.now >= _notice_at(job):
            self._tell(job, gang, change)

    def time_passed(self, change: Change) -> None:
        """Give the notices that are due, and end the jobs whose time is over."""
        while self._due and self._due[0][0] <= change.now:
            _, job_id = heapq.heappop(self._due)
            job = self._table.jobs.get(job_id)
            if job is None or job.state.finished:
                continue
            if change.now >= job.ends_at:
                self._ends.end_job(job, f"{_limit(job)} is over", change)
                continue
            for gang in job.gangs:
                if gang.placed:
                    self._tell(job, gang, change)
            heapq.heappush(self._due, (job.ends_at, job_id))

    def _tell(self, job: Job, gang: Gang, change: Change) -> None:
        notice = Notice(NoticeKind.TIME_LIMIT, f"{_limit(job)} is nearly over", job.ends_at)
        self._notices.tell(job, gang, notice, change)

    def check(self) -> None:
        """Raise AssertionError if a limited job has no entry. For tests."""
        known = {job_id for _, job_id in self._due}
        for job_id, job in self._table.jobs.items():
            assert job.state.finished or job.ends_at == math.inf or job_id in known, f"{job_id}: it has no end"


def _notice_at(job: Job) -> float:
    limit = job.spec.max_runtime
    return math.inf if limit is None else job.ends_at - min(RUNTIME_NOTICE_S, limit / 2)


def _limit(job: Job) -> str:
    return f"its max_runtime of {job.spec.max_runtime:g} s"
