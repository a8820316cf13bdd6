"""How many decisions a second the allocator of slots makes, and what an event costs. Needs neither Ray nor devices.

    python benchmarks/slots.py            # about a minute
    python benchmarks/slots.py --events   # only what an event costs; some seconds

Runners have eight GPUs of 80 GB, all of them full. *4 slots* have two devices each, and so do the models that are to be
placed. *16 slots* have half a device each. There are 500 models of 20 sizes to be placed, in turn: 61 to 80 GB on two
devices, or 30.5 to 40 GB on one. Two of them never fit where one slot was, so a decision needs an eviction unless a
slot has just ended. *Mixed* are 16 slots again, with models of 10 to 40 GB: some decisions evict two slots, some none.

Each decision is carried out, and the slots that it makes and evicts are ready and gone at once, so that the indexes
have to follow. A *naive* allocator looks at every device of every runner for each decision. Times are CPU time.

*Events* are requests that come and end on warm slots, one for each of 100 GPUs, or for each model if there are fewer.
*Waiting* models have one request each, and no room. *All models* is what an event costs that has all models looked at,
as one in five seconds has. *Prewarm* is the event that gives each runner a slot of a model.

*Slots* are warm slots of one model, and a request is its arrival and its end. *All busy* are the same events when each
slot serves a request and a hundred more have waited for a minute. *Runners* are 1,000 with eight full GPUs, and 1,000
models of 20 sizes wait for room: one runner is lost, and one joins and reports.
"""

import argparse
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.allocator import Allocator, Place, SlotRequirement
from iris_ray.slots.core.devices import Device, DeviceKind, Runner
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.instructions import CreateSlot, StartRequest
from iris_ray.slots.core.models import ModelSpec, Request
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.slots.core.reconciler import Reconciler
from iris_ray.slots.core.slot import Allocation, Slot, SlotState

GB = 10**9
DEVICES, MEMORY = 8, 80 * GB
MODELS, SIZES = 500, 20
POLICY = PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0)


@dataclass(frozen=True)
class Layout:
    """How runners are filled, and what the models need that are to be placed there."""

    name: str
    slots_each: int
    models: Sequence[ModelSpec]

    def places(self) -> Iterator[tuple[int, ...]]:
        """The devices of each slot of a runner: pairs, or each device twice."""
        width = max(1, DEVICES // self.slots_each)
        for slot in range(self.slots_each):
            first = slot * width % DEVICES
            yield tuple(range(first, first + width))

    def bytes_each(self) -> int:
        """Bytes of each old slot on each of its devices."""
        return min(MEMORY, MEMORY * DEVICES // self.slots_each)


def models(memory: Callable[[int], dict[int, int]]) -> list[ModelSpec]:
    return [ModelSpec(f"model-{number}", memory(number)) for number in range(MODELS)]


LAYOUTS = (
    Layout("4", 4, models(lambda number: {2: (61 + number % SIZES) * GB})),
    Layout("16", 16, models(lambda number: {1: 30 * GB + (number % SIZES + 1) * GB // 2})),
    Layout("mixed", 16, models(lambda number: {1: (10 + number % 4 * 10) * GB})),
)


def full_fleet(runners: int, layout: Layout, chance: random.Random) -> SlotFleet:
    """Every device is filled with idle slots of equal size."""
    fleet = SlotFleet()
    ids = count()
    for number in range(runners):
        name = f"runner-{number}"
        fleet.add_runner(Runner(name, (Device(DeviceKind.GPU, MEMORY),) * DEVICES))
        for place in layout.places():
            slot_id, size = f"slot-{next(ids)}", layout.bytes_each()
            spec = ModelSpec(f"old-{chance.randrange(200)}", {len(place): size})
            fleet.plan(slot_id, spec, Allocation(name, place, (size,) * len(place)), 0.0)
            fleet.start(slot_id, 0.0)
            fleet.set_ready(slot_id, chance.random())
    specs = [*layout.models, *(ModelSpec(f"old-{n}", {1: 1}) for n in range(200))]
    fleet.set_prices({spec.name: chance.randrange(100_000) for spec in specs})
    return fleet


@dataclass
class Taken:
    """Seconds of each decision, with what the next one pays for it, and how many slots were evicted."""

    seconds: list[float]
    evicted: int = 0


def measure(fleet: SlotFleet, layout: Layout, share: float, decisions: int, chance: random.Random) -> Taken:
    """Decide, and carry out."""
    allocator = Allocator(fleet, POLICY)
    for spec in layout.models[:SIZES]:
        allocator.decide(SlotRequirement(spec), 1.0)  # the indexes are built once
    ids, taken, now = count(), Taken([]), 1.0
    for number in range(decisions):
        if share == 0 or chance.random() >= share:
            make_room(fleet)
        spec = layout.models[number % MODELS]
        started = time.thread_time()
        decision = allocator.decide(SlotRequirement(spec), now)
        assert isinstance(decision, Place), decision
        slot_id = f"new-{next(ids)}"
        for evicted in decision.evict:
            fleet.retire(evicted, SlotState.DRAINING)
            fleet.end(evicted)
        fleet.plan(slot_id, spec, decision.allocation, now)
        fleet.start(slot_id, now)
        fleet.set_ready(slot_id, now)
        taken.seconds.append(time.thread_time() - started)
        taken.evicted += len(decision.evict)
    return taken


def make_room(fleet: SlotFleet) -> None:
    """End one slot, so that the next decision needs no eviction."""
    slot_id = next(iter(fleet.slots))
    fleet.retire(slot_id, SlotState.DRAINING)
    fleet.end(slot_id)


def naive_seconds(fleet: SlotFleet, layout: Layout, decisions: int) -> float:
    """The median of looking at all devices anew for each decision."""
    taken = []
    for number in range(decisions):
        started = time.thread_time()
        Allocator(fleet, POLICY).decide(SlotRequirement(layout.models[number]), 1.0)
        taken.append(time.thread_time() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decisions per second of the allocator of slots.")
    parser.add_argument("--decisions", type=int, default=4_000)
    parser.add_argument("--runners", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--events", action="store_true", help="only what an event costs")
    arguments = parser.parse_args()
    if not arguments.events:
        print_decisions(arguments.runners, arguments.decisions)
    print_events()


def print_decisions(counts: Sequence[int], decisions: int) -> None:
    """Print the first table."""
    print(" runners    slots  evicting  per second   p50 µs   p99 µs  evicted each  naive/s")
    for runners in counts:
        for layout in LAYOUTS:
            for share in (0.0, 0.5, 1.0):
                row(runners, layout, share, decisions)


def row(runners: int, layout: Layout, share: float, decisions: int) -> None:
    """Print one line of the table."""
    chance = random.Random(7)
    fleet = full_fleet(runners, layout, chance)
    naive = naive_seconds(fleet, layout, 5)
    gc.collect()
    gc.disable()
    taken = measure(fleet, layout, share, decisions, chance)
    gc.enable()
    seconds = sorted(taken.seconds)
    p50, p99 = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
    print(
        f"{runners:>8} {layout.name:>8} {share:>9.0%} {len(seconds) / sum(seconds):>11,.0f} {p50 * 1e6:>8.1f} "
        f"{p99 * 1e6:>8.1f} {taken.evicted / decisions:>13.2f} {1 / naive:>8,.0f}",
        flush=True,
    )


def serving(models: int, waiting: int) -> Reconciler:
    """A reconciler of 100 GPUs, with a warm slot on each as far as there are models, and models that wait for room."""
    core, names = empty_reconciler(25, devices=4), count()
    specs = [ModelSpec(f"model-{number}", {1: MEMORY}) for number in range(models)]
    for spec in specs:
        core.handle(ev.ModelRegistered(spec), 0.0)
    for spec in specs[:100]:
        asked = ev.RequestArrived(Request(f"first-{next(names)}", spec.name, 0.0))
        (create,) = (each for each in core.handle(asked, 0.0) if isinstance(each, CreateSlot))
        core.handle(ev.SlotReady(create.slot_id), 0.0)
        core.handle(ev.RequestEnded(asked.request.request_id, create.slot_id), 0.0)
    for spec in specs[models - waiting :]:
        core.handle(ev.RequestArrived(Request(f"waits-{next(names)}", spec.name, 0.0)), 0.0)
    return core


def empty_reconciler(runners: int, devices: int) -> Reconciler:
    """A reconciler of runners that have reported."""
    ids = count()
    core = Reconciler(ServingPolicy(), new_id=lambda: f"slot-{next(ids)}")
    for number in range(runners):
        core.handle(ev.RunnerJoined(Runner(f"runner-{number}", (Device(DeviceKind.GPU, MEMORY),) * devices)), 0.0)
        core.handle(ev.RunnerReported(f"runner-{number}", 0.0, {}), 0.0)
    return core


def seconds_of_event(models: int, waiting: int, look_at_all: bool, requests: int = 500) -> float:
    """The median CPU time of an event."""
    core, taken, now = serving(models, waiting), [], 1.0
    slots = list(core.fleet.slots.values())
    for number in range(requests):
        slot = slots[number % len(slots)]
        request = Request(f"request-{number}", slot.model, now)
        for event in (ev.RequestArrived(request), ev.RequestEnded(request.request_id, slot.slot_id)):
            now += 0.001
            if look_at_all:
                core._planner.look_at_all()
            started = time.thread_time()
            core.handle(event, now)
            taken.append(time.thread_time() - started)
    core.check()
    return statistics.median(taken)


def seconds_of_prewarm(runners: int) -> float:
    """The CPU time of the event that gives each runner a slot."""
    core = empty_reconciler(runners, DEVICES)
    started = time.thread_time()
    created = core.handle(ev.ModelRegistered(ModelSpec("m", {1: MEMORY}), prewarm=True), 1.0)
    assert sum(isinstance(each, CreateSlot) for each in created) == runners
    return time.thread_time() - started


def full_reconciler(slots: int, model: ModelSpec) -> Reconciler:
    """A reconciler of runners whose GPUs have a warm slot each."""
    runners = -(-slots // DEVICES)
    core = empty_reconciler(runners, DEVICES)
    core.handle(ev.ModelRegistered(model), 0.0)
    for number in range(slots):
        place = Allocation(f"runner-{number // DEVICES}", (number % DEVICES,), (MEMORY,))
        core.fleet.adopt(Slot(f"warm-{number}", model, place, 0.0, SlotState.READY, 0.0, 0.0))
    return core


def seconds_of_requests(slots: int, all_busy: bool, requests: int = 200) -> tuple[float, float]:
    """The median and the 99th percentile of the CPU time of a request's arrival and its end."""
    model, names = ModelSpec("m", {1: MEMORY}), count()
    core, taken, now, running = full_reconciler(slots, model), [], 1.0, deque[tuple[str, str]]()

    def arrive() -> None:
        done = core.handle(ev.RequestArrived(Request(f"r{next(names)}", model.name, now)), now)
        running.extend((each.request.request_id, each.slot_id) for each in done if isinstance(each, StartRequest))

    for _ in range(slots + 100 if all_busy else 0):
        arrive()
    now += 60.0
    core.handle(ev.Tick(), now)
    for _ in range(requests):
        now += 0.0001
        started = time.thread_time()
        arrive()
        done = core.handle(ev.RequestEnded(*running.popleft()), now)
        taken.append(time.thread_time() - started)
        running.extend((each.request.request_id, each.slot_id) for each in done if isinstance(each, StartRequest))
    return statistics.median(taken), sorted(taken)[len(taken) * 99 // 100]


def seconds_of_runners(runners: int, waiting: int) -> tuple[float, float]:
    """The CPU time of the loss of a runner, and of one that joins, while models wait for room."""
    core = full_reconciler(runners * DEVICES, ModelSpec("old", {1: MEMORY}))
    for number in range(waiting):
        model = ModelSpec(f"m{number}", {1: (61 + number % SIZES) * GB - GB})
        core.handle(ev.ModelRegistered(model), 1.0)
        core.handle(ev.RequestArrived(Request(f"r{number}", model.name, 1.0)), 1.0)
    taken = []
    joins = ev.RunnerJoined(Runner("new", (Device(DeviceKind.GPU, MEMORY),) * DEVICES))
    happens: list[list[ev.Event]] = [[ev.RunnerLost("runner-0")], [joins, ev.RunnerReported("new", 1.0, {})]]
    for events in happens:
        started = time.thread_time()
        for event in events:
            core.handle(event, 1.0)
        taken.append(time.thread_time() - started)
    assert sum(slot.state is SlotState.STARTING for slot in core.fleet.slots.values()) == DEVICES
    return taken[0], taken[1]


def print_events() -> None:
    """Print the tables of events."""
    print("   slots  request p50 µs   p99 µs  all busy p50 µs   p99 µs")
    for slots in (104, 2_400, 8_000):
        each = [time * 1e6 for all_busy in (False, True) for time in seconds_of_requests(slots, all_busy)]
        print(f"{slots:>8} {each[0]:>15.0f} {each[1]:>8.0f} {each[2]:>16.0f} {each[3]:>8.0f}", flush=True)
    print(" runners  waiting  ms lost  ms joined")
    lost, joined = seconds_of_runners(1_000, 1_000)
    print(f"{1_000:>8} {1_000:>8} {lost * 1e3:>8.1f} {joined * 1e3:>10.1f}", flush=True)
    print("  models  waiting  µs each event  µs, all models")
    for models, waiting in ((20, 0), (500, 0), (500, 400)):
        changed, all_models = (seconds_of_event(models, waiting, look_at_all) for look_at_all in (False, True))
        print(f"{models:>8} {waiting:>8} {changed * 1e6:>14.0f} {all_models * 1e6:>15.0f}", flush=True)
    print(" runners  ms prewarm")
    for runners in (50, 200):
        print(f"{runners:>8} {min(seconds_of_prewarm(runners) for _ in range(3)) * 1e3:>11.1f}", flush=True)


if __name__ == "__main__":
    main()
