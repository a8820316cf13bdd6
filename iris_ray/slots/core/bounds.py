"""Lower bounds of what room costs: for one device, for sets of devices, and a priority queue over them."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter, itemgetter
from typing import Generic, NamedTuple, TypeVar

from iris_ray.slots.core.devices import DeviceSet, Runner
from iris_ray.slots.core.slot import Slot

# -- ranking -----------------------------------------------------------------------------------------------------------
# A priority queue whose keys are lower bounds: exact keys are computed from the front, and no more than needed.

Item = TypeVar("Item", bound=str | tuple[str, int])
Key = tuple[int, int, float]
"""Smaller comes first. Of an eviction: its price, the bytes of what it evicts, and when one of them was last used."""

LONG_AGO = float("-inf")
NOTHING: Key = (0, 0, LONG_AGO)
"""The key of evicting nothing."""


class Ranking(Generic[Item]):
    """Items by bound. Changing a bound costs a push; entries that are out of date are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Item]] = []
        self._bounds: dict[Item, Key] = {}

    def put(self, item: Item, bound: Key | None) -> None:
        """Set what an item's exact key is not below; None removes the item."""
        if bound is None:
            self._bounds.pop(item, None)
        elif self._bounds.get(item) != bound:
            self._bounds[item] = bound
            heappush(self._heap, (bound, item))
            if len(self._heap) > 4 * len(self._bounds) + 64:
                self._heap = [(bound, item) for item, bound in self._bounds.items()]
                heapify(self._heap)

    def clear(self) -> None:
        """Remove all items."""
        self._heap.clear()
        self._bounds.clear()

    def best(self, exact: Callable[[Item, Key], Key | None], most: float = math.inf) -> tuple[Key, Item] | None:
        """Return the item with the smallest exact key, or None.

        Args:
            exact: of an item and its bound: returns its key, or None if it is no candidate.
            most: after so many items the best of them is returned, though bounds of others are lower.
        """
        aside: list[tuple[Key, Item]] = []
        found: tuple[Key, Item] | None = None
        while (entry := self.first()) is not None and (found is None or entry[0] < found[0]):
            bound, item = entry
            key = exact(item, bound)
            if key is not None and (found is None or key < found[0]):
                found = key, item
            if key == bound:
                break
            aside.append(heappop(self._heap))
            if found is not None and len(aside) >= most:
                break
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def first(self) -> tuple[Key, Item] | None:
        """Return the item with the lowest bound, which comes first; None: there are no items."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._bounds.get(entry[1]) == entry[0]:
                return entry
            heappop(heap)
        return None


# -- staircase ---------------------------------------------------------------------------------------------------------
# What room on one device costs at least: a price for each number of bytes.

MOST_EXACT = 6
"""Slots whose combinations are all compared. For more, parts of slots count, as if they could be evicted."""

StairItem = tuple[int, Key, Slot]
"""Of a slot that could be evicted: bytes that it leaves on the device, the key of evicting it, and the slot."""


class Step(NamedTuple):
    """Some slots that could be evicted.

    Attributes:
        gain: bytes that they leave on the device.
        key: what their end costs, their bytes, and when one of them was used.
        slots: which slots; None if parts of slots are among them.
    """

    gain: int
    key: Key
    slots: tuple[Slot, ...] | None


FREE = Step(0, NOTHING, ())
"""Nothing needs to be evicted."""

_gain = attrgetter("gain")
_key = itemgetter(1)


class Staircase:
    """The least that has to be paid for some bytes, if these are the slots that can be evicted."""

    __slots__ = ("_cheapest", "_items", "_steps")

    def __init__(self, items: Sequence[StairItem]) -> None:
        self._items = items
        self._cheapest = FREE
        if items:
            gain, key, slot = min(items, key=_key) if len(items) > 1 else items[0]
            self._cheapest = Step(gain, key, (slot,))
        self._steps: list[Step] = []
        """Evictions, the fewest bytes first; empty until somebody needs more than the cheapest slot leaves."""

    def least(self, missing: int) -> Step | None:
        """Return a step whose key no eviction for ``missing`` bytes (above 0) is below; None: there are too few."""
        if self._cheapest.gain >= missing:
            return self._cheapest
        exact = len(self._items) <= MOST_EXACT
        if not self._steps:
            self._steps = _combinations(self._items) if exact else _fractions(self._items)
        place = bisect_left(self._steps, missing, key=_gain)
        if place == len(self._steps):
            return None
        above = self._steps[place]
        return above if exact else _between(self._steps[place - 1] if place else FREE, above, missing)


def _combinations(items: Sequence[StairItem]) -> list[Step]:
    """Return the steps that are cheaper than all that leave more."""
    sums: list[tuple[Key, int, tuple[Slot, ...]]] = [(NOTHING, 0, ())]
    for gain, (price, size, used), slot in items:
        sums += [
            ((p + price, s + size, u if u > used else used), loss - gain, (*slots, slot))
            for (p, s, u), loss, slots in sums
        ]
    sums.sort(key=itemgetter(0, 1))  # the cheapest first; of these the one that leaves most: gains are negative
    steps: list[Step] = []
    most = 0
    for key, loss, slots in sums:
        if -loss > most:
            most = -loss
            steps.append(Step(most, key, slots))
    return steps


def _fractions(items: Sequence[StairItem]) -> list[Step]:
    """Return the sums of slots, those that cost least for each byte first."""
    steps = [FREE]
    for gain, (price, size, _), _ in sorted(items, key=lambda item: item[1][0] / item[0]):
        below, (cost, total, _), _ = steps[-1]
        steps.append(Step(below + gain, (cost + price, total + size, LONG_AGO), None))
    return steps[1:]


def _between(below: Step, above: Step, missing: int) -> Step:
    """Return what a part of a slot costs, in proportion."""
    gain, (price, *_), _ = below
    part = (above.key[0] - price) * (missing - gain) // (above.gain - gain)
    return Step(missing, (price + part, missing, LONG_AGO), None)


# -- device sets -------------------------------------------------------------------------------------------------------
# Sets of devices in the order of what room on them costs at least.

Bound = tuple[Key, int]
"""A key that no plan for a device is below, and the device's number."""


def sum_of(keys: Iterable[Key]) -> Key:
    """Return a key that no plan for several devices is below, if none for one of them is below its key."""
    price, size, used = NOTHING
    for more, bytes_more, when in keys:
        price, size = price + more, size + bytes_more
        if when > used:
            used = when
    return price, size, used


def cheapest_bound(order: Sequence[Bound], degree: int) -> Key | None:
    """Return a key that no plan for any ``degree`` of these devices is below; None: there are not so many."""
    return sum_of([key for key, _ in order[:degree]]) if len(order) >= degree else None


def cheapest_sets(runner: Runner, order: Sequence[Bound], degree: int) -> Iterable[tuple[Key, DeviceSet]]:
    """Return the sets of devices that a slot can use together, each with its bound, the lowest bound first.

    Args:
        runner: whose devices they are.
        order: its devices that have room, the lowest bound first.
        degree: how many devices a slot has.
    """
    if runner.legal_sets is None:
        return _any_sets(order, degree)
    keys = {device: key for key, device in order}
    sets = [devices for devices in runner.sets(degree) if keys.keys() >= set(devices)]
    return sorted((sum_of([keys[device] for device in devices]), devices) for devices in sets)


def _any_sets(order: Sequence[Bound], degree: int) -> Iterator[tuple[Key, DeviceSet]]:
    """There may be too many sets to look at all: each follows from one that is not dearer."""
    first = cheapest_bound(order, degree)
    if first is None:
        return
    yield first, tuple(sorted([device for _, device in order[:degree]]))  # nearly always nothing more is asked for
    places = tuple(range(degree))
    heap: list[tuple[Key, DeviceSet]] = []
    seen = {places}
    while True:
        for more in _next(places, len(order)):
            if more not in seen:
                seen.add(more)
                heappush(heap, (sum_of([order[place][0] for place in more]), more))
        if not heap:
            return
        bound, places = heappop(heap)
        yield bound, tuple(sorted([order[place][1] for place in places]))


def _next(places: DeviceSet, end: int) -> Iterator[DeviceSet]:
    """Yield the sets in which one place is the next one instead."""
    for number, (place, after) in enumerate(zip(places, (*places[1:], end), strict=True)):
        if place + 1 < after:
            yield (*places[:number], place + 1, *places[number + 1 :])
