"""Lower bounds of what an eviction costs: for one device, for sets of devices, and a priority queue over them."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter, itemgetter
from typing import Generic, NamedTuple, TypeVar

from iris_ray.slots.core.devices import DeviceSet, Runner
from iris_ray.slots.core.slot import Slot

Item = TypeVar("Item", bound=str | tuple[str, int])
Key = tuple[int, int, float]
"""The rank of an eviction, smaller first: its price, the bytes that it evicts, and the last use of an evicted slot."""

LONG_AGO = float("-inf")
NOTHING: Key = (0, 0, LONG_AGO)
"""The key of evicting nothing."""


class Ranking(Generic[Item]):
    """A priority queue whose keys are lower bounds: `best` computes exact keys from the front, as few as it needs.

    Changing a bound costs a push; an entry that is out of date is dropped when it comes up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Item]] = []
        self._bounds: dict[Item, Key] = {}

    def put(self, item: Item, bound: Key | None) -> None:
        """Set an item's lower bound, which its exact key is never below; None removes the item."""
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
            exact: takes an item and its bound, and returns its exact key, or None if it is no candidate.
            most: how many items are compared; the best of them is returned, even if another item has a lower bound.
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
        """Return the item with the lowest bound; None: there are no items."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._bounds.get(entry[1]) == entry[0]:
                return entry
            heappop(heap)
        return None


# -- staircase ---------------------------------------------------------------------------------------------------------

MOST_EXACT = 6
"""Up to so many slots, all combinations are compared. For more, the bound counts parts of slots as evictable."""

StairItem = tuple[int, Key, Slot]
"""A slot that could be evicted: bytes that it frees on the device, the key of its eviction, and the slot."""


class Step(NamedTuple):
    """Some slots that could be evicted.

    Attributes:
        gain: bytes that their eviction frees on the device.
        slots: the slots; None if parts of slots are counted.
    """

    gain: int
    key: Key
    slots: tuple[Slot, ...] | None


FREE = Step(0, NOTHING, ())
"""Nothing needs to be evicted."""

_gain = attrgetter("gain")
_key = itemgetter(1)


class Staircase:
    """The lowest price of evictions on one device, for each number of bytes that they free."""

    __slots__ = ("_cheapest", "_items", "_steps")

    def __init__(self, items: Sequence[StairItem]) -> None:
        self._items = items
        self._cheapest = FREE
        if items:
            gain, key, slot = min(items, key=_key) if len(items) > 1 else items[0]
            self._cheapest = Step(gain, key, (slot,))
        self._steps: list[Step] = []
        """Evictions, the fewest bytes first; empty until a caller needs more than the cheapest slot frees."""

    def least(self, missing: int) -> Step | None:
        """Return a lower bound of all evictions that free ``missing`` bytes (above 0); None: none frees so many."""
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
    """Return the evictions that cost less than every one that frees more."""
    sums: list[tuple[Key, int, tuple[Slot, ...]]] = [(NOTHING, 0, ())]
    for gain, (price, size, used), slot in items:
        sums += [
            ((p + price, s + size, u if u > used else used), loss - gain, (*slots, slot))
            for (p, s, u), loss, slots in sums
        ]
    sums.sort(key=itemgetter(0, 1))  # the cheapest first; of these the one that frees most: gains are negative
    steps: list[Step] = []
    most = 0
    for key, loss, slots in sums:
        if -loss > most:
            most = -loss
            steps.append(Step(most, key, slots))
    return steps


def _fractions(items: Sequence[StairItem]) -> list[Step]:
    """Return the running sums of all slots, the lowest price for each byte first."""
    steps = [FREE]
    for gain, (price, size, _), _ in sorted(items, key=lambda item: item[1][0] / item[0]):
        below, (cost, total, _), _ = steps[-1]
        steps.append(Step(below + gain, (cost + price, total + size, LONG_AGO), None))
    return steps[1:]


def _between(below: Step, above: Step, missing: int) -> Step:
    """Return the price of ``missing`` bytes between two steps, in proportion."""
    gain, (price, *_), _ = below
    part = (above.key[0] - price) * (missing - gain) // (above.gain - gain)
    return Step(missing, (price + part, missing, LONG_AGO), None)


# -- device sets -------------------------------------------------------------------------------------------------------

Bound = tuple[Key, int]
"""The lower bound of evictions on a device, and the device's number."""


def sum_of(keys: Iterable[Key]) -> Key:
    """Return the lower bound for several devices, given the bound of each."""
    price, size, used = NOTHING
    for more, bytes_more, when in keys:
        price, size = price + more, size + bytes_more
        if when > used:
            used = when
    return price, size, used


def cheapest_bound(order: Sequence[Bound], degree: int) -> Key | None:
    """Return the lower bound for any ``degree`` of these devices; None: there are fewer."""
    return sum_of([key for key, _ in order[:degree]]) if len(order) >= degree else None


def cheapest_sets(runner: Runner, order: Sequence[Bound], degree: int) -> Iterable[tuple[Key, DeviceSet]]:
    """Return the sets of ``degree`` devices that a slot can use together, each with its bound, the lowest bound first.

    ``order`` holds the runner's devices that have room or can be given room, the lowest bound first.
    """
    if runner.legal_sets is None:
        return _any_sets(order, degree)
    keys = {device: key for key, device in order}
    sets = [devices for devices in runner.sets(degree) if keys.keys() >= set(devices)]
    return sorted((sum_of([keys[device] for device in devices]), devices) for devices in sets)


def _any_sets(order: Sequence[Bound], degree: int) -> Iterator[tuple[Key, DeviceSet]]:
    """Generate the sets lazily, for there may be too many: each follows from one whose bound is not higher."""
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
    """Yield the sets that differ by moving one place to the next."""
    for number, (place, after) in enumerate(zip(places, (*places[1:], end), strict=True)):
        if place + 1 < after:
            yield (*places[:number], place + 1, *places[number + 1 :])
