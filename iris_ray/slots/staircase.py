"""What room on one device costs at least: a price for each number of bytes."""

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from iris_ray.slots.ranking import LONG_AGO, NOTHING, Key
from iris_ray.slots.slot import Slot

MOST_EXACT = 6
"""Slots whose combinations are all compared. For more, parts of slots count, as if they could be evicted."""


Item = tuple[int, int, int, Slot]
"""Of a slot that could be evicted: bytes that it leaves on the device, what its end costs, its bytes, and the slot."""


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


class Staircase(NamedTuple):
    """The least that has to be paid for some bytes.

    Attributes:
        steps: evictions, the fewest bytes first.
        exact: whether one pays per step, else in proportion between steps.
    """

    steps: Sequence[Step]
    exact: bool

    def least(self, missing: int) -> Step | None:
        """Return a step whose key no eviction for so many bytes is below; None: there are not so many."""
        place = bisect_left(self.steps, missing, key=attrgetter("gain"))
        if place == len(self.steps):
            return None
        above = self.steps[place]
        if self.exact:
            return above
        gain, (price, *_), _ = self.steps[place - 1] if place else FREE
        part = (above.key[0] - price) * (missing - gain) // (above.gain - gain)
        return Step(missing, (price + part, missing, LONG_AGO), None)


def staircase(items: Sequence[Item]) -> Staircase:
    """Return what bytes cost if these are the slots that can be evicted."""
    return _combinations(items) if len(items) <= MOST_EXACT else _fractions(items)


def _combinations(items: Sequence[Item]) -> Staircase:
    sums: list[tuple[int, int, float, int, tuple[Slot, ...]]] = [(*NOTHING, 0, ())]
    for gain, price, size, slot in items:
        used = slot.last_activity
        sums += [(p + price, s + size, max(u, used), g - gain, (*slots, slot)) for p, s, u, g, slots in sums]
    sums.sort(key=itemgetter(0, 1, 2, 3))  # the cheapest first; of these the one that leaves most: gains are negative
    steps: list[Step] = []
    most = -1
    for price, size, used, loss, slots in sums:
        if -loss > most:
            most = -loss
            steps.append(Step(most, (price, size, used), slots))
    return Staircase(steps, exact=True)


def _fractions(items: Sequence[Item]) -> Staircase:
    steps = [FREE]
    for gain, price, size, _ in sorted(items, key=lambda item: item[1] / item[0]):
        below, (cost, total, _), _ = steps[-1]
        steps.append(Step(below + gain, (cost + price, total + size, LONG_AGO), None))
    return Staircase(steps[1:], exact=False)
