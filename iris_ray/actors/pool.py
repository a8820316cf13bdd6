"""The actor through which one calling process runs its jobs.

A SlicePoolManager lives in the caller's Ray job and ends with the calling process; all that it started ends with it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray

from iris_ray.actors.controller_client import ControllerClient
from iris_ray.actors.held_slice import HeldSlice
from iris_ray.actors.job_run import JobRun
from iris_ray.actors.last_lines import LastLinesRelay
from iris_ray.actors.messages import AttemptOrder, RunRequest
from iris_ray.actors.slice_pool import SlicePool
from iris_ray.errors import DeposedError
from iris_ray.task_logs import LastLines

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.5
LONG_IDLE_S = 10.0
LATEST_QUESTION_S = 60.0
"""How long after a job's end it is known whether the Controller had it."""
LAST_ANSWERS_S = 2.0
"""How long a pool without a caller stays after its job, for whoever waits for the results."""


class SlicePoolManager:
    """Runs gangs on slices that the Controller assigns, and keeps idle slices warm for a while."""

    def __init__(self) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        self._slices = SlicePool(ray.get_runtime_context().get_actor_id() or "")
        self._controller = ControllerClient()
        self._last_lines = LastLinesRelay(self._controller)
        self._runs: dict[str, JobRun] = {}
        self._unsettled: dict[str, JobRun] = {}  # their results are out, their end is still to be reported
        self._acceptances: dict[str, asyncio.Future[bool]] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._done = 0
        self._idle_s = 0.0
        self._changed = asyncio.Condition()
        self._keeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return "iris_ray"  # what Ray's driver shows before our own messages

    # -- called by the driver --------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> list[Any]:
        """Run one job to its end; its tasks' results by index, or the job's own error."""
        self._start_keeper()
        accepted = self._acceptance(request.spec.job_id)
        run = JobRun(self._slices, self._controller, request, accepted)
        self._runs[run.job_id] = run
        try:
            await self._controller.connect()
            return await run.run()
        finally:
            if not accepted.done():
                accepted.set_result(False)
            asyncio.get_running_loop().call_later(LATEST_QUESTION_S, self._acceptances.pop, run.job_id)
            self._unsettled[run.job_id] = self._runs.pop(run.job_id)
            settling = asyncio.ensure_future(self._settle(run))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
            await self._give_back(lambda held: held.used_by == run.job_id and held.keep_warm <= 0)
            self._done += 1
            await self._notify()

    async def run_alone(self, request: RunRequest) -> list[Any]:
        """Like `run`, in a pool that has no caller: it ends with this job."""
        try:
            return await self.run(request)
        finally:
            ending = asyncio.ensure_future(self._end())
            self._settling.add(ending)

    async def _end(self) -> None:
        await self.release()
        await asyncio.gather(*(run.settled() for run in self._unsettled.values()))
        await asyncio.sleep(LAST_ANSWERS_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def accepted(self, job_id: str) -> bool:
        """Whether the Controller has that job; returns when that is known."""
        return await asyncio.shield(self._acceptance(job_id))

    async def release(self) -> None:
        """Give up every slice that no job has a use for, those included whose last task is just being ended."""

        def unused(held: HeldSlice) -> bool:
            return held.used_by not in self._runs

        await self._slices.settle(unused)
        await self._give_back(unused)

    async def until_idle(self, calls: int) -> None:
        """Returns when that many runs have come and gone and no slice is left.

        A run that was cancelled before it arrived never comes: nothing at all for a while will do, too.
        """

        self._start_keeper()

        def idle() -> bool:
            quiet = not self._runs and not self._unsettled and not len(self._slices)
            return quiet and (self._done >= calls or self._idle_s > LONG_IDLE_S)

        async with self._changed:
            await self._changed.wait_for(idle)

    # -- called by hosts ---------------------------------------------------------------------------------------------

    async def take_last_lines(self, last: LastLines) -> None:
        """A task has printed something; its last lines are to outlive its host."""
        self._last_lines.take(last)

    # -- called by the Controller ----------------------------------------------------------------------------------

    async def watched(self) -> None:
        """Never returns; whoever waits for it learns of this process's end."""
        await asyncio.Event().wait()

    async def reconnect(self, epoch: int) -> tuple[str, ...]:
        """A new Controller has taken over: from now on it is obeyed, and no earlier one. The slices that are held."""
        self._obey(epoch)
        return self._slices.slice_names()

    async def assign(self, order: AttemptOrder) -> bool:
        """Start an attempt, if it is not known already; False if the job is not known here (any more)."""
        self._obey(order.epoch)
        run = self._known(order.job_id)
        if run is None:
            return False
        run.take(order)
        return True

    async def stop_attempt(self, job_id: str, first_task: int, attempt: int, reason: str, epoch: int) -> None:
        """End an attempt of the gang that begins with that task; returns when no process of it is left."""
        self._obey(epoch)
        if run := self._known(job_id):
            await run.stop_attempt(first_task, attempt, reason)

    async def job_ended(self, job_id: str) -> None:
        """The Controller has ended a job; if it waits, it waits in vain."""
        if run := self._runs.get(job_id):
            run.wake()

    async def give_up_slice(self, name: str, epoch: int) -> bool:
        """Let go of an idle slice that somebody else needs; False if it is in use after all."""
        self._obey(epoch)
        if name in self._slices and not self._slices[name].in_use:
            logger.info("%s goes to another job", name)
            await self._give_back(lambda held: held.name == name)
        await self._slices.left(name)
        return name not in self._slices

    def _acceptance(self, job_id: str) -> "asyncio.Future[bool]":
        """Whether the Controller has a job; who asks may be faster than the job itself."""
        return self._acceptances.setdefault(job_id, asyncio.get_running_loop().create_future())

    def _known(self, job_id: str) -> JobRun | None:
        return self._runs.get(job_id) or self._unsettled.get(job_id)

    def _obey(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise DeposedError(f"Controller {epoch} was replaced by Controller {self._epoch}")
        self._epoch = epoch

    async def _settle(self, run: JobRun) -> None:
        await run.settled()
        del self._unsettled[run.job_id]

    # -- idle slices -----------------------------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_idle_slices())

    async def _keep_idle_slices(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            await self._give_back(self._kept_long_enough)
            busy = self._runs or len(self._slices)
            self._idle_s = 0.0 if busy else self._idle_s + IDLE_CHECK_S
            await self._notify()

    def _kept_long_enough(self, held: HeldSlice) -> bool:
        idle_s = asyncio.get_running_loop().time() - held.idle_since
        return held.used_by not in self._runs and idle_s > held.keep_warm

    async def _give_back(self, condition: Callable[[HeldSlice], bool]) -> None:
        """Release idle slices and tell the Controller. Never raises: nobody's result depends on it."""
        try:
            released = await self._slices.release_if(condition)
            if released:
                await self._controller.ask("report", None, released)
                await self._notify()
        except Exception:
            logger.exception("giving slices back failed")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
