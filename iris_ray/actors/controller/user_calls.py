"""The Controller's answers to people, who ask through the command line, `IrisClient` and the dashboard."""

import asyncio
import heapq
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from string import hexdigits
from typing import Any

import ray

import iris_ray
from iris_ray.actors.calls.message_checks import checked
from iris_ray.actors.controller.controller_process import ControllerProcess
from iris_ray.actors.controller.views import (
    job_events,
    task_status,
    unusable_status,
    worker_status,
)
from iris_ray.actors.protocol.overview import Changes, Position
from iris_ray.actors.protocol.services import setting_named
from iris_ray.actors.protocol.status import (
    PAGE,
    JobEvent,
    JobFacts,
    JobStatus,
    Place,
    TaskStatus,
    WorkerStatus,
    job_status,
)
from iris_ray.actors.protocol.version import package_directory
from iris_ray.errors import UnknownNameError
from iris_ray.model.checks import Seconds, require, unknown, unknown_number
from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.containment import SetAside
from iris_ray.model.jobs import Job
from iris_ray.model.plain_values import Words
from iris_ray.model.workers import TPU_NAME
from iris_ray.state.events import (
    JobCancelledEvent,
    JobYieldsEvent,
    SettingSetEvent,
    TaintedEvent,
    TaintLiftedEvent,
)

TAINTED = Seconds(0, most=365 * 86_400.0, or_none=True)
"""The time for which a taint may be set."""


class UserCalls(ControllerProcess):
    """The actor's methods for people. See `ForPeople`."""

    @checked
    async def list_jobs(self, after: int = 0) -> list[JobStatus]:
        await self.ping()
        return [self._status(job) for job in islice((j for j in self._state.jobs.values() if j.number > after), PAGE)]

    @checked
    async def job_status(self, job_id: str) -> JobStatus:
        await self.ping()
        job = self._job(job_id)
        return replace(self._status(job), about_team=self._services.about_job(job))

    @checked
    async def job_events(self, job_id: str) -> list[JobEvent]:
        await self.ping()
        return job_events(self._job(job_id), self._clock)

    @checked
    async def list_tasks(self, job_id: str, after: int = -1) -> list[TaskStatus]:
        await self.ping()
        job = self._job(job_id)
        return [task_status(job, index, self._state, self._clock) for index in range(job.size)[after + 1 :][:PAGE]]

    @checked
    async def task_status(self, job_id: str, index: int) -> TaskStatus:
        await self.ping()
        job = self._job(job_id)
        if index not in range(job.size):
            raise unknown_number(f"task of {job_id}", index, range(job.size))
        return task_status(job, index, self._state, self._clock)

    async def list_workers(self, after: Place = ("", -1, "")) -> list[WorkerStatus]:
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
        await self.ping()
        found = self._overview.since(since, self._journal.epoch)
        return replace(found, failing=tuple(f"{one.service}: {one.trouble}" for one in self._services.failing()))

    @checked
    async def cancel(self, job_id: str, reason: Words, user: str) -> JobStatus:
        before = await self.job_status(job_id)
        self._permissions.require_own(user, self._job(job_id))
        await self._events.recorded([JobCancelledEvent(job_id, reason)])
        return before

    @checked
    async def set_yielding(self, yielding: Mapping[str, bool], user: str) -> None:
        await self.ping()
        known = {job_id: self._state.jobs[job_id] for job_id in yielding if job_id in self._state.jobs}
        for job in known.values():
            self._permissions.require_own(user, job, "say that it yields")
        await self._events.recorded([JobYieldsEvent(job_id, yielding[job_id]) for job_id in known])

    @checked
    async def require_own(self, job_id: str, user: str, what: Words) -> None:
        await self.ping()
        self._permissions.require_own(user, self._job(job_id), what)

    @checked
    async def require_operator(self, user: str, what: Words) -> None:
        await self.ping()
        self._permissions.require_operator(user, what)

    @checked
    async def taint(self, target: str, taint: str, reason: Words, user: str, seconds: float | None = None) -> list[str]:
        await self.ping()
        require("seconds", seconds, TAINTED)
        self._permissions.require_operator(user, "drain and taint hosts")
        node_ids = self._hosts(target)
        until = None if seconds is None else self._clock.now() + seconds
        await self._events.recorded([TaintedEvent(target, taint, reason, until)])
        return node_ids

    @checked
    async def lift_taint(self, target: str, taint: str, user: str) -> list[str]:
        await self.ping()
        self._permissions.require_operator(user, "lift drains and taints")
        if taint not in self._state.fleet.taints.get(target, {}):
            tainted = [name for name, taints in self._state.fleet.taints.items() if taint in taints]
            if not tainted:
                raise UnknownNameError(f"there is no taint {taint} on {target!r}, and none on any other host or slice")
            raise unknown(f"taint {taint} on", target, tainted)
        await self._events.recorded([TaintLiftedEvent(target, taint)])
        return [w.node_id for w in self._state.fleet.slice_workers(target)] or [target]

    async def list_settings(self) -> dict[str, WasSet]:
        await self.ping()
        return dict(self._state.settings.was_set)

    @checked
    async def set_settings(self, texts: Mapping[str, str | None], unless_set: bool, user: str) -> dict[str, WasSet]:
        await self.ping()
        named = {setting_named(name): text for name, text in texts.items()}
        checked = {one.name: None if text is None else one.checked(text) for one, text in named.items()}
        was_set = self._state.settings.was_set
        before = {name: was_set[name].text if name in was_set else None for name in checked}
        changes = {n: text for n, text in checked.items() if text != before[n] and not (unless_set and n in was_set)}
        if changes:
            self._permissions.require_operator(user, "change the settings of the cluster")
            now = self._clock.wall(self._clock.now())
            sets = {name: None if text is None else WasSet(text, user, now) for name, text in changes.items()}
            recorded = self._events.apply([SettingSetEvent(name, to) for name, to in sets.items()])
            self._follow_settings()  # at once: Ray may cancel a call
            await asyncio.shield(recorded)
        return dict(was_set)

    async def statistics(self) -> dict[str, int]:
        await self.ping()
        return {"epoch": self._journal.epoch, **self._planner.counts}

    async def about(self) -> dict[str, Any]:
        return {
            "epoch": (await self.statistics())["epoch"],
            "version": iris_ray.__version__,
            "package": package_directory(),
            "started_at": self._started_at,
            "pid": os.getpid(),
            "address": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "set_aside": self._set_aside(),
            "clock_jumps": self._clock.jumps,
            "services": self._board.about(),
            "service_health": self._services.health(),
        }

    def _status(self, job: Job) -> JobStatus:
        return job_status(self._facts_of(job)._replace(waiting=self._waiting(job)))

    def _facts_of(self, job: Job) -> JobFacts:
        return JobFacts(job, self._state, self._clock.wall, self._progress.of(job.spec.job_id))

    def _set_aside(self) -> list[SetAside]:
        """Return jobs that the Controller could not handle or can't place, and records that can't be read."""
        contained, wall = self._journal.contained, self._clock.wall_or_none
        found = {**contained.jobs, **self._planner.left_out, **contained.records}
        return [replace(one, since=wall(one.since), until=wall(one.until)) for one in found.values()]

    def _hosts(self, target: str) -> list[str]:
        found = [worker.node_id for worker in self._state.fleet.slice_workers(target)]
        if not found and target in self._state.workers:
            found = [target]
        if not found:
            slices = self._state.fleet.grouping(TPU_NAME)
            ids = self._state.workers if set(target) <= set(hexdigits) else ()  # nobody types one but from a copy
            raise unknown("host or slice", target, [*slices, *ids])
        return found
