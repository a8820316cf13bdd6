"""One incarnation of a gang, from its order to its verdict.

A fixed sequence: hold the slices → have every host ready → start every task → wait → gather evidence → stop everybody
→ judge. It knows nothing of budgets and does not talk about its end to the Controller; `GangRun` does.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from ray.exceptions import RuntimeEnvSetupError

from iris_ray.actors.pool.failure_detector import FailureDetector
from iris_ray.actors.pool.reserved_slices import ReservedSlices, in_words, is_broken
from iris_ray.actors.wire.answers import ANSWER_TIMEOUT_S, ChipsHeld, Gone, NotReserved, Unreachable
from iris_ray.actors.wire.controller_client import ControllerClient
from iris_ray.actors.wire.messages import AttemptOrder, Progress, RunRequest, TaskLaunch
from iris_ray.errors import TaskSetupError
from iris_ray.model.ids import task_id
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.outcomes import (
    DID_NOT_RUN,
    EndKind,
    HostEvidence,
    ProviderWord,
    RunErrorKind,
    TaskEnd,
    TaskKey,
    TpuCancelled,
    TpuPreempted,
    TpuResult,
    TpuRunError,
)
from iris_ray.model.verdict import Verdict, judge_gang

logger = logging.getLogger(__name__)

REFILL_DELAY_S = 4.0
"""A gang that has run so long gets its next standbys; before, they would only compete with it."""
STOP_TIMEOUT_S = 20.0
RUNNING_DELAY_S = 0.1
"""A gang that ends sooner is not worth a report that it runs."""
AT_ONCE_S = 0.5
"""A host that is found lost so soon after the start was lost before: it broke while its slice was idle."""
STACKS_S = 1.0
"""How long the stacks of a gang that hangs have to reach the logs."""
ASK_AGAIN_S, ASK_AGAIN_AT_MOST_S = 1.0, 10.0
"""How soon tasks are asked again whether they have saved, ever more seldom."""
CONTROLLER_AWAY_S = 10.0
"""How long a verdict waits for a Controller that is being started anew: it knows of notices."""
ALONE_TIMEOUT_S = 1.0
"""How long a host has to answer whose SliceActor does not."""

Ends = dict[TaskKey, TaskEnd | None]


class LaunchFailed(Exception):
    """The attempt could not be started whole; no user code ran.

    Attributes:
        broken: the slices that are at fault.
        suspicious: those among them of which a host may be gone.
        by_request: what the user asked for is at fault.
    """

    def __init__(
        self,
        reason: str,
        broken: tuple[str, ...] = (),
        suspicious: tuple[str, ...] = (),
        by_request: bool = False,
    ) -> None:
        super().__init__(reason)
        self.broken = broken
        self.suspicious = suspicious
        self.by_request = by_request


class Attempt:
    """Runs one order.

    Attributes:
        id: which attempt it is.
        names: the slices' names by slice id.
        lost: slices that are no good any more, known after the verdict.
        suspects: hosts that did not answer or whose chips somebody else holds, by node id, and why they are no good.
        tidy: its slices are idle again; they may already be somebody else's.
        over: set when no process of it is left and its end has been reported.
        moved_for: the notice because of which all its tasks were ended, if nothing else was the matter.
    """

    def __init__(
        self, slices: ReservedSlices, controller: ControllerClient, request: RunRequest, order: AttemptOrder
    ) -> None:
        self.id = order.attempt
        self.names = tuple(hosts[0].slice_name for hosts in order.slices)
        self.lost: tuple[str, ...] = ()
        self.suspects: dict[str, str] = {}
        self.tidy = False
        self.over = asyncio.Event()
        self.moved_for: Notice | None = None
        self._ends: Ends = {}
        self._running = self._ended = self._ended_at_once = False
        self._lost_hosts: set[TaskKey] = set()
        self._there: set[TaskKey] = set()  # hosts that answer, or of which only a process is known to be gone
        self._progress_at = 0.0
        self._notice: Notice | None = None
        self._telling: asyncio.Future[None] | None = None
        self._our_reason: tuple[TaskKey, TpuResult] | None = None
        self._silent: dict[str, str] = {}  # slices whose SliceActor has stopped answering, and for how long
        self._slices = slices
        self._controller = controller
        self._request = request
        self._order = order
        self._stop_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def on_slices(self) -> bool:
        return self._order.on_slices

    @property
    def where(self) -> str:
        """Its place, in words."""
        if not self.on_slices:
            return self._order.slices[0][0].address
        return f"{', '.join(self.names)} ({self.num_tasks} host{'s' if self.num_tasks > 1 else ''})"

    @property
    def leaving(self) -> tuple[str, ...]:
        """What is given back at once: slices that are no good any more, and the place on a host that others share."""
        return self.lost if self.on_slices else self.names

    @property
    def num_tasks(self) -> int:
        return self._order.hosts_per_slice * len(self.names)

    def index_of(self, key: TaskKey) -> int:
        return self.id.gang + key.slice_id * self._order.hosts_per_slice + key.host_index

    def place_in_words(self, key: TaskKey) -> str:
        if not self.on_slices:
            return f"task {self.id.gang} on {self.where}"
        return f"slice {key.slice_id} ({self.names[key.slice_id]}) worker {key.host_index}"

    def never_started(self, key: TaskKey) -> bool:
        """Whether this task had ended before any user code ran in it, or its host was no good from the beginning."""
        end = self._ends.get(key)
        return (end is not None and end.kind in DID_NOT_RUN) or (self._ended_at_once and key in self._lost_hosts)

    async def silent_hosts(self, names: tuple[str, ...]) -> dict[str, str]:
        """Node ids of these slices' hosts that do not answer, and why they count as lost."""
        silent: dict[str, str] = {}
        for hosts in self._order.slices:
            name = hosts[0].slice_name
            if name in names and name in self._slices:
                reasons = await self._slices.ask_hosts(name)
                silent |= {host.node_id: why.reason for host in hosts if (why := reasons[host.host_index]) is not None}
        return silent

    def blamed_host(self, key: TaskKey) -> tuple[str, bool] | None:
        """The host that may be at fault for a task's end, and whether user code ran there; None if it can't be."""
        end = self._ends.get(key)
        if end is None or not (end.kind is EndKind.CRASHED or end.kind in DID_NOT_RUN):
            return None
        host = self._order.slices[key.slice_id][key.host_index]
        return host.node_id, end.kind is EndKind.CRASHED

    def stop(self, reason: str) -> None:
        """Have it end soon; wait for `over` to know that it has."""
        if not self._stop_reason.done():
            self._stop_reason.set_result(reason)

    def notify(self, notice: Notice) -> None:
        """Tell every task that the gang is to move; it does so once all have saved their state.

        An attempt that has not begun yet does not begin.
        """
        if notice == self._notice or self._stop_reason.done() or self._ended:
            return
        self._notice = notice
        self._progress_at = time.time()  # to save takes time, too
        if not self._running:
            if notice.kind is not NoticeKind.GROWTH:
                self.stop(notice.reason)
            return
        if self._telling is not None:
            self._telling.cancel()
        self._telling = asyncio.ensure_future(self._tell(notice))

    async def _tell(self, notice: Notice) -> None:
        seconds = notice.deadline - time.time()
        logger.info("%s is to move within %.0f s: %s", self.id, seconds, notice.reason)
        pause = ASK_AGAIN_S
        while True:  # after the deadline, too: who has saved must not wait for ever
            patience = max(0.0, notice.deadline - time.time()) + 5.0
            asks = (self._slices.ask(one, "notify", self.id, notice, timeout_s=patience) for one in self.names)
            replies = await asyncio.gather(*asks, return_exceptions=True)
            answers = [(False, False) if isinstance(r, (Unreachable, BaseException)) else r for r in replies]
            ready, waiting = all(saved for saved, _ in answers), any(some for _, some in answers)
            if ready:
                break
            if waiting or notice.kind is NoticeKind.GROWTH:
                await asyncio.sleep(max(0.0, notice.deadline - time.time()))
                if waiting or await self._is_to_grow():
                    break
            await asyncio.sleep(pause)  # nobody could be told, or is left to be told, or wants to be
            pause = min(2 * pause, ASK_AGAIN_AT_MOST_S)
        how = "all its tasks have saved" if ready else "not all of its tasks have saved, but time is up"
        self._move(notice, f"{notice.reason}; {how}")

    async def _is_to_grow(self) -> bool:
        """Whether the slices to move to are still there. If not it stays, unless a task has saved and waits."""
        if self._notice is None:
            return False
        try:
            there = await self._controller.ask_once("is_to_grow", self.id)
        except AttributeError:  # a Controller of a version that did not call growth off
            return True
        if there is False:
            logger.info("%s stays: the slices for it are gone", self.id)
            self._notice = None
        return there is True

    def _move(self, notice: Notice, reason: str) -> None:
        if self._stop_reason.done():
            return
        if notice.kind is NoticeKind.GROWTH:
            self._our_reason = TaskKey(0, 0), TpuCancelled(reason)
        else:
            self._our_reason = TaskKey(0, 0), TpuPreempted(reason)
        self.moved_for = notice
        self.stop(reason)

    async def prepare(self) -> dict[str, list[TaskLaunch]]:
        """Get every host to the point where its task starts at once; what to launch, by slice name.

        Raises:
            LaunchFailed: some host did not get there, or somebody wants the attempt to stop.
        """
        self._slices.scale_multislice(self._order, self._request.process, self._request.keep_warm)
        ready = asyncio.ensure_future(self._slices.all_ready(self.names, self._request.silence_s))
        first: set[asyncio.Future[Any]] = {ready, self._stop_reason}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._stop_reason.done():
            raise LaunchFailed(self._stop_reason.result())
        answers = ready.result()
        broken = {name: reply for name, reply in answers.items() if is_broken(reply)}
        if broken:
            by_request = any(isinstance(a, (RuntimeEnvSetupError, TaskSetupError)) for a in broken.values())
            self.suspects |= {a.node_id: a.held for a in broken.values() if isinstance(a, ChipsHeld)}
            suspicious = (n for n, a in broken.items() if isinstance(a, Unreachable) and not isinstance(a, NotReserved))
            raise LaunchFailed(in_words(broken), tuple(broken), tuple(suspicious), by_request)
        return self._launches(answers[self.names[0]])

    async def run(self, launches: Mapping[str, list[TaskLaunch]], say_running: Callable[[], None]) -> Verdict:
        """Start every task and wait for the gang's end. After success, `stop_all` ends its processes.

        Args:
            launches: what each host gets, by slice name.
            say_running: called once the gang has run for a moment.
        """
        slices, silence_s = self._slices, self._request.silence_s
        calls: dict[asyncio.Future[Any], int] = {
            asyncio.ensure_future(
                slices.ask(name, "run_remote_fn", self.id, launches[name], silence_s, timeout_s=None)
            ): slice_id
            for slice_id, name in enumerate(self.names)
        }
        self._running, began = True, time.monotonic()
        for call in calls:
            call.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # nobody asks once we are cancelled
        slices.use_standbys(self.names)
        refill = asyncio.get_running_loop().call_later(
            REFILL_DELAY_S, slices.renew_standbys, self.names, self._request.process
        )
        running = asyncio.get_running_loop().call_later(RUNNING_DELAY_S, say_running)
        stall = asyncio.ensure_future(self._watch_progress())
        try:
            ends = await self._until_end(calls)
        finally:
            self._ended, self._ended_at_once = True, time.monotonic() < began + AT_ONCE_S
            refill.cancel()
            running.cancel()
            stall.cancel()
            if self._telling is not None:
                self._telling.cancel()
        if all(returned(end) for end in ends.values()):
            return judge_gang(ends, dict.fromkeys(ends, HostEvidence()))

        if self._notice is not None and self._telling is not None:
            self._move(self._notice, f"{self._notice.reason}; a task ended before all had saved")
        evidence = await self._gather_evidence()
        self._lost_hosts = {key for key, host in evidence.items() if host.lost and not host.draining}
        # The slice is the unit of failure: one host lost or about to go, and it is worthless.
        bad = {key.slice_id for key, host in evidence.items() if host.lost or host.draining}
        self.lost = tuple(self.names[slice_id] for slice_id in sorted(bad))
        reason = self._stop_reason.result() if self._stop_reason.done() else "another task of the gang ended"
        stopped = await self.stop_all(reason)
        await self._end_what_is_left(self._there - stopped.keys())
        self._ends = ends | stopped
        for key, end in self._ends.items():
            if end is not None and end.kind is EndKind.DEVICE_BUSY:
                self.suspects.setdefault(self._order.slices[key.slice_id][key.host_index].node_id, end.error)
                self.lost = tuple(sorted({*self.lost, self.names[key.slice_id]}))
        if self._our_reason is not None and isinstance(self._our_reason[1], TpuPreempted):
            doomed = next((key for key, host in evidence.items() if host.draining), self._our_reason[0])
            self._our_reason = doomed, self._our_reason[1]
        verdict = judge_gang(self._ends, evidence, self._our_reason, was_told=self.moved_for is not None)
        if self._our_reason is None or verdict.result is not self._our_reason[1]:
            self.moved_for = None  # something else was the matter
        return verdict

    async def stop_all(self, reason: str | None) -> Ends:
        """End all tasks and wait until their processes are gone; how each one ended, as far as its host can say.

        Args:
            reason: why; None after success, to let exit handlers of user code run.
        """
        names = [name for name in self.names if name in self._slices and name not in self._silent]
        self.lost = tuple(sorted({*self.lost, *self._silent}))
        replies = await asyncio.gather(
            *(self._slices.ask(name, "stop", self.id, reason, timeout_s=STOP_TIMEOUT_S) for name in names),
            return_exceptions=True,
        )
        ends: Ends = {}
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, (Unreachable, BaseException)) or None in reply.values():
                self.lost = tuple(sorted({*self.lost, name}))  # what is not known to be clean is not used again
            if not isinstance(reply, (Unreachable, BaseException)):
                slice_id = self.names.index(name)
                ends |= {TaskKey(slice_id, worker): end for worker, end in reply.items() if end is not None}
        return ends

    # -- its parts -------------------------------------------------------------------------------------------------

    async def _end_what_is_left(self, hosts: Collection[TaskKey]) -> None:
        """End what runs on those hosts of lost slices, though a process of ours that should have done so is gone."""
        left = {name: [key.host_index for key in hosts if self.names[key.slice_id] == name] for name in self.lost}
        asks = (
            self._slices.end_tasks(name, workers) for name, workers in left.items() if workers and name in self._slices
        )
        await asyncio.gather(*asks)

    def _launches(self, ports: tuple[int, ...]) -> dict[str, list[TaskLaunch]]:
        """What each host gets, with addresses for this attempt alone."""
        request, slices, job_id = self._request, self._order.slices, self.id.job_id
        spec = request.spec
        self._slices.used_ports.extend(ports)
        megascale_port, debug_port, coordinator_port = ports
        coordinator = slices[0][0].address
        launches: dict[str, list[TaskLaunch]] = {}
        for slice_id, hosts in enumerate(slices):
            multislice = MultisliceInfo(coordinator, slice_id, len(slices), megascale_port, debug_port)
            launches[self.names[slice_id]] = slice_launches = []
            for host in hosts:
                key = TaskKey(slice_id, host.host_index)
                index = self.index_of(key)
                info = JobInfo(
                    job_id=job_id,
                    task_id=task_id(job_id, index),
                    task_index=index,
                    num_tasks=self.num_tasks if spec.coscheduling else spec.replicas,
                    attempt=self.id.number,
                    slice_id=slice_id,
                    num_slices=len(slices),
                    slice_name=host.slice_name if self.on_slices else "",
                    worker_id=host.host_index,
                    coordinator_address=f"{coordinator}:{coordinator_port}",
                )
                place = f"slice={slice_id} worker={host.host_index}" if spec.coscheduling else f"task={index}"
                label = f"{spec.name} {place}"
                slice_launches.append(
                    TaskLaunch(
                        request.pickled_function, request.env, info, multislice, spec.resources.get("CPU"), label
                    )
                )
        return launches

    async def _until_end(self, calls: Mapping["asyncio.Future[Any]", int]) -> Ends:
        """Wait until all tasks have returned, one has not, or somebody wants the attempt to stop."""
        workers = range(self._order.hosts_per_slice)
        ends: Ends = {TaskKey(slice_id, w): None for slice_id in calls.values() for w in workers}
        names, actors = self.names, self._slices.members()
        watch = FailureDetector(lambda name: actors[name].ping.remote(), names, self._request.silence_s)
        silence = asyncio.ensure_future(watch.found())
        pending: set[asyncio.Future[Any]] = set(calls)
        try:
            while pending and not self._stop_reason.done() and not silence.done():
                awaited = {*pending, silence, self._stop_reason}
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                replies = {calls[call]: call.result() for call in done & pending}
                pending -= done
                for slice_id, reply in replies.items():
                    if not isinstance(reply, Unreachable):
                        ends |= {TaskKey(slice_id, worker): end for worker, end in reply.items()}
                if not all(returned(ends[TaskKey(slice_id, w)]) for slice_id in replies for w in workers):
                    break
        finally:
            silence.cancel()
            watch.stop()
        self._silent = watch.hung
        return ends

    async def _watch_progress(self) -> None:
        """Stop the attempt once no task has said for too long that it makes progress."""
        limit, self._progress_at = self._request.stall_timeout, time.time()
        running: set[TaskKey] = set()
        while limit is not None:
            await asyncio.sleep(min(limit / 4, 5.0))
            before, (running, progress) = running, await self._progress()
            now = time.time()
            beats = [now - p.age for p in progress.values() if p.age is not None]
            if before - running:  # who has returned has made progress
                beats.append(now)
            if self._notice is not None and now < self._notice.deadline and any(p.saved for p in progress.values()):
                beats.append(now)  # the others may be waiting for those that have saved
            self._progress_at = max([self._progress_at, *beats])
            silence = now - self._progress_at
            if progress and silence > limit:
                await self._stalled(progress, silence)
                return

    async def _progress(self) -> tuple[set[TaskKey], dict[TaskKey, Progress]]:
        """The tasks that have not returned, and how far each of them is, as far as hosts answer."""
        asks = (self._slices.ask(one, "progress", self.id) for one in self.names)
        replies = await asyncio.gather(*asks, return_exceptions=True)
        running = {
            TaskKey(slice_id, worker): found
            for slice_id, reply in enumerate(replies)
            if not isinstance(reply, (Unreachable, BaseException))
            for worker, found in reply.items()
        }
        return set(running), {key: found for key, found in running.items() if not isinstance(found, Unreachable)}

    async def _stalled(self, progress: Mapping[TaskKey, Progress], silence: float) -> None:
        steps = [p.step for p in progress.values() if p.step is not None]
        # Who has never said anything is further behind than anybody who has.
        last = min(
            progress, key=lambda k: (-1 if (p := progress[k]).step is None else p.step, -(p.age or float("inf")))
        )
        step = progress[last].step
        where = "before its first heartbeat" if step is None and progress[last].age is None else f"at step {step}"
        others = f"; the furthest is at step {max(steps)}" if steps else ""
        dumps = (self._slices.ask(one, "dump_stacks", self.id) for one in self.names)
        await asyncio.gather(*dumps, return_exceptions=True)
        await asyncio.sleep(STACKS_S)
        reason = (
            f"no task has made progress for {silence:.0f} s; the last is {self.place_in_words(last)}, {where}{others}."
            " What each was doing is in its log"
        )
        if not self._stop_reason.done():
            self._our_reason = last, TpuRunError(reason, kind=RunErrorKind.HANG)
            self.stop(reason)

    async def _gather_evidence(self) -> dict[TaskKey, HostEvidence]:
        """Ask every host whether it is there, and the Controller what it has heard about them."""
        slices = self._order.slices
        node_ids = [host.node_id for hosts in slices for host in hosts]
        heard, *replies = await asyncio.gather(
            self._heard(node_ids),
            *(self._healthy(name) for name in self.names),
        )
        evidence: dict[TaskKey, HostEvidence] = {}
        unexplained: dict[TaskKey, str] = {}
        for slice_id, (hosts, reply) in enumerate(zip(slices, replies, strict=True)):
            alone = isinstance(reply, Unreachable)  # its SliceActor is gone; the hosts may be there
            silent: Mapping[int, Unreachable | None] = (
                await self._slices.ask_hosts(self.names[slice_id], ALONE_TIMEOUT_S) if alone else reply
            )
            for host in hosts:
                said = heard.get(host.node_id, HostEvidence())
                key, silence = TaskKey(slice_id, host.host_index), silent[host.host_index]
                if not said.lost and (silence is None or isinstance(silence, Gone)):
                    self._there.add(key)
                lost = said.lost or (None if silence is None else silence.reason)
                if lost:
                    self.suspects[host.node_id] = lost
                    if not said.draining:
                        unexplained[key] = host.node_id
                elif alone and host.host_index == 0:
                    lost = reply.reason
                evidence[key] = HostEvidence(lost, said.draining)
        words = await self._provider_words(list(unexplained.values()))
        for key, node_id in unexplained.items():
            evidence[key] = replace(evidence[key], provider=words.get(node_id))
        return evidence

    async def _healthy(self, name: str) -> Any:
        if name in self._silent:
            return Unreachable(f"slice {name} {self._silent[name]}")
        patience = self._request.silence_s
        return await self._slices.ask(name, "healthy", patience, timeout_s=patience + ANSWER_TIMEOUT_S)

    async def _heard(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        """What the Controller has heard about hosts; it may just be coming back."""
        give_up_at = time.monotonic() + CONTROLLER_AWAY_S
        while isinstance(word := await self._controller.ask_once("evidence", node_ids), Unreachable):
            if time.monotonic() > give_up_at:
                return {}
            await asyncio.sleep(ASK_AGAIN_S / 2)
        heard: dict[str, HostEvidence] = word
        return heard

    async def _provider_words(self, node_ids: list[str]) -> dict[str, ProviderWord]:
        """What the provider says about hosts that were lost without notice, as far as it says anything."""
        if not node_ids:
            return {}
        try:
            words = await self._controller.ask_once("provider_words", node_ids)
        except AttributeError:  # a Controller of a version that did not ask the provider
            return {}
        return {} if isinstance(words, Unreachable) else words


def returned(end: TaskEnd | None) -> bool:
    return end is not None and end.kind is EndKind.RETURNED
