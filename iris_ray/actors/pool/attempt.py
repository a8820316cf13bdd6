"""One incarnation of a gang, from its order to its verdict.

A fixed sequence: hold the slices → have every host ready → start every task → wait → gather evidence → stop everybody
→ judge. It knows nothing of budgets and does not report its end to the Controller; `GangRun` does.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum, auto
from types import MappingProxyType
from typing import Any

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.evidence import Evidence, gather_evidence
from iris_ray.actors.pool.hang_watch import HangWatch
from iris_ray.actors.pool.launch_plan import launch_plan
from iris_ray.actors.pool.notice_delivery import NoticeDelivery
from iris_ray.actors.pool.progress_watch import ProgressWatch
from iris_ray.actors.pool.reserved_slices import ReservedSlices, in_words, is_broken
from iris_ray.actors.pool.stop_request import StopRequest
from iris_ray.actors.wire.answers import NotReserved, SetupFailed, Unfit, Unreachable
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.actors.wire.controller_client import ControllerClient
from iris_ray.actors.wire.failure_detector import FailureDetector, answers_unless_silent
from iris_ray.actors.wire.messages import AttemptOrder, RunRequest, SliceReady, TaskLaunch
from iris_ray.actors.wire.payloads import with_fetched_payload
from iris_ray.goodput.marks import Marks
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.outcomes import DID_NOT_RUN, EndKind, Fault, HostEvidence, TaskEnd, TaskKey, TpuPreempted
from iris_ray.model.verdict import Verdict, judge_gang

REFILL_DELAY_S, MANY_CORES = 4.0, 16
"""A gang on slices that has run so long gets its next standbys; before, they would only compete with it. On hosts with
many cores they don't, and start at once."""
RUNNING_DELAY_S = 0.1
"""A gang that ends sooner is not worth a report that it runs."""
AT_ONCE_S = 0.5
"""A host that is found lost so soon after the start was lost before: it broke while its slice was idle."""

FAULTS = {
    EndKind.CRASHED: Fault.CRASH,
    EndKind.DISK_ERROR: Fault.DISK,
    EndKind.NEVER_STARTED: Fault.NO_START,
    EndKind.HOST_UNFIT: Fault.HOST,
}
"""Ends that may be the host's fault."""

Ends = dict[TaskKey, TaskEnd | None]


class Phase(IntEnum):
    """How far an attempt is."""

    PREPARING = auto()
    RUNNING = auto()
    ENDED = auto()  # its tasks have ended, or are being stopped
    TIDY = auto()  # its slices are idle again; another attempt may have them


class LaunchFailed(Exception):
    """The attempt could not be started whole; no user code ran.

    Attributes:
        broken: the slices that are at fault.
        suspicious: those among them of which a host may be gone.
        by_request: what the user asked for is at fault.
        blamed: hosts that answer and are at fault, by node id: why, and in which way.
        counts: whether it counts as a failed launch. The gang only has to wait if other tasks of iris_ray hold all
            chips that are missing.
    """

    def __init__(
        self,
        reason: str,
        broken: tuple[str, ...] = (),
        suspicious: tuple[str, ...] = (),
        by_request: bool = False,
        blamed: Mapping[str, tuple[str, Fault]] = MappingProxyType({}),
        counts: bool = True,
    ) -> None:
        super().__init__(reason)
        self.broken = broken
        self.suspicious = suspicious
        self.by_request = by_request
        self.blamed = blamed
        self.counts = counts


class Attempt:
    """Runs one order.

    Attributes:
        id: which attempt it is.
        place: where it runs.
        phase: how far it is.
        lost: names of slices that can't be used any more, known after the verdict.
        suspects: hosts that did not answer or can't take a task, by node id, and why.
        over: set when no process of it is left and its end has been reported.
    """

    def __init__(
        self, slices: ReservedSlices, controller: ControllerClient, request: RunRequest, order: AttemptOrder
    ) -> None:
        self.id = order.attempt
        self.place = AttemptPlace(order)
        self.phase = Phase.PREPARING
        self.lost: tuple[str, ...] = ()
        self.suspects: dict[str, str] = {}
        self.over = asyncio.Event()
        self._slices = slices
        self._controller = controller
        self._request = request
        self._order = order
        self._names = self.place.names
        self._stop = StopRequest()
        self._notices = NoticeDelivery(self.place, slices, controller, self._stop)
        self._hangs = HangWatch(self.place, slices, self._notices, self._stop, request.stall_timeout)
        self._progress = ProgressWatch(self.place, slices, self._hangs, controller, request.spec.most_tasks)
        self._background = BackgroundTasks()
        self._refill_delay_s = REFILL_DELAY_S
        self._ends: Ends = {}
        self._ended_at_once = False
        self._lost_hosts: set[TaskKey] = set()
        self._silent: dict[str, str] = {}  # slices whose SliceActor has stopped answering, and for how long

    # -- what others want of it ------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the attempt soon. Wait for `over` to know that it has ended."""
        self._stop.ask(reason)

    def notify(self, notice: Notice) -> None:
        """Tell every task that the gang is to move. It moves once all have saved their state.

        An attempt that has not begun yet does not begin.
        """
        if notice == self._notices.latest or self._stop.asked or self.phase > Phase.RUNNING:
            return
        self._hangs.progress_made()  # to save takes time, too
        if self.phase is Phase.RUNNING:
            self._notices.deliver(notice)
            return
        self._notices.latest = notice
        if notice.kind is not NoticeKind.GROWTH:
            self.stop(notice.reason)

    # -- what became of it -----------------------------------------------------------------------------------------

    @property
    def moved_for(self) -> Notice | None:
        """The notice because of which all its tasks were ended, if nothing else was the matter."""
        return self._stop.moved_for

    @property
    def evicted(self) -> bool:
        """Whether the Controller has ended it after notice that it is to give its hosts to another job."""
        told = self._notices.latest
        return self._stop.asked and self._stop.cause is None and told is not None and told.kind is NoticeKind.EVICTION

    @property
    def leaving(self) -> tuple[str, ...]:
        """What is given back at once: slices that can't be used any more, and the place on a host that others share."""
        return self.lost if self.place.on_slices else self._names

    def never_started(self, key: TaskKey) -> bool:
        """Return whether a task ended before any user code ran in it, or its host was lost from the beginning."""
        end = self._ends.get(key)
        return (end is not None and end.kind in DID_NOT_RUN) or (self._ended_at_once and key in self._lost_hosts)

    def counts(self, key: TaskKey) -> bool:
        """Return whether an attempt whose first cause is this task, which never started, counts as a failed launch."""
        end = self._ends.get(key)
        return end is None or end.kind is not EndKind.CHIPS_TAKEN

    @property
    def marks(self) -> Marks:
        """What its task has said about its time."""
        return self._progress.marks

    async def look_again(self) -> None:
        """Learn what the tasks have said since the last look, before their processes end."""
        await self._progress.look_again(has_failed=False)

    def exit_code(self, key: TaskKey) -> int | None:
        """Return the exit code of a task's process, if it is known."""
        end = self._ends.get(key)
        return None if end is None else end.exit_code

    def blamed_host(self, key: TaskKey) -> tuple[str, Fault] | None:
        """Return the host that may be at fault for a task's end, and in which way; None if it can't be."""
        end = self._ends.get(key)
        fault = None if end is None else FAULTS.get(end.kind)
        return None if fault is None else (self.place.host(key).node_id, fault)

    async def silent_hosts(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the node ids of these slices' hosts that do not answer, and why they count as lost."""
        silent: dict[str, str] = {}
        for hosts in self._order.slices:
            name = hosts[0].slice_name
            if name in names and name in self._slices:
                reasons = await self._slices.ask_hosts(name)
                silent |= {host.node_id: why.reason for host in hosts if (why := reasons[host.host_index]) is not None}
        return silent

    # -- its course ------------------------------------------------------------------------------------------------

    async def prepare(self) -> dict[str, list[TaskLaunch]]:
        """Get every host to the point where its task starts at once; return what to launch, by slice name.

        Raises:
            LaunchFailed: some host did not get there, or the attempt was asked to stop.
        """
        self._slices.scale_multislice(self._order, self._request.process, self._request.keep_warm)
        ready = asyncio.ensure_future(self._slices.all_ready(self._names, self._request.silence_s))
        first: set[asyncio.Future[Any]] = {ready, self._stop.reason}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._stop.asked:
            raise LaunchFailed(self._stop.reason.result())
        answers = ready.result()
        broken = {name: reply for name, reply in answers.items() if is_broken(reply)}
        if broken:
            raise self._failed_launch(broken, some_are_ready=len(broken) < len(answers))
        first_slice: SliceReady = answers[self._names[0]]
        self._refill_delay_s = REFILL_DELAY_S if first_slice.cores < MANY_CORES else 0.0
        self._slices.used_ports.extend(first_slice.ports)
        return launch_plan(self._request, self.place, first_slice.ports)

    def _failed_launch(self, broken: Mapping[str, Any], some_are_ready: bool) -> LaunchFailed:
        """Return the error if these slices can't be used. The request is not at fault for what works on any host."""
        setups = {name: reply for name, reply in broken.items() if isinstance(reply, SetupFailed)}
        works = some_are_ready or self._slices.has_worked(self._request.process)
        works = works or any(setup.works_elsewhere for setup in setups.values())
        unfit = [reply for reply in broken.values() if isinstance(reply, Unfit)]
        self.suspects |= {reply.node_id: reply.why for reply in unfit}
        blamed = {reply.node_id: (reply.why, Fault.HOST) for reply in unfit if not reply.ours}
        if works:
            for hosts in self._order.slices:
                if (setup := setups.get(hosts[0].slice_name)) is not None:
                    blamed |= {hosts[i].node_id: (setup.reason, Fault.NO_START) for i in setup.hosts}
        answer = (NotReserved, Unfit, SetupFailed)
        suspicious = (n for n, a in broken.items() if isinstance(a, Unreachable) and not isinstance(a, answer))
        by_request = bool(setups) and not works
        counts = not all(reply.ours for reply in unfit) or len(unfit) < len(broken)
        return LaunchFailed(in_words(broken), tuple(broken), tuple(suspicious), by_request, blamed, counts)

    async def run(self, launches: Mapping[str, list[TaskLaunch]], report_running: Callable[[], None]) -> Verdict:
        """Start every task, wait for the gang's end and judge it. After success, `stop_all` ends its processes.

        Args:
            launches: what each host gets, by slice name.
            report_running: called once the gang has run for a moment.
        """
        ends = await self._run_tasks(launches, report_running)
        if all(map(returned, ends.values())):
            return judge_gang(ends, dict.fromkeys(ends, HostEvidence()))
        self._notices.move_early()
        last_look = asyncio.ensure_future(self._progress.look_again(has_failed=True))
        evidence = await gather_evidence(
            self.place, self._slices, self._controller, self._silent, self._request.silence_s
        )
        self._take_note(evidence)
        await last_look
        reason = self._stop.reason.result() if self._stop.asked else "another task of the gang ended"
        stopped = await self.stop_all(reason)
        await self._end_leftovers(evidence.reachable - stopped.keys())
        self._ends = ends | stopped
        self._suspect_the_unfit()
        return self._judge(evidence)

    async def stop_all(self, reason: str | None) -> Ends:
        """End all tasks and wait until their processes are gone; return how each ended, as far as its host can say.

        Args:
            reason: why; None after success, to let exit handlers of user code run. A later call with a reason cuts that
                short.
        """
        names = [name for name in self._names if name in self._slices and name not in self._silent]
        self._lose(*self._silent)
        stubs = {name: self._slices.stub(name) for name in names}
        grace = self._request.exit_grace if reason is None else 0.0
        asks = {name: stub.stop(self.id, reason, grace) for name, stub in stubs.items()}
        replies = await answers_unless_silent(asks, lambda name: stubs[name].ping(), self._request.silence_s)
        ends: Ends = {}
        for name, reply in replies.items():
            if isinstance(reply, (Unreachable, BaseException)):
                self._lose(name)
                continue
            if None in reply.values():
                self._lose(name)  # what is not known to be clean is not used again
            slice_id = self._names.index(name)
            ends |= {TaskKey(slice_id, host_index): end for host_index, end in reply.items() if end is not None}
        return ends

    # -- its parts -------------------------------------------------------------------------------------------------

    async def _run_tasks(self, launches: Mapping[str, list[TaskLaunch]], report_running: Callable[[], None]) -> Ends:
        """Start every task; return when all have returned, or as soon as the gang can't succeed any more."""
        loop = asyncio.get_running_loop()
        calls: dict[asyncio.Future[Any], int] = {
            asyncio.ensure_future(self._run_slice(name, launches[name])): slice_id
            for slice_id, name in enumerate(self._names)
        }
        self.phase, began = Phase.RUNNING, time.monotonic()
        for call in calls:
            call.add_done_callback(_heed_error)  # there is no caller once we are cancelled
        self._slices.use_standbys(self._names)
        kept = self._names if self.place.on_slices else ()  # other places are given back with every attempt
        refill = loop.call_later(self._refill_delay_s, self._slices.renew_standbys, kept, self._request.process)
        running = loop.call_later(RUNNING_DELAY_S, report_running)
        self._hangs.progress_made()
        progress = self._background.start(self._progress.watch(), f"asking how far {self.id} is")
        try:
            return await self._until_end(calls)
        finally:
            self.phase, self._ended_at_once = Phase.ENDED, time.monotonic() < began + AT_ONCE_S
            refill.cancel()
            running.cancel()
            progress.cancel()
            self._notices.cancel()

    async def _run_slice(self, name: str, launches: list[TaskLaunch]) -> dict[int, TaskEnd | None] | Unreachable:
        """Start a slice's tasks; return their ends with their results, which come straight from their processes."""
        ends = await self._slices.stub(name).run_remote_fn(self.id, launches, self._request.silence_s)
        if isinstance(ends, Unreachable):
            return ends
        return dict(zip(ends, await asyncio.gather(*map(with_fetched_payload, ends.values())), strict=True))

    async def _until_end(self, calls: Mapping["asyncio.Future[Any]", int]) -> Ends:
        """Wait until all tasks have returned, one has not, a slice is silent, or the attempt is asked to stop."""
        hosts = range(self._order.hosts_per_slice)
        ends: Ends = dict.fromkeys(self.place.tasks())
        stubs = {name: self._slices.stub(name) for name in self._names}
        detector = FailureDetector(lambda name: stubs[name].ping(), self._names, self._request.silence_s)
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
                        ends |= {TaskKey(slice_id, host_index): end for host_index, end in reply.items()}
                if not all(returned(ends[TaskKey(slice_id, i)]) for slice_id in replies for i in hosts):
                    break
        finally:
            silence.cancel()
            detector.stop()
        self._silent = detector.hung
        return ends

    def _take_note(self, evidence: Evidence) -> None:
        self.suspects |= evidence.suspects
        self._lost_hosts = evidence.lost_without_notice
        self.lost = tuple(self._names[slice_id] for slice_id in sorted(evidence.bad_slices))

    async def _end_leftovers(self, hosts: Collection[TaskKey]) -> None:
        """End what runs on those hosts of lost slices, though a process of ours that should have done so is gone."""
        left = {name: [key.host_index for key in hosts if self.place.name(key) == name] for name in self.lost}
        asks = (
            self._slices.end_tasks(name, indexes) for name, indexes in left.items() if indexes and name in self._slices
        )
        await asyncio.gather(*asks)

    def _suspect_the_unfit(self) -> None:
        """Avoid hosts that can't take a task, and give their slices back."""
        for key, end in self._ends.items():
            if end is not None and end.kind in (EndKind.HOST_UNFIT, EndKind.CHIPS_TAKEN):
                self.suspects.setdefault(self.place.host(key).node_id, end.error)
                self._lose(self.place.name(key))

    def _judge(self, evidence: Evidence) -> Verdict:
        cause = self._stop.cause
        if cause is not None and isinstance(cause[1], TpuPreempted):
            cause = evidence.draining or cause[0], cause[1]
        verdict = judge_gang(self._ends, evidence.hosts, cause, was_told=self.moved_for is not None)
        if cause is None or verdict.result is not cause[1]:
            self._stop.moved_for = None  # something else was the matter
        return verdict

    def _lose(self, *names: str) -> None:
        self.lost = tuple(sorted({*self.lost, *names}))


def returned(end: TaskEnd | None) -> bool:
    """Return whether a task's function returned."""
    return end is not None and end.kind is EndKind.RETURNED


def _heed_error(done: "asyncio.Future[Any]") -> None:
    """Keep asyncio from logging an error for which no caller waits any more."""
    if not done.cancelled():
        done.exception()
