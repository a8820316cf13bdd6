"""The cluster's Controller: one detached actor that sees every TPU host and every job, and decides who runs where.

It holds no user code and nothing of its callers. All decisions are made by the pure core. This module is what may be
asked of it; the other modules of this room do the work: `event_processor`, `dispatcher`, `node_diff`, `recovery`,
`journal`, `pool_registry`, `log_service`, `maintenance_service`.
"""

import asyncio
import gc
import heapq
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import ray
from ray.actor import ActorHandle

import iris_ray
from iris_ray.actors.controller.autoscaler_demand import AutoscalerDemand
from iris_ray.actors.controller.dispatcher import Dispatcher
from iris_ray.actors.controller.door import ReportedEvent, checked
from iris_ray.actors.controller.event_processor import EventProcessor
from iris_ray.actors.controller.goodput_views import chips_by_state, day_of, job_goodput
from iris_ray.actors.controller.job_events import job_events
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.log_service import LogService, log_standing
from iris_ray.actors.controller.maintenance_service import MaintenanceService
from iris_ray.actors.controller.measurements import Measurements
from iris_ray.actors.controller.meter import Meter, RayMeter
from iris_ray.actors.controller.node_diff import NodeDiff
from iris_ray.actors.controller.node_table import NODE_POLL_S, NodeTable
from iris_ray.actors.controller.overview import Overview
from iris_ray.actors.controller.permissions import Permissions, operators_in
from iris_ray.actors.controller.pool_registry import PoolRegistry
from iris_ray.actors.controller.progress_board import ProgressBoard
from iris_ray.actors.controller.recovery import come_back
from iris_ray.actors.controller.status_views import (
    job_status,
    limit_statuses,
    task_status,
    unusable_status,
    worker_status,
)
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.actors.wire.messages import GangProgress, JobView, PoolProcess
from iris_ray.actors.wire.overview import Changes, Position
from iris_ray.actors.wire.pool_stub import PoolStub
from iris_ray.actors.wire.protocol import PROTOCOL_VERSION
from iris_ray.actors.wire.status import (
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
from iris_ray.actors.wire.task_log import MOST_LOGS, LastLines, LogPlace, LogPosition, TaskLog
from iris_ray.cloud.demand import missing_slices, slices_in
from iris_ray.cloud.provider_words import ProviderWords
from iris_ray.errors import (
    ControllerUnavailableError,
    DeposedError,
    InvalidJobError,
    InvalidRequestError,
    IrisError,
    JobCancelledError,
    UnknownNameError,
)
from iris_ray.goodput.user_times import UserDay
from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import JobSpec, PriorityBand
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.limits import Limits
from iris_ray.model.outcomes import HostEvidence, ProviderWord
from iris_ray.model.plain import Words
from iris_ray.model.suggestions import unknown, unknown_number
from iris_ray.model.workers import TPU_NAME
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.evictions import GRACE_S, EvictionRules
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.planner import Planner
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    Event,
    JobCancelledEvent,
    JobSubmittedEvent,
    LimitsSetEvent,
    MaintenanceCalledOffEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TaskDispatchFailedEvent,
    WorkerDrainedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.job_times import is_measured

logger = logging.getLogger(__name__)

MOST_PLACED = 200
"""Gangs that one plan places at most: others are answered between two plans."""

TIMED = (TaskDispatchFailedEvent, WorkerSuspectedEvent)
"""Reports whose time is the Controller's: clocks of other hosts mean nothing here."""


LOST = (
    "its record was damaged when this Controller took over, so iris_ray does not know it any more. What runs of it goes"
    " on until its caller ends. Submit it again. The rest of the record is kept in the cluster's store, under corrupt/"
)
MEASURE_S = 5.0
"""How often it measures what there is."""
END_AFTER_S = 5.0
"""So long a Controller that has failed says why. If the next one fails as well, they don't follow each other faster."""


def end_process_soon() -> None:
    """End this process, so that Ray starts the Controller anew; it goes on from its records."""
    asyncio.get_running_loop().call_later(END_AFTER_S, os._exit, 1)


COUNT_CHIPS_S = 10.0
"""How often it looks what the chips of the cluster are in."""

EVICTIONS, GRACE = "IRIS_RAY_EVICTIONS", "IRIS_RAY_EVICTION_GRACE_S"


def eviction_rules(environment: Mapping[str, str]) -> EvictionRules | None:
    """Return when jobs may take hosts from lower bands, by the variables of the head node; None: never."""
    if environment.get(EVICTIONS, "1") == "0":
        return None
    try:
        grace_s = float(environment.get(GRACE, GRACE_S))
    except ValueError:
        grace_s = -1.0
    if 0.0 <= grace_s < math.inf:
        return EvictionRules(grace_s)
    logger.warning("%s is %r, not a number of seconds; %g is used", GRACE, environment.get(GRACE), GRACE_S)
    return EvictionRules()


class Controller:
    """The actor's methods: for pools, for people, and its own start and watching.

    Args:
        read_nodes: reads Ray's node table; blocks.
        end: ends this process, when only a new one helps.
        find_demand: returns what tells Ray's autoscaler of missing slices; None if there is no autoscaler.
        meter: makes what takes the measurements.
    """

    def __init__(
        self,
        read_nodes: Callable[[], NodeTable] = NodeTable.read,
        end: Callable[[], object] = end_process_soon,
        find_demand: Callable[[], AutoscalerDemand | None] = AutoscalerDemand.of_this_cluster,
        meter: Callable[[], Meter] = RayMeter,
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._started_at = time.time()
        self._read_nodes = read_nodes
        self._end = end
        self._find_demand = find_demand
        self._demand: AutoscalerDemand | None = None
        self._meter = meter
        self._measurements: Measurements | None = None
        self._state = ControllerState()
        self._journal = Journal()
        self._clock = self._journal.clock
        self._background = BackgroundTasks(self._background_failed)
        scheduler = Scheduler(evictions=eviction_rules(os.environ))
        self._planner = Planner(self._state, NODE_POLL_S, scheduler, most_placed=MOST_PLACED)
        self._events = EventProcessor(
            self._state, self._planner, self._journal, self._background, self._end, self._measure_wait
        )
        self._pools = PoolRegistry(self._journal, self._state, self._events.apply, self._background)
        self._logs = LogService()
        self._progress = ProgressBoard()
        self._dispatcher = Dispatcher(
            self._state, self._journal, self._pools, self._logs, self._events.apply, self._background
        )
        self._nodes = NodeDiff(self._state, self._clock)
        self._overview = Overview(self._state, self._planner, self._nodes, self._progress, self._clock)
        self._permissions = Permissions(operators_in(os.environ), self._state, self._nodes)
        self._maintenance = MaintenanceService(lambda node_id: self._events.apply([MaintenanceCalledOffEvent(node_id)]))
        self._provider = ProviderWords.of(os.environ)
        self._starting = asyncio.ensure_future(self._start())  # Ray makes async actors in their event loop

    async def versions(self) -> dict[str, Any]:
        """What it is and speaks. Answers at once, whatever becomes of its start, and clients of all versions."""
        return {"protocol": PROTOCOL_VERSION, "version": iris_ray.__version__}

    # -- called by pools -------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        """Answers as soon as the cluster's hosts are known, and what an earlier Controller has left.

        Raises:
            UnknownRecordError: another version of iris_ray has left it.
            ControllerUnavailableError: it could not start for another reason, or has failed and is about to be
                started anew.
            DeposedError: another Controller has taken over.
        """
        if self._events.deposed:
            raise DeposedError(self._events.deposed)
        if self._events.failed:
            raise ControllerUnavailableError(self._events.failed)
        try:
            await asyncio.shield(self._starting)
        except IrisError:
            raise
        except Exception as error:
            raise ControllerUnavailableError(
                f"the Controller of iris_ray {iris_ray.__version__} can't start: {type(error).__name__}: {error}"
            ) from error

    @checked
    async def submit(self, spec: JobSpec, pool: ActorHandle, incarnation: int) -> JobState:
        """Take a job. Submitting the same one again changes nothing; how it stands.

        Args:
            spec: the job.
            pool: who runs it.
            incarnation: number of the pool's process; a larger one than before means that it was started anew.

        Raises:
            SupersededError: a newer process has taken this one's place.
            InvalidJobError: there is another job of this id.
            JobCancelledError: iris_ray could not handle it and has set it aside.
            LimitReachedError: its user has too many jobs that wait, or too many tasks.
        """
        await self.ping()
        if spec.owner not in self._pools:
            self._pools.meet(spec.owner, PoolStub(pool), incarnation)
        await self._pools.process_is(spec.owner, incarnation)
        if spec.owner not in self._pools:
            raise DeposedError("the pool that submits this job is gone")
        known = self._state.jobs.get(spec.job_id)
        if known is None:
            self._state.limits.require_room(spec)
        elif known.spec != spec:
            raise InvalidJobError(f"there is a job {spec.job_id} already, of {known.spec.user}; choose another id")
        await self._events.apply([JobSubmittedEvent(spec, self._clock.now())])
        if (why := self._events.aside.jobs.get(spec.job_id)) is not None:
            raise JobCancelledError(f"job {spec.job_id} was cancelled: {why}")
        return self._state.jobs[spec.job_id].state

    @checked
    async def report(
        self, job_id: str | None, events: list[ReportedEvent], gang: int = 0, sender: PoolProcess | None = None
    ) -> JobView | None:
        """Take what a pool has to say, and answer how a gang of the job stands now.

        Raises:
            SupersededError: a newer process of the pool has taken the sender's place.
            NotPermittedError: it is about what another pool has.
        """
        await self.ping()
        if sender is not None:
            self._pools.require_latest(sender)
            self._permissions.require_pools_own(sender.owner, job_id or "")
        events = self._permissions.of_pools_own(sender.owner if sender else "", events)
        self._nodes.note_drains(events)
        await self._events.apply(map(self._by_our_clock, events))
        job = self._state.jobs.get(job_id or "")
        if job is None:
            return None
        if not 0 <= gang < len(job.gangs):
            raise unknown_number(f"gang of {job_id}", gang, range(len(job.gangs)))
        found, state = job.gangs[gang], job.gang_state(gang)
        counts = found.attempt, found.failures, found.preemptions, found.dispatch_failures
        return JobView(state, *counts, found.error or job.error, job.state)

    @checked
    async def why(self, job_id: str) -> str:
        """Why a job is not running, or not all of it, in a sentence."""
        await self.ping()
        job = self._state.jobs.get(job_id)
        if job is None:
            return "the Controller does not know it"
        if not job.pending:
            return f"it is being started on {', '.join(job_status(job, self._state, self._clock, None).groups)}"
        return str(self._waiting(job) or "it will be looked at in a moment")

    @checked
    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        """What is known about these hosts."""
        await self.ping()
        return self._nodes.evidence(node_ids)

    @checked
    async def is_to_grow(self, attempt: AttemptId) -> bool:
        """Whether the slices that an attempt's gang was told to move to are still there for it."""
        await self.ping()
        job = self._state.jobs.get(attempt.job_id)
        return job is not None and job.gang.attempt == attempt.number and job.gang.is_to_grow

    @checked
    async def provider_words(self, node_ids: list[str]) -> dict[str, ProviderWord]:
        """What the provider says about the slices of these hosts, which do not answer; nothing if it is not asked."""
        await self.ping()
        names = self._nodes.slices_of(node_ids)
        words = await self._provider.about(set(names.values()))
        return {node_id: words[name] for node_id, name in names.items() if name in words}

    @checked
    async def note_last_lines(self, batch: list[LastLines], sender: PoolProcess) -> None:
        """Remember what tasks of a pool have printed last, in case that their hosts vanish.

        Raises:
            NotPermittedError: they are tasks of another pool.
        """
        for job_id in {last.job_id for last in batch}:
            self._permissions.require_pools_own(sender.owner, job_id)
        self._logs.note(batch)

    @checked
    async def note_progress(self, progress: GangProgress, sender: PoolProcess) -> None:
        """Remember what the tasks of an attempt have said about themselves.

        Raises:
            NotPermittedError: they are tasks of another pool.
        """
        job_id = progress.attempt.job_id
        self._permissions.require_pools_own(sender.owner, job_id)
        if job_id in self._state.jobs:
            self._progress.note(progress, self._clock.now(), self._state.jobs)
            self._state.show_anew(job_id)

    # -- called by people ------------------------------------------------------------------------------------------

    @checked
    async def list_jobs(self, after: int = 0) -> list[JobStatus]:
        """A page of the jobs that are known, the oldest first: those that come after the one with this number."""
        await self.ping()
        return [self._status(job) for job in islice((j for j in self._state.jobs.values() if j.number > after), PAGE)]

    @checked
    async def job_status(self, job_id: str) -> JobStatus:
        """How one job stands.

        Raises:
            UnknownNameError: there is no such job.
        """
        await self.ping()
        return self._status(self._job(job_id))

    @checked
    async def job_events(self, job_id: str) -> list[JobEvent]:
        """What has happened to a job, oldest first; raises like `job_status`."""
        await self.ping()
        return job_events(self._job(job_id), self._clock)

    @checked
    async def list_goodput(self, after: int = 0) -> list[JobGoodput]:
        """A page of what the time of gangs went into, the oldest first: those after the job with this number."""
        await self.ping()
        jobs = (job for job in self._state.jobs.values() if job.number > after and is_measured(job))
        return [job_goodput(job, self._progress.of(job.spec.job_id), self._clock) for job in islice(jobs, PAGE)]

    @checked
    async def job_goodput(self, job_id: str) -> JobGoodput:
        """What the time of one job went into.

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
        """What the time of jobs went into that are forgotten, by the day of their end and user, since a time."""
        await self.ping()
        for job in self._state.take_forgotten():
            self._journal.user_times.add(job)
        return self._journal.user_times.since(since)

    @checked
    async def fleet_times(self, since: str) -> dict[str, dict[str, float]]:
        """Chip-seconds by day and state, since a day in UTC, such as 2026-11-23."""
        await self.ping()
        return self._journal.fleet_times.since(since)

    @checked
    async def list_tasks(self, job_id: str, after: int = -1) -> list[TaskStatus]:
        """A page of the tasks of a job: those that come after this index; raises like `job_status`."""
        await self.ping()
        job = self._job(job_id)
        return [task_status(job, index, self._state, self._clock) for index in range(job.size)[after + 1 :][:PAGE]]

    @checked
    async def task_status(self, job_id: str, index: int) -> TaskStatus:
        """How one task stands.

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
        """A piece of what a task has printed.

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
        """Pieces of what several tasks of a job have printed, by task index; tasks that do not exist are left out.

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
        """Where the logs of several tasks of a job are, by task index; the first `MOST_LOGS` that exist.

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
        """A page of the live hosts, by slice and number: those that come after this place.

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
        """What has changed since a position, for those who watch the whole cluster."""
        await self.ping()
        return self._overview.since(since, self._journal.epoch)

    @checked
    async def cancel(self, job_id: str, reason: Words, user: str) -> JobStatus:
        """End a job, wherever it stands; how it stood before.

        Raises:
            UnknownNameError: there is no such job.
            NotPermittedError: it is a job of somebody else, and the user is no operator.
        """
        before = await self.job_status(job_id)
        self._permissions.require_own(user, self._job(job_id))
        await self._events.apply([JobCancelledEvent(job_id, reason)])
        return before

    @checked
    async def taint(self, target: str, taint: str, reason: Words, user: str) -> list[str]:
        """Keep jobs that don't tolerate the taint away from a host or slice; the ids of the hosts that are concerned.

        Raises:
            UnknownNameError: there is no such host or slice.
            NotPermittedError: the user is no operator.
        """
        await self.ping()
        self._permissions.require_operator(user, "drain and taint hosts")
        node_ids = self._hosts(target)
        await self._events.apply([TaintedEvent(target, taint, reason)])
        return node_ids

    @checked
    async def lift_taint(self, target: str, taint: str, user: str) -> list[str]:
        """The opposite of `taint`.

        Raises:
            UnknownNameError: nothing of that name was tainted so.
            NotPermittedError: the user is no operator.
        """
        await self.ping()
        self._permissions.require_operator(user, "lift drains and taints")
        if taint not in self._state.fleet.taints.get(target, {}):
            tainted = [name for name, taints in self._state.fleet.taints.items() if taint in taints]
            raise unknown(f"taint {taint} on", target, tainted)
        await self._events.apply([TaintLiftedEvent(target, taint)])
        return [w.node_id for w in self._state.fleet.slice_workers(target)] or [target]

    async def list_limits(self) -> list[LimitStatus]:
        """What each user has and may have: first the limits of everybody, then those of each user with jobs."""
        await self.ping()
        return limit_statuses(self._state)

    @checked
    async def set_limits(
        self, whose: str, bands: list[PriorityBand], limits: Limits, reset: bool, user: str
    ) -> list[LimitStatus]:
        """Set some limits of a user, or of everybody; how all limits stand then.

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
        await self._events.apply(events)
        return limit_statuses(self._state)

    async def statistics(self) -> dict[str, int]:
        """Counts since this Controller began: jobs that starved, timed out or were unschedulable, evicted attempts."""
        await self.ping()
        return {"epoch": self._journal.epoch, **self._planner.counts}

    async def demand(self) -> dict[str, list[int]]:
        """How many more slices of each type each gang that waits would need to run; see `missing_slices`."""
        await self.ping()
        jobs = self._state.jobs
        waits = [(jobs[job_id], why) for job_id, why in self._planner.pending_reasons.items() if job_id in jobs]
        return missing_slices(waits, self._state.fleet)

    async def about(self) -> dict[str, Any]:
        """Who this Controller is: epoch, version, process, node; and what it could not handle."""
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

    def _by_our_clock(self, event: ReportedEvent) -> Event:
        """A pool's event with our time."""
        if isinstance(event, TIMED):
            return replace(event, now=self._clock.now())
        return self._clock.heard(event) if isinstance(event, WorkerDrainedEvent) else event

    def _status(self, job: Job) -> JobStatus:
        return job_status(job, self._state, self._clock, self._waiting(job), self._progress.of(job.spec.job_id))

    def _waiting(self, job: Job) -> PendingReason | None:
        """Why a job waits, and what the autoscaler is asked for; None if it does not wait, or no plan has come yet."""
        waiting = self._planner.pending_reasons.get(job.spec.job_id)
        if waiting is None or self._demand is None or job.spec.device is None:
            return waiting
        return replace(waiting, asked_for=self._demand.asked_for(job.spec.device))

    def _set_aside(self) -> list[SetAside]:
        """Jobs that it could not handle, or can't place, and records that can't be read."""
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

    # -- its own work ----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        gc.disable()  # next to nothing that is made now is garbage, and to look through it takes half of the time
        try:
            await come_back(
                self._state,
                self._journal,
                self._pools,
                self._nodes,
                self._dispatcher,
                self._events.aside,
                self._read_nodes,
            )
        except IrisError:  # another process of this version would meet it, too
            raise
        except Exception as error:
            self._events.fail(error)
            raise
        finally:
            gc.enable()
        gc.collect()
        gc.freeze()  # the hosts stay; looking through them again and again would stop everything for a while
        self._background.start(self._watch_nodes(), "watching Ray's node table")
        self._background.start(self._count_chips(), "counting what the chips are in")
        self._demand = self._find_demand()
        if self._demand is not None:
            self._background.start(self._watch_demand(self._demand), "telling Ray's autoscaler what is missing")
        self._measurements = Measurements(self._state, self._meter(), self._clock.now())
        self._background.start(self._watch_measurements(self._measurements), "measuring")
        self._events.begin(self._dispatcher)

    async def _watch_nodes(self) -> None:
        while not self._events.deposed:
            await asyncio.sleep(NODE_POLL_S)
            self._clock.look()
            try:
                table = await asyncio.to_thread(self._read_nodes)
                self._events.apply(self._nodes.events_of(table))
                self._maintenance.look_at(self._state.workers, self._state.holders)
            except Exception:
                logger.exception("reading Ray's node table failed; trying again")

    async def _count_chips(self) -> None:
        at = self._clock.now()
        while not self._events.deposed:
            await asyncio.sleep(COUNT_CHIPS_S)
            before, at = at, self._clock.now()
            self._journal.fleet_times.add(day_of(self._clock.wall(at)), chips_by_state(self._state), at - before)

    def _measure_wait(self, job: Job, gang: Gang, now: float) -> None:
        try:
            if self._measurements is not None:
                self._measurements.placed(job, gang, now)
        except Exception:  # what is only measured stops nobody
            logger.exception("measuring failed")

    async def _watch_measurements(self, measurements: Measurements) -> None:
        while not self._events.deposed:
            await asyncio.sleep(MEASURE_S)
            try:
                measurements.look(self._clock.now())
            except Exception:
                logger.exception("measuring failed; trying again")

    async def _watch_demand(self, demand: AutoscalerDemand) -> None:
        while not self._events.deposed:
            try:
                missing = {tpu_type: sum(gangs) for tpu_type, gangs in (await self.demand()).items()}
                await asyncio.to_thread(demand.update, missing, slices_in(self._state.fleet))
            except Exception:
                logger.exception("telling Ray's autoscaler what is missing failed; trying again")
            await asyncio.sleep(NODE_POLL_S)

    def _background_failed(self, error: BaseException) -> None:
        if isinstance(error, DeposedError):
            self._events.step_down(error)
