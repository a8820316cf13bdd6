"""What room on one device costs at least: a price for each number of bytes."""

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from iris_ray.slots.ranking import LONG_AGO, NOTHING, Key
from iris_ray.slots.slot import Slot

MOST_EXACT = 6
"""Slots whose combinations are all compared. For more, parts of slots count, as if they could be evicted."""

Item = tuple[int, Key, Slot]
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

    def __init__(self, items: Sequence[Item]) -> None:
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


def _combinations(items: Sequence[Item]) -> list[Step]:
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


def _fractions(items: Sequence[Item]) -> list[Step]:
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
