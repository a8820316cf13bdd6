"""The cluster's Controller: one detached actor that sees every TPU host and every job, and decides who runs where.

It holds no user code and nothing of its callers. All decisions are made by the pure core; this file turns Ray's node
table and the pools' reports into events, and the core's instructions into calls.
"""

import asyncio
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle

import iris_ray
from iris_ray.actors.controller.autoscaler_demand import AutoscalerDemand
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.log_service import LogService, log_standing
from iris_ray.actors.controller.maintenance_service import MaintenanceService
from iris_ray.actors.controller.node_table import SLICE_NAME_LABEL, NodeTable, failure, registration
from iris_ray.actors.controller.pool_registry import POOL_GONE, PoolRegistry
from iris_ray.actors.controller.status_views import job_status, task_statuses, worker_status
from iris_ray.actors.wire.answers import Unreachable, answer
from iris_ray.actors.wire.messages import AttemptOrder, HostPlace, JobView
from iris_ray.actors.wire.protocol import PROTOCOL_VERSION
from iris_ray.actors.wire.status import JobStatus, TaskStatus, WorkerStatus
from iris_ray.actors.wire.task_log import LastLines, LogPosition, TaskLog
from iris_ray.cloud.cloud_tpu import ProviderWords
from iris_ray.cloud.provisioning import missing_slices, slices_in
from iris_ray.errors import ControllerUnavailableError, DeposedError, IrisError, NotYetError
from iris_ray.model.ids import AttemptId
from iris_ray.model.jobs import Gang, Job, JobSpec
from iris_ray.model.lifecycle import JobState
from iris_ray.model.outcomes import HostEvidence, ProviderWord
from iris_ray.model.suggestions import unknown
from iris_ray.model.workers import TPU_NAME
from iris_ray.scheduler import Scheduler, SchedulingResult
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.state.controller_state import ControllerState, apply_all
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    JobCancelledEvent,
    JobRestoredEvent,
    JobSubmittedEvent,
    MaintenanceCalledOffEvent,
    SliceHeldEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TaskAssignedEvent,
    TaskDispatchFailedEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.instructions import DropSpare, Instructions, NotifyGang, ReclaimSlice, StopAttempt
from iris_ray.state.records import JobRecord

logger = logging.getLogger(__name__)

DISPATCH_TIMEOUT_S = 5.0
NODE_POLL_S = 0.5
RECLAIM_TIMEOUT_S = 30.0
TIMED = (TaskDispatchFailedEvent, WorkerSuspectedEvent)
GONE_HOSTS_KEPT = 10_000


class Controller:
    """snapshot → plan → commit → dispatch."""

    def __init__(self, read_nodes: Callable[[], NodeTable] = NodeTable.read) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._read_nodes = read_nodes
        self._state = ControllerState()
        self._scheduler = Scheduler()
        self._waiting: dict[str, PendingReason] = {}
        self._starved: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._gone: dict[str, str] = {}  # worker id → how it was lost
        self._notices: dict[str, str] = {}  # worker id → the notice that it had when it was lost
        self._slices: dict[str, str] = {}  # node id → the slice that it is, or was, of
        self._provider = ProviderWords.of(os.environ)
        self._journal = Journal()
        self._pools = PoolRegistry(self._journal, self._state, self._apply, self._in_background)
        self._logs = LogService()
        self._maintenance = MaintenanceService(lambda node_id: self._apply([MaintenanceCalledOffEvent(node_id)]))
        self._instructions = Instructions()  # what the latest events want done
        self._follow_up: asyncio.Future[None] | None = None  # of what has come since the latest plan
        self._following = True  # nothing is to follow from anything before the start is complete
        self._planned_for = (0, 0)
        self._planned_at = 0.0
        self._deposed: str | None = None
        self._started_at = time.time()
        self._background: set[asyncio.Task[None]] = set()
        self._readings: dict[str, object] = {}  # node id → what was last read of it
        self._starting = asyncio.ensure_future(self._start())  # Ray makes async actors in their event loop

    async def versions(self) -> dict[str, Any]:
        """What it is and speaks. Answers at once, whatever becomes of its start, and clients of all versions."""
        return {"protocol": PROTOCOL_VERSION, "version": iris_ray.__version__}

    # -- called by pools -------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        """Answers as soon as the cluster's hosts are known, and what an earlier Controller has left.

        Raises:
            UnknownRecordError: another version of iris_ray has left it.
            ControllerUnavailableError: it could not start for another reason.
            DeposedError: another Controller has taken over.
        """
        if self._deposed:
            raise DeposedError(self._deposed)
        try:
            await asyncio.shield(self._starting)
        except IrisError:
            raise
        except Exception as error:
            raise ControllerUnavailableError(
                f"the Controller of iris_ray {iris_ray.__version__} can't start: {type(error).__name__}: {error}"
            ) from error

    async def submit(self, spec: JobSpec, pool: ActorHandle, incarnation: str) -> JobState:
        """Take a job. Submitting the same one again changes nothing; how it stands.

        Args:
            spec: the job.
            pool: who runs it.
            incarnation: which process of the pool; another one than before means that it was started anew.
        """
        await self.ping()
        if spec.owner not in self._pools:
            self._pools.meet(spec.owner, pool, incarnation)
        await self._pools.process_is(spec.owner, incarnation)
        if spec.owner not in self._pools:
            raise DeposedError("the pool that submits this job is gone")
        await self._apply([JobSubmittedEvent(spec, time.time())])
        return self._state.jobs[spec.job_id].state

    async def report(self, job_id: str | None, events: list[Event], gang: int = 0) -> JobView | None:
        """Take what a pool has to say, and answer how a gang of the job stands now."""
        await self.ping()
        now = time.time()  # clocks of other hosts mean nothing here
        told = (event for event in events if isinstance(event, WorkerDrainedEvent))
        self._notices |= {event.node_id: event.reason for event in told if event.node_id not in self._state.workers}
        await self._apply(replace(e, now=now) if isinstance(e, TIMED) else e for e in events)
        job = self._state.jobs.get(job_id or "")
        if job is None:
            return None
        found, state = job.gangs[gang], job.gang_state(gang)
        return JobView(state, found.attempt, found.failures, found.preemptions, found.error or job.error)

    async def why(self, job_id: str) -> str:
        """Why a job is not running, or not all of it, in a sentence."""
        await self.ping()
        job = self._state.jobs.get(job_id)
        if job is None:
            return "the Controller does not know it"
        if not job.pending:
            return f"it is being started on {', '.join(job_status(job, None).groups)}"
        return str(self._waiting.get(job_id, "it will be looked at in a moment"))

    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        """What is known about these hosts."""
        await self.ping()
        known = {}
        for node_id in node_ids:
            worker = self._state.workers.get(node_id)
            draining = worker.draining if worker else self._notices.get(node_id)
            known[node_id] = HostEvidence(self._gone.get(node_id), draining)
        return known

    async def is_to_grow(self, attempt: AttemptId) -> bool:
        """Whether the slices that an attempt's gang was told to move to are still there for it."""
        await self.ping()
        job = self._state.jobs.get(attempt.job_id)
        return job is not None and job.gang.attempt == attempt.number and job.gang.is_to_grow

    async def provider_words(self, node_ids: list[str]) -> dict[str, ProviderWord]:
        """What the provider says about the slices of these hosts, which do not answer; nothing if it is not asked."""
        await self.ping()
        names = {node_id: self._slices[node_id] for node_id in node_ids if node_id in self._slices}
        words = await self._provider.about(set(names.values()))
        return {node_id: words[name] for node_id, name in names.items() if name in words}

    async def note_last_lines(self, batch: list[LastLines]) -> None:
        """Remember what tasks have printed last, in case that their hosts vanish."""
        self._logs.note(batch)

    # -- called by people ------------------------------------------------------------------------------------------

    async def list_jobs(self) -> list[JobStatus]:
        """All jobs that are known, the oldest first."""
        await self.ping()
        return [job_status(job, self._waiting.get(job_id)) for job_id, job in self._state.jobs.items()]

    async def job_status(self, job_id: str) -> JobStatus:
        """How one job stands.

        Raises:
            UnknownNameError: there is no such job.
        """
        await self.ping()
        return job_status(self._job(job_id), self._waiting.get(job_id))

    async def list_tasks(self, job_id: str) -> list[TaskStatus]:
        """The tasks of a job, by index; raises like `job_status`."""
        await self.ping()
        return list(task_statuses(self._job(job_id), self._state))

    async def task_status(self, job_id: str, index: int) -> TaskStatus:
        """How one task stands.

        Raises:
            UnknownNameError: there is no such job, or it has no such task.
        """
        found = {task.task_index: task for task in await self.list_tasks(job_id)}
        if index not in found:
            raise unknown(f"task of {job_id}", str(index), map(str, found))
        return found[index]

    async def fetch_task_logs(
        self,
        job_id: str,
        task_index: int,
        attempt: int | None = None,
        offset: int = 0,
        max_bytes: int = 1 << 20,
        tail_lines: int | None = None,
    ) -> TaskLog:
        """A piece of what a task has printed.

        Args:
            job_id, task_index: which task.
            attempt: its attempt; None for the latest.
            offset: where the piece begins, in bytes.
            max_bytes: how long it may be.
            tail_lines: give the last lines instead, so many.

        Raises:
            UnknownNameError: there is no such job, task or attempt.
        """
        await self.ping()
        standing = log_standing(self._state, self._job(job_id), task_index, attempt)
        return await self._logs.fetch(standing, self._state.workers, offset, max_bytes, tail_lines)

    async def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        """Pieces of what several tasks of a job have printed, by task index; tasks that do not exist are left out.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """
        await self.ping()
        job = self._job(job_id)
        there = {index: at for index, at in wanted.items() if 0 <= index < len(job.tasks)}
        calls = (
            self.fetch_task_logs(job_id, index, at.attempt, at.offset, max_bytes, at.tail_lines)
            for index, at in there.items()
        )
        return dict(zip(there, await asyncio.gather(*calls), strict=True))

    async def list_workers(self) -> list[WorkerStatus]:
        """All live hosts, by slice and number."""
        await self.ping()
        now = time.time()
        found = [worker_status(worker, self._state, now) for worker in self._state.workers.values()]
        return sorted(found, key=lambda w: (w.slice_name or "", w.host_index or 0, w.node_id))

    async def cancel(self, job_id: str, reason: str) -> JobStatus:
        """End a job, wherever it stands; how it stood before. Raises like `job_status`."""
        before = await self.job_status(job_id)
        await self._apply([JobCancelledEvent(job_id, reason)])
        return before

    async def taint(self, target: str, taint: str, reason: str) -> list[str]:
        """Keep jobs that don't tolerate the taint away from a host or slice; the ids of the hosts that are concerned.

        Raises:
            UnknownNameError: there is no such host or slice.
        """
        await self.ping()
        node_ids = self._hosts(target)
        await self._apply([TaintedEvent(target, taint, reason)])
        return node_ids

    async def lift_taint(self, target: str, taint: str) -> list[str]:
        """The opposite of `taint`.

        Raises:
            UnknownNameError: nothing of that name was tainted so.
        """
        await self.ping()
        if taint not in self._state.fleet.taints.get(target, {}):
            tainted = [name for name, taints in self._state.fleet.taints.items() if taint in taints]
            raise unknown(f"taint {taint} on", target, tainted)
        await self._apply([TaintLiftedEvent(target, taint)])
        return [w.node_id for w in self._state.fleet.slice_workers(target)] or [target]

    async def statistics(self) -> dict[str, int]:
        """Counts since this Controller began: jobs that starved, timed out or turned out to be unschedulable."""
        await self.ping()
        return {"epoch": self._journal.epoch, **self._counts}

    async def demand(self) -> dict[str, int]:
        """How many more slices of each type the jobs that wait could use."""
        await self.ping()
        jobs = self._state.jobs
        return missing_slices((jobs[job_id], why) for job_id, why in self._waiting.items() if job_id in jobs)

    async def about(self) -> dict[str, Any]:
        """Who this Controller is: epoch, version, process, node."""
        return {
            "epoch": (await self.statistics())["epoch"],
            "version": iris_ray.__version__,
            "started_at": self._started_at,
            "pid": os.getpid(),
            "address": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
        }

    def _job(self, job_id: str) -> Job:
        job = self._state.jobs.get(job_id)
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

    # -- plan, commit, dispatch ------------------------------------------------------------------------------------

    def _apply(self, events: Iterable[Event]) -> "asyncio.Future[None]":
        """Change the state. The future is done when what follows is decided and put down; whoever acknowledges waits.

        What comes in the same turn of the event loop, or while something is put down, shares one plan and one writing.
        """
        apply_all(self._state, [TimePassedEvent(time.time()), *events], self._instructions)
        if self._follow_up is None:
            self._follow_up = asyncio.get_running_loop().create_future()
        if not self._following:
            self._following = True
            self._in_background(self._follow())
        return self._follow_up

    async def _follow(self) -> None:
        """Plan, put down, carry out, until nothing new has come meanwhile."""
        try:
            while self._follow_up is not None:
                orders = self._plan()
                follow_up, self._follow_up = self._follow_up, None
                instructions, self._instructions = self._instructions, Instructions()
                try:
                    await self._journal.write(self._state)
                except DeposedError as error:
                    self._step_down(error, follow_up)
                    return
                self._carry_out(instructions)
                for order, owner, reclaim in orders:
                    if owner in self._pools:
                        self._in_background(self._dispatch(order, self._pools[owner], reclaim))
                follow_up.set_result(None)
        finally:
            self._following = False

    def _step_down(self, error: DeposedError, follow_up: "asyncio.Future[None]") -> None:
        """Acknowledge nothing any more; whoever asks is told to look for another Controller."""
        logger.warning("%s", error)
        self._deposed = str(error)
        for waited_for in (follow_up, self._follow_up):
            if waited_for is not None:
                waited_for.set_exception(error)
                waited_for.exception()  # maybe nobody waits for it
        self._follow_up = None

    def _plan(self) -> list[tuple[AttemptOrder, str, list[ReclaimSlice]]]:
        """Place what can be placed: the orders, to whom they go, and what others must let go before."""
        state, now = self._state, time.time()
        recent, fleet_version = now < self._planned_at + NODE_POLL_S, self._planned_for[0]
        if recent and self._planned_for == (state.fleet.version, state.queue_version):
            return []  # nothing has changed that a plan depends on
        still_waiting = self._waiting if recent and fleet_version == state.fleet.version else None
        if still_waiting is None:
            self._planned_at = now
        plan = self._scheduler.find_assignments(state.pending(), state.fleet, state.usage, now, still_waiting)
        self._waiting = plan.waiting
        self._record_plan(plan)
        orders, queue_version = [], state.queue_version
        for assignment in plan.assignments:
            instructions = state.handle_event(assignment)
            self._instructions.add(instructions)
            job = state.jobs[assignment.job_id]
            gang = job.gang_of(assignment.task_index) if isinstance(assignment, TaskAssignedEvent) else job.gang
            orders.append((self._order(job, gang), job.spec.owner, instructions.reclaim))
        done = state.queue_version == queue_version  # else some gang got spares to be placed, or needs fewer
        if done:
            self._planned_for = state.fleet.version, state.queue_version  # its own assignments leave nothing to place
        apply_all(state, (*plan.timed_out, *plan.unschedulable), self._instructions)
        return orders if done else orders + self._plan()

    def _record_plan(self, plan: SchedulingResult) -> None:
        """Log and count what did not go as its owner hoped, once for each job."""
        starved = [job_id for job_id in plan.starving if job_id not in self._starved]
        self._starved = set(plan.starving)
        for job_id in starved:
            logger.warning("%s starves: %s", job_id, plan.waiting[job_id])
        for event in (*plan.timed_out, *plan.unschedulable):
            logger.warning("%s is given up: %s", event.job_id, event.reason)
        self._counts.update(starved=len(starved), timed_out=len(plan.timed_out), unschedulable=len(plan.unschedulable))

    async def _dispatch(self, order: AttemptOrder, pool: ActorHandle, reclaim: list[ReclaimSlice]) -> None:
        """Get the slices from whoever keeps them warm, then hand them to the job's pool.

        The pool may have the order already, from an earlier Controller; then it ignores this one.
        """
        attempt = order.attempt
        if order.spare_for is None:
            self._logs.placed(order)
        problem = await self._reclaim(reclaim)
        if problem is None:
            try:
                reply = await answer(pool.assign.remote(order), "the job's pool", DISPATCH_TIMEOUT_S)
            except NotYetError as not_yet:
                failed = TaskDispatchFailedEvent(attempt, str(not_yet), time.time())
                self._apply([failed, AttemptEndConfirmedEvent(attempt)])
                return
            if reply is True or reply is None:  # None: its process is another one by now, and what ran there is over
                return
            if reply is False:
                gone = JobCancelledEvent(attempt.job_id, "its pool does not know it any more")
                self._apply([gone, AttemptEndConfirmedEvent(attempt)])
                return
            problem = reply.reason
        self._apply([TaskDispatchFailedEvent(attempt, problem, time.time())])
        await self._stop(StopAttempt(attempt, problem))

    def _order(self, job: Job, gang: Gang) -> AttemptOrder:
        workers = [self._state.workers[task.node_id or ""] for task in gang.tasks]
        names = gang.groups if job.requirement.chips else (gang.tasks[0].task_id,)
        size = len(workers) // len(names)
        slices = tuple(
            tuple(
                HostPlace(worker.node_id, worker.address, name, number)
                for number, worker in enumerate(workers[i * size : (i + 1) * size])
            )
            for i, name in enumerate(names)
        )
        return AttemptOrder(
            job.current_attempt(gang),
            slices,
            job.requirement.demand(workers[0]),
            self._journal.epoch,
            self._pools.incarnation(job.spec.owner),
            job.spec.spare_for.job_id if job.spec.spare_for else None,
        )

    async def _reclaim(self, slices: list[ReclaimSlice]) -> str | None:
        """Ask the holders of warm slices to let go; why it failed, or None."""
        for wanted in slices:
            holder = self._pools.get(wanted.holder)
            if holder is None:
                continue  # its owner is gone, and so are its actors
            call = holder.give_up_slice.remote(wanted.slice_name, self._journal.epoch)
            reply = await answer(call, f"the holder of {wanted.slice_name}", RECLAIM_TIMEOUT_S)
            if reply is True:
                self._apply([SliceReleasedEvent(wanted.slice_name, wanted.holder)])
            if reply is False:
                return f"{wanted.slice_name} was in use after all"
            if isinstance(reply, Unreachable):
                logger.info("reclaiming %s: %s", wanted.slice_name, reply.reason)
        return None

    def _carry_out(self, instructions: Instructions) -> None:
        for stop in instructions.stop:
            # Not so if its end came in the same report.
            if self._state.holds_capacity(stop.attempt):
                self._in_background(self._stop(stop))
        for dropped in instructions.dropped:
            self._in_background(self._drop_spare(dropped))
        for told in instructions.notices:
            self._in_background(self._notify(told))
        for job_id in instructions.finished:
            job = self._state.jobs.get(job_id)  # None if so many others have ended meanwhile that it is forgotten
            if job and job.state is not JobState.SUCCEEDED and job.spec.owner in self._pools:
                self._in_background(self._tell(self._pools[job.spec.owner], job_id))

    async def _notify(self, told: NotifyGang) -> None:
        """Have a gang told that it is to move. Its pool may be busy; a notice is worth some tries."""
        while (job := self._state.jobs.get(told.attempt.job_id)) is not None and job.spec.spare_for is None:
            pool = self._pools.get(job.spec.owner)
            if pool is None or not self._state.holds_capacity(told.attempt):
                return
            call = pool.notify_attempt.remote(told.attempt, told.notice, self._journal.epoch)
            if not isinstance(await answer(call, "the job's pool", DISPATCH_TIMEOUT_S), Unreachable):
                return
            await asyncio.sleep(0.5)

    async def _drop_spare(self, dropped: DropSpare) -> None:
        """The order for it may still be on its way; what it has reserved by now, its pool keeps warm."""
        if pool := self._pools.get(dropped.owner):
            await answer(pool.drop_spare.remote(dropped.job_id), "the job's pool", DISPATCH_TIMEOUT_S)

    async def _tell(self, pool: ActorHandle, job_id: str) -> None:
        """Its pool may still wait for an order; a pool that is gone needs no word."""
        await answer(pool.job_ended.remote(job_id), "the job's pool", DISPATCH_TIMEOUT_S)

    async def _stop(self, stop: StopAttempt) -> None:
        """Have an attempt ended; its capacity is free when its pool says so, or is gone itself."""
        while self._state.holds_capacity(stop.attempt):
            pool = self._pools.get(self._state.jobs[stop.attempt.job_id].spec.owner)
            if pool is None:
                return  # the end of its pool confirms the end of its attempts
            call = pool.stop_attempt.remote(stop.attempt, stop.reason, self._journal.epoch)
            reply = await answer(call, "the job's pool", 60.0)
            if not isinstance(reply, Unreachable):
                self._apply([AttemptEndConfirmedEvent(stop.attempt)])
                return
            await asyncio.sleep(1.0)

    # -- coming back -----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        gc.disable()  # next to nothing that is made now is garbage, and to look through it takes half of the time
        try:
            await self._come_back()
        finally:
            gc.enable()
        gc.collect()
        gc.freeze()  # the hosts stay; looking through them again and again would stop everything for a while
        self._in_background(self._watch_nodes())
        if (demand := AutoscalerDemand.of(os.environ)) is not None:
            self._in_background(self._watch_demand(demand))
        self._following = False
        self._apply([])

    async def _come_back(self) -> None:
        """Learn what hosts there are, and take up what an earlier Controller has left."""
        records, taints = self._journal.begin()
        table, views = await asyncio.gather(asyncio.to_thread(self._read_nodes), self._pools.come_back())
        held = (SliceHeldEvent(name, owner) for owner, view in views.items() for name in view.slices)
        apply_all(self._state, [TimePassedEvent(time.time()), *held])
        apply_all(self._state, [*taints, *self._events_of(table)])
        instructions = apply_all(self._state, map(JobRestoredEvent, records))
        for owner, view in views.items():
            await self._pools.process_is(owner, view.incarnation)
        self._pools.watch(views)
        self._carry_out(self._without_pools(instructions))
        apply_all(self._state, self._events_of(table))  # by now it is known which chips are reserved by ourselves
        await self._journal.take_over(self._state)
        for record in records:
            self._take_up(record, instructions.reclaim)
        if records:
            logger.info("Controller %d takes up %d jobs of %d pools", self._journal.epoch, len(records), len(views))

    def _without_pools(self, instructions: Instructions) -> Instructions:
        """Jobs whose pool is gone end."""
        orphans = [job for job in self._state.jobs.values() if job.spec.owner not in self._pools]
        ends = (JobCancelledEvent(job.spec.job_id, POOL_GONE) for job in orphans if not job.state.finished)
        return apply_all(self._state, ends, instructions)

    def _take_up(self, record: JobRecord, reclaim: list[ReclaimSlice]) -> None:
        """Go on with a job. Its pool gets its orders again, which it ignores if it has them already."""
        job, pool = self._state.jobs.get(record.job.spec.job_id), self._pools.get(record.job.spec.owner)
        if job is None or job.state.finished or pool is None:  # a pool that has just gone ends its jobs itself
            return
        for gang in job.gangs:
            if gang.placed:
                wanted = [one for one in reclaim if one.slice_name in gang.groups]
                self._in_background(self._dispatch(self._order(job, gang), pool, wanted))

    # -- the outside world -----------------------------------------------------------------------------------------

    async def _watch_nodes(self) -> None:
        while not self._deposed:
            await asyncio.sleep(NODE_POLL_S)
            try:
                table = await asyncio.to_thread(self._read_nodes)
                self._apply(self._events_of(table))
                self._maintenance.look_at(self._state.workers, self._state.holders)
            except Exception:
                logger.exception("reading Ray's node table failed; trying again")

    async def _watch_demand(self, demand: AutoscalerDemand) -> None:
        while not self._deposed:
            try:
                await asyncio.to_thread(demand.update, await self.demand(), slices_in(self._state.fleet))
            except Exception:
                logger.exception("telling Ray's autoscaler what is missing failed; trying again")
            await asyncio.sleep(NODE_POLL_S)

    def _events_of(self, table: NodeTable) -> list[Event]:
        """What changed since the last reading."""
        events: list[Event] = []
        workers = self._state.workers
        seen = set()
        for node in table.nodes:
            node_id = node["NodeID"]
            if node_id not in self._slices and (name := node.get("Labels", {}).get(SLICE_NAME_LABEL)):
                self._slices[node_id] = name
            if not node["Alive"]:
                if node_id not in self._gone:
                    if node_id in workers and (draining := workers[node_id].draining):
                        self._notices[node_id] = draining
                    self._lost(node_id, failure(node).reason)
                self._readings.pop(node_id, None)
                if node_id in workers:
                    died, notice = failure(node), self._notices.get(node_id)
                    events.append(replace(died, reason=f"{died.reason}; {notice}") if notice else died)
                continue
            seen.add(node_id)
            held = node.get("Labels", {}).get("ray.io/tpu-slice-name") in self._state.holders
            reading = node, table.draining.get(node_id), table.available.get(node_id), held
            if self._readings.get(node_id) == reading:
                continue
            self._readings[node_id] = reading
            chips = node.get("Resources", {}).get("TPU", 0.0)
            worker = registration(node, table, ours=chips if held else 0.0)
            if isinstance(worker, str):
                if worker not in self._refused:
                    self._refused.add(worker)
                    logger.warning("refused: %s", worker)
            elif worker is not None and not self._state.knows(worker):
                events.append(worker)
        return events

    def _lost(self, node_id: str, reason: str) -> None:
        self._gone[node_id] = reason
        while len(self._gone) > GONE_HOSTS_KEPT:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._notices.pop(oldest, None)
            self._slices.pop(oldest, None)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, DeposedError):
            self._deposed = str(error)
        logger.error("background work failed", exc_info=error)
