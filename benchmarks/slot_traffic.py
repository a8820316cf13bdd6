"""How often models are loaded for a stream of requests, beside the fewest loads that were possible. Needs no Ray.

    python benchmarks/slot_traffic.py          # virtual time; about a minute

1,000 requests come at random times. *zipf*: the n-th model gets a share in proportion to 1 / n. *turns*: the models
take turns, which is the worst case for evicting the least recently used slot (*LRU*). Models load in 5 s and answer in
0.2 s, four requests at a time. The *optimum* knows all requests beforehand, and serves each one before the next. Slots
may need fewer loads: a request may wait until its model's turn comes.
"""

import heapq
import random
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from iris_ray.slots.core import events as ev
from iris_ray.slots.core import instructions as todo
from iris_ray.slots.core.devices import Device, DeviceKind, Runner
from iris_ray.slots.core.models import ModelSpec, Request
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.slots.core.reconciler import Reconciler

GB = 10**9
REQUESTS = 1_000
POLICIES = {
    "usual": ServingPolicy(),
    "eager": ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0)),
}
Arrival = tuple[float, str]
"""When a request comes, in seconds, and the name of its model."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long things take, in seconds.

    Args:
        load: from the order to make a slot until it is ready.
        answer: of a request on a slot.
        end: from the order to end a slot until its process is gone.
    """

    load: float = 5.0
    answer: float = 0.2
    end: float = 0.5


@dataclass(slots=True)
class Played:
    """What happened.

    Attributes:
        loads: slots that were made.
        evictions: slots that were told to end.
        waits: seconds from each arrival to its start on a slot, in the order of starts.
        refused: why requests got no answer.
    """

    loads: int = 0
    evictions: int = 0
    waits: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def zipf_arrivals(
    models: Sequence[str], requests: int, per_second: float, exponent: float = 1.0, seed: int = 1
) -> list[Arrival]:
    """Return requests at random times, of which the n-th model gets a share in proportion to n ** -exponent."""
    chance = random.Random(seed)
    times = accumulate(chance.expovariate(per_second) for _ in range(requests))
    weights = [(place + 1) ** -exponent for place in range(len(models))]
    return list(zip(times, chance.choices(models, weights, k=requests), strict=True))


def play(
    arrivals: Iterable[Arrival],
    models: Iterable[ModelSpec],
    runners: Iterable[Runner],
    policy: ServingPolicy | None = None,
    times: Times | None = None,
) -> Played:
    """Have slots serve these arrivals, to the last one, and check the books then."""
    return _Player(policy or ServingPolicy(), times or Times()).play(arrivals, models, runners)


def least_loads(models: Sequence[str], room: int) -> int:
    """Return how many loads it takes at least to serve requests in this order where so many models fit at once.

    What is asked for next after the longest time gives way (Belady's rule, which is optimal for models of one size).
    """
    next_use: list[float] = [float("inf")] * len(models)
    last: dict[str, int] = {}
    for place in reversed(range(len(models))):
        next_use[place] = last.get(models[place], float("inf"))
        last[models[place]] = place
    loads = 0
    loaded: dict[str, float] = {}
    for model, following in zip(models, next_use, strict=True):
        if model not in loaded:
            loads += 1
            if len(loaded) == room:
                del loaded[max(loaded, key=lambda name: loaded[name])]
        loaded[model] = following
    return loads


class _Player:
    def __init__(self, policy: ServingPolicy, times: Times) -> None:
        ids = count()
        self._core = Reconciler(policy, new_id=lambda: f"slot-{next(ids)}")
        self._times = times
        self._order = count()
        self._coming: list[tuple[float, int, ev.Event]] = []
        self._played = Played()

    def play(self, arrivals: Iterable[Arrival], models: Iterable[ModelSpec], runners: Iterable[Runner]) -> Played:
        for spec in models:
            self._hear(ev.ModelRegistered(spec, load_s=self._times.load), 0.0)
        for runner in runners:
            self._hear(ev.RunnerJoined(runner), 0.0)
        for number, (when, model) in enumerate(arrivals):
            self._later(when, ev.RequestArrived(Request(f"request-{number}", model, when)))
        while self._coming or len(self._core.queue):
            wakeup = self._core.wakeup()
            if self._coming and self._coming[0][0] <= wakeup:
                now, _, event = heapq.heappop(self._coming)
            else:
                now, event = wakeup, ev.Tick()
            self._hear(event, now)
        self._core.check()
        return self._played

    def _later(self, when: float, event: ev.Event) -> None:
        heapq.heappush(self._coming, (when, next(self._order), event))

    def _hear(self, event: ev.Event, now: float) -> None:
        for instruction in self._core.handle(event, now):
            self._carry_out(instruction, now)

    def _carry_out(self, instruction: todo.Instruction, now: float) -> None:
        times = self._times
        match instruction:
            case todo.CreateSlot(slot_id=slot_id):
                self._played.loads += 1
                self._later(now + times.load, ev.SlotReady(slot_id))
            case todo.DeleteSlot(slot_id=slot_id):
                self._played.evictions += 1
                self._later(now + times.end, ev.SlotEnded(slot_id))
            case todo.StartRequest(request=request, slot_id=slot_id):
                self._played.waits.append(now - request.arrived_at)
                self._later(now + times.answer, ev.RequestEnded(request.request_id, slot_id))
            case todo.RefuseRequest(reason=reason):
                self._played.refused.append(reason)
            case todo.AskRunner(runner_id=runner_id):
                slots = [slot.slot_id for slot in self._core.fleet.on_runner(runner_id)]
                self._later(now, ev.RunnerReported(runner_id, now, slots))


def lru_loads(models: Sequence[str], room: int) -> int:
    """Loads if what was used longest ago gives way."""
    loaded: OrderedDict[str, None] = OrderedDict()
    loads = 0
    for model in models:
        loads += model not in loaded
        loaded[model] = None
        loaded.move_to_end(model)
        if len(loaded) > room:
            loaded.popitem(last=False)
    return loads


def row(pattern: str, room: int, number: int, per_second: float, policy: str) -> None:
    """Print one line of the table."""
    specs = [ModelSpec(f"model-{place}", {1: 40 * GB}, concurrency=4) for place in range(number)]
    arrivals: list[Arrival] = zipf_arrivals([spec.name for spec in specs], REQUESTS, per_second)
    if pattern == "turns":
        arrivals = [(when, specs[place % number].name) for place, (when, _) in enumerate(arrivals)]
    runners = [Runner(f"runner-{place}", (Device(DeviceKind.GPU, 80 * GB),)) for place in range(room // 2)]
    played = play(arrivals, specs, runners, POLICIES[policy])
    models = [model for _, model in arrivals]
    optimum, waits = least_loads(models, room), sorted(played.waits)
    p50, p99 = statistics.median(waits), waits[len(waits) * 99 // 100]
    print(
        f"{pattern:>8} {room:>5} {number:>7} {per_second:>11} {policy:>7} {played.loads:>6} {played.evictions:>10} "
        f"{optimum:>8} {lru_loads(models, room):>5} {played.loads / optimum:>6.2f} × {p50:>7.1f} s "
        f"{p99:>7.1f} s",
        flush=True,
    )


def main() -> None:
    print(" pattern  room  models  per second  policy  loads  evictions  optimum   LRU    ratio  wait p50  wait p99")
    for pattern in ("zipf", "turns"):
        for policy in POLICIES:
            for room, number in ((8, 16), (8, 40), (2, 3)):
                for per_second in (0.2, 1.0, 5.0):
                    row(pattern, room, number, per_second, policy)


if __name__ == "__main__":
    main()
