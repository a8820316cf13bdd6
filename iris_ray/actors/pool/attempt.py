"""One attempt of a gang: launch, run, end.

The sequence is fixed: hold the slices → have every host ready (`launch`) → start every task → wait → gather evidence →
stop every task → judge (all in `attempt_end`). `GangRun` knows the retry budgets and reports the end to the Controller.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum, auto
from typing import Any

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.calls.liveness import FailureDetector
from iris_ray.actors.pool.attempt_end import (
    AttemptEnd,
    AttemptShutdown,
    Ends,
    all_returned,
    gather_evidence,
    judge_attempt,
    with_late_ends,
)
from iris_ray.actors.pool.attempt_place import AttemptContext, AttemptPlace, StopRequest
from iris_ray.actors.pool.launch import Launches, SecretNotReadable, prepare_launch
from iris_ray.actors.pool.notice_delivery import NoticeDelivery
from iris_ray.actors.pool.progress_watch import ProgressWatch
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.services import AttemptBegan, AttemptOver, AttemptTold, PoolParts, RunningAttempt
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import AttemptOrder, RunRequest, TaskLaunch
from iris_ray.actors.protocol.payloads import with_fetched_payload
from iris_ray.errors import IrisError
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import HostNotice, Notice, NoticeKind
from iris_ray.model.outcomes import EndKind, TaskEnd

RUNNING_DELAY_S = 0.1
"""A gang that ends sooner is never reported as running."""
AT_ONCE_S = 0.5
"""If a host is found lost this soon after the start, we assume that it broke before, while its slice was idle."""


class Phase(IntEnum):
    """The phase of an attempt."""

    PREPARING = auto()
    RUNNING = auto()
    ENDED = auto()  # its tasks have ended, or are being stopped
    TIDY = auto()  # its slices are idle again; another attempt may use them


class Attempt:
    """Runs one order.

    Attributes:
        context: what its parts share.
        progress: asks its tasks for their steps.
        shutdown: ends its tasks, and knows which slices can't be used again.
        over: set when all of its processes are gone and its end has been reported.
    """

    def __init__(
        self,
        slices: ReservedSlices,
        controller: ControllerClient,
        services: PoolParts,
        request: RunRequest,
        order: AttemptOrder,
    ) -> None:
        self.context = context = AttemptContext(AttemptPlace(order), slices, controller, request)
        self.phase = Phase.PREPARING
        self.over = asyncio.Event()
        self._services = services
        self._notices = NoticeDelivery(context)
        self._seen_by_services = RunningAttempt(context, self._notices)
        self.progress = ProgressWatch(self._seen_by_services, services)
        self.shutdown = AttemptShutdown(context)
        self._background = BackgroundTasks()

    @property
    def id(self) -> AttemptId:
        return self.context.id

    @property
    def place(self) -> AttemptPlace:
        return self.context.place

    @property
    def _stop(self) -> StopRequest:
        return self.context.stop

    # -- called by GangRun -----------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ask the attempt to end, and return at once. `over` is set when it has ended."""
        self._stop.ask(reason)

    def notify(self, notice: Notice) -> None:
        """Take a notice of the Controller."""
        self._tell(self._notices.heard_from_controller(notice))

    def host_goes(self, node_id: str, notice: HostNotice) -> None:
        """Take the notice of a host, which may have no task of this gang."""
        self._tell(self._notices.heard_from_host(node_id, notice))

    def host_stays(self, node_id: str) -> None:
        """Note that the maintenance of a host is called off."""
        self._tell(self._notices.maintenance_called_off(node_id))

    def _tell(self, notice: Notice | None) -> None:
        """Tell every task that the gang is to move. It moves once all tasks have saved their state.

        If the attempt has not started any task yet, a notice ends it, unless the gang is only to grow.
        """
        if notice is None or self._stop.asked or self.phase > Phase.RUNNING:
            return
        self._services.note([AttemptTold(self._seen_by_services)])
        if self.phase is Phase.RUNNING:
            self._notices.deliver(notice)
            return
        self._notices.latest = notice
        if notice.kind is not NoticeKind.GROWTH:
            self._stop.move(notice, notice.reason)

    @property
    def evicted(self) -> bool:
        """Whether the Controller ended the attempt after an eviction notice."""
        told = self._notices.latest
        return self._stop.asked and self._stop.cause is None and told is not None and told.kind is NoticeKind.EVICTION

    async def prepare(self, suspected: Mapping[str, str]) -> Launches:
        """Get every host ready to start its task at once, as `prepare_launch` does.

        Raises:
            LaunchFailed: some host does not get ready, or a service can't provide what the job needs.
        """
        try:
            request = await self._services.prepared(self.context.request)
        except IrisError as error:
            raise SecretNotReadable(str(error)) from None
        return await prepare_launch(replace(self.context, request=request), self._services, suspected)

    async def run(
        self, launches: Launches, report_running: Callable[[], None], changed: Callable[[], None]
    ) -> AttemptEnd:
        """Start every task, wait for the gang's end and judge it. After success, `shutdown` ends its processes.

        Args:
            launches: what to start.
            report_running: called after `RUNNING_DELAY_S`, if the gang still runs.
            changed: called when the tasks have been started, and as soon as they can't all return any more.
        """
        began = time.monotonic()
        ends = await self._run_tasks(launches, report_running, changed)
        at_once = time.monotonic() < began + AT_ONCE_S
        self.shutdown.heard(ends)
        if all(map(returned, ends.values())):
            return all_returned(self.place, ends)
        changed()
        self._notices.move_early()
        last_look = asyncio.ensure_future(self.progress.look_again(has_failed=True))
        evidence = await gather_evidence(self.context, self.shutdown.hung)
        names = self.place.names
        self.shutdown.lose(names[slice_id] for slice_id in evidence.bad_slices)
        await last_look
        reason = self._stop.reason.result() if self._stop.asked else "another task of the gang ended"
        stopped = await self.shutdown.stop_all(reason)
        await self.shutdown.end_leftovers(evidence.reachable - stopped.keys())
        ends = with_late_ends(ends, stopped, was_asked=self._stop.asked)
        end = judge_attempt(self.place, ends, evidence, self._stop, at_once)
        self.shutdown.lose(end.unfit_slices)
        return end

    # -- helpers ---------------------------------------------------------------------------------------------------

    async def _run_tasks(
        self, launches: Launches, report_running: Callable[[], None], changed: Callable[[], None]
    ) -> Ends:
        """Start every task; return when all have returned, or as soon as the gang can't succeed any more."""
        generations = self.context.slices.take_processes(self.place.names)
        calls: dict[asyncio.Future[Any], int] = {
            asyncio.ensure_future(self._run_slice(name, generations[name], launches[name])): slice_id
            for slice_id, name in enumerate(self.place.names)
        }
        self.phase = Phase.RUNNING
        changed()
        for call in calls:
            call.add_done_callback(_heed_error)  # once we are cancelled, nobody awaits it
        running = asyncio.get_running_loop().call_later(RUNNING_DELAY_S, report_running)
        self._services.note([AttemptBegan(self._seen_by_services)])
        progress = self._background.start(self.progress.watch(), f"asking how far {self.id} is")
        introducing = self._background.start(self._introduce_hosts(), f"letting the hosts of {self.id} know each other")
        try:
            return await self._until_end(calls)
        finally:
            self.phase = Phase.ENDED
            self._services.note([AttemptOver(self._seen_by_services)])
            running.cancel()
            progress.cancel()
            introducing.cancel()
            self._notices.cancel()

    async def _introduce_hosts(self) -> None:
        """Let the hosts of the gang know each other, after the launch, which this would delay."""
        if self.place.on_slices or self.place.num_hosts > 1:
            await asyncio.sleep(RUNNING_DELAY_S)
            await self._notices.introduce()

    async def _run_slice(
        self, name: str, generation: int, launches: list[TaskLaunch]
    ) -> dict[int, TaskEnd | None] | Unreachable:
        """Start a slice's tasks. Return their ends, with the results that the pool fetches from the task processes."""
        ends = await self.context.slices.actor(name).ask_once(
            SliceActor.run_remote_fn, self.id, generation, launches, self.context.request.host_silence
        )
        if isinstance(ends, Unreachable):
            return ends
        return dict(zip(ends, await asyncio.gather(*map(with_fetched_payload, ends.values())), strict=True))

    async def _until_end(self, calls: Mapping["asyncio.Future[Any]", int]) -> Ends:
        """Wait until all tasks have returned, one ends otherwise, a slice is silent, or we are asked to stop."""
        ends: Ends = dict.fromkeys(self.place.tasks())
        actors = {name: self.context.slices.actor(name) for name in self.place.names}
        detector = FailureDetector(
            lambda name: actors[name].call(SliceActor.ping), actors, self.context.request.host_silence
        )
        silence = asyncio.ensure_future(detector.found())
        pending: set[asyncio.Future[Any]] = set(calls)
        try:
            while pending and not self._stop.asked and not silence.done():
                awaited = {*pending, silence, self._stop.reason}
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                replies = {calls[call]: call.result() for call in done & pending}
                pending -= done
                for slice_id, reply in replies.items():
                    if not isinstance(reply, Unreachable):
                        ends |= {self.place.key(slice_id, process): end for process, end in reply.items()}
                if not all(returned(end) for key, end in ends.items() if key.slice_id in replies):
                    break
        finally:
            silence.cancel()
            detector.stop()
        self.shutdown.hung = detector.hung
        return ends


def returned(end: TaskEnd | None) -> bool:
    return end is not None and end.kind is EndKind.RETURNED


def _heed_error(done: "asyncio.Future[Any]") -> None:
    """Retrieve the error, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()
