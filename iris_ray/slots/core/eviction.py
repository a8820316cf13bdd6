"""Finds the cheapest slots to evict so that devices have room; exact unless a search exceeds `MOST_STEPS`.

Plans are compared by price, then by the bytes of the evicted slots on all devices, then by the last use of any of them:
the longer ago, the better.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from iris_ray.slots.core.bounds import FREE, NOTHING, Key, Staircase, StairItem, Step, sum_of
from iris_ray.slots.core.devices import Device, DeviceKey, DeviceSet
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.models import SlotIdentity
from iris_ray.slots.core.policy import Staleness
from iris_ray.slots.core.slot import Slot, SlotState

AGAIN_S = 30.0
"""How soon a slot that is not stale is looked at again: `Policy.stale_at` may have failed, or may change its answer."""


@dataclass(slots=True, eq=False)
class DeviceView:
    """One device as evictions see it.

    Attributes:
        free: bytes that are promised to no slot.
        slots: the slots that could be evicted.
        prices: the price of evicting one slot, by identity.
        device: the device's number.
    """

    hardware: Device
    free: int
    slots: Sequence[Slot]
    prices: Mapping[SlotIdentity, int]
    device: int
    _alone: Staircase | None = field(init=False, default=None)
    _shared: Staircase | None = field(init=False, default=None)

    def least(self, need: int, degree: int) -> Step | None:
        """Return a lower bound of all plans for ``need`` bytes on this device, one of ``degree``; None: no room.

        A plan for this device alone pays the whole price of a slot, even if the slot has other devices as well. A plan
        for several devices pays a share on each, and the shares add up to the price.
        """
        if need > self.hardware.memory:
            return None
        missing = self.missing(need)
        if missing <= 0:
            return FREE
        stairs = (self._alone if degree == 1 else self._shared) or self._climb(degree)
        return stairs.least(missing)

    def _climb(self, degree: int) -> Staircase:
        if degree == 1:
            self._alone = stairs = Staircase([self._whole(slot) for slot in self.slots])
        else:
            self._shared = stairs = Staircase([self._share(slot) for slot in self.slots])
        return stairs

    def missing(self, need: int) -> int:
        """Return how many bytes have to be evicted for a slot that needs ``need`` bytes here."""
        return self.hardware.charge(need) - self.free

    def _whole(self, slot: Slot) -> StairItem:
        place, price = slot.allocation, self.prices.get(slot.identity, 0)
        return place.bytes_each[place.devices.index(self.device)], (price, place.total, slot.last_activity), slot

    def _share(self, slot: Slot) -> StairItem:
        place, price = slot.allocation, self.prices.get(slot.identity, 0)
        part, parts = place.devices.index(self.device), len(place.devices)
        share, size = price * (part + 1) // parts - price * part // parts, place.bytes_each[part]
        return size, (share, size, slot.last_activity), slot


class EvictableSlots:
    """Keeps a view of each device for which `view` was called. Time must not go backwards.

    With ``busy_too``, slots that serve requests, or are not stale yet, count as evictable, too.
    """

    def __init__(self, fleet: SlotFleet, staleness: Staleness, busy_too: bool = False) -> None:
        self._busy_too = busy_too
        self._fleet = fleet
        self._staleness = staleness
        self._now = float("-inf")
        self._read = 0
        self._views: dict[DeviceKey, DeviceView] = {}
        self._before: dict[DeviceKey, DeviceView] = {}
        """Views that are out of date, of devices whose view has not been asked for since."""
        self._gained = False
        self._views_for: dict[DeviceKey, dict[SlotIdentity, DeviceView]] = {}
        self._times: list[tuple[float, DeviceKey]] = []
        """When a slot on a device may become evictable without an event: the earliest time of each device."""
        self._next: dict[DeviceKey, float] = {}

    def refresh(self, now: float) -> None:
        """Forget the views of devices that have changed, or where a slot's time has come."""
        self._now = max(now, self._now)
        changes = self._fleet.changes
        while self._times and self._times[0][0] <= self._now:
            when, key = heapq.heappop(self._times)
            if self._next.get(key) == when:
                del self._next[key]
            if key in self._fleet.devices():
                changes.add([key])
        changed = changes.since(self._read)
        self._read = changes.end
        for key in list(self._views) if changed is None else changed:
            if view := self._views.pop(key, None):
                self._before[key] = view
                self._views_for.pop(key, None)

    def has_gained(self, now: float) -> bool:
        """Return whether a device with a view has gained free bytes or evictable slots since the last call."""
        self.refresh(now)
        for key in list(self._before):
            if key in self._fleet.devices():
                self.view(key)
        self._before.clear()
        gained, self._gained = self._gained, False
        return gained

    def next_change(self) -> float:
        """Return when the next slot may become evictable without an event; infinity: none is known to."""
        return self._times[0][0] if self._times else float("inf")

    def view(self, key: DeviceKey) -> DeviceView:
        """Return the view of a device with all its evictable slots."""
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._view_of(key, self._evictable(key))
            before = self._before.pop(key, None)
            if before is not None and not self._gained:
                self._gained = view.free > before.free or any(slot not in before.slots for slot in view.slots)
        return view

    def view_for(self, key: DeviceKey, keep: SlotIdentity) -> DeviceView:
        """Return the view of a device for a new slot of ``keep``: slots of the same identity are not evicted."""
        view = self._views.get(key) or self.view(key)
        for slot in view.slots:
            if slot.identity == keep:
                return self._view_without(keep, key, view)
        return view

    def _view_without(self, keep: SlotIdentity, key: DeviceKey, view: DeviceView) -> DeviceView:
        views = self._views_for.setdefault(key, {})
        if keep not in views:
            views[keep] = self._view_of(key, [slot for slot in view.slots if slot.identity != keep])
        return views[keep]

    def _view_of(self, key: DeviceKey, slots: Sequence[Slot]) -> DeviceView:
        runner_id, device = key
        hardware = self._fleet.runners[runner_id].devices[device]
        return DeviceView(hardware, self._fleet.ledger.unpromised_on(*key), slots, self._fleet.prices, device)

    def _evictable(self, key: DeviceKey) -> list[Slot]:
        busy_too, now = self._busy_too, self._now
        found = []
        for slot in self._fleet.on_device(key):
            if slot.state is SlotState.READY and not slot.claimed and (busy_too or not slot.active):
                when = self.evictable_at(slot)
                if when <= now:
                    found.append(slot)
                else:
                    self._look_again(key, min(when, now + AGAIN_S))
        return found

    def _look_again(self, key: DeviceKey, when: float) -> None:
        if when < self._next.get(key, math.inf):
            self._next[key] = when
            heapq.heappush(self._times, (when, key))

    def evictable_at(self, slot: Slot) -> float:
        """Return from when on a ready slot may be evicted if nothing happens to it."""
        return self._staleness.resident_until(slot) if self._busy_too else self._staleness.evictable_at(slot)


# -- search ------------------------------------------------------------------------------------------------------------

MOST_STEPS = 5_000
"""The limit of one search. After that the best plan so far is taken: it works, but there may be a cheaper one."""


class EvictionPlan(NamedTuple):
    """Devices for a slot, and the slots to evict there."""

    key: Key
    devices: DeviceSet
    evict: tuple[Slot, ...]


@dataclass(slots=True)
class EvictionSearch:
    """Looks for the cheapest plan on some devices of a runner: depth first, with bounds. ``prices`` are by identity."""

    prices: Mapping[SlotIdentity, int]
    best: EvictionPlan | None = None
    steps: int = 0
    _devices: DeviceSet = ()
    _slots: Sequence[Slot] = ()

    def may_improve(self, bound: Key) -> bool:
        """Return whether plans with this lower bound may be better than the best so far, within `MOST_STEPS`."""
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
        """Combine the cheapest eviction of each device into a plan. Return whether no plan can be cheaper."""
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
        """Return whether the slots from ``index`` on can make room for less than the best plan so far."""
        price, size = key[0], key[1]
        for device, lacks in zip(self._devices, missing, strict=True):
            if lacks > 0:
                least = self._least(index, device, lacks)
                if least is None:
                    return False
                price, size = price + least[0], size + least[1]
        return self.best is None or (price, size, key[2]) < self.best.key

    def _least(self, index: int, device: int, lacks: int) -> tuple[int, int] | None:
        """Return lower bounds of the price of ``lacks`` bytes on a device, and of the bytes that are evicted for them.

        The price counts parts of slots as evictable. The bytes count as few slots as possible, at the smallest size.
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
