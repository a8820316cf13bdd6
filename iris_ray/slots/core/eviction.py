"""The cheapest eviction that makes room for a slot on one runner, and the views of runners from which it is computed.

Plans are compared by how long the evicted slots may hold the new one up, then by price, then by the bytes of the
evicted slots on all devices, then by the last use of any of them: the longer ago, the better.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, islice
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from iris_ray.slots.core.devices import DeviceSet, Needs, Runner
from iris_ray.slots.core.fleet import FleetChanges, SlotFleet
from iris_ray.slots.core.policy import Staleness
from iris_ray.slots.core.slot import Slot, SlotState

Key = tuple[float, int, int, float]
"""The rank of an eviction, smaller first: how long it may hold up, its price, its bytes, and the last use of a slot."""

AT_ONCE: Final = -math.inf
NOTHING: Final[Key] = (AT_ONCE, 0, 0, AT_ONCE)
"""The key of evicting nothing."""
NEVER: Final[Key] = (math.inf, 0, 0, math.inf)
"""The key of a place where nothing can be evicted."""
LOAD_S: Final = 30.0
"""A slot that is planned, or loads, counts like a request that began this many seconds earlier."""
MOST_OPTIONS = 64
"""How many evictions of a device are compared, beside the eviction of all its slots."""
MOST_SPANNING = 6
"""Of how many slots with several devices all combinations are compared, beside one of all that is just enough."""
MOST_SETS = 100
"""The largest number of sets of devices that are all considered. Of more, only sets of the cheapest devices are; or, if
the devices need different bytes, this many ways to give them devices, the largest bytes on the cheapest ones first."""


def hold_up(slot: Slot) -> float:
    """Return how long a slot may hold up one that takes its place, compared with others: the smaller, the sooner.

    An idle slot ends at once. Of others nobody knows how long they need. What has begun lately is mostly over soon, and
    what runs for long may run for long, so it is the time, with a minus, at which the oldest request began.
    """
    if slot.active:
        return -next(iter(slot.active.values()))
    if slot.state in (SlotState.PLANNED, SlotState.STARTING):
        return LOAD_S - slot.created_at
    return AT_ONCE


def plus(one: Key, other: Key) -> Key:
    """Return the key of two evictions together."""
    return max(one[0], other[0]), one[1] + other[1], one[2] + other[2], max(one[3], other[3])


class EvictionOption(NamedTuple):
    """Slots whose eviction frees ``gain`` bytes of a device."""

    gain: int
    key: Key
    slots: tuple[Slot, ...]


FREE: Final = EvictionOption(0, NOTHING, ())
_gain, _key = attrgetter("gain"), attrgetter("key")


def options_of(items: Sequence[EvictionOption]) -> list[EvictionOption]:
    """Return the combinations of evictions, the fewest bytes first, if no larger one costs as little."""
    options = [FREE, *items[:1]]
    for item in items[1:]:
        more = [EvictionOption(o.gain + item.gain, plus(o.key, item.key), o.slots + item.slots) for o in options]
        found: list[EvictionOption] = []
        for option in sorted(options + more, key=lambda each: (each.key, -each.gain)):
            if not found or option.gain > found[-1].gain:
                found.append(option)
        options = found if len(found) <= MOST_OPTIONS else [*found[:MOST_OPTIONS], found[-1]]
    return options


def least(options: Sequence[EvictionOption], missing: int) -> EvictionOption | None:
    """Return the cheapest eviction that frees the missing bytes, or None."""
    if missing <= 0:
        return FREE
    place = bisect_left(options, missing, key=_gain)
    return options[place] if place < len(options) else None


class EvictionPlan(NamedTuple):
    """Devices for a slot, those of the largest bytes first, and the slots to evict there."""

    key: Key
    devices: tuple[int, ...]
    evict: tuple[Slot, ...]


@dataclass(slots=True, eq=False)
class RunnerView:
    """A runner as a new slot sees it, until something changes there.

    Attributes:
        free: bytes of each device that are free now.
        unpromised: bytes of each device that are promised to no slot, without those of slots that do not end.
        slots: the slots that could be evicted, with their prices.
        planned: those of them that are only planned.
        bound: what an eviction costs here at least: the cheapest slot.
        keys: what those plans cost that were computed, by what they were for.
    """

    runner: Runner
    free: list[int]
    unpromised: list[int]
    slots: dict[Slot, int]
    planned: list[Slot] = field(init=False)
    bound: Key = field(init=False)
    keys: dict[Needs, Key] = field(init=False, default_factory=dict)
    _plans: dict[Needs, EvictionPlan | None] = field(init=False, default_factory=dict)
    _options: dict[tuple[int, bool], list[EvictionOption]] = field(init=False, default_factory=dict)
    _by_device: dict[int, list[Slot]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.planned = [slot for slot in self.slots if slot.state is SlotState.PLANNED]
        soon_free = any(later > now for later, now in zip(self.unpromised, self.free, strict=True))
        self.bound = NOTHING if soon_free else min([self._cost(slot).key for slot in self.slots], default=NOTHING)

    def room(self) -> list[int]:
        """Return the bytes of each device that would be free if everything that can be evicted were gone."""
        room = list(self.unpromised)
        for slot in self.slots:
            for device, need in slot.allocation.needs:
                room[device] += need
        return room

    def without(self, kept: Iterable[Slot]) -> "RunnerView":
        """Return a view in which these slots can't be evicted."""
        left = {slot: price for slot, price in self.slots.items() if slot not in kept}
        return RunnerView(self.runner, self.free, self.unpromised, left)

    def after(self, gone: Sequence[Slot]) -> "RunnerView":
        """Return a view in which these slots have been evicted."""
        view = self.without(gone)
        view.unpromised = list(self.unpromised)
        for slot in gone:
            for device, size in slot.allocation.needs:
                view.unpromised[device] += size
        return view

    def cost_of(self, slots: Iterable[Slot]) -> Key:
        """Return the cost of evicting these slots."""
        return sum_of([self._cost(slot).key for slot in slots])

    def plan(self, needs: Needs) -> EvictionPlan | None:
        """Return the cheapest plan for what devices need; None: there is no room."""
        if needs not in self._plans:
            found = self._plans[needs] = self._search(needs)
            self.keys[needs] = NEVER if found is None else found.key
        return self._plans[needs]

    def _search(self, needs: Needs) -> EvictionPlan | None:
        best: EvictionPlan | None = None
        for bound, sizes in self._ways(needs):
            if best is not None and bound >= best.key:
                break
            best = self._best_on(sizes, best)
            if best is not None and best.key == bound:
                break  # nearly always the first way; the others are not even made then
        return best

    def _ways(self, needs: Needs) -> Iterator[tuple[Key, dict[int, int]]]:
        """Yield devices with the bytes of each, and the least that an eviction there costs, the lowest bound first."""
        if len(needs) == 1:
            ((degree, need),) = needs
            for bound, devices in self._sets(self._bounds(need), degree):
                yield bound, dict.fromkeys(devices, need)
            return
        bounds = [self._bounds(size) for _, size in needs]
        if all(len(there) >= count for (count, _), there in zip(needs, bounds, strict=True)):
            some = list(islice(_uneven(needs, bounds, {}), MOST_SETS))
            yield from sorted(((sum_of(keys.values()), sizes) for keys, sizes in some), key=itemgetter(0))

    def _bounds(self, need: int) -> dict[int, Key]:
        """Return the least that an eviction costs on each device that can have ``need`` bytes free."""
        bounds: dict[int, Key] = {}
        for device, hardware in enumerate(self.runner.devices):
            option = least(self._options_on(device, shared=True), hardware.charge(need) - self.unpromised[device])
            if option is not None and need <= hardware.memory:
                bounds[device] = option.key
        return bounds

    def _sets(self, bounds: dict[int, Key], degree: int) -> Iterator[tuple[Key, DeviceSet]]:
        """Yield sets of devices, each with the least that an eviction there costs, the lowest bound first."""

        def bounded(sets: Iterable[DeviceSet]) -> list[tuple[Key, DeviceSet]]:
            return sorted((sum_of([bounds[device] for device in devices]), devices) for devices in sets)

        if self.runner.legal_sets is not None:
            yield from bounded(each for each in self.runner.sets(degree) if bounds.keys() >= set(each))
        elif len(bounds) >= degree:
            order = sorted(bounds, key=bounds.__getitem__)
            yield from bounded([tuple(sorted(order[:degree]))])
            some = order if math.comb(len(order), degree) <= MOST_SETS else order[: degree + 2]
            yield from bounded(tuple(sorted(each)) for each in combinations(some, degree))

    def _best_on(self, sizes: Mapping[int, int], best: EvictionPlan | None) -> EvictionPlan | None:
        """Return the cheapest plan on these devices, or ``best`` if none is cheaper."""
        hardware, left = self.runner.devices, self.unpromised
        missing = {device: hardware[device].charge(size) - left[device] for device, size in sizes.items()}
        for evicted in self._spanning(missing):
            best = self._plan_with(evicted, missing, best) or best
        return best

    def _spanning(self, missing: Mapping[int, int]) -> Iterator[tuple[Slot, ...]]:
        """Yield the combinations of slots with several devices that are compared."""
        several = (slot for slot in self.slots if len(slot.allocation.devices) > 1)
        spanning = [slot for slot in several if not missing.keys().isdisjoint(slot.allocation.devices)]
        spanning = sorted(spanning, key=lambda slot: self._cost(slot).key)
        few = spanning[:MOST_SPANNING]
        yield from chain.from_iterable(combinations(few, count) for count in range(len(few) + 1))
        if len(spanning) > len(few):  # none of these combinations may be enough
            yield self._just_enough(spanning, missing)

    def _just_enough(self, spanning: Sequence[Slot], missing: Mapping[int, int]) -> tuple[Slot, ...]:
        """Return slots with several devices without which others, with one device, are not enough.

        Args:
            spanning: the slots, the cheapest first. All of them are enough.
            missing: the bytes that each device lacks.
        """
        lacks = dict(missing)
        for slot in spanning:
            for device, size in slot.allocation.needs:
                lacks[device] = lacks.get(device, 0) - size
        needed: list[Slot] = []
        for slot in reversed(spanning):
            without = {device: lacks[device] + size for device, size in slot.allocation.needs if device in missing}
            if all(least(self._options_on(device, shared=False), lack) for device, lack in without.items()):
                lacks |= without
            else:
                needed.append(slot)
        return tuple(reversed(needed))

    def _plan_with(
        self, evicted: tuple[Slot, ...], missing: Mapping[int, int], best: EvictionPlan | None
    ) -> EvictionPlan | None:
        """Return the cheapest plan that evicts these slots, which have several devices, and others that have one.

        None: there is no plan, or none that is cheaper than ``best``.
        """
        key, chosen, gained = self.cost_of(evicted), list(evicted), dict[int, int]()
        for slot in evicted:
            for device, size in slot.allocation.needs:
                gained[device] = gained.get(device, 0) + size
        for device, lacks in missing.items():
            option = least(self._options_on(device, shared=False), lacks - gained.get(device, 0))
            if option is None:
                return None
            key = plus(key, option.key)
            if best is not None and key >= best.key:
                return None
            chosen += option.slots
        return EvictionPlan(key, tuple(missing), tuple(chosen))

    def _options_on(self, device: int, shared: bool) -> list[EvictionOption]:
        """Return the evictions on one device.

        ``shared``: slots with several devices are among them, each with its share of the price, which adds up on all
        devices. Else only slots that have this device alone.
        """
        known = self._options.get((device, shared))
        if known is None:
            here = self._slots_on().get(device, [])
            alone = [slot for slot in here if len(slot.allocation.devices) == 1]
            if not shared:
                known = options_of([self._cost(slot, 0) for slot in alone])
            elif len(alone) == len(here):
                known = self._options_on(device, shared=False)
            else:
                known = options_of([self._cost(slot, slot.allocation.devices.index(device)) for slot in here])
            self._options[device, shared] = known
        return known

    def _slots_on(self) -> dict[int, list[Slot]]:
        if not self._by_device:
            for slot in self.slots:
                for device in slot.allocation.devices:
                    self._by_device.setdefault(device, []).append(slot)
        return self._by_device

    def _cost(self, slot: Slot, part: int | None = None) -> EvictionOption:
        """Return the cost of evicting a slot, or the share of one of its devices."""
        place, price = slot.allocation, self.slots[slot]
        if part is None:
            return EvictionOption(place.total, (hold_up(slot), price, place.total, slot.last_activity), (slot,))
        parts, size = len(place.devices), place.bytes_each[part]
        share = price * (part + 1) // parts - price * part // parts
        return EvictionOption(size, (hold_up(slot), share, size, slot.last_activity), (slot,))


def _uneven(
    needs: Needs, bounds: Sequence[Mapping[int, Key]], keys: dict[int, Key], before: int = 0
) -> Iterator[tuple[dict[int, Key], dict[int, int]]]:
    """Yield the ways to give devices to different bytes: the bound of each device, and its bytes, the largest first.

    A device that can have the larger bytes can have the smaller ones, too. So no choice for the larger ones leads
    nowhere, if there is any way. The first way gives the largest bytes to the cheapest devices, and so on.

    Args:
        needs, bounds: those of the bytes that have no devices yet.
        keys: the devices that are taken, with their bounds.
    """
    if not needs:
        yield keys, {}
        return
    (count, size), *others = needs
    left = sorted(bounds[0].keys() - keys.keys(), key=lambda device: (bounds[0][device], device))
    for devices in combinations(left, count - before):
        taken = keys | {device: bounds[0][device] for device in devices}
        for found, sizes in _uneven(tuple(others), bounds[1:], taken, count):
            yield found, dict.fromkeys(sorted(devices), size) | sizes


def sum_of(keys: Iterable[Key]) -> Key:
    """Return the key of several evictions together."""
    total = NOTHING
    for key in keys:
        total = plus(total, key)
    return total


# -- views -------------------------------------------------------------------------------------------------------------

AGAIN_S = 30.0
"""How soon a slot that is not stale is looked at again: `Policy.stale_at` may have failed, or may change its answer."""


class Views:
    """The views of all open runners, and which of them have gained room. Time must not go backwards.

    With ``starving``, slots that are planned, load, serve requests or are not stale yet can be evicted as well.

    Attributes:
        by_runner: the views, once `refresh` was called.
        free: the most bytes that are free on each of several devices of a runner, by the number of devices and runner.
        room: as ``free``, if everything that can be evicted were gone.
        gains: the runners that have gained room, in order.
    """

    def __init__(self, fleet: SlotFleet, staleness: Staleness, starving: bool) -> None:
        self.by_runner: dict[str, RunnerView] = {}
        self.free: dict[int, dict[str, int]] = {}
        self.room: dict[int, dict[str, int]] = {}
        self.gains: list[str] = []
        self._fleet, self._staleness, self._starving = fleet, staleness, starving
        self._changes = FleetChanges(dict.fromkeys(fleet.runners))
        fleet.watchers.append(self._changes)
        self._times: list[tuple[float, str]] = []
        """When a slot may become evictable without an event: the earliest time of each runner."""
        self._next: dict[str, float] = {}

    def next_change(self) -> float:
        """Return when the next slot may become evictable without an event; infinity: none is known to."""
        return self._times[0][0] if self._times else math.inf

    def refresh(self, now: float) -> None:
        """Look anew at all runners where something has changed, or a slot's time has come."""
        for slot in self._changes.used.values():
            self._changes.runners[slot.allocation.runner_id] = None
        self._changes.used.clear()
        self.find_gains(now)

    def find_gains(self, now: float) -> None:
        """Look anew at the runners that may have gained room. Requests that begin and end only set times for looks."""
        changed = self._changes.runners
        for slot in self._changes.idle.values():
            if slot.state is SlotState.READY and not slot.active and not self._starving:
                self._look_again(slot.allocation.runner_id, self._staleness.evictable_at(slot), now)
        self._changes.idle.clear()
        while self._times and self._times[0][0] <= now:
            when, runner_id = heapq.heappop(self._times)
            if self._next.get(runner_id) == when:
                del self._next[runner_id]
                changed[runner_id] = None
        for runner_id in changed:
            self._look_at(runner_id, now)
        changed.clear()

    def _look_again(self, runner_id: str, when: float, now: float) -> None:
        when = min(when, now + AGAIN_S)
        if when < self._next.get(runner_id, math.inf):
            self._next[runner_id] = when
            heapq.heappush(self._times, (when, runner_id))

    def _look_at(self, runner_id: str, now: float) -> None:
        before, runner = self.by_runner.pop(runner_id, None), self._fleet.runners.get(runner_id)
        is_open = runner is not None and runner_id not in self._fleet.closed
        if before is not None and (not is_open or before.runner is not runner):
            for by_runner in chain(self.free.values(), self.room.values()):
                by_runner.pop(runner_id, None)
        if runner is None or not is_open:
            return
        view = self.by_runner[runner_id] = self._view_of(runner, now)
        for sums, amounts in ((self.free, view.free), (self.room, view.room())):
            for degree, amount in most_on_each(runner, amounts):
                sums.setdefault(degree, {})[runner_id] = amount
        if before is None or before.runner is not runner or _has_gained(before, view):
            self.gains.append(runner_id)

    def _view_of(self, runner: Runner, now: float) -> RunnerView:
        fleet, runner_id = self._fleet, runner.runner_id
        unpromised, slots = fleet.books[runner_id].unpromised(), dict[Slot, int]()
        for slot in fleet.on_runner(runner_id):
            if slot.stuck:
                for device, need in slot.allocation.needs:
                    unpromised[device] -= need
            elif slot.wanted and not slot.claimed:
                when = self._evictable_at(slot)
                if when <= now:
                    slots[slot] = fleet.prices.get(slot.model, 0)
                elif slot.state is SlotState.READY and not slot.active:
                    self._look_again(runner_id, when, now)
        return RunnerView(runner, fleet.books[runner_id].free_now(), unpromised, slots)

    def _evictable_at(self, slot: Slot) -> float:
        if self._starving:
            return AT_ONCE
        return self._staleness.evictable_at(slot) if slot.state is SlotState.READY and not slot.active else math.inf


def _has_gained(before: RunnerView, view: RunnerView) -> bool:
    """Return whether a slot may find a place that it did not find before. A plan can give way once it loads."""
    more = any(now > then for now, then in zip(view.unpromised, before.unpromised, strict=True))
    started = any(slot in view.slots and slot.state is not SlotState.PLANNED for slot in before.planned)
    return more or started or any(slot not in before.slots for slot in view.slots)


def most_on_each(runner: Runner, amounts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield for each number of devices that a slot can have, how many bytes each of them has at most."""
    if runner.legal_sets is None:
        yield from enumerate(sorted(amounts, reverse=True), start=1)
    else:
        most: dict[int, int] = {}
        for devices in runner.legal_sets:
            most[len(devices)] = max(most.get(len(devices), 0), min(amounts[device] for device in devices))
        yield from most.items()


def freest(runner: Runner, free: Sequence[int], degree: int) -> tuple[int, ...]:
    """Return the devices whose fullest one has the most free; GPUs with the most free first."""
    if runner.legal_sets is None:
        return tuple(sorted(range(len(free)), key=free.__getitem__, reverse=True)[:degree])
    return max(runner.sets(degree), key=lambda devices: min([free[device] for device in devices]))
