"""The cheapest slots to evict so that devices have room. Exact, but for a bound on the search.

Plans are compared by price, then by the bytes of the evicted slots on all devices, then by when one of them was last
used: the longer ago, the better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from iris_ray.slots.device_sets import sum_of
from iris_ray.slots.devices import DeviceSet
from iris_ray.slots.evictable import DeviceView
from iris_ray.slots.models import SlotIdentity
from iris_ray.slots.ranking import NOTHING, Key
from iris_ray.slots.slot import Slot
from iris_ray.slots.staircase import Step

MOST_STEPS = 5_000
"""Of one search. After that the best plan found so far is taken: it works, but there may be a cheaper one."""


class EvictionPlan(NamedTuple):
    """Devices for a slot, and what to evict there."""

    key: Key
    devices: DeviceSet
    evict: tuple[Slot, ...]


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
    _slots: Sequence[Slot] = ()

    def may_improve(self, bound: Key) -> bool:
        """Return whether to look on, for plans that are not below the bound."""
        return self.best is None or (bound < self.best.key and self.steps <= MOST_STEPS)

    def try_devices(self, devices: DeviceSet, views: Sequence[DeviceView], need: int) -> None:
        """Look for a plan with ``need`` bytes on each of these devices that is better than the best so far."""
        self.steps += 1
        steps = [step for view in views if (step := view.least(need, len(devices)))]
        if len(steps) < len(devices):
            return
        self._devices = devices
        if self._cheapest_of_each(steps):
            return
        unique = dict.fromkeys(slot for view in views for slot in view.slots)
        self._slots = sorted(unique, key=lambda slot: (self._price(slot) / slot.allocation.total, slot.last_activity))
        self._search(0, [view.missing(need) for view in views], NOTHING, ())

    def _cheapest_of_each(self, steps: Sequence[Step]) -> bool:
        """Try what is cheapest for each device by itself. Return whether nothing can be cheaper for all of them."""
        unique: dict[Slot, None] = {}
        for step in steps:
            if step.slots is None:
                return False
            for slot in step.slots:
                unique[slot] = None
        key = NOTHING
        for slot in unique:
            key = self._with(key, slot)
        self._keep(EvictionPlan(key, self._devices, tuple(unique)))
        return key == sum_of([step.key for step in steps])

    def _with(self, key: Key, slot: Slot) -> Key:
        return key[0] + self._price(slot), key[1] + slot.allocation.total, max(key[2], slot.last_activity)

    def _keep(self, plan: EvictionPlan) -> None:
        if self.best is None or plan.key < self.best.key:
            self.best = plan

    def _price(self, slot: Slot) -> int:
        return self.prices.get(slot.identity, 0)

    def _search(self, index: int, missing: list[int], key: Key, chosen: tuple[Slot, ...]) -> None:
        self.steps += 1
        if max(missing) <= 0:
            self._keep(EvictionPlan(key, self._devices, chosen))
            return
        if self.steps > MOST_STEPS or not self._promising(index, missing, key):
            return
        slot = self._slots[index]
        gains = [slot.allocation.on(device) for device in self._devices]
        if any(gain and lacks > 0 for gain, lacks in zip(gains, missing, strict=True)):
            left = [lacks - gain for lacks, gain in zip(missing, gains, strict=True)]
            self._search(index + 1, left, self._with(key, slot), (*chosen, slot))
        self._search(index + 1, missing, key, chosen)

    def _promising(self, index: int, missing: Sequence[int], key: Key) -> bool:
        """Return whether the slots from ``index`` on can make room, for less than the best plan so far."""
        price, size = key[0], key[1]
        for device, lacks in zip(self._devices, missing, strict=True):
            if lacks > 0:
                least = self._least(index, device, lacks)
                if least is None:
                    return False
                price, size = price + least[0], size + least[1]
        return self.best is None or (price, size, key[2]) < self.best.key

    def _least(self, index: int, device: int, lacks: int) -> tuple[int, int] | None:
        """Return what room for ``lacks`` bytes on a device costs at least, and how many bytes are evicted there.

        The price counts as if parts of slots could be evicted, the bytes as if all slots were as large as the largest
        one, and then as small as the smallest one.
        """
        slots = [slot for slot in self._slots[index:] if slot.allocation.on(device)]
        price, left = 0, lacks
        for slot in slots:
            gain = slot.allocation.on(device)
            share = self._price(slot) // len(slot.allocation.devices)
            if gain >= left:
                gains = [slot.allocation.on(device) for slot in slots]
                return price + share * left // gain, max(lacks, -(-lacks // max(gains)) * min(gains))
            price, left = price + share, left - gain
        return None
