"""The cheapest slots to evict so that devices have room. Exact, but for a bound on the search.

Plans are compared by price, then by the bytes of the evicted slots on all devices, then by when one of them was last
used: the longer ago, the better.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from iris_ray.slots.devices import DeviceSet
from iris_ray.slots.evictable import DeviceView
from iris_ray.slots.models import SlotIdentity
from iris_ray.slots.ranking import LONG_AGO, NOTHING, Key
from iris_ray.slots.slot import Slot

MOST_STEPS = 5_000
"""Of one search. After that the best plan found so far is taken: it works, but there may be a cheaper one."""


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Devices for a slot, and what to evict there."""

    key: Key
    devices: DeviceSet
    evict: tuple[Slot, ...]


def sum_of(keys: Iterable[Key]) -> Key:
    """Return a key that no plan for several devices is below, if none for one of them is below its key."""
    price = size = 0
    for key in keys:
        price, size = price + key[0], size + key[1]
    return price, size, LONG_AGO


@dataclass(slots=True)
class EvictionSearch:
    """Looks for the cheapest plan on some devices of a runner: depth first, with bounds.

    Attributes:
        prices: what evicting one slot of an identity costs.
    """

    prices: Mapping[SlotIdentity, int]
    best: EvictionPlan | None = None
    steps: int = 0
    _devices: DeviceSet = ()
    _slots: Sequence[Slot] = field(default_factory=list)

    def try_devices(self, devices: DeviceSet, views: Sequence[DeviceView], needs: Sequence[int]) -> None:
        """Look for a plan with these devices that is better than the best so far."""
        self._devices = devices
        unique = {slot.slot_id: slot for view in views for slot in view.slots}
        self._slots = sorted(unique.values(), key=lambda slot: self._price(slot) / slot.allocation.total)
        missing = [need - view.free for need, view in zip(needs, views, strict=True)]
        self._search(0, missing, NOTHING, ())

    def _price(self, slot: Slot) -> int:
        return self.prices.get(slot.identity, 0)

    def _search(self, index: int, missing: list[int], key: Key, chosen: tuple[Slot, ...]) -> None:
        self.steps += 1
        if max(missing) <= 0:
            if self.best is None or key < self.best.key:
                self.best = EvictionPlan(key, self._devices, chosen)
            return
        if self.steps > MOST_STEPS or not self._promising(index, missing, key):
            return
        slot = self._slots[index]
        gains = [slot.allocation.on(device) for device in self._devices]
        if any(gain and lacks > 0 for gain, lacks in zip(gains, missing, strict=True)):
            left = [lacks - gain for lacks, gain in zip(missing, gains, strict=True)]
            more = key[0] + self._price(slot), key[1] + slot.allocation.total, max(key[2], slot.last_activity)
            self._search(index + 1, left, more, (*chosen, slot))
        self._search(index + 1, missing, key, chosen)

    def _promising(self, index: int, missing: Sequence[int], key: Key) -> bool:
        """Return whether the slots from ``index`` on can make room, for less than the best plan so far."""
        price, size = key[0], key[1]
        for device, lacks in zip(self._devices, missing, strict=True):
            if lacks > 0:
                least = self._least_price(index, device, lacks)
                if least is None:
                    return False
                price, size = price + least, size + lacks
        return self.best is None or (price, size, key[2]) < self.best.key

    def _least_price(self, index: int, device: int, lacks: int) -> int | None:
        """Return what ``lacks`` bytes on a device cost at least, if parts of slots could be evicted."""
        price = 0
        for slot in self._slots[index:]:
            gain = slot.allocation.on(device)
            share = self._price(slot) // len(slot.allocation.devices)
            if gain >= lacks:
                return price + share * lacks // gain
            price, lacks = price + share, lacks - gain
        return None
