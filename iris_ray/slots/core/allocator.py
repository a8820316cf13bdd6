"""Decides where a slot goes, and which slots are evicted for it.

The order of preference:

1. free devices: the one with the most bytes free, on a runner that has loaded the model before if there is one; else 2,
   3, … devices of one runner, as the model can be split;
2. the cheapest eviction, on any runner, for any number of devices. An eviction costs the time to load the evicted
   models again, times the demand for them.

If `PlacementPolicy.spread_before_evicting` is off, evicting for one device comes before using two free ones, and so on.
Slots are evicted only if the new slot has a place afterwards.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

from iris_ray.model.constraints import Constraint
from iris_ray.slots.core.devices import UNKNOWN, DeviceKind, Needs, Runner
from iris_ray.slots.core.eviction import NEVER, EvictionPlan, RunnerView, Views, freest, most_on_each, plus
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.models import ModelSpec, Shape
from iris_ray.slots.core.policy import PlacementPolicy, Staleness
from iris_ray.slots.core.slot import Allocation

MOST_PLANS: Final = 32
"""On how many runners one decision computes the cheapest plan, for each number of devices. The others are judged by
what an eviction costs there at least."""
MOST_GAINS: Final = 10_000
"""How many runners that have gained room are remembered."""


class SlotRequirement(NamedTuple):
    """One more slot of a model is needed.

    Attributes:
        avoid: ids of runners not to use now, for instance because the model failed to load there.
        prefer: ids of runners to use before others if they have room, because they have loaded the model before.
        starving: whether every slot that is not claimed may be evicted: a slot that serves requests takes no new ones
            and ends after the last one, and a slot that loads serves for a while first.
        asked_at: since when its model waits: since its oldest request arrived, or since one was served. A slot that is
            only planned, for a model that has waited for less time, may be evicted as well.
        there: how many slots of the model are on each runner, if it is to go where the fewest are.
        evicts: whether slots may be evicted for it.
    """

    spec: ModelSpec
    avoid: frozenset[str] = frozenset()
    starving: bool = False
    asked_at: float = inf
    prefer: Collection[str] = ()
    there: Mapping[str, int] = MappingProxyType({})
    evicts: bool = True


class Place(NamedTuple):
    """Put the slot there, and evict exactly these slots for it.

    The slot may have to wait for its memory: until the evicted slots, or others that end there, are gone.
    """

    allocation: Allocation
    evict: tuple[str, ...] = ()


class NoPlace(NamedTuple):
    """No place was found, not even with evictions. ``for_ever``: not even an empty runner is large enough."""

    reason: str
    for_ever: bool = False


Decision = Place | NoPlace


class _Pool(NamedTuple):
    """The runners of a kind that satisfy some constraints; ``alike`` holds one of each hardware."""

    runners: list[str]
    alike: list[Runner]


class _Lack(Enum):
    """Why there is no place for a model."""

    UNSUITABLE = "no runner suits it"
    TOO_SMALL = "it fits on no empty runner"
    IMPOSSIBLE = "no runner of its kind is there or will come"
    HOSTLESS = "it fits only on runners that have no host now"
    FULL = "all is full"


class Allocator:
    """Decides on a fleet that others change. It looks anew only at runners that have changed.

    There is no index by size: a decision compares all runners by what an eviction costs there at least, and computes
    the cheapest plan for the first few. After an answer "no place" it looks only at runners that have gained room.
    """

    def __init__(self, fleet: SlotFleet, policy: PlacementPolicy) -> None:
        self.fleet = fleet
        self.policy = policy
        self.staleness = Staleness(policy)
        self._views = {starving: Views(fleet, self.staleness, starving) for starving in (False, True)}
        self._refused: dict[tuple[bool, Shape, str | None], tuple[float, int]] = {}
        """For what there was no place, with `SlotRequirement.asked_at` and the number of `Views.gains` at that time."""
        self._seen = {False: 0}
        """How many gains were seen, by whether for models that starve: only after one of them was refused."""
        self._pools: dict[tuple[DeviceKind, tuple[Constraint, ...]], _Pool] = {}
        self._lacks: dict[Shape, _Lack] = {}
        self._runner_changes = -1

    def decide(self, requirement: SlotRequirement, now: float) -> Decision:
        """Return where one more slot goes. Changes nothing. ``now`` must not go backwards."""
        spec, starving = requirement.spec, requirement.starving
        views = self._views[starving]
        views.find_gains(now)
        if len(views.gains) > MOST_GAINS:
            views.gains.clear()
            self._refused.clear()
            self._seen[starving] = 0
        is_special = self.fleet.of_model(spec.name).all or spec.group or spec.alone
        own = spec.name if is_special else None  # others of its shape get other answers
        refused = self._refused.get((starving, spec.shape, own))
        if refused is not None and refused[0] <= requirement.asked_at and not requirement.avoid:
            gained = dict.fromkeys(views.gains[refused[1] :])
            if not gained:
                return self._no_place(spec)
            views.refresh(now)
            runners = [each for each in gained if each in views.by_runner and _suits(self.fleet.runners[each], spec)]
        else:
            views.refresh(now)
            runners, avoid = self._pool(spec).runners, requirement.avoid
            runners = [each for each in runners if each not in avoid] if avoid else runners
        degrees = list(spec.memory)
        free = runners
        if self.fleet.has_rules_for(spec):
            free = [each for each in runners if not self.fleet.excluded(each, spec)]
        for some in [degrees] if self.policy.spread_before_evicting else [[degree] for degree in degrees]:
            place = _free_place(views, requirement, some, free)
            place = place or self._evicting_place(views, requirement, some, runners)
            if place and (requirement.evicts or not place.evict):
                return place
        if not requirement.avoid and requirement.evicts:
            self._seen.setdefault(starving, len(views.gains))
            self._refused[starving, spec.shape, own] = requirement.asked_at, len(views.gains)
        return self._no_place(spec)

    def has_gained(self, now: float) -> bool:
        """Return whether a decision "no place" may have become another one since the last call."""
        gained = False
        for starving, seen in self._seen.items():
            views = self._views[starving]
            views.find_gains(now)
            gained |= len(views.gains) != seen
            self._seen[starving] = len(views.gains)
        return gained

    def next_change(self) -> float:
        """Return when the next slot may become evictable without an event; infinity: none is known to."""
        return self._views[False].next_change()

    def forget(self, spec: ModelSpec) -> None:
        """Forget a model that is served no more, and the answers of its shape."""
        left = (key for key in self._refused if spec.shape != key[1] and spec.name != key[2])
        self._refused = {key: self._refused[key] for key in left}
        self._lacks.pop(spec.shape, None)
        self._pools.pop((spec.kind, spec.constraints), None)

    def free_place_on(self, runner_id: str, spec: ModelSpec, now: float) -> Place | None:
        """Return free devices of one runner for a slot of the model, or None."""
        if not _suits(self.fleet.runners[runner_id], spec) or self.fleet.excluded(runner_id, spec):
            return None
        views = self._views[False]
        views.refresh(now)
        return _free_place(views, SlotRequirement(spec), spec.memory, [runner_id])

    def _evicting_place(
        self, views: Views, requirement: SlotRequirement, degrees: Iterable[int], runners: Sequence[str]
    ) -> Place | None:
        spec, best, best_on = requirement.spec, None, ""
        for degree in degrees:
            needs, by_runner = spec.needs[degree], views.by_runner
            there = [by_runner[each] for each in _roomy(views.room, needs, runners)]
            bounds = [view.keys.get(needs, view.bound) for view in there]
            for _ in range(min(MOST_PLANS, len(there))):
                bound = min(bounds)
                if bound == NEVER or (best is not None and bound >= best.key):
                    break
                place = bounds.index(bound)
                bounds[place] = NEVER
                plan = self._plan_on(there[place], requirement, degree)
                if plan is not None and (best is None or plan.key < best.key):
                    best, best_on = plan, there[place].runner.runner_id
        if best is None:
            return None
        allocation = _allocation(self.fleet.runners[best_on], best.devices, spec)
        return Place(allocation, tuple([slot.slot_id for slot in best.evict]))

    def _plan_on(self, view: RunnerView, requirement: SlotRequirement, degree: int) -> EvictionPlan | None:
        """Return the cheapest plan on a runner that evicts no slot of the model, and no older plan.

        It evicts all slots beside which there may be none of the model.
        """
        spec = requirement.spec
        kept = [slot for slot in view.planned if slot.asked_at <= requirement.asked_at]
        if self.fleet.of_model(spec.name).all:
            kept += [slot for slot in view.slots if slot.model == spec.name]
        view = view.without(kept) if kept else view
        if not (excluded := self.fleet.excluded(view.runner.runner_id, spec)):
            return view.plan(spec.needs[degree])
        evict = tuple([slot for slot in excluded if slot.wanted])
        if any(slot.stuck for slot in excluded) or not view.slots.keys() >= set(evict):
            return None
        plan = view.after(evict).plan(spec.needs[degree])
        return plan and EvictionPlan(plus(plan.key, view.cost_of(evict)), plan.devices, evict + plan.evict)

    # -- no places --------------------------------------------------------------------------------

    def fits_nowhere(self, spec: ModelSpec) -> str:
        """Return why not even an empty runner could hold the model; "": one could, or one may come."""
        match self._lack(spec):
            case _Lack.IMPOSSIBLE:
                return f"there is no runner for {spec.name}: {self.fleet.problems[spec.kind]}"
            case _Lack.TOO_SMALL:
                return why_never(self._pool(spec).alike or self._to_come(spec), spec)
        return ""

    def _no_place(self, spec: ModelSpec) -> NoPlace:
        if never := self.fits_nowhere(spec):
            return NoPlace(never, for_ever=True)
        match self._lack(spec):
            case _Lack.UNSUITABLE:
                return NoPlace(f"no runner with {spec.kind.value} devices satisfies the constraints of {spec.name}")
            case _Lack.HOSTLESS:
                return NoPlace(f"no runner that could hold {spec.name} has its host; `iris-ray ls` shows their jobs")
        if spec.group or spec.alone:
            beside = f"of group {spec.group!r}" if spec.group and not spec.alone else "of other models"
            why = f"hosts that could hold {spec.name} are full or have slots {beside} that may not be evicted now"
        else:
            why = f"devices that could hold {spec.name} are full, and nothing there may be evicted now"
        return NoPlace(f"all {why}")

    def _lack(self, spec: ModelSpec) -> _Lack:
        """Return why there is no place: for all models of a shape, until a runner comes, goes or opens."""
        pool = self._pool(spec)
        if (known := self._lacks.get(spec.shape)) is None:
            known = self._lacks[spec.shape] = self._look_for_lack(spec, pool.alike)
        return known

    def _look_for_lack(self, spec: ModelSpec, alike: Sequence[Runner]) -> _Lack:
        to_come = self._to_come(spec)
        if not alike and not to_come:
            return _Lack.IMPOSSIBLE if spec.kind in self.fleet.problems else _Lack.UNSUITABLE
        if any(fits_when_empty(runner, spec) for runner in alike):
            return _Lack.FULL
        return _Lack.HOSTLESS if any(fits_when_empty(runner, spec) for runner in to_come) else _Lack.TOO_SMALL

    def _to_come(self, spec: ModelSpec) -> list[Runner]:
        return [runner for runner in self.fleet.expected if runner.kind is spec.kind]

    def _pool(self, spec: ModelSpec) -> _Pool:
        """Return the runners that suit a model. All are forgotten when a runner comes, goes, opens or closes."""
        if self._runner_changes != self.fleet.runner_changes:
            self._runner_changes = self.fleet.runner_changes
            self._pools.clear()
            self._lacks.clear()
        key = spec.kind, spec.constraints
        if (known := self._pools.get(key)) is None:
            suitable = [runner for runner in self.fleet.runners.values() if _suits(runner, spec)]
            alike = {runner.hardware: runner for runner in suitable}
            known = self._pools[key] = _Pool([runner.runner_id for runner in suitable], list(alike.values()))
        return known


def _free_place(
    views: Views, requirement: SlotRequirement, degrees: Iterable[int], runners: Sequence[str]
) -> Place | None:
    spec = requirement.spec
    for degree in degrees:
        free, needs = views.free.get(degree, {}), spec.needs[degree]
        if max(free.values(), default=0) >= needs[-1][1]:
            roomy = _roomy(views.free, needs, runners)
            if requirement.there:
                fewest = min([requirement.there.get(each, 0) for each in roomy], default=0)
                roomy = [each for each in roomy if requirement.there.get(each, 0) == fewest]
            if roomy:
                known = [each for each in requirement.prefer if each in roomy]
                view = views.by_runner[max(known or roomy, key=free.__getitem__)]
                return Place(_allocation(view.runner, freest(view.runner, view.free, degree), spec))
    return None


def _roomy(amounts: Mapping[int, Mapping[str, int]], needs: Needs, runners: Sequence[str]) -> Sequence[str]:
    """Return the runners whose devices have enough: their largest amounts, in order, against the largest needs.

    Args:
        amounts: as `Views.free` and `Views.room`.
    """
    for count, size in needs:
        by_runner = amounts.get(count, {})
        runners = [each for each in runners if by_runner.get(each, 0) >= size]
    return runners


def fits_when_empty(runner: Runner, spec: ModelSpec) -> bool:
    """Return whether a slot of the model fits on the runner if nothing else is there."""
    most = dict(most_on_each(runner, [device.memory for device in runner.devices]))
    return any(all(most.get(count, 0) >= size for count, size in needs) for needs in spec.needs.values())


MOST_SHOWN: Final = 4
"""How many kinds of runners a reason lists."""


def why_never(runners: Sequence[Runner], spec: ModelSpec) -> str:
    """Return why none of these runners, not even an empty one, can hold a slot of the model."""
    needs = " or ".join(_words(spec.sizes_on(degree)) for degree in spec.memory)
    there = dict.fromkeys(_words([device.memory for device in runner.devices]) for runner in runners)
    listed = "; or ".join(list(there)[:MOST_SHOWN]) + ("; or others" if len(there) > MOST_SHOWN else "")
    return (
        f"{spec.name} fits on no runner, not even on an empty one. It needs {needs} {spec.kind.value} devices of "
        f"one runner; a runner has {listed}. Give it less memory, allow it to be split over more devices, or add "
        f"larger runners."
    )


def _words(sizes: Sequence[int]) -> str:
    """Return the bytes of devices in words, the largest first."""
    if sizes[0] == UNKNOWN:
        return f"{len(sizes)} of unknown size"
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{sizes[0]:,} bytes on each of {len(sizes)}"
    return f"{' + '.join(f'{size:,}' for size in sorted(sizes, reverse=True))} bytes on {len(sizes)}"


def _allocation(runner: Runner, devices: Sequence[int], spec: ModelSpec) -> Allocation:
    """Return the place of a slot on these devices, of which the first ones are for the largest bytes."""
    sizes = spec.sizes_on(len(devices))
    if len(spec.needs[len(devices)]) == 1:
        devices = sorted(devices)
    else:  # the process sees its devices in the order in which the model names its bytes
        by_size = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        devices = [device for _, device in sorted(zip(by_size, devices, strict=True))]
    each = [runner.devices[device].charge(size) for device, size in zip(devices, sizes, strict=True)]
    return Allocation(runner.runner_id, tuple(devices), tuple(each))


def _suits(runner: Runner, spec: ModelSpec) -> bool:
    return runner.kind is spec.kind and runner.satisfies(spec.constraints)
