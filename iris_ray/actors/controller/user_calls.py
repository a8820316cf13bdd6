"""What people ask of the Controller, through the command line, `IrisClient` and the dashboard."""

import asyncio
import heapq
import os
from collections.abc import Mapping
from itertools import islice
from typing import Any

import ray

import iris_ray
from iris_ray.actors.controller.controller_process import ControllerProcess
from iris_ray.actors.controller.journal import add_forgotten
from iris_ray.actors.controller.log_service import log_standing
from iris_ray.actors.controller.message_checks import checked
from iris_ray.actors.controller.views import (
    job_events,
    job_goodput,
    job_status,
    limit_statuses,
    task_status,
    unusable_status,
    worker_status,
)
from iris_ray.actors.protocol.overview import Changes, Position
from iris_ray.actors.protocol.status import (
    PAGE,
    JobEvent,
    JobGoodput,
    JobStatus,
    LimitStatus,
    Place,
    SetAside,
    TaskStatus,
    WorkerStatus,
)
from iris_ray.actors.protocol.task_log import MOST_LOGS, LogPlace, LogPosition, TaskLog
from iris_ray.errors import InvalidRequestError, UnknownNameError
from iris_ray.model.goodput_sums import UserDay
from iris_ray.model.job_spec import PriorityBand
from iris_ray.model.jobs import Job
from iris_ray.model.limits import Limits
from iris_ray.model.plain import Words
from iris_ray.model.suggestions import unknown, unknown_number
from iris_ray.model.workers import TPU_NAME
from iris_ray.state.events import JobCancelledEvent, JobYieldsEvent, LimitsSetEvent, TaintedEvent, TaintLiftedEvent
from iris_ray.state.job_table import is_measured

LOST = (
    "its record was damaged when this Controller took over, so iris_ray does not know it any more. What runs of it goes"
    " on until its caller ends. Submit it again. The rest of the record is kept in the cluster's store, under corrupt/"
)


class UserCalls(ControllerProcess):
    """The actor's methods for people."""

    @checked
    async def list_jobs(self, after: int = 0) -> list[JobStatus]:
        """Return a page of the jobs that are known, the oldest first: those after the one with this number."""
        await self.ping()
        return [self._status(job) for job in islice((j for j in self._state.jobs.values() if j.number > after), PAGE)]

    @checked
    async def job_status(self, job_id: str) -> JobStatus:
        """Return how one job stands.

        Raises:
            UnknownNameError: there is no such job.
        """
        await self.ping()
        return self._status(self._job(job_id))

    @checked
    async def job_events(self, job_id: str) -> list[JobEvent]:
        """Return what has happened to a job, oldest first. Raise like `job_status`."""
        await self.ping()
        return job_events(self._job(job_id), self._clock)

    @checked
    async def list_goodput(self, after: int = 0) -> list[JobGoodput]:
        """Return a page of what the time of gangs went into, the oldest first: those after the job with this number."""
        await self.ping()
        jobs = (job for job in self._state.jobs.values() if job.number > after and is_measured(job))
        return [job_goodput(job, self._progress.of(job.spec.job_id), self._clock) for job in islice(jobs, PAGE)]

    @checked
    async def job_goodput(self, job_id: str) -> JobGoodput:
        """Return what the time of one job went into.

        Raises:
            UnknownNameError: there is no such job.
            InvalidRequestError: it is no gang.
        """
        await self.ping()
        job = self._job(job_id)
        if not is_measured(job):
            raise InvalidRequestError(f"{job_id} is no gang: goodput is measured of jobs whose tasks start together")
        return job_goodput(job, self._progress.of(job_id), self._clock)

    @checked
    async def user_times(self, since: float) -> list[UserDay]:
        """Return what the time of forgotten jobs went into, by the day of their end and user, since a time."""
        await self.ping()
        add_forgotten(self._state, self._journal.user_times, self._clock)
        return self._journal.user_times.since(since)

    @checked
    async def fleet_times(self, since: str) -> dict[str, dict[str, float]]:
        """Return chip-seconds by day and state, since a day in UTC, such as 2026-11-23."""
        await self.ping()
        return self._journal.fleet_times.since(since)

    @checked
    async def list_tasks(self, job_id: str, after: int = -1) -> list[TaskStatus]:
        """Return a page of the tasks of a job: those that come after this index. Raise like `job_status`."""
        await self.ping()
        job = self._job(job_id)
        return [task_status(job, index, self._state, self._clock) for index in range(job.size)[after + 1 :][:PAGE]]

    @checked
    async def task_status(self, job_id: str, index: int) -> TaskStatus:
        """Return how one task stands.

        Raises:
            UnknownNameError: there is no such job, or it has no such task.
        """
        await self.ping()
        job = self._job(job_id)
        if index not in range(job.size):
            raise unknown_number(f"task of {job_id}", index, range(job.size))
        return task_status(job, index, self._state, self._clock)

    @checked
    async def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog:
        """Return a piece of what a task has printed.

        Args:
            job_id, task_index: which task.
            at: where the piece begins, and in which attempt.
            max_bytes: how long it may be.

        Raises:
            UnknownNameError: there is no such job, task or attempt.
        """
        await self.ping()
        standing = log_standing(self._state, self._job(job_id), task_index, at.attempt)
        return await self._logs.fetch(standing, self._state.workers, at, max_bytes)

    @checked
    async def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        """Return pieces of what several tasks of a job have printed, by task index, without tasks that do not exist.

        At most `MOST_LOGS` tasks are read; those beyond are left out, too, and to be asked for again.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """
        await self.ping()
        job = self._job(job_id)
        there = dict(islice(((index, at) for index, at in wanted.items() if 0 <= index < job.size), MOST_LOGS))
        calls = (self.fetch_task_logs(job_id, index, at, max_bytes) for index, at in there.items())
        return dict(zip(there, await asyncio.gather(*calls), strict=True))

    @checked
    async def locate_logs(self, job_id: str, wanted: Mapping[int, LogPosition]) -> dict[int, LogPlace]:
        """Return where the logs of several tasks of a job are, by task index: the first `MOST_LOGS` that exist.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """
        await self.ping()
        job = self._job(job_id)
        there = islice(((index, at) for index, at in wanted.items() if 0 <= index < job.size), MOST_LOGS)
        return {
            index: self._logs.locate(log_standing(self._state, job, index, at.attempt), self._state.workers)
            for index, at in there
        }

    async def list_workers(self, after: Place = ("", -1, "")) -> list[WorkerStatus]:
        """Return a page of the live hosts, by slice and number: those that come after this place.

        Hosts that no job gets, because of their labels or chips, are among them, each with the reason.
        """
        await self.ping()
        now, workers, unusable = self._clock.now(), self._state.workers, self._nodes.unusable
        places = [(w.slice_name or "", w.host_index or 0, w.node_id) for w in workers.values()]
        places += [(u.slice_name or "", 0, u.node_id) for u in unusable.values() if u.node_id not in workers]
        page = heapq.nsmallest(PAGE, (place for place in places if place > after))
        return [
            worker_status(workers[i], self._state, now) if i in workers else unusable_status(unusable[i])
            for _, _, i in page
        ]

    @checked
    async def changes(self, since: Position) -> Changes:
        """Return what has changed since a position, for those who watch the whole cluster."""
        await self.ping()
        return self._overview.since(since, self._journal.epoch)

    @checked
    async def cancel(self, job_id: str, reason: Words, user: str) -> JobStatus:
        """End a job, wherever it stands. Return how it stood before.

        Raises:
            UnknownNameError: there is no such job.
            NotPermittedError: it is a job of somebody else, and the user is no operator.
        """
        before = await self.job_status(job_id)
        self._permissions.require_own(user, self._job(job_id))
        await self._events.recorded([JobCancelledEvent(job_id, reason)])
        return before

    @checked
    async def set_yielding(self, yielding: Mapping[str, bool], user: str) -> None:
        """Note which jobs give their hosts to whoever waits, and which do so no more. Unknown ones are left out.

        Raises:
            NotPermittedError: one is a job of somebody else, and the user is no operator.
        """
        await self.ping()
        known = {job_id: self._state.jobs[job_id] for job_id in yielding if job_id in self._state.jobs}
        for job in known.values():
            self._permissions.require_own(user, job, "say that it yields")
        await self._events.recorded([JobYieldsEvent(job_id, yielding[job_id]) for job_id in known])

    @checked
    async def taint(self, target: str, taint: str, reason: Words, user: str) -> list[str]:
        """Keep jobs that don't tolerate the taint away from a host or slice. Return the ids of the hosts concerned.

        Raises:
            UnknownNameError: there is no such host or slice.
            NotPermittedError: the user is no operator.
        """
        await self.ping()
        self._permissions.require_operator(user, "drain and taint hosts")
        node_ids = self._hosts(target)
        await self._events.recorded([TaintedEvent(target, taint, reason)])
        return node_ids

    @checked
    async def lift_taint(self, target: str, taint: str, user: str) -> list[str]:
        """Lift a taint. Return the ids of the hosts concerned.

        Raises:
            UnknownNameError: nothing of that name was tainted so.
            NotPermittedError: the user is no operator.
        """
        await self.ping()
        self._permissions.require_operator(user, "lift drains and taints")
        if taint not in self._state.fleet.taints.get(target, {}):
            tainted = [name for name, taints in self._state.fleet.taints.items() if taint in taints]
            if not tainted:
                raise UnknownNameError(f"there is no taint {taint} on {target!r}, and none on any other host or slice")
            raise unknown(f"taint {taint} on", target, tainted)
        await self._events.recorded([TaintLiftedEvent(target, taint)])
        return [w.node_id for w in self._state.fleet.slice_workers(target)] or [target]

    async def list_limits(self) -> list[LimitStatus]:
        """Return what each user has and may have: first the limits of everybody, then those of each user with jobs."""
        await self.ping()
        return limit_statuses(self._state)

    @checked
    async def set_limits(
        self, whose: str, bands: list[PriorityBand], limits: Limits, reset: bool, user: str
    ) -> list[LimitStatus]:
        """Set some limits of a user, or of everybody. Return how all limits stand then.

        Args:
            whose: the user, or `EVERYBODY`.
            bands: in which bands.
            limits: those that are None stay as they are.
            reset: forget those that were set before.
            user: who sets them.

        Raises:
            NotPermittedError: the user is no operator.
        """
        await self.ping()
        self._permissions.require_operator(user, "set limits")
        table = self._state.limits.table
        before = [Limits() if reset else table.get((whose, band), Limits()) for band in bands]
        events = [LimitsSetEvent(whose, band, limits.over(old)) for band, old in zip(bands, before, strict=True)]
        await self._events.recorded(events)
        return limit_statuses(self._state)

    async def statistics(self) -> dict[str, int]:
        """Return counts since this Controller began: starved, timed out and unschedulable jobs, evicted attempts."""
        await self.ping()
        return {"epoch": self._journal.epoch, **self._planner.counts}

    async def demand(self) -> dict[str, list[int]]:
        """Return how many more slices of each type each gang that waits would need to run; see `missing_slices`."""
        await self.ping()
        return self._missing()

    async def about(self) -> dict[str, Any]:
        """Return who this Controller is: epoch, version, process, node; and what it could not handle."""
        return {
            "epoch": (await self.statistics())["epoch"],
            "version": iris_ray.__version__,
            "started_at": self._started_at,
            "pid": os.getpid(),
            "address": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "set_aside": self._set_aside(),
            "clock_jumps": self._clock.jumps,
        }

    def _status(self, job: Job) -> JobStatus:
        return job_status(job, self._state, self._clock, self._waiting(job), self._progress.of(job.spec.job_id))

    def _set_aside(self) -> list[SetAside]:
        """Return jobs that the Controller could not handle or can't place, and records that can't be read."""
        found = {**self._events.aside.jobs, **self._planner.left_out}
        lost = {name: f"{LOST} ({why})" for name, why in self._journal.corrupt.why.items()}
        return [SetAside(name, why) for name, why in (found | lost).items()]

    def _job(self, job_id: str) -> Job:
        job = self._state.jobs.get(job_id)
        if job is None and (why := self._journal.corrupt.why.get(job_id)) is not None:
            raise UnknownNameError(f"{job_id}: {LOST} ({why})")
        if job is None:
            raise unknown("job", job_id, self._state.jobs)
        return job

    def _hosts(self, target: str) -> list[str]:
        found = [worker.node_id for worker in self._state.fleet.slice_workers(target)]
        if not found and target in self._state.workers:
            found = [target]
        if not found:
            slices = self._state.fleet.grouping(TPU_NAME)
            raise unknown("host or slice", target, [*slices, *self._state.workers])
        return found
