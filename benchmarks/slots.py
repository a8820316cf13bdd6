"""How many decisions a second the allocator of slots makes. Needs neither Ray nor devices; about a minute.

    python benchmarks/slots.py

Runners have eight GPUs of 80 GB, and 4 or 16 slots. Models need 10 to 40 GB, twenty different ones in turn. A share of
the decisions needs an eviction: they are for models that fit nowhere without one. Each decision is carried out, and the
slots that it makes and evicts are ready and gone at once, so that the indexes have to follow. A *naive* allocator
looks at every device of every runner for each decision, with the same views of the devices. Times are CPU time.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from itertools import count

from iris_ray.slots.allocator import Allocator
from iris_ray.slots.decisions import Place, Requirement
from iris_ray.slots.devices import Device, DeviceKind, Runner
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.models import ModelSpec
from iris_ray.slots.policy import IdleFor, Policy
from iris_ray.slots.slot import Allocation, SlotState

GB = 10**9
DEVICES, MEMORY = 8, 80 * GB
MODELS = 20
POLICY = Policy(stale_at=IdleFor(0.0), min_residency_s=0.0)


def model(number: int) -> ModelSpec:
    return ModelSpec(f"model-{number}", {1: (10 + number % 4 * 10) * GB})


def full_fleet(runners: int, slots_each: int, chance: random.Random) -> SlotFleet:
    """Every device is filled with idle slots of equal size."""
    fleet = SlotFleet()
    ids = count()
    size = MEMORY * DEVICES // slots_each
    for number in range(runners):
        name = f"runner-{number}"
        fleet.add_runner(Runner(name, (Device(DeviceKind.GPU, MEMORY),) * DEVICES))
        for place in places(slots_each):
            slot_id = f"slot-{next(ids)}"
            spec = ModelSpec(f"old-{chance.randrange(200)}", {len(place): size // len(place)})
            fleet.plan(slot_id, spec, Allocation(name, place, (size // len(place),) * len(place)), 0.0)
            fleet.start(slot_id, 0.0)
            fleet.set_ready(slot_id, chance.random())
    specs = [*(model(number) for number in range(MODELS)), *(ModelSpec(f"old-{n}", {1: 1}) for n in range(200))]
    fleet.set_prices({spec.identity: chance.randrange(100_000) for spec in specs})
    return fleet


def places(slots_each: int) -> Iterator[tuple[int, ...]]:
    """The devices of each slot of a runner: with 4 slots pairs, with 16 each device twice."""
    if slots_each < DEVICES:
        width = DEVICES // slots_each
        yield from (tuple(range(first, first + width)) for first in range(0, DEVICES, width))
    else:
        yield from ((slot % DEVICES,) for slot in range(slots_each))


def seconds_each(fleet: SlotFleet, share: float, decisions: int, chance: random.Random) -> list[float]:
    """Decide, carry out, and measure each decision with what the next one pays for it."""
    allocator = Allocator(fleet, POLICY)
    specs = [model(number) for number in range(MODELS)]
    for spec in specs:
        allocator.decide(Requirement(spec), 1.0)  # the indexes are built once
    ids, taken, now = count(), [], 1.0
    for number in range(decisions):
        if share == 0 or chance.random() >= share:
            make_room(fleet)
        started = time.thread_time()
        decision = allocator.decide(Requirement(specs[number % MODELS]), now)
        assert isinstance(decision, Place), decision
        slot_id = f"new-{next(ids)}"
        allocator.commit(slot_id, specs[number % MODELS], decision, now)
        for evicted in decision.evict:
            fleet.end(evicted)
        if decision.evict:
            fleet.start(slot_id, now)
        fleet.set_ready(slot_id, now)
        taken.append(time.thread_time() - started)
    return taken


def make_room(fleet: SlotFleet) -> None:
    """End one slot, so that the next decision needs no eviction."""
    slot_id = next(iter(fleet.slots))
    fleet.retire(slot_id, SlotState.DRAINING)
    fleet.end(slot_id)


def naive_seconds(fleet: SlotFleet, decisions: int) -> float:
    """The median of looking at all devices anew for each decision."""
    taken = []
    for number in range(decisions):
        started = time.thread_time()
        Allocator(fleet, POLICY).decide(Requirement(model(number)), 1.0)
        taken.append(time.thread_time() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decisions per second of the allocator of slots.")
    parser.add_argument("--decisions", type=int, default=4_000)
    arguments = parser.parse_args()
    print(" runners slots each  evicting  per second   p50 µs   p99 µs  naive/s")
    for runners in (10, 100, 1_000):
        for slots_each in (4, 16):
            for share in (0.0, 0.5, 1.0):
                row(runners, slots_each, share, arguments.decisions)


def row(runners: int, slots_each: int, share: float, decisions: int) -> None:
    """Print one line of the table."""
    chance = random.Random(7)
    fleet = full_fleet(runners, slots_each, chance)
    naive = naive_seconds(fleet, 5)
    gc.disable()
    taken = sorted(seconds_each(fleet, share, decisions, chance))
    gc.enable()
    p50, p99 = taken[len(taken) // 2], taken[len(taken) * 99 // 100]
    print(
        f"{runners:>8} {slots_each:>10} {share:>9.0%} {len(taken) / sum(taken):>11,.0f} {p50 * 1e6:>8.1f} "
        f"{p99 * 1e6:>8.1f} {1 / naive:>8,.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
