"""What room on one device costs at least: a price for each number of bytes."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from iris_ray.slots.ranking import LONG_AGO, NOTHING, Key

MOST_EXACT = 6
"""Slots whose combinations are all compared. For more, parts of slots count, as if they could be evicted."""


class Item(NamedTuple):
    """One slot that could be evicted.

    Attributes:
        gain: bytes that it leaves on the device.
        price: what its end costs.
        size: its bytes.
        used: when it was used.
    """

    gain: int
    price: int
    size: int
    used: float


class Step(NamedTuple):
    """Some slots that could be evicted.

    Attributes:
        gain: bytes that they leave on the device.
        key: what their end costs, their bytes, and when one of them was used.
        bits: which slots of the device; None if parts of slots are among them.
    """

    gain: int
    key: Key
    bits: int | None


FREE = Step(0, NOTHING, 0)
"""Nothing needs to be evicted."""


class Staircase(NamedTuple):
    """The least that has to be paid for some bytes.

    Attributes:
        gains: bytes, ascending.
        steps: evictions that leave so many bytes.
        exact: whether one pays per step, else in proportion between steps.
    """

    gains: Sequence[int]
    steps: Sequence[Step]
    exact: bool

    def least(self, missing: int) -> Step | None:
        """Return a step whose key no eviction for so many bytes is below; None: there are not so many."""
        place = bisect_left(self.gains, missing)
        if place == len(self.gains):
            return None
        above = self.steps[place]
        if self.exact:
            return above
        gain, price = (self.gains[place - 1], self.steps[place - 1].key[0]) if place else (0, 0)
        part = (above.key[0] - price) * (missing - gain) // (above.gain - gain)
        return Step(missing, (price + part, missing, LONG_AGO), None)


def staircase(slots: Sequence[Item]) -> Staircase:
    """Return what bytes cost if these are the slots that can be evicted."""
    return _combinations(slots) if len(slots) <= MOST_EXACT else _fractions(slots)


def _combinations(slots: Sequence[Item]) -> Staircase:
    sums = [(0, *NOTHING, 0)]  # minus the gain, so that sorting puts most bytes first
    for number, (gain, price, size, used) in enumerate(slots):
        bit = 1 << number
        sums += [(g - gain, p + price, s + size, max(u, used), bits | bit) for g, p, s, u, bits in sums]
    sums.sort()
    steps: list[Step] = []
    for loss, price, size, used, bits in sums:
        key = price, size, used
        if not steps or key < steps[-1].key:
            steps.append(Step(-loss, key, bits))
    steps.reverse()
    return Staircase([step.gain for step in steps], steps, exact=True)


def _fractions(slots: Sequence[Item]) -> Staircase:
    steps = [FREE]
    for gain, price, size, _ in sorted(slots, key=lambda slot: slot.price / slot.gain):
        below, (cost, total, _), _ = steps[-1]
        steps.append(Step(below + gain, (cost + price, total + size, LONG_AGO), None))
    del steps[0]
    return Staircase([step.gain for step in steps], steps, exact=False)
