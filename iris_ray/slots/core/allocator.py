"""Decides where a slot goes, and which slots are evicted for it.

The order of preference:

1. free devices: the one with the most bytes free; else 2, 3, … devices of one runner, as the model can be split;
2. the cheapest eviction, on any runner, for any number of devices. An eviction costs the time to load the evicted
   models again, times the demand for them.

If `PlacementPolicy.spread_before_evicting` is off, evicting for one device comes before using two free ones, and so on.
Slots are evicted only if the new slot has a place afterwards.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from iris_ray.slots.core.devices import DeviceSet, Runner
from iris_ray.slots.core.eviction import EvictableSlots, EvictionPlan
from iris_ray.slots.core.eviction_indexes import EvictionIndexes
from iris_ray.slots.core.fleet import DevicePool, FreeIndex, SlotFleet
from iris_ray.slots.core.models import ModelSpec, SlotIdentity
from iris_ray.slots.core.policy import PlacementPolicy, Staleness
from iris_ray.slots.core.slot import Allocation, SlotState


class SlotRequirement(NamedTuple):
    """One more slot of a model is needed.

    Attributes:
        avoid: ids of runners not to use now, for instance because the model failed to load there.
        starving: whether slots that serve requests may be evicted too: they take no new request, and end after the
            last one.
    """

    spec: ModelSpec
    avoid: frozenset[str] = frozenset()
    starving: bool = False


class Place(NamedTuple):
    """Put the slot there, and evict exactly these slots for it.

    The slot may have to wait for its memory: until the evicted slots, or others that end there, are gone.
    """

    allocation: Allocation
    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Full:
    """There is no place now, not even with evictions; there may be one later."""

    reason: str


@dataclass(frozen=True, slots=True)
class Never:
    """Not even an empty runner could hold the slot. Waiting is of no use."""

    reason: str


Decision = Place | Full | Never


class Allocator:
    """Decides on a fleet that others change. It keeps indexes of the fleet, and updates them by the fleet's changes."""

    def __init__(self, fleet: SlotFleet, policy: PlacementPolicy) -> None:
        self.fleet = fleet
        self.policy = policy
        self.staleness = Staleness(policy)
        self.evictable = EvictableSlots(fleet, self.staleness)
        self._busy_too = EvictableSlots(fleet, self.staleness, busy_too=True)
        self._no_places: dict[SlotIdentity, tuple[int, ModelSpec, Full | Never]] = {}
        self._pools: dict[DevicePool, _Indexes] = {}
        self._runner_changes = 0

    def decide(self, requirement: SlotRequirement, now: float) -> Decision:
        """Return where one more slot goes. Changes nothing. ``now`` must not go backwards."""
        self.evictable.refresh(now)
        if requirement.starving:
            self._busy_too.refresh(now)
        by_degree = [self._indexes(requirement.spec, degree) for degree in requirement.spec.memory]
        for indexes in [by_degree] if self.policy.spread_before_evicting else [[each] for each in by_degree]:
            if place := _free_place(requirement, indexes) or _evicting_place(requirement, indexes):
                return place
        return self._no_place(requirement.spec)

    def has_gained(self, now: float) -> bool:
        """Return whether a decision "no place" may have become another one since the last call."""
        runner_changes, self._runner_changes = self._runner_changes, self.fleet.changes.runner_changes
        gained = [each.has_gained(now) for each in (self.evictable, self._busy_too)]
        return any(gained) or runner_changes != self._runner_changes

    def commit(self, slot_id: str, spec: ModelSpec, place: Place, now: float) -> None:
        """Carry a decision out in the books: drain the evicted slots, plan the new one, and start it if it can."""
        for evicted in place.evict:
            self.fleet.retire(evicted, SlotState.DRAINING)
        self.fleet.plan(slot_id, spec, place.allocation, now)
        self.fleet.start(slot_id, now)

    def free_place_on(self, runner_id: str, spec: ModelSpec) -> Place | None:
        """Return free devices of one runner for a slot of the model, or None."""
        for degree, need in spec.memory.items():
            if devices := self._indexes(spec, degree).free.find_on(runner_id, need):
                return Place(_allocation(self.fleet.runners[runner_id], devices, spec))
        return None

    def _indexes(self, spec: ModelSpec, degree: int) -> "_Indexes":
        pool = DevicePool(spec.kind, spec.constraints, degree)
        found = self._pools.get(pool)
        if found is None:
            found = self._pools[pool] = _Indexes(
                degree,
                FreeIndex(self.fleet, pool),
                EvictionIndexes(self.fleet, pool, self.evictable),
                EvictionIndexes(self.fleet, pool, self._busy_too),
            )
        return found

    def fits_nowhere(self, spec: ModelSpec) -> Never | None:
        """Return why not even an empty runner could hold the model; None: one could, or one may come."""
        answer = self._no_place(spec)
        return answer if isinstance(answer, Never) else None

    def _no_place(self, spec: ModelSpec) -> Full | Never:
        """Return why there is no place. Look at all runners only if some have come, gone, opened or closed."""
        changes = self.fleet.changes.runner_changes
        known = self._no_places.get(spec.identity)
        if known is None or known[:2] != (changes, spec):
            known = self._no_places[spec.identity] = (changes, spec, self._why_no_place(spec))
        return known[2]

    def _why_no_place(self, spec: ModelSpec) -> Full | Never:
        alike = [runner for runner in self.fleet.runners.values() if _suits(runner, spec)]
        to_come = [runner for runner in self.fleet.expected if runner.kind is spec.kind]
        if not alike and not to_come:
            return Full(f"no runner with {spec.kind.value} devices satisfies the constraints of {spec.identity}")
        if not any(fits_when_empty(runner, spec) for runner in (*alike, *to_come)):
            return Never(why_never(alike or to_come, spec))
        if not any(fits_when_empty(runner, spec) for runner in alike):
            return Full(f"no runner that could hold {spec.identity} has its host; `iris-ray ls` shows their jobs")
        return Full(f"all devices that could hold {spec.identity} are full, and nothing there may be evicted now")


@dataclass(frozen=True, slots=True)
class _Indexes:
    degree: int
    free: FreeIndex
    evictable: EvictionIndexes
    busy_too: EvictionIndexes


def _free_place(requirement: SlotRequirement, by_degree: Iterable[_Indexes]) -> Place | None:
    spec = requirement.spec
    for indexes in by_degree:
        if found := indexes.free.find(spec.memory[indexes.degree], requirement.avoid):
            return Place(_allocation(*found, spec))
    return None


def _evicting_place(requirement: SlotRequirement, by_degree: Iterable[_Indexes]) -> Place | None:
    spec = requirement.spec
    best: tuple[Runner, EvictionPlan] | None = None
    for indexes in by_degree:
        evictions = indexes.busy_too if requirement.starving else indexes.evictable
        found = evictions.find(spec, requirement.avoid)
        if found and (best is None or found[1].key < best[1].key):
            best = found
    if best is None:
        return None
    runner, plan = best
    return Place(_allocation(runner, plan.devices, spec), tuple([slot.slot_id for slot in plan.evict]))


def fits_when_empty(runner: Runner, spec: ModelSpec) -> bool:
    """Return whether a slot of the model fits on the runner if nothing else is there."""
    return any(_has_set(runner, degree, need) for degree, need in spec.memory.items())


def _has_set(runner: Runner, degree: int, need: int) -> bool:
    large = {number for number, device in enumerate(runner.devices) if device.memory >= need}
    if runner.legal_sets is None:
        return len(large) >= degree
    return any(large.issuperset(devices) for devices in runner.sets(degree))


def why_never(runners: Sequence[Runner], spec: ModelSpec) -> str:
    """Return why none of these runners, not even an empty one, can hold a slot of the model."""
    largest = max(device.memory for runner in runners for device in runner.devices)
    most = max(len(runner.devices) for runner in runners)
    needs = ", ".join(f"{need:,} bytes on each of {degree}" for degree, need in spec.memory.items())
    return (
        f"{spec.identity} fits on no runner, not even on an empty one. It needs {needs} {spec.kind.value} devices of "
        f"one runner; the largest device has {largest:,} bytes, and no runner has more than {most} of them. Give it "
        f"less memory, allow it to be split over more devices, or add larger runners."
    )


def _allocation(runner: Runner, devices: DeviceSet, spec: ModelSpec) -> Allocation:
    need = spec.memory[len(devices)]
    return Allocation(runner.runner_id, devices, tuple([runner.devices[device].charge(need) for device in devices]))


def _suits(runner: Runner, spec: ModelSpec) -> bool:
    return runner.kind is spec.kind and runner.satisfies(spec.constraints)
