"""What room on one device costs at least: a price for each number of bytes."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from iris_ray.slots.ranking import LONG_AGO, NOTHING, Key

MOST_EXACT = 6
"""Slots whose combinations are all compared. For more, parts of slots count, as if they could be evicted."""


class Item(NamedTuple):
    """One slot that could be evicted.

    Attributes:
        gain: bytes that it leaves on the device.
        key: what its end costs, its bytes, and when it was used.
    """

    gain: int
    key: Key


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
    sums = [Item(0, NOTHING)]
    for gain, (price, size, used) in items:
        sums += [Item(gain + g, (price + key[0], size + key[1], max(used, key[2]))) for g, key in sums]
    steps: list[Item] = []
    for item in sorted(sums, key=lambda each: (-each.gain, each.key)):
        if not steps or item.key < steps[-1].key:
            steps.append(item)
    steps.reverse()
    return Staircase([item.gain for item in steps], [item.key for item in steps], exact=True)


def _fractions(items: Sequence[Item]) -> Staircase:
    gains, keys = [0], [NOTHING]
    for gain, (price, size, _) in sorted(items, key=lambda each: each.key[0] / each.gain):
        gains.append(gains[-1] + gain)
        keys.append((keys[-1][0] + price, keys[-1][1] + size, LONG_AGO))
    return Staircase(gains[1:], keys[1:], exact=False)
