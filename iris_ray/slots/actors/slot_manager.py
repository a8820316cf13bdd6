"""The SlotManager gives the reconciler its events and carries out its instructions. One event loop, no lock."""

import asyncio
import gc
import logging
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from ray.exceptions import RayError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.errors import InvalidSlotError, IrisError, RequestLostError, UnknownNameError
from iris_ray.slots.actors.messages import (
    AnswerPiece,
    Ask,
    Grant,
    Maker,
    ModelOrder,
    SlotHosts,
    SlotStatus,
    StopReasons,
    packed,
    packed_error,
    runner_names,
)
from iris_ray.slots.actors.model_call import SlotRequest
from iris_ray.slots.actors.runners import HostHere, RunnerHere, Runners, Yielding
from iris_ray.slots.actors.slot_actor import SlotActor
from iris_ray.slots.actors.slot_processes import SlotProcess, SlotProcesses, status_of
from iris_ray.slots.actors.streams import Batch, Pieces, StreamEnd
from iris_ray.slots.actors.waiting import Clients, ClientStreams, WaitingCaller, cancelled, error_of
from iris_ray.slots.core import events as ev
from iris_ray.slots.core import instructions as todo
from iris_ray.slots.core.devices import DeviceKind, Runner
from iris_ray.slots.core.models import Request
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.reconciler import Reconciler

REPORT_TIMEOUT_S = 10.0
EMPTY_LOOK_S = 0.05
MEMORY_LOOK_S = 60.0
"""How often it measures the memory of slots, and so may raise an alarm."""
CLIENTS_LOOK_S = 5.0
"""How often it looks whether the clients of requests are there."""
TAKE_S = 5.0
"""How long a client's call waits for pieces of its streams. If there are none, the client calls again."""
logger = logging.getLogger(__name__)


class SlotManager:
    """An actor that serves models on the hosts of its jobs. It ends with the Ray job of its maker."""

    def __init__(self, policy: ServingPolicy, maker: Maker) -> None:
        self._maker = maker
        self._core = Reconciler(policy, new_id=lambda: uuid.uuid4().hex[:12])
        self._waiting: dict[str, WaitingCaller] = {}
        self._orders: dict[str, ModelOrder] = {}
        self._background = BackgroundTasks()
        self._timer: asyncio.TimerHandle | None = None
        self._runners = Runners(self._hear)
        self._processes = SlotProcesses(self._runners.by_id, self._hear)
        self._jobs: tuple[str, ...] = ()
        self._reasons = StopReasons()
        self._memory_looks: dict[str, float] = {}
        self._in_use: dict[str, Mapping[int, int]] = {}
        self._expected: dict[str, Runner] = {}
        self._problems: dict[DeviceKind, str] = {}
        self._clients = Clients(policy.silence_s / CLIENTS_LOOK_S)
        self._is_started = asyncio.Event()
        self._streams: dict[str, ClientStreams] = {}
        self._cancelled_early, self._over = StopReasons(), StopReasons()

    # -- what clients call ------------------------------------------------------------------------

    async def maker(self) -> Maker:
        """Return the process that made it."""
        return self._maker

    async def start(self, hosts: Sequence[SlotHosts], jobs: Sequence[str]) -> None:
        """Set the expected hosts, and the ids of the jobs that get them."""
        gc.freeze()  # else Python looks at all modules again and again, which holds up all requests for 50 ms
        self._jobs = tuple(jobs)
        self._is_started.set()
        self._expected |= {name: each.runner for name, each in runner_names(hosts) if name not in self._expected}
        self._expect()
        yielding = Yielding(self._core, self._runners.by_id, self._jobs, self._maker.user)
        self._background.repeat(lambda: yielding.report(self._now), "telling the Controller which runners are idle")
        self._background.repeat(self._watch_clients, "looking whether clients are there")
        self._hear(ev.Tick())

    async def kind(self) -> DeviceKind | None:
        """Return the kind of devices that its hosts have; None if they are of several kinds, or there are none.

        Its maker may still submit the jobs that get them, and start a Controller for these.
        """
        await self._is_started.wait()
        kinds = {runner.kind for runner in self._expected.values()}
        return kinds.pop() if len(kinds) == 1 else None

    async def close(self) -> tuple[str, ...]:
        """Give all hosts back. Return the ids of the jobs that have them, or wait for some."""
        if self._timer is not None:
            self._timer.cancel()
        self._runners.close()
        return self._jobs

    async def watch(self) -> None:
        """Never return: the call fails when this process is gone."""
        await asyncio.Event().wait()

    async def register(self, order: ModelOrder) -> None:
        """Serve a model from now on."""
        self._orders[order.spec.name] = order
        self._hear(order.event)

    async def remove(self, model: str) -> None:
        """Stop serving a model."""
        del self._orders[self._known(model)]
        self._hear(ev.ModelRemoved(model))

    async def change(self, orders: Sequence[ModelOrder], gone: Collection[str]) -> None:
        """Serve some models from now on, and others no longer. It never waits: all of it is done, or nothing."""
        for order in orders:
            await self.register(order)
        for model in self._orders.keys() & set(gone):
            await self.remove(model)

    async def submit(self, ask: Ask) -> AnswerPiece:
        """Return the answer to a request, or its error."""
        pieces = (await self._answer(ask, None)).pieces
        return pieces[-1] if pieces else packed_error(cancelled(ask.request_id))

    async def stream(self, ask: Ask) -> StreamEnd:
        """Answer a request in pieces, which `take` returns as they come. The last one may be an error."""
        with self._streams_of(ask.client_id) as streams:
            return await self._answer(ask, streams)

    async def take(self, client_id: str) -> Batch:
        """Return the next pieces of a client's streams; nothing if none come within `TAKE_S`."""
        with self._streams_of(client_id) as streams:
            return await streams.take(TAKE_S)

    async def note_read(self, request_id: str, pieces: int) -> None:
        """Tell a stream's slot that the caller has read this number of further pieces."""
        active = self._core.active.by_id.get(request_id)
        if active is not None and (made := self._processes.by_slot.get(active.slot_id)):
            made.actor.call(SlotActor.note_read, request_id, pieces)

    async def cancel(self, request_id: str) -> None:
        """Forget a request. Its caller gets an error; nothing happens if it is over."""
        if waiting := self._waiting.get(request_id):
            waiting.end(cancelled(request_id))
        elif request_id not in self._core.active.by_id and not self._over.knows(request_id):
            # Ray may deliver a large request after its cancelling
            self._cancelled_early.note(request_id, "cancelled")
        self._hear(ev.RequestCancelled(request_id))

    async def renew(self, client_id: str, idle: Mapping[str, float]) -> Mapping[str, str]:
        """Note that a client is there, and for how many seconds each of its sessions has been idle.

        Returns:
            The sessions that are over, and why.
        """
        now, active = self._now(), self._core.active.by_id
        self._clients.heard(client_id)
        self._hear(ev.SessionsRenewed({session_id: now - seconds for session_id, seconds in idle.items()}))
        over = (each for each in idle if each not in active or active[each].stopped)
        return {session_id: self._reasons.of(session_id) for session_id in over}

    async def evict(self, slot_id: str) -> None:
        """Have a slot end after its running requests, or after `ServingPolicy.drain_s`."""
        if slot_id not in self._core.fleet.slots:
            known = ", ".join(sorted(self._core.fleet.slots)) or "none"
            raise UnknownNameError(f"there is no slot {slot_id}; there are: {known}")
        self._hear(ev.SlotEviction(slot_id))

    async def prewarm(self, model: str) -> None:
        """Give each runner a slot of a model, if there is room without evicting."""
        self._hear(replace(self._orders[self._known(model)].event, prewarm=True))

    async def status(self) -> SlotStatus:
        """Return the status of runners, slots and models."""
        return status_of(self._core, self._processes.by_slot, self._now(), self._in_use)

    # -- what runners call ------------------------------------------------------------------------

    async def hold_host(self, here: HostHere) -> bool:
        """Use a host until its agent is gone or it is given back; return whether it is given back."""
        if here.sizes:  # what its GPUs have is known only now
            self._expected[here.runner_id] = RunnerHere((here,)).runner()
            self._expect()
        return await self._runners.hold(here)

    async def give_up_runner(self, runner_id: str, why: str) -> None:
        """Stop expecting a runner. If no other one of its kind can come, requests for that kind are refused."""
        if runner := self._expected.pop(runner_id, None):
            logger.error("runner %s can hold no slots: %s", runner_id, why)
            self._problems[runner.kind] = f"{runner_id} can hold no slots: {why}"
            self._expect()

    async def empty_runner(self, runner_id: str, why: str) -> None:
        """Close a runner that has to go; return when its slots have ended."""
        self._hear(ev.RunnerClosed(runner_id, reason=f"its host has to go: {why}"))
        while runner_id in self._core.fleet.runners and self._core.fleet.on_runner(runner_id):
            await asyncio.sleep(EMPTY_LOOK_S)

    # -- events and instructions ------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _expect(self) -> None:
        alike = {runner.hardware: runner for runner in self._expected.values()}
        self._hear(ev.RunnersExpected(tuple(alike.values()), dict(self._problems)))

    def _hear(self, event: ev.Event) -> None:
        loop = asyncio.get_running_loop()
        try:
            for instruction in self._core.handle(event, self._now()):
                self._carry_out_safely(instruction)
        finally:  # the next Tick comes even after an error
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(self._core.wakeup() + 0.001, self._hear, ev.Tick())

    def _carry_out_safely(self, instruction: todo.Instruction) -> None:
        try:
            self._carry_out(instruction)
        except Exception as error:  # one slot stops no other, and no request
            logger.exception("%s could not be carried out", type(instruction).__name__)
            if isinstance(instruction, todo.CreateSlot):
                why = f"its process could not be created: {type(error).__name__}: {error}"
                asyncio.get_running_loop().call_soon(self._hear, ev.SlotFailed(instruction.slot_id, why))

    def _carry_out(self, instruction: todo.Instruction) -> None:
        match instruction:
            case todo.CreateSlot(spec=spec):
                self._processes.create(instruction, self._orders[spec.name].pickled)
            case todo.DeleteSlot(slot_id=slot_id):
                self._processes.delete(slot_id)
            case todo.StartRequest(request=request, slot_id=slot_id):
                self._background.start(self._serve(request, slot_id), f"request {request.request_id}")
            case todo.EndRequest(request_id=request_id):
                self._note_end(request_id, instruction.reason)
                if active := self._core.active.by_id.get(request_id):  # else its slot is lost
                    stop = self._end_session if active.request.is_session else self._stop
                    self._background.start(stop(instruction), f"stopping request {request_id}")
            case todo.RequeueRequest(request=request, reason=reason):
                self._give_up_what_has_begun(request, reason)
            case todo.RefuseRequest(request_id=request_id, refusal=refusal, reason=reason):
                self._note_end(request_id, reason)
                if waiting := self._waiting.get(request_id):
                    waiting.end(error_of(refusal, reason))
            case todo.AskRunner(runner_id=runner_id):
                self._background.start(self._report(runner_id), f"asking runner {runner_id} for its slots")
            case todo.RaiseAlarm(text=text):
                logger.warning(text)

    async def _answer(self, ask: Ask, streams: ClientStreams | None) -> StreamEnd:
        try:
            waiting = self._admit(ask, streams)
        except IrisError as error:
            return StreamEnd(0, (packed_error(error),))
        try:
            return await waiting.answer()
        finally:
            if streams is not None:
                streams.forget(ask.request_id)
            del self._waiting[ask.request_id]
            self._over.note(ask.request_id, "over")

    @contextmanager
    def _streams_of(self, client_id: str) -> Iterator[ClientStreams]:
        """Return a client's streams for one call, and forget them after its last call."""
        streams = self._streams.setdefault(client_id, ClientStreams())
        streams.calls += 1
        try:
            yield streams
        finally:
            streams.calls -= 1
            if not streams.calls:
                del self._streams[client_id]

    def _admit(self, ask: Ask, streams: ClientStreams | None) -> WaitingCaller:
        if ask.request_id in self._waiting:
            raise InvalidSlotError(f"request {ask.request_id} was submitted already; give each request its own id")
        model, now = self._known(ask.model), self._now()
        if self._cancelled_early.forget(ask.request_id):
            raise cancelled(ask.request_id)
        if ask.client_id:
            self._clients.heard(ask.client_id)
        deadline = None if ask.timeout_s is None else now + ask.timeout_s
        how = ask.priority, deadline, ask.retriable, ask.kind, ask.idle_s, len(ask.payload)
        request = Request(ask.request_id, model, now, *how)
        waiting = self._waiting[ask.request_id] = WaitingCaller(ask, streams)
        try:
            self._hear(ev.RequestArrived(request))
        except BaseException:
            del self._waiting[ask.request_id]
            raise
        return waiting

    def _known(self, model: str) -> str:
        if model not in self._orders:
            known = ", ".join(sorted(self._orders)) or "none"
            raise UnknownNameError(f"there is no model {model!r}; there are: {known}")
        return model

    async def _serve(self, request: Request, slot_id: str) -> None:
        waiting, made = self._waiting.get(request.request_id), self._processes.by_slot.get(slot_id)
        if made is None:
            return  # `SlotEnded` is about to come
        if waiting is not None and waiting.is_over:
            waiting = None
        try:
            if waiting is not None and request.is_session:
                await self._grant(waiting, slot_id, made.actor)
                return
            begun = SlotRequest(request.request_id, request.attempt)
            if waiting is not None and not await self._have_answered(waiting, begun, slot_id, made):
                return
        except RayError as error:
            self._hear(ev.SlotFailed(slot_id, _unreachable(slot_id, error)))
        else:
            self._end(request.request_id, slot_id, waiting)

    async def _have_answered(
        self, waiting: WaitingCaller, request: SlotRequest, slot_id: str, made: SlotProcess
    ) -> bool:
        """Return whether the caller has the answer; False if the request was given to another slot meanwhile."""
        ask = waiting.ask

        def give(pieces: Pieces) -> None:
            if self._runs_on(ask.request_id, slot_id) and not waiting.is_over:
                waiting.give(pieces)
            elif pieces:  # nobody reads them: pieces of two slots must not be mixed
                made.actor.call(SlotActor.note_read, ask.request_id, len(pieces))

        if waiting.streams is not None:
            await made.streams.read(ask.request_id, made.actor.call(SlotActor.stream, request, ask.payload), give)
            if not self._runs_on(ask.request_id, slot_id):
                return False
        elif (answer := await made.actor.call(SlotActor.serve, request, ask.payload)) is not None:
            waiting.give((answer,))
        waiting.end()
        return True

    def _runs_on(self, request_id: str, slot_id: str) -> bool:
        active = self._core.active.by_id.get(request_id)
        return active is not None and active.slot_id == slot_id

    async def _grant(self, waiting: WaitingCaller, slot_id: str, actor: Actor[SlotActor]) -> None:
        session_id = waiting.ask.request_id
        await actor.call(SlotActor.open_session, session_id)
        self._hear(ev.SessionsRenewed({session_id: self._now()}))
        waiting.give((packed(Grant(slot_id, actor.handle)),))
        waiting.end()

    async def _end_session(self, order: todo.EndRequest) -> None:
        """Have a slot refuse further calls of a session, and wait for the running ones."""
        try:
            if made := self._processes.by_slot.get(order.slot_id):
                await made.actor.call(SlotActor.end_session, order.request_id, order.reason)
                self._end(order.request_id, order.slot_id)
        except RayError as error:
            self._hear(ev.SlotFailed(order.slot_id, _unreachable(order.slot_id, error)))

    def _note_end(self, request_id: str, reason: str) -> None:
        """Keep why a session is over until its client asks. A caller who waits for an answer is told at once."""
        if request_id not in self._waiting:
            self._reasons.note(request_id, reason)

    def _end(self, request_id: str, slot_id: str, waiting: WaitingCaller | None = None) -> None:
        self._hear(ev.RequestEnded(request_id, slot_id))
        if self._waiting.get(request_id, waiting) is not waiting:
            return  # another request has its id by now
        if request_id in self._core.queue or request_id in self._core.active.by_id:
            self._hear(ev.RequestCancelled(request_id))  # it was given to another slot as well

    def _give_up_what_has_begun(self, request: Request, reason: str) -> None:
        """End a request whose caller has had a part of the answer: a repetition would send that part twice."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.begun:
            cancel = ev.RequestCancelled(request.request_id)
            asyncio.get_running_loop().call_soon(self._hear, cancel)
        if waiting is not None and waiting.begun:
            waiting.end(RequestLostError(f"request {request.request_id} was cut off: {reason}"))

    async def _stop(self, order: todo.EndRequest) -> None:
        if made := self._processes.by_slot.get(order.slot_id):
            with suppress(RayError):
                await made.actor.call(SlotActor.stop, order.request_id)

    async def _watch_clients(self) -> None:
        await asyncio.sleep(CLIENTS_LOOK_S)
        client_of = {request_id: waiting.ask.client_id for request_id, waiting in self._waiting.items()}
        silent = self._clients.look(set(client_of.values()))
        for request_id in (each for each, client_id in client_of.items() if client_id in silent):
            logger.warning("request %s is given up: nothing is heard of its client", request_id)
            await self.cancel(request_id)

    async def _report(self, runner_id: str) -> None:
        as_of = self._now()
        if (runner := self._runners.by_id.get(runner_id)) is None:
            return
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                slots = await self._processes.alive_on(runner_id, runner)
            observed: Mapping[int, int] = {}
            with suppress(RayError, TimeoutError):  # a driver that hangs keeps no slot from its host
                async with asyncio.timeout(REPORT_TIMEOUT_S):
                    observed = await self._memory_on(runner_id, runner)
            self._hear(ev.RunnerReported(runner_id, as_of, slots, observed))

    async def _memory_on(self, runner_id: str, runner: RunnerHere) -> Mapping[int, int]:
        """Return the bytes in use by device; nothing if they were measured less than `MEMORY_LOOK_S` ago."""
        if self._now() < self._memory_looks.get(runner_id, float("-inf")) + MEMORY_LOOK_S:
            return {}
        here = self._runners.by_id
        self._memory_looks = {each: when for each, when in self._memory_looks.items() if each in here}
        self._memory_looks[runner_id] = self._now()
        found = await self._processes.memory_on(runner)
        self._in_use = {each: used for each, used in self._in_use.items() if each in here} | {runner_id: found}
        return found


def _unreachable(slot_id: str, error: RayError) -> str:
    return f"slot {slot_id} can't be reached: {type(error).__name__}"
