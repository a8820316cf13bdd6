"""The cluster's Controller: one detached actor that sees every TPU host and every job, and decides who runs where.

It holds no user code and nothing of its callers. All decisions are made by the pure core; this file turns Ray's node
table and the pools' reports into events, and the core's effects into calls.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group_table, remove_placement_group

from iris_ray.actors.held_slice import PLACEMENT_GROUP_PREFIX
from iris_ray.actors.messages import AttemptOrder, HostPlace, JobView
from iris_ray.actors.node_watch import NodeTable, failure, registration
from iris_ray.actors.ray_internals import placement_group_by_id
from iris_ray.actors.resource_pool import Unreachable, answer
from iris_ray.events import (
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TimePassedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.jobs import JobSpec
from iris_ray.lifecycle import JobState
from iris_ray.outcomes import HostEvidence
from iris_ray.scheduler import Scheduler, SchedulingResult
from iris_ray.state import ControllerState, Effects, ReclaimSlice, StopAttempt, apply_all
from iris_ray.waiting import Waiting

logger = logging.getLogger(__name__)

DISPATCH_TIMEOUT_S = 5.0
NODE_POLL_S = 0.5
RECLAIM_TIMEOUT_S = 30.0
TIMED = (TaskDispatchFailedEvent, WorkerSuspectedEvent)
GONE_HOSTS_KEPT = 10_000


class Controller:
    """snapshot → plan → commit → dispatch."""

    def __init__(self) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._state = ControllerState()
        self._scheduler = Scheduler()
        self._pools: dict[str, ActorHandle] = {}
        self._waiting: dict[str, Waiting] = {}
        self._starved: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._gone: dict[str, str] = {}  # worker id → how it was lost
        self._notices: dict[str, str] = {}  # worker id → the drain notice that it had
        self._watching: asyncio.Task[None] | None = None
        self._seen_nodes = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    # -- called by pools -------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        """Answers as soon as the cluster's hosts are known."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_nodes())
        await self._seen_nodes.wait()

    async def submit(self, spec: JobSpec, pool: ActorHandle) -> None:
        """Take a job. Submitting the same one again changes nothing."""
        await self.ping()
        if spec.owner not in self._pools:
            self._pools[spec.owner] = pool
            self._in_background(self._watch_pool(spec.owner, pool))
        self._apply([JobSubmittedEvent(spec, time.monotonic())])

    async def report(self, job_id: str | None, events: list[Event]) -> JobView | None:
        """Take what a pool has to say, and answer how the job stands now."""
        now = time.monotonic()  # clocks of other hosts mean nothing here
        self._apply(replace(e, now=now) if isinstance(e, TIMED) else e for e in events)
        job = self._state.jobs.get(job_id or "")
        if job is None:
            return None
        return JobView(job.state, job.gang.attempt, job.failures, job.preemptions, job.error)

    async def why(self, job_id: str) -> str:
        """Why a job is not running, in a sentence."""
        job = self._state.jobs.get(job_id)
        if job is None:
            return "the Controller does not know it"
        if job.state is not JobState.PENDING:
            return f"attempt {job.gang.attempt} is being started on {', '.join(job.gang.groups)}"
        return str(self._waiting.get(job_id, "it will be looked at in a moment"))

    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        """What is known about these hosts."""
        known = {}
        for node_id in node_ids:
            worker = self._state.workers.get(node_id)
            draining = worker.draining if worker else self._notices.get(node_id)
            known[node_id] = HostEvidence(self._gone.get(node_id), draining)
        return known

    # -- plan, commit, dispatch ------------------------------------------------------------------------------------

    def _apply(self, events: Iterable[Event]) -> None:
        self._carry_out(apply_all(self._state, [TimePassedEvent(time.monotonic()), *events]))
        self._schedule()

    def _schedule(self) -> None:
        pending = self._state.pending()
        if not pending:
            self._waiting.clear()
            return
        state = self._state
        plan = self._scheduler.find_assignments(pending, state.fleet, state.usage, time.monotonic())
        self._waiting = plan.waiting
        self._put_down(plan)
        for assignment in plan.assignments:
            effects = state.handle_event(assignment)
            assert isinstance(assignment, GangAssignedEvent), "pools submit gangs"
            attempt = state.jobs[assignment.job_id].gang.attempt
            self._in_background(self._dispatch(assignment, attempt, effects.reclaim))
        for given_up in (*plan.timed_out, *plan.unschedulable):
            self._carry_out(state.handle_event(given_up))

    def _put_down(self, plan: SchedulingResult) -> None:
        """Log and count what did not go as its owner hoped, once for each job."""
        starved = [job_id for job_id in plan.starving if job_id not in self._starved]
        self._starved = set(plan.starving)
        for job_id in starved:
            logger.warning("%s starves: %s", job_id, plan.waiting[job_id])
        for event in (*plan.timed_out, *plan.unschedulable):
            logger.warning("%s is given up: %s", event.job_id, event.reason)
        self._counts.update(starved=len(starved), timed_out=len(plan.timed_out), unschedulable=len(plan.unschedulable))

    async def _dispatch(self, assignment: GangAssignedEvent, attempt: int, reclaim: list[ReclaimSlice]) -> None:
        """Get the slices from whoever keeps them warm, then hand them to the job's pool."""
        job = self._state.jobs[assignment.job_id]
        pool = self._pools[job.spec.owner]
        slices = tuple(
            tuple(self._place(worker_id, name) for worker_id in group)
            for name, group in zip(assignment.group_names, assignment.groups, strict=True)
        )
        bundle = job.requirement.demand(self._state.workers[assignment.groups[0][0]])
        order = AttemptOrder(assignment.job_id, attempt, slices, bundle)
        problem = await self._reclaim(reclaim)
        if problem is None:
            reply = await answer(pool.assign.remote(order), "the job's pool", DISPATCH_TIMEOUT_S)
            if reply is True:
                return
            if reply is False:
                self._apply([JobCancelledEvent(assignment.job_id, "its pool does not know it any more")])
                self._apply([AttemptEndConfirmedEvent(assignment.job_id, attempt)])
                return
            problem = reply.reason
        self._apply([TaskDispatchFailedEvent(assignment.job_id, attempt, problem, time.monotonic())])
        await self._stop(StopAttempt(assignment.job_id, attempt, problem))

    def _place(self, worker_id: str, slice_name: str) -> HostPlace:
        worker = self._state.workers[worker_id]
        assert worker.host_number is not None, "the scheduler places nothing on a host without a number"
        return HostPlace(worker_id, worker.address, slice_name, worker.host_number)

    async def _reclaim(self, slices: list[ReclaimSlice]) -> str | None:
        """Ask the holders of warm slices to let go; why it failed, or None."""
        for wanted in slices:
            holder = self._pools.get(wanted.holder)
            if holder is None:
                continue  # its owner is gone, and so are its actors
            call = holder.give_up_slice.remote(wanted.slice_name)
            reply = await answer(call, f"the holder of {wanted.slice_name}", RECLAIM_TIMEOUT_S)
            if reply is True:
                self._apply([SliceReleasedEvent(wanted.slice_name, wanted.holder)])
            if reply is False:
                return f"{wanted.slice_name} was in use after all"
            if isinstance(reply, Unreachable):
                logger.info("reclaiming %s: %s", wanted.slice_name, reply.reason)
        return None

    def _carry_out(self, effects: Effects) -> None:
        for stop in effects.stop:
            if self._state.holds_capacity(stop.job_id, stop.attempt):  # not so if its end came in the same report
                self._in_background(self._stop(stop))

    async def _stop(self, stop: StopAttempt) -> None:
        """Have an attempt ended; its capacity is free when its pool says so, or is gone itself."""
        while self._state.holds_capacity(stop.job_id, stop.attempt):
            job = self._state.jobs[stop.job_id]
            pool = self._pools.get(job.spec.owner)
            if pool is None:
                return  # the end of its pool confirms the end of its attempts
            call = pool.stop_attempt.remote(stop.job_id, stop.attempt, stop.reason)
            reply = await answer(call, "the job's pool", 60.0)
            if not isinstance(reply, Unreachable):
                self._apply([AttemptEndConfirmedEvent(stop.job_id, stop.attempt)])
                return
            await asyncio.sleep(1.0)

    # -- the outside world -----------------------------------------------------------------------------------------

    async def _watch_nodes(self) -> None:
        while True:
            try:
                table = await asyncio.to_thread(NodeTable.read)
                self._apply(self._events_of(table))
                self._seen_nodes.set()
            except Exception:
                logger.exception("reading Ray's node table failed; trying again")
            await asyncio.sleep(NODE_POLL_S)

    def _events_of(self, table: NodeTable) -> list[Event]:
        """What changed since the last reading."""
        events: list[Event] = []
        workers = self._state.workers
        seen = set()
        for node in table.nodes:
            node_id = node["NodeID"]
            if not node["Alive"]:
                if node_id in workers:
                    event = failure(node)
                    events.append(event)
                    self._lost(node_id, event.reason)
                continue
            seen.add(node_id)
            held = node.get("Labels", {}).get("ray.io/tpu-slice-name") in self._state.holders
            chips = node.get("Resources", {}).get("TPU", 0.0)
            worker = registration(node, table, ours=chips if held else 0.0)
            if isinstance(worker, str):
                if worker not in self._refused:
                    self._refused.add(worker)
                    logger.warning("refused: %s", worker)
            elif worker is not None:
                if worker.draining:
                    self._notices[node_id] = worker.draining
                if not self._state.knows(worker):
                    events.append(worker)
        return events

    def _lost(self, node_id: str, reason: str) -> None:
        self._gone[node_id] = reason
        while len(self._gone) > GONE_HOSTS_KEPT:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._notices.pop(oldest, None)

    async def _watch_pool(self, owner: str, pool: ActorHandle) -> None:
        """Wait for the end of a pool, that is of its calling process, and clear up after it."""
        while True:
            try:
                await pool.watched.remote()
            except ActorUnavailableError:
                await asyncio.sleep(0.5)
            except RayError:
                break
        del self._pools[owner]
        try:
            await asyncio.to_thread(remove_reservations, owner)
        except Exception:
            logger.exception("removing the reservations of a pool that is gone failed")
        state = self._state
        events: list[Event] = [
            JobCancelledEvent(job.spec.job_id, "the process that called run_on_pod is gone")
            for job in state.jobs_of(owner)
        ]
        events += state.attempts_of(owner)
        events += [SliceReleasedEvent(name, owner) for name, holder in state.holders.items() if holder == owner]
        self._apply(events)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("background work failed", exc_info=error)


def remove_reservations(owner: str) -> None:
    """Remove the placement groups that a vanished pool left behind. Their names say whose they are."""
    prefix = f"{PLACEMENT_GROUP_PREFIX}{owner}/"
    for group_id, group in placement_group_table().items():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            remove_placement_group(placement_group_by_id(group_id))
