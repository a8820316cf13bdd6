"""What room on one device costs at least: a price for each number of bytes."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from iris_ray.slots.ranking import LONG_AGO, NOTHING, Key

MOST_EXACT = 6
"""Slots whose combinations are all compared. For more, parts of slots count, as if they could be evicted."""


class Item(NamedTuple):
    """One slot that could be evicted: what its end costs, the bytes that it leaves on the device, when it was used."""

    price: int
    gain: int
    used: float


@dataclass(frozen=True, slots=True)
class Staircase:
    """The least that has to be paid for some bytes.

    Attributes:
        gains: bytes, ascending.
        keys: of an eviction that leaves so many bytes.
        exact: whether one pays per step, else in proportion between steps.
    """

    gains: Sequence[int]
    keys: Sequence[Key]
    exact: bool

    def least(self, missing: int) -> Key | None:
        """Return a key that no eviction for so many bytes is below; None: there are not so many."""
        step = bisect_left(self.gains, missing)
        if step == len(self.gains):
            return None
        if self.exact:
            return self.keys[step]
        gain, price = (self.gains[step - 1], self.keys[step - 1][0]) if step else (0, 0)
        part = (self.keys[step][0] - price) * (missing - gain) // (self.gains[step] - gain)
        return price + part, missing, LONG_AGO


def staircase(items: Sequence[Item]) -> Staircase:
    """Return what bytes cost if these slots are what can be evicted."""
    return _combinations(items) if len(items) <= MOST_EXACT else _fractions(items)


def _combinations(items: Sequence[Item]) -> Staircase:
    sums: list[Key] = [NOTHING]
    for price, gain, used in items:
        sums += [(price + key[0], gain + key[1], max(used, key[2])) for key in sums]
    steps: list[Key] = []
    for key in sorted(sums, key=lambda each: (-each[1], each[0], each[2])):
        if not steps or (key[1] < steps[-1][1] and key[0] <= steps[-1][0]):
            steps.append(key)
    steps.reverse()
    return Staircase([key[1] for key in steps], steps, exact=True)


def _fractions(items: Sequence[Item]) -> Staircase:
    keys = [NOTHING]
    for price, gain, _ in sorted(items, key=lambda each: each.price / each.gain):
        keys.append((keys[-1][0] + price, keys[-1][1] + gain, LONG_AGO))
    return Staircase([key[1] for key in keys[1:]], keys[1:], exact=False)
