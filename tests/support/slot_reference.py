"""The allocator of slots for a snapshot, and once more, slow and obvious: every set of devices and evictions."""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import combinations, permutations

from iris_ray.slots.core.allocator import Allocator, Decision, Place, SlotRequirement
from iris_ray.slots.core.devices import DeviceKind, Runner
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import PlacementPolicy
from iris_ray.slots.core.slot import USES_MEMORY, Slot, SlotState

Score = tuple[float, ...]
LONG_AGO = float("-inf")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Runners and slots at one moment. Slots are copied before anything is changed."""

    runners: tuple[Runner, ...]
    slots: tuple[Slot, ...] = ()
    closed: frozenset[str] = frozenset()
    prices: Mapping[str, int] = field(default_factory=dict, hash=False)


def decide(snapshot: Snapshot, requirement: SlotRequirement, policy: PlacementPolicy, now: float) -> Decision:
    """Return where one more slot goes."""
    return next(plan(snapshot, [requirement], policy, now))


def plan(
    snapshot: Snapshot, queue: Iterable[SlotRequirement], policy: PlacementPolicy, now: float
) -> Iterator[Decision]:
    """Yield a decision for each requirement, as if the decisions before it had been carried out."""
    allocator = Allocator(fleet_of(snapshot), policy)
    for number, requirement in enumerate(queue):
        decision = allocator.decide(requirement, now)
        if isinstance(decision, Place):
            commit(allocator, f"planned {number}", requirement.spec, decision, now)
        yield decision


def commit(allocator: Allocator, slot_id: str, spec: ModelSpec, place: Place, now: float) -> None:
    """Carry a decision out in the books."""
    for evicted in place.evict:
        allocator.fleet.retire(evicted, SlotState.DRAINING)
    allocator.fleet.plan(slot_id, spec, place.allocation, now)
    allocator.fleet.start(slot_id, now)


def fleet_of(snapshot: Snapshot) -> SlotFleet:
    """Return a fleet as the snapshot describes it, with copies of its slots."""
    fleet = SlotFleet()
    for runner in snapshot.runners:
        fleet.add_runner(runner)
        fleet.set_open(runner.runner_id, runner.runner_id not in snapshot.closed)
    for slot in snapshot.slots:
        fleet.adopt(deepcopy(slot))
    fleet.set_prices(snapshot.prices)
    return fleet


def best_score(snapshot: Snapshot, requirement: SlotRequirement, policy: PlacementPolicy, now: float) -> Score | None:
    """The score of the best plan; smaller is better. None: there is no plan."""
    return min((score for score, _ in all_plans(snapshot, requirement, policy, now)), default=None)


def score_of(
    place: Place, snapshot: Snapshot, requirement: SlotRequirement, policy: PlacementPolicy, now: float
) -> Score:
    """The best score of the plans that are this place. Fails if there is none."""
    same = place.allocation.runner_id, place.allocation.devices, frozenset(place.evict)
    return min(score for score, plan in all_plans(snapshot, requirement, policy, now) if plan == same)


def all_plans(
    snapshot: Snapshot, requirement: SlotRequirement, policy: PlacementPolicy, now: float
) -> Iterator[tuple[Score, tuple[str, tuple[int, ...], frozenset[str]]]]:
    spec = requirement.spec
    for runner in snapshot.runners:
        name = runner.runner_id
        if runner.kind is not spec.kind or name in snapshot.closed | requirement.avoid:
            continue
        slots = [slot for slot in snapshot.slots if slot.allocation.runner_id == name]
        excluded = {slot for slot in slots if spec.excludes(slot.spec)}
        for degree in spec.memory:
            for devices, needs in ways(runner, spec, degree):
                charge = [runner.devices[device].charge(need) for device, need in zip(devices, needs, strict=True)]
                if any(runner.devices[device].memory < need for device, need in zip(devices, needs, strict=True)):
                    continue
                room = [free_now(runner, slots, device) for device in devices]
                if not excluded and all(free >= each for free, each in zip(room, charge, strict=True)):
                    yield free_score(policy, degree, min(room)), (name, devices, frozenset())
                for evict in subsets([slot for slot in slots if evictable(slot, requirement, policy, now)]):
                    if not {slot for slot in excluded if slot.wanted} <= set(evict):
                        continue
                    left = [promised_left(runner, slots, evict, device) for device in devices]
                    if all(free >= each for free, each in zip(left, charge, strict=True)):
                        price = sum(snapshot.prices.get(slot.model, 0) for slot in evict)
                        size = sum(slot.allocation.total for slot in evict)
                        newest = max((slot.last_activity for slot in evict), default=LONG_AGO)
                        ids = frozenset(slot.slot_id for slot in evict)
                        yield tiered(policy, degree, (price, size, newest)), (name, devices, ids)


def ways(runner: Runner, spec: ModelSpec, degree: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All devices that a slot could have, in the order in which its process sees them, with the bytes of each."""
    sizes = spec.sizes_on(degree)
    if len(set(sizes)) == 1 or runner.kind is DeviceKind.TPU:
        yield from ((devices, (max(sizes),) * degree) for devices in runner.sets(degree))
    else:
        yield from ((devices, sizes) for devices in permutations(range(len(runner.devices)), degree))


def tiered(policy: PlacementPolicy, degree: int, key: Score) -> Score:
    return (1, *key, degree) if policy.spread_before_evicting else (0, degree, 1, *key)


def evictable(slot: Slot, requirement: SlotRequirement, policy: PlacementPolicy, now: float) -> bool:
    if slot.state is not SlotState.READY or slot.active or slot.claimed or slot.model == requirement.spec.name:
        return False
    assert slot.ready_at is not None
    stale_at = policy.stale_at(slot.allocation.runner_id, slot.last_activity)
    return slot.ready_at + policy.min_residency_s <= now and stale_at <= now


def free_now(runner: Runner, slots: list[Slot], device: int) -> int:
    in_use = sum(slot.allocation.on(device) for slot in slots if slot.state in USES_MEMORY)
    return min(runner.devices[device].memory - in_use, promised_left(runner, slots, (), device))


def promised_left(runner: Runner, slots: list[Slot], evict: tuple[Slot, ...], device: int) -> int:
    staying = [slot for slot in slots if slot.wanted and slot not in evict]
    return runner.devices[device].memory - sum(slot.allocation.on(device) for slot in staying)


def subsets(slots: list[Slot]) -> Iterator[tuple[Slot, ...]]:
    for count in range(len(slots) + 1):
        yield from combinations(slots, count)


def free_score(policy: PlacementPolicy, degree: int, room: int) -> Score:
    return (0, degree, -room) if policy.spread_before_evicting else (0, degree, 0, -room)
