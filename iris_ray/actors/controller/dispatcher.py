"""Turns committed placements and instructions into calls of the pools."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.pool_registry import Pool, PoolRegistry
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace
from iris_ray.actors.protocol.pool_interface import PoolInterface
from iris_ray.errors import NotYetError
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.workers import TOPOLOGY_LABEL, string_attribute
from iris_ray.scheduler.planner import PlacedGang
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    JobCancelledEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
)
from iris_ray.state.instructions import DropSpare, Instructions, NotifyGang, ReclaimSlice, StopAttempt

logger = logging.getLogger(__name__)

NOTIFY_AGAIN_S = 0.5
STOP_AGAIN_S = 1.0
CALLS_IN_A_TURN = 100
"""The number of calls that are started without a pause; each takes a fraction of a millisecond."""


class Dispatcher:
    """Calls the pools side by side, outside any plan.

    Args:
        state: read only. The results of the calls reach it as events.
        journal: knows the epoch that orders carry, and the time.
        pools: the pools to call.
        placed: is told where attempts are about to run.
        apply: takes events.
        background: runs the calls.
    """

    def __init__(
        self,
        state: ControllerState,
        journal: Journal,
        pools: PoolRegistry,
        placed: Callable[[AttemptOrder], object],
        apply: Callable[[Iterable[Event]], object],
        background: BackgroundTasks,
    ) -> None:
        self._state = state
        self._journal = journal
        self._pools = pools
        self._placed = placed
        self._apply = apply
        self._background = background

    def order(self, job: Job, gang: Gang) -> AttemptOrder:
        """Return the order to start a gang's current attempt."""
        workers = [self._state.workers[task.node_id or ""] for task in gang.tasks]
        size = len(workers) // len(gang.groups)
        # Hosts without chips are shared, a rack's too: the name of a pool's reservation there is its first task's id.
        names = gang.groups if job.requirement.chips else tuple(task.task_id for task in gang.tasks[::size])
        slices = tuple(
            tuple(
                HostPlace(worker.node_id, worker.address, name, number)
                for number, worker in enumerate(workers[i * size : (i + 1) * size])
            )
            for i, name in enumerate(names)
        )
        before = gang.previous_indices
        return AttemptOrder(
            job.current_attempt(gang),
            slices,
            workers[0].as_ray_counts(job.requirement.demand(workers[0])),
            self._journal.epoch,
            self._pools.incarnation(job.spec.owner),
            job.spec.spare_for.job_id if job.spec.spare_for else None,
            job.spec.processes_per_host,
            tuple(string_attribute(worker.attributes, TOPOLOGY_LABEL) or "" for worker in workers[::size]),
            {worker.node_id: before[worker.node_id] for worker in workers if worker.node_id in before},
        )

    def dispatch(self, order: AttemptOrder, placement: PlacedGang) -> None:
        """Send an order to the job's pool, if the pool is still there."""
        if pool := self._pools.get(placement.job.spec.owner):
            self._background.start(self._dispatch(order, pool, placement.reclaim), f"dispatching {order.attempt}")

    def carry_out(self, instructions: Instructions) -> None:
        """Start the calls that the instructions ask for."""
        if instructions.stop:
            self._background.start(self._stop_all(instructions.stop), "stopping attempts")
        for dropped in instructions.dropped:
            self._background.start(self._drop_spare(dropped), f"dropping the spare {dropped.job_id}")
        for told in instructions.notices:
            self._background.start(self._notify(told), f"giving notice to {told.attempt}")
        for job_id in instructions.finished:
            job = self._state.jobs.get(job_id)  # None if the state has forgotten it, after many other jobs ended
            if job and job.state is not JobState.SUCCEEDED and (pool := self._pools.get(job.spec.owner)):
                ended = pool.ask_once(PoolInterface.job_ended, job_id)
                self._background.start(ended, f"telling a pool of the end of {job_id}")

    async def _dispatch(self, order: AttemptOrder, pool: Pool, reclaim: list[ReclaimSlice]) -> None:
        """Reclaim the slices from the pools that keep them warm, then give the order to the job's pool.

        A pool that has the order already, from an earlier Controller, ignores it.
        """
        attempt = order.attempt
        if order.spare_for is None:
            self._placed(order)
        problem = await self.reclaim(reclaim)
        if problem is None:
            try:
                reply = await pool.ask_once(PoolInterface.assign, order)
            except NotYetError as not_yet:
                failed = TaskDispatchFailedEvent(attempt, str(not_yet), self._journal.clock.now())
                self._apply([failed, AttemptEndConfirmedEvent(attempt)])
                return
            if reply is True or reply is None:  # None: the pool's process was restarted, so the attempt is over
                return
            if reply is False:
                gone = JobCancelledEvent(attempt.job_id, "the process that ran it no longer knows it")
                self._apply([gone, AttemptEndConfirmedEvent(attempt)])
                return
            problem = reply.reason
        if self._runs(attempt):
            return  # the order was a repeated one; `PoolRegistry` notices if the pool's process has ended
        self._apply([TaskDispatchFailedEvent(attempt, problem, self._journal.clock.now())])
        await self._stop(StopAttempt(attempt, problem))

    def _runs(self, attempt: AttemptId) -> bool:
        """Return whether a pool has reported that an attempt runs."""
        if (job := self._state.jobs.get(attempt.job_id)) is None:
            return False
        gang = job.gangs[attempt.gang]
        return gang.attempt == attempt.number and gang.running_since < math.inf

    async def reclaim(self, slices: Iterable[ReclaimSlice]) -> str | None:
        """Ask the holders of warm slices to release them, side by side. Return why that failed, or None."""
        problems = await asyncio.gather(*map(self._reclaim_one, slices))
        return next((problem for problem in problems if problem is not None), None)

    async def _reclaim_one(self, wanted: ReclaimSlice) -> str | None:
        holder = self._pools.get(wanted.holder)
        if holder is None:
            return None  # its owner is gone, and so are its actors
        named = Pool(holder.handle, f"the holder of {wanted.slice_name}")
        reply = await named.ask_once(PoolInterface.give_up_slice, wanted.slice_name, self._journal.epoch)
        if reply is True:
            self._apply([SliceReleasedEvent(wanted.slice_name, wanted.holder)])
        if isinstance(reply, Unreachable):
            logger.info("reclaiming %s: %s", wanted.slice_name, reply.reason)
        return f"{wanted.slice_name} was in use after all" if reply is False else None

    async def _notify(self, told: NotifyGang) -> None:
        """Tell a gang's pool that the gang is to move. Try again as long as the pool does not answer."""
        while (job := self._state.jobs.get(told.attempt.job_id)) is not None and job.spec.spare_for is None:
            pool = self._pools.get(job.spec.owner)
            if pool is None or not self._state.holds_capacity(told.attempt):
                return
            notice = self._journal.clock.told(told.notice), self._journal.epoch, time.time()
            reply = await pool.ask_once(PoolInterface.notify_attempt, told.attempt, *notice)
            if not isinstance(reply, Unreachable):
                return
            await asyncio.sleep(NOTIFY_AGAIN_S)

    async def _drop_spare(self, dropped: DropSpare) -> None:
        """Tell the pool that a spare is not wanted any more. Its order may still be on its way."""
        if pool := self._pools.get(dropped.owner):
            await pool.ask_once(PoolInterface.drop_spare, dropped.job_id)

    async def _stop_all(self, stops: list[StopAttempt]) -> None:
        """Start to stop each attempt, some at a time: the end of a large job stops very many."""
        for number, stop in enumerate(stops, 1):
            if self._state.holds_capacity(stop.attempt):  # it does not if the same report has confirmed its end
                self._background.start(self._stop(stop), f"stopping {stop.attempt}")
            if number % CALLS_IN_A_TURN == 0:
                await asyncio.sleep(0)

    async def _stop(self, stop: StopAttempt) -> None:
        """Have an attempt ended. Its capacity is free once its pool confirms the end, or is gone itself."""
        while self._state.holds_capacity(stop.attempt):
            pool = self._pools.get(self._state.jobs[stop.attempt.job_id].spec.owner)
            if pool is None:
                return  # the end of its pool confirms the end of its attempts
            how = stop.attempt, stop.reason, self._journal.epoch
            reply = await pool.ask_once(PoolInterface.stop_attempt, *how)
            if not isinstance(reply, Unreachable):
                self._apply([AttemptEndConfirmedEvent(stop.attempt)])
                return
            await asyncio.sleep(STOP_AGAIN_S)
