"""The actor through which one calling process runs its jobs.

It lives in the caller's Ray job. The pool and every actor that it started end with the calling process.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.clocks import by_this_clock
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.calls.names import NAMESPACE, take_incarnation
from iris_ray.actors.pool.children import differences, latest_adopter, may_adopt, may_replace, note_adopter
from iris_ray.actors.pool.gang_run import GangRun
from iris_ray.actors.pool.job_run import JobRun
from iris_ray.actors.pool.reserved_slice import ReservedSlice
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.services import JobOver, Pool, pool_parts
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import (
    Adoption,
    AttemptOrder,
    ChildOf,
    PoolProcess,
    PoolView,
    RunRequest,
    with_stored_function,
)
from iris_ray.actors.protocol.payloads import fetched
from iris_ray.errors import ControllerUnavailableError, DeposedError, NotYetError, VersionMismatchError
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.notices import HostNotice, Notice, NoticeKind
from iris_ray.model.workers import TPU
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.state.events import JobCancelledEvent, MaintenanceCalledOffEvent, WorkerDrainedEvent

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.5
LONG_IDLE_S = 10.0
IDLE_LOOK_S = 10.0
"""The interval at which the pool asks whether idle slices still answer, and whether other Ray work waits for them."""
LEAVING_S = 1.0
"""The time that a new job waits for warm slices on which processes of the job before are still ending."""
LATEST_QUESTION_S = 60.0
"""The time after a job's end in which the pool answers `accepted`."""
REPEATED_WITHIN_S = 60.0
"""The time that callers have to repeat their jobs after the pool's process was restarted."""
DROPPED_KEPT = 100
"""The number of dropped spares that the pool remembers, because their orders may still come."""
COMES_BACK_S, COMES_BACK_POLL_S = 3.0, 0.02
"""An order that comes before its job waits for this time, at this interval. Refused, it would count as a failed launch.
It is less than the time that the Controller waits for an answer."""
LAST_ANSWERS_S = 2.0
"""The time that a pool without a caller lives after its job, so that the results can be fetched."""


class SlicePoolManager:
    """Runs gangs on slices that the Controller assigns, and keeps idle slices warm for a while. See `PoolInterface`.

    If its process dies, Ray restarts it and repeats the calls of waiting callers. The Controller recognizes the job by
    its id and orders another attempt.

    Args:
        alone: the only job of a pool that has no caller. The pool ends with it.
        starter: a process of this machine that the caller has begun, and that starts the Controller.
        child: who submits the only job, if the next attempt of that task may adopt it.
    """

    def __init__(
        self,
        alone: RunRequest | None = None,
        starter: ProcessIdentity | None = None,
        child: ChildOf | None = None,
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        owner = ray.get_runtime_context().get_actor_id() or ""
        self._incarnation = take_incarnation(owner)
        self._slices = ReservedSlices(owner)
        self._controller = ControllerClient(PoolProcess(owner, self._incarnation), starter)
        self._notices: dict[tuple[str, NoticeKind], HostNotice] = {}  # the latest ones, by node id and kind
        self._passing_on = asyncio.Lock()  # the Controller hears of notices in the order in which they came
        self._runs: dict[str, JobRun] = {}
        self._unsettled: dict[str, JobRun] = {}  # their results are out, but their end is not reported yet
        self._gangs: dict[tuple[str, int], GangRun] = {}  # of both, by job id and number
        self._just_over: set[JobRun] = set()  # their results went out less than `LEAVING_S` ago
        self._acceptances: dict[str, asyncio.Future[bool]] = {}
        self._background = BackgroundTasks()
        self._services = pool_parts(Pool(self._controller, self._only_request, self._background))
        for work, what in self._services.works():
            self._background.start(work, what)
        self._epoch = 0
        self._deposed = asyncio.Event()  # set when a newer Controller is obeyed, with another one in its place
        self._done = 0
        self._idle_s = 0.0
        self._changed = asyncio.Condition()
        self._watches_idle_slices = False
        self._others = OthersWaiting()
        self._dropped: deque[str] = deque(maxlen=DROPPED_KEPT)
        self._had: set[str] = set()  # jobs that this process has run within `REPEATED_WITHIN_S` after its start
        self._began = time.monotonic()
        self._alone = None if alone is None else asyncio.ensure_future(self._run_alone(alone))
        self._only = alone
        self._child = child  # the task's latest attempt that has submitted or adopted the only job
        self._ends_only = False  # whether the only job is being ended
        if child is not None:
            if self._incarnation > 1:  # an attempt may have adopted it from an earlier process of this pool
                self._child = latest_adopter(owner, child)
            self._background.start(self._end_with_parent(child.job_id), f"waiting for the end of {child.job_id}")

    def __repr__(self) -> str:
        return "iris_ray"  # Ray's driver shows this before our log messages

    # -- called by the driver --------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> list[Any]:
        self._watch_idle_slices()
        accepted = self._acceptance(request.spec.job_id)
        run = JobRun(self._slices, self._controller, self._services, request, accepted, self._incarnation)
        self._runs[run.job_id] = run
        self._gangs |= {(run.job_id, number): gang for number, gang in enumerate(run.gangs)}
        if self._callers_repeat:
            self._had.add(run.job_id)
        try:
            await self._controller.connect()
            await self._warm_slices_left(request)
            return await run.run()
        finally:
            if not accepted.done():
                accepted.set_result(False)
            asyncio.get_running_loop().call_later(LATEST_QUESTION_S, self._acceptances.pop, run.job_id)
            self._unsettled[run.job_id] = self._runs.pop(run.job_id)
            self._just_over.add(run)
            asyncio.get_running_loop().call_later(LEAVING_S, self._just_over.discard, run)
            self._background.start(self._settle(run), f"reporting the end of {run.job_id}")
            self._done += 1
            await self._notify()

    async def begin(self, request: RunRequest) -> None:
        self._only = with_stored_function(request)
        self._alone = asyncio.ensure_future(self._run_alone(self._only))

    async def results(self) -> list[Any]:
        assert self._alone is not None
        try:
            return await asyncio.shield(self._alone)
        except asyncio.CancelledError:
            if self._child is not None and not self._alone.done():  # the task has called `ray.cancel`
                self._background.start(self._end_only("cancelled by its owner"), "ending the only job")
            raise

    async def _run_alone(self, request: RunRequest) -> list[Any]:
        try:
            results = await self.run(request)
        except BaseException:
            self._background.start(self._end(), "ending this pool with its only job")
            raise
        if request.child_of is None:
            self._background.start(self._end(), "ending this pool with its only job")
        else:  # an attempt of its parent may still ask for the results
            self._background.start(self.release(), "giving up the slices of the only job")
        return results

    async def adopt(self, request: RunRequest, replaces: bool = False) -> Adoption:
        by, only = request.child_of, self._only
        if by is None or only is None or only.spec.name != request.spec.name or not self._is_free_for(by):
            return Adoption()
        functions = [await fetched(one.pickled_function) for one in (only, request)]
        differs = await asyncio.to_thread(differences, only, request, *functions)
        if not differs and await self._has_failed(only.spec.job_id):
            return Adoption()
        if not self._is_free_for(by):  # another call of this attempt was first, or the job has failed
            return Adoption()
        if not differs:
            await self._adopted_by(by)
            logger.info("%s: attempt %d of %s has adopted it", only.spec.job_id, by.attempt, by.job_id)
            return Adoption(only.spec.job_id)
        assert self._child is not None
        if not may_replace(by, self._child):
            return Adoption()
        if replaces:
            await self._adopted_by(by)
            await self._end_only(f"{by.job_id} has submitted another job of its name: {'; '.join(differs)}")
        return Adoption(None, differs)

    async def _adopted_by(self, by: ChildOf) -> None:
        self._child = by
        await asyncio.to_thread(note_adopter, self._slices.owner, by)

    async def _has_failed(self, job_id: str) -> bool:
        """Return whether the Controller says that the only job has failed or was cancelled; its error is on its way."""
        assert self._alone is not None
        if self._alone.done():
            return False
        try:
            view = await self._controller.ask_once(ControllerInterface.report, job_id, [], 0, self._controller.sender)
        except (ControllerUnavailableError, VersionMismatchError):
            return False
        if view is None or isinstance(view, Unreachable):
            return False
        return view.job_state.finished and view.job_state is not JobState.SUCCEEDED

    def _is_free_for(self, by: ChildOf) -> bool:
        """Return whether an attempt may adopt the only job, which runs or has succeeded."""
        if self._child is None or self._alone is None or self._ends_only or not may_adopt(by, self._child):
            return False
        return not self._alone.done() or not (self._alone.cancelled() or self._alone.exception())

    async def _end_with_parent(self, parent: str) -> None:
        """End the only job, and this pool, when the job has ended whose task has submitted it."""
        over: bool | Unreachable = False
        while over is not True:
            try:
                over = await self._controller.ask_once(ControllerInterface.until_over, parent)
            except (ControllerUnavailableError, VersionMismatchError) as error:
                over = Unreachable(str(error))
            if isinstance(over, Unreachable):
                await asyncio.sleep(IDLE_LOOK_S)
        await self._end_only(f"{parent}, whose task had submitted it, has ended")

    async def _end_only(self, reason: str) -> None:
        """End the only job, wait until its processes are gone, and end this pool."""
        self._ends_only = True
        if self._only is not None and self._alone is not None:
            job_id = self._only.spec.job_id
            if not self._alone.done() and await self.accepted(job_id):
                await self._controller.report(job_id, [JobCancelledEvent(job_id, reason)])
            await asyncio.wait({self._alone})
            await asyncio.gather(*(run.settled() for run in self._unsettled.values()))
        self._background.start(self._end(), "ending this pool with its only job")

    async def _end(self) -> None:
        await self.release()
        await asyncio.gather(*(run.settled() for run in self._unsettled.values()))
        await asyncio.sleep(LAST_ANSWERS_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def accepted(self, job_id: str) -> bool:
        return await asyncio.shield(self._acceptance(job_id))

    async def release(self) -> None:
        await self.tasks_ended()
        await self._give_back(self._unused)
        await self._slices.release_idle_hosts()

    async def tasks_ended(self) -> None:
        await self._slices.settle(self._unused)

    async def until_idle(self, calls: int) -> None:
        self._watch_idle_slices()

        def idle() -> bool:
            quiet = not self._runs and not self._unsettled and not self._slices.holds_any
            return quiet and (self._done >= calls or self._idle_s > LONG_IDLE_S)

        async with self._changed:
            await self._changed.wait_for(idle)

    # -- called by hosts ---------------------------------------------------------------------------------------------

    async def take_notice(self, node_id: str, notice: HostNotice, sent_at: float) -> None:
        notice = by_this_clock(notice, sent_at)
        logger.info("host %s: %s", node_id[:8], notice.reason)
        self._notices[node_id, notice.kind] = notice
        for gang in self._gangs.values():
            if gang.attempt is not None:
                gang.attempt.host_goes(node_id, notice)
        async with self._passing_on:
            await self._controller.report(None, [drained(node_id, notice)])

    async def maintenance_called_off(self, node_id: str) -> None:
        logger.info("host %s: the metadata server of the host has called its maintenance off", node_id[:8])
        self._notices.pop((node_id, NoticeKind.MAINTENANCE), None)
        for gang in self._gangs.values():
            if gang.attempt is not None:
                gang.attempt.host_stays(node_id)
        async with self._passing_on:
            await self._controller.report(None, [MaintenanceCalledOffEvent(node_id)])

    async def _repeat_notices(self) -> None:
        async with self._passing_on:
            if known := [drained(node_id, notice) for (node_id, _), notice in self._notices.items()]:
                await self._controller.report(None, known)

    async def serve(self, service: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await self._services.answer(service, method, args, kwargs)

    # -- called by the Controller ----------------------------------------------------------------------------------

    async def watched(self) -> None:
        await self._deposed.wait()  # else the calls of Controllers that are gone would stay, with their connections

    async def reconnect(self, epoch: int) -> PoolView:
        self._obey(epoch)
        if self._notices:  # the new Controller does not know them; it listens once it has our answer
            self._background.start(self._repeat_notices(), "repeating the notices of hosts")
        return PoolView(self._incarnation, self._slices.slice_names())

    async def assign(self, order: AttemptOrder) -> bool | None:
        self._obey(order.epoch)
        key = (order.spare_for, 0) if order.spare_for else _gang_of(order.attempt)
        deadline = time.monotonic() + COMES_BACK_S
        while self._may_come_back(order) and key not in self._gangs and time.monotonic() < deadline:
            await asyncio.sleep(COMES_BACK_POLL_S)
        if order.incarnation != self._incarnation or order.attempt.job_id in self._dropped:
            return None
        gang = self._gangs.get(key)
        if gang is None:
            if self._may_come_back(order):
                raise NotYetError(
                    f"job {order.attempt.job_id} has not come back since its pool's process was restarted"
                )
            return False
        if order.spare_for:
            gang.hold_spare(order)
        else:
            gang.take(order)
        return True

    def _may_come_back(self, order: AttemptOrder) -> bool:
        """Return whether the caller of an order's job may still repeat the job to this new process."""
        return self._callers_repeat and order.attempt.job_id not in self._had

    async def drop_spare(self, job_id: str) -> None:
        self._dropped.append(job_id)

    async def notify_attempt(self, attempt: AttemptId, notice: Notice, epoch: int, sent_at: float) -> None:
        self._obey(epoch)
        if gang := self._gangs.get(_gang_of(attempt)):
            gang.notify(attempt.number, by_this_clock(notice, sent_at))

    async def stop_attempt(self, attempt: AttemptId, reason: str, epoch: int) -> None:
        self._obey(epoch)
        if gang := self._gangs.get(_gang_of(attempt)):
            await gang.stop_attempt(attempt.number, reason)

    async def job_ended(self, job_id: str) -> None:
        for gang in self._runs[job_id].gangs if job_id in self._runs else ():
            gang.wake()

    async def give_up_slice(self, name: str, epoch: int) -> bool:
        self._obey(epoch)
        if name in self._slices and not self._slices[name].in_use:
            logger.info("%s goes to another job", name)
            await self._give_back(lambda held: held.name == name)
        await self._slices.left(name)
        return name not in self._slices

    @property
    def _callers_repeat(self) -> bool:
        """Whether callers may still repeat jobs that an earlier process of this pool had."""
        return time.monotonic() < self._began + REPEATED_WITHIN_S

    def _only_request(self) -> RunRequest | None:
        run = next(iter(self._runs.values()), None)
        return None if self._alone is None or run is None else run.request

    def _acceptance(self, job_id: str) -> "asyncio.Future[bool]":
        """Return a future: whether the Controller has the job. The question may come before the job itself."""
        return self._acceptances.setdefault(job_id, asyncio.get_running_loop().create_future())

    def _unused(self, held: ReservedSlice) -> bool:
        return held.used_by not in self._runs

    def _obey(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise DeposedError(f"Controller {epoch} was replaced by Controller {self._epoch}")
        if epoch > self._epoch:
            self._epoch = epoch
            self._deposed.set()
            self._deposed = asyncio.Event()

    async def _warm_slices_left(self, request: RunRequest) -> None:
        """Wait a moment if a job that is just over is still leaving slices that are warm for this request.

        Otherwise the Controller would start the job cold on other free slices.
        """
        if leaving := [run.settled() for run in self._just_over if run.is_warm_for(request)]:
            await asyncio.wait({asyncio.ensure_future(asyncio.gather(*leaving))}, timeout=LEAVING_S)

    async def _settle(self, run: JobRun) -> None:
        await run.settled()
        await self._slices.job_over(run.job_id)
        self._services.note([JobOver(run.job_id)])
        await self._give_back(lambda held: held.used_by == run.job_id and held.keep_warm <= 0)
        del self._unsettled[run.job_id]
        for number, gang in enumerate(run.gangs):
            if self._gangs.get((run.job_id, number)) is gang:  # the job may have been run again
                del self._gangs[run.job_id, number]

    # -- idle slices -----------------------------------------------------------------------------------------------

    def _watch_idle_slices(self) -> None:
        if not self._watches_idle_slices:
            self._watches_idle_slices = True
            self._background.start(self._give_back_idle_slices(), "watching idle slices")

    async def _give_back_idle_slices(self) -> None:
        look_at = 0.0
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            await self._give_back(self._kept_long_enough)
            if asyncio.get_running_loop().time() > look_at:
                look_at = asyncio.get_running_loop().time() + IDLE_LOOK_S
                await self._retire_the_lost()
                await self._yield_to_others()
            busy = self._runs or self._slices.holds_any
            self._idle_s = 0.0 if busy else self._idle_s + IDLE_CHECK_S
            await self._notify()

    async def _retire_the_lost(self) -> None:
        """Give slices with lost hosts back: their reservations would wait for these hosts for ever. Raise nothing."""
        try:
            if lost := await self._slices.lost_while_idle():
                logger.info("%s: lost while idle", ", ".join(lost))
                await self._controller.report(None, self._slices.retire_idle(lost))
        except Exception:
            logger.exception("looking at idle slices failed")

    async def _yield_to_others(self) -> None:
        """Give back idle slices that only the next run could use, if other Ray work waits for chips. Raise nothing."""
        if not self._slices.has_idle(self._is_kept_warm):
            return
        try:
            chips = await asyncio.to_thread(self._others.look)
        except Exception:
            logger.exception("looking for other Ray work that waits failed")
            return
        if chips is not None:
            logger.info("other Ray work waits for chips: warm slices are given back")
            await self._give_back(lambda held: self._is_kept_warm(held) and held.bundle[TPU] >= chips)

    def _is_kept_warm(self, held: ReservedSlice) -> bool:
        return self._unused(held) and TPU in held.bundle

    def _kept_long_enough(self, held: ReservedSlice) -> bool:
        idle_s = asyncio.get_running_loop().time() - held.idle_since
        return self._unused(held) and idle_s > held.keep_warm

    async def _give_back(self, condition: Callable[[ReservedSlice], bool]) -> None:
        """Release idle slices and tell the Controller. Raise nothing, because no result depends on it."""
        try:
            released = await self._slices.release_if(condition)
            if released:
                await self._controller.report(None, released)
                await self._notify()
        except Exception:
            logger.exception("giving slices back failed")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _gang_of(attempt: AttemptId) -> tuple[str, int]:
    return attempt.job_id, attempt.gang


def drained(node_id: str, notice: HostNotice) -> WorkerDrainedEvent:
    """Return a host's notice as an event for the Controller."""
    return WorkerDrainedEvent(node_id, notice.reason, notice.kind, notice.deadline)


# -- other Ray work ----------------------------------------------------------------------------------------------------


class OthersWaiting:
    """Placement groups of others, such as Ray Train's, that wait for chips.

    Ray Train reserves a slice by its head, which no job of ours claims, and then waits for the chips of that slice. Its
    workers have 60 s to start (``DEFAULT_WORKER_GROUP_START_TIMEOUT_S``, Ray 2.60), which ``keep_warm`` may exceed.
    Each group is yielded to once: one that can't be placed for another reason must not end every later warm time.
    """

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._yielded: set[str] = set()

    def look(self) -> float | None:
        """Return the least number of chips on a host that helps a group that has waited since the last look.

        None if there is none. This blocks for a few milliseconds.
        """
        chips = dict(_waiting_for_chips(placement_group_table().items()))
        new = (chips.keys() & self._waiting) - self._yielded
        self._waiting = set(chips)
        self._yielded = (self._yielded & chips.keys()) | new
        return min((chips[group] for group in new), default=None)


def _waiting_for_chips(groups: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterable[tuple[str, float]]:
    """Yield the id and the chips of the largest bundle of each waiting group of others."""
    for group_id, group in groups:
        chips = max((bundle.get(TPU, 0.0) for bundle in group["bundles"].values()), default=0.0)
        if chips > 0 and group["state"] == "PENDING" and not group["name"].startswith(NAMESPACE):
            yield group_id, chips
