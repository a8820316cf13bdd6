"""Runners on paper that carry out what the reconciler wants, with real processes replaced by entries in a table.

Orders reach a runner in the order in which they were given, when the test lets them. The world knows which bytes of
which device processes use, whatever the reconciler believes.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.devices import Runner
from iris_ray.slots.core.instructions import (
    AskRunner,
    CreateSlot,
    DeleteSlot,
    EndRequest,
    Instruction,
    RaiseAlarm,
    Refusal,
    RefuseRequest,
    RequeueRequest,
    StartRequest,
)
from iris_ray.slots.core.models import ModelSpec, Request, WorkloadKind
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.slots.core.reconciler import Reconciler
from iris_ray.slots.core.slot import Allocation, SlotState
from tests.support.slots import gpus, model

QUICK = ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0))
Order = CreateSlot | DeleteSlot | StartRequest | EndRequest | tuple[AskRunner, float]


@dataclass
class Process:
    """A process that holds a slot's memory. ``ready``: whether its model is loaded.

    ``sessions``: those that have a seat. ``calls``: those of which a call runs. ``stopped``: those that may call no
    more.
    """

    slot_id: str
    model: str
    allocation: Allocation
    seats: int
    ready: bool = False
    requests: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)


class SlotWorld:
    """A reconciler, and runners that do what it says."""

    def __init__(self, policy: ServingPolicy | None = None) -> None:
        ids = count(1)
        self.now = 0.0
        self.reconciler = Reconciler(policy or ServingPolicy(), lambda: f"slot-{next(ids)}")
        self.runners: dict[str, Runner] = {}
        self.orders: dict[str, deque[Order]] = {}
        self.processes: dict[str, Process] = {}
        self.refused: dict[str, RefuseRequest] = {}
        self.answered: dict[str, int] = {}
        self.requeued: list[Request] = []
        self.created: list[str] = []
        self.deleted: list[tuple[str, str]] = []
        self.alarms: list[str] = []
        self.ended: dict[str, str] = {}
        """Why sessions were told to stop."""
        self.stopped_at: dict[str, float] = {}
        self.stuck: set[str] = set()
        """Runners on which no model ever loads."""

    # -- what happens -----------------------------------------------------------------------------

    def hear(self, event: ev.Event) -> None:
        """Give an event to the reconciler, hand its instructions out, and check everything."""
        for instruction in self.reconciler.handle(event, self.now):
            self._hand_out(instruction)
        self.reconciler.check()
        self.check_devices()
        self.check_seats()

    def join(self, runner: Runner) -> None:
        self.runners[runner.runner_id] = runner
        self.orders[runner.runner_id] = deque()
        self.hear(ev.RunnerJoined(runner))

    def lose(self, runner_id: str) -> None:
        del self.runners[runner_id], self.orders[runner_id]
        self.processes = {n: p for n, p in self.processes.items() if p.allocation.runner_id != runner_id}
        self.hear(ev.RunnerLost(runner_id))

    def ask(self, request_id: str, model: str, **kw) -> None:
        self.hear(ev.RequestArrived(Request(request_id, model, self.now, **kw)))

    def open(self, session_id: str, model: str, idle_s: float = 60.0, **kw) -> None:
        self.ask(session_id, model, kind=WorkloadKind.SESSION, idle_s=idle_s, **kw)

    def open_sessions(self) -> dict[str, Process]:
        """The sessions that may be used, and where."""
        return {name: each for each in self.processes.values() for name in each.sessions - each.stopped}

    def renew(self, *session_ids: str, ago: float = 0.0) -> None:
        """Let a client say that it has these sessions, and when it used them."""
        self.hear(ev.SessionsRenewed(dict.fromkeys(session_ids, self.now - ago)))

    def begin_call(self, session_id: str) -> None:
        self.open_sessions()[session_id].calls.add(session_id)

    def end_call(self, session_id: str) -> None:
        """A session that was stopped ends with its last call."""
        for process in list(self.processes.values()):
            if session_id in process.calls:
                process.calls.discard(session_id)
                if session_id in process.stopped:
                    self._end_session(session_id, process)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.hear(ev.Tick())

    def carry_out(self, runner_id: str) -> None:
        """Let a runner do the first thing that it was told."""
        order = self.orders[runner_id].popleft()
        match order:
            case CreateSlot(slot_id, spec, allocation):
                self.processes[slot_id] = Process(slot_id, spec.name, allocation, spec.requests_at_a_time)
                self.created.append(slot_id)
            case DeleteSlot(slot_id, _, reason):
                gone = self.processes.pop(slot_id, None)
                self.deleted += [(slot_id, reason)] if gone else []
                self.hear(ev.SlotEnded(slot_id))
            case StartRequest(request, slot_id):
                if slot_id in self.processes:
                    self._begin(request, self.processes[slot_id])
            case EndRequest(request_id, slot_id, _):
                self._stop(request_id, slot_id)
            case (AskRunner(), as_of):
                here = [each for each in self.processes.values() if each.allocation.runner_id == runner_id]
                self.hear(ev.RunnerReported(runner_id, as_of, {each.slot_id for each in here}))

    def load(self, slot_id: str) -> None:
        self.processes[slot_id].ready = True
        self.hear(ev.SlotReady(slot_id))

    def crash(self, *request_ids: str) -> None:
        """Let the processes that serve these requests end by themselves."""
        for slot_id, process in list(self.processes.items()):
            if process.requests & set(request_ids):
                del self.processes[slot_id]
                self.hear(ev.SlotEnded(slot_id))

    def end_request(self, request_id: str, slot_id: str, answered: bool = True) -> None:
        process = self.processes.get(slot_id)
        if process is not None and request_id in process.requests:
            process.requests.discard(request_id)
            if answered:
                self.answered[request_id] = self.answered.get(request_id, 0) + 1
            self.hear(ev.RequestEnded(request_id, slot_id))

    def settle(self, serve: bool = True) -> None:
        """Let everything happen that can without time passing. ``serve``: whether requests are answered, too."""
        for _ in range(1000):
            if not self.settle_one(serve):
                return
        raise AssertionError("it goes on and on")

    def settle_one(self, serve: bool = True) -> bool:
        """Let one thing happen; return whether there was one."""
        busy = [runner_id for runner_id, orders in self.orders.items() if orders]
        loading = [p for p in self.processes.values() if not p.ready and p.allocation.runner_id not in self.stuck]
        running = [(r, p.slot_id) for p in self.processes.values() for r in sorted(p.requests) if serve]
        if busy:
            self.carry_out(busy[0])
        elif loading:
            self.load(loading[0].slot_id)
        elif running:
            self.end_request(*running[0])
        return bool(busy or loading or running)

    def run(self, seconds: float, serve: bool = True) -> None:
        """Let time pass, second by second, with everything that can happen."""
        for _ in range(round(seconds)):
            self.tick(1.0)
            self.settle(serve)

    def _begin(self, request: Request, process: Process) -> None:
        if request.is_session:
            process.sessions.add(request.request_id)
            self.renew(request.request_id)
        else:
            process.requests.add(request.request_id)

    def _stop(self, request_id: str, slot_id: str) -> None:
        process = self.processes.get(slot_id)
        if process is None or request_id not in process.sessions:
            self.end_request(request_id, slot_id, answered=False)
            return
        process.stopped.add(request_id)
        if request_id not in process.calls:
            self._end_session(request_id, process)

    def _end_session(self, session_id: str, process: Process) -> None:
        process.sessions.discard(session_id)
        process.stopped.discard(session_id)
        self.hear(ev.RequestEnded(session_id, process.slot_id))

    # -- what there is ----------------------------------------------------------------------------

    def ready(self, name: str) -> list[str]:
        """The slots of a model that are loaded."""
        return [each.slot_id for each in self.processes.values() if each.model == name and each.ready]

    def check_devices(self) -> None:
        """No device is over-committed, whatever anybody believes."""
        used: dict[tuple[str, int], int] = {}
        for process in self.processes.values():
            place = process.allocation
            for device, need in zip(place.devices, place.bytes_each, strict=True):
                used[place.runner_id, device] = used.get((place.runner_id, device), 0) + need
        for (runner_id, device), need in used.items():
            assert need <= self.runners[runner_id].devices[device].memory, f"{runner_id}: {device} has {need:,} bytes"

    def check_seats(self) -> None:
        """No process serves more at a time than it may."""
        for process in self.processes.values():
            assert len(process.requests) + len(process.sessions) <= process.seats, process

    def check_cut_off(self, slot_id: str) -> None:
        """A slot that ends in order cuts no call of a session off before the session has had its time."""
        slot, process = self.reconciler.fleet.slots.get(slot_id), self.processes.get(slot_id)
        if slot is None or process is None or slot.state is not SlotState.DRAINING:
            return
        for session_id in process.calls:
            assert self.now - self.stopped_at[session_id] >= self.reconciler.policy.drain_s, session_id

    def _hand_out(self, instruction: Instruction) -> None:
        match instruction:
            case CreateSlot(_, _, allocation):
                self._order(allocation.runner_id, instruction)
            case DeleteSlot(slot_id, runner_id, _):
                self.check_cut_off(slot_id)
                self._order(runner_id, instruction)
            case StartRequest(_, slot_id) | EndRequest(_, slot_id, _):
                if isinstance(instruction, EndRequest) and instruction.request_id not in self.stopped_at:
                    self.stopped_at[instruction.request_id] = self.now
                    self.ended[instruction.request_id] = instruction.reason
                self._order(self.reconciler.fleet.slots[slot_id].allocation.runner_id, instruction)
            case AskRunner(runner_id):
                self._order(runner_id, (instruction, self.now))
            case RefuseRequest(request_id, _, _):
                before = self.refused.get(request_id)
                assert before is None or Refusal.DUPLICATE in (before.refusal, instruction.refusal), request_id
                self.refused[request_id] = instruction
            case RequeueRequest(request, _):
                self.requeued.append(request)
            case RaiseAlarm(text):
                self.alarms.append(text)

    def _order(self, runner_id: str, order: Order) -> None:
        if runner_id in self.orders:
            self.orders[runner_id].append(order)


def serving_world(
    *models: ModelSpec, runners: int = 1, gpus_each: int = 1, policy: ServingPolicy = QUICK, **kw: Any
) -> SlotWorld:
    """Runners with devices of 80 GB, and models that were registered in the same way."""
    made = SlotWorld(policy)
    for number in range(runners):
        made.join(gpus("abcdef"[number], gpus_each))
    made.settle()
    for spec in models:
        made.hear(ev.ModelRegistered(spec, **kw))
    made.settle()
    return made


A, B, C = model("a", 50), model("b", 60), model("c", 70)


# -- in time ----------------------------------------------------------------------------------------------------------


class TimedWorld(SlotWorld):
    """A world in which loads, answers and ends of processes take time. Seconds, by the name of a model."""

    def __init__(
        self, policy: ServingPolicy, load_s: Mapping[str, float], answer_s: Mapping[str, float], end_s: float = 0.5
    ) -> None:
        super().__init__(policy)
        self.load_s, self.answer_s, self.end_s = load_s, answer_s, end_s
        self.waits: dict[str, list[float]] = {}
        """Seconds from each arrival to its start on a slot, by the name of the model."""
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heappush(self._coming, (self.now + seconds, next(self._numbers), what))

    def ask_every(self, seconds: float, name: str, spec: ModelSpec, first: float = 0.0) -> None:
        """Ask for a model again and again."""

        def ask() -> None:
            self.ask(f"{name}{next(self._numbers)}", spec.name)
            self.later(seconds, ask)

        self.later(first, ask)

    def run_until(self, end: float) -> None:
        """Let everything happen up to a time."""
        while True:
            wakeup = self.reconciler.wakeup()
            if self._coming and self._coming[0][0] <= min(wakeup, end):
                self.now, _, what = heappop(self._coming)
                what()
            elif wakeup <= end:
                self.now = wakeup
                self.hear(ev.Tick())
            else:
                self.now = end
                return

    def answer_takes(self, name: str) -> float:
        """How many seconds the next answer of a model takes."""
        return self.answer_s[name]

    def longest_wait(self, name: str) -> float:
        """The longest wait for a model, that of requests which still wait included."""
        waiting = [self.now - each.arrived_at for each in self.reconciler.queue if each.model == name]
        return max([*self.waits.get(name, []), *waiting], default=0.0)

    def _order(self, runner_id: str, order: Order) -> None:
        match order:
            case CreateSlot(slot_id, spec, place):
                self.processes[slot_id] = Process(slot_id, spec.name, place, spec.requests_at_a_time)
                self.created.append(slot_id)
                self.later(self.load_s[spec.name], lambda: self._loaded(slot_id))
            case DeleteSlot(slot_id, _, reason):
                self.later(self.end_s, lambda: self._gone(slot_id, reason))
            case StartRequest(request, slot_id):
                self.waits.setdefault(request.model, []).append(self.now - request.arrived_at)
                self.processes[slot_id].requests.add(request.request_id)
                takes_s = self.answer_takes(request.model)
                self.later(takes_s, lambda: self.end_request(request.request_id, slot_id))
            case EndRequest(request_id, slot_id, _):
                self.later(0.0, lambda: self.end_request(request_id, slot_id, answered=False))
            case (AskRunner(), as_of):
                self.later(0.0, lambda: self._report(runner_id, as_of))

    def _loaded(self, slot_id: str) -> None:
        if slot_id in self.processes:
            self.load(slot_id)

    def _gone(self, slot_id: str, reason: str) -> None:
        if self.processes.pop(slot_id, None):
            self.deleted.append((slot_id, reason))
        self.hear(ev.SlotEnded(slot_id))

    def _report(self, runner_id: str, as_of: float) -> None:
        here = {n for n, each in self.processes.items() if each.allocation.runner_id == runner_id}
        self.hear(ev.RunnerReported(runner_id, as_of, here))
