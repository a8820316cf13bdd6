"""Which slots could be evicted now, device by device, cheapest first."""

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from iris_ray.slots.fleet import DeviceKey, SlotFleet
from iris_ray.slots.policy import Policy
from iris_ray.slots.slot import Slot, SlotState


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device as evictions see it.

    Attributes:
        free: bytes that are promised to nobody.
        slots: those that could be evicted, the least price for a byte first.
        gains: bytes that the first one, the first two, … of them leave on this device.
        shares: what they cost together. A slot on several devices counts with its share, rounded down.
    """

    free: int
    slots: tuple[Slot, ...]
    gains: tuple[int, ...]
    shares: tuple[int, ...]

    def estimate(self, need: int) -> tuple[int, int] | None:
        """Return price and bytes that room for ``need`` bytes can't cost less than; None: there can't be room."""
        missing = need - self.free
        if missing <= 0:
            return 0, 0
        last = bisect_left(self.gains, missing)
        if last == len(self.gains):
            return None
        gain, share = (self.gains[last - 1], self.shares[last - 1]) if last else (0, 0)
        part = (self.shares[last] - share) * (missing - gain) // (self.gains[last] - gain)
        return share + part, missing


class EvictableSlots:
    """Keeps a view of each device that somebody has asked for. Time must not go backwards."""

    def __init__(self, fleet: SlotFleet, policy: Policy) -> None:
        self._fleet = fleet
        self._policy = policy
        self._now = float("-inf")
        self._changed = fleet.watch()
        self._views: dict[DeviceKey, DeviceView] = {}
        self._times: list[tuple[float, DeviceKey]] = []
        """When a slot on a device may become evictable though nothing happens."""

    def refresh(self, now: float) -> None:
        """Forget what has changed, by time as well."""
        self._now = max(now, self._now)
        while self._times and self._times[0][0] <= self._now:
            _, key = heapq.heappop(self._times)
            if key[0] in self._fleet.runners:
                self._fleet.touch([key])
        for key in self._changed:
            self._views.pop(key, None)
        self._changed.clear()

    def view(self, key: DeviceKey) -> DeviceView:
        """Return the view of a device."""
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._look(key)
        return view

    def _look(self, key: DeviceKey) -> DeviceView:
        slots = sorted(self._evictable(key), key=self._price_for_a_byte)
        prices = (self._fleet.prices.get(slot.identity, 0) // len(slot.allocation.devices) for slot in slots)
        gains = (slot.allocation.on(key[1]) for slot in slots)
        free = self._fleet.ledger.unpromised(key[0])[key[1]]
        return DeviceView(free, tuple(slots), tuple(accumulate(gains)), tuple(accumulate(prices)))

    def _evictable(self, key: DeviceKey) -> Iterator[Slot]:
        for slot in self._fleet.on_device(key):
            if slot.state is SlotState.READY and not slot.active and not slot.claimed:
                when = self.evictable_at(slot)
                if when <= self._now:
                    yield slot
                else:
                    heapq.heappush(self._times, (when, key))

    def evictable_at(self, slot: Slot) -> float:
        """Return from when on a ready slot may be evicted if it stays idle."""
        assert slot.ready_at is not None, f"slot {slot.slot_id} is not ready"
        stale_at = self._policy.stale_at(slot.allocation.runner_id, slot.last_activity)
        return max(slot.ready_at + self._policy.min_residency_s, stale_at)

    def _price_for_a_byte(self, slot: Slot) -> tuple[float, float]:
        return self._fleet.prices.get(slot.identity, 0) / slot.allocation.total, slot.last_activity
