"""Which slots could be evicted now, device by device, cheapest first."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from iris_ray.slots.changes import DeviceKey
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.models import SlotIdentity
from iris_ray.slots.policy import Policy
from iris_ray.slots.ranking import NOTHING, Key
from iris_ray.slots.slot import Slot, SlotState
from iris_ray.slots.staircase import Item, Staircase, staircase


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device as evictions see it.

    Attributes:
        free: bytes that are promised to nobody.
        slots: those that could be evicted.
        identities: what these serve.
        alone: what their bytes cost whoever needs this device only.
        shared: what they cost whoever needs others as well: a slot on several devices counts with its share, rounded
            down.
    """

    free: int
    slots: tuple[Slot, ...]
    identities: frozenset[SlotIdentity]
    alone: Staircase
    shared: Staircase

    def least(self, need: int, degree: int) -> Key | None:
        """Return a key that no plan for ``need`` bytes here, as one of so many devices, is below; None: no room."""
        missing = need - self.free
        return NOTHING if missing <= 0 else (self.alone if degree == 1 else self.shared).least(missing)


class EvictableSlots:
    """Keeps a view of each device that somebody has asked for. Time must not go backwards.

    With ``busy_too``, slots that serve requests or have just done so count as well.
    """

    def __init__(self, fleet: SlotFleet, policy: Policy, busy_too: bool = False) -> None:
        self._busy_too = busy_too
        self._fleet = fleet
        self._policy = policy
        self._now = float("-inf")
        self._read = 0
        self._views: dict[DeviceKey, DeviceView] = {}
        self._views_for: dict[DeviceKey, dict[SlotIdentity, DeviceView]] = {}
        self._times: list[tuple[float, DeviceKey]] = []
        """When a slot on a device may become evictable though nothing happens."""

    def refresh(self, now: float) -> None:
        """Forget what has changed, by time as well."""
        self._now = max(now, self._now)
        changes = self._fleet.changes
        while self._times and self._times[0][0] <= self._now:
            changes.add([heapq.heappop(self._times)[1]])
        changed = changes.since(self._read)
        self._read = changes.end
        for key in list(self._views) if changed is None else changed:
            self._views.pop(key, None)
            self._views_for.pop(key, None)

    def next_change(self) -> float:
        """Return when the next slot may become evictable though nothing happens; infinity if none is known to."""
        return self._times[0][0] if self._times else float("inf")

    def view(self, key: DeviceKey, keep: SlotIdentity) -> DeviceView:
        """Return the view of a device for whoever needs room for ``keep``, of which no slot is evicted."""
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._view_of(key, tuple(self._evictable(key)))
        if keep not in view.identities:
            return view
        views = self._views_for.setdefault(key, {})
        if keep not in views:
            views[keep] = self._view_of(key, tuple(slot for slot in view.slots if slot.identity != keep))
        return views[keep]

    def _view_of(self, key: DeviceKey, slots: tuple[Slot, ...]) -> DeviceView:
        alone = staircase([self._item(slot, key[1], 1) for slot in slots])
        spread = any(len(slot.allocation.devices) > 1 for slot in slots)
        shared = staircase([self._item(s, key[1], len(s.allocation.devices)) for s in slots]) if spread else alone
        identities = frozenset(slot.identity for slot in slots)
        return DeviceView(self._fleet.ledger.unpromised_on(*key), slots, identities, alone, shared)

    def _item(self, slot: Slot, device: int, among: int) -> Item:
        place, price = slot.allocation, self._fleet.prices.get(slot.identity, 0)
        return Item(place.on(device), (price // among, place.total // among, slot.last_activity))

    def _evictable(self, key: DeviceKey) -> Iterator[Slot]:
        for slot in self._fleet.on_device(key):
            if slot.state is SlotState.READY and not slot.claimed and (self._busy_too or not slot.active):
                when = self.evictable_at(slot)
                if when <= self._now:
                    yield slot
                else:
                    heapq.heappush(self._times, (when, key))

    def evictable_at(self, slot: Slot) -> float:
        """Return from when on a ready slot may be evicted if it stays as it is."""
        assert slot.ready_at is not None, f"slot {slot.slot_id} is not ready"
        if self._busy_too:
            return slot.ready_at + self._policy.min_residency_s
        stale_at = self._policy.stale_at(slot.allocation.runner_id, slot.last_activity)
        return max(slot.ready_at + self._policy.min_residency_s, stale_at)
