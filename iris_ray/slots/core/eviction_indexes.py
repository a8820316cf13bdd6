"""Finds the cheapest eviction on any runner, for models of any size.

An index ranks devices or runners by the price of room for *at least* so many bytes. For one model that price is a lower
bound: the model may need more bytes, and its own slots are not evicted for it. So exact prices are computed from the
front, until no other item can be cheaper. Models of similar sizes share an index. A model for which too many exact
prices have to be computed gets an index of its own size, whose bounds are closer.
"""

from abc import abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter

from iris_ray.slots.core.bounds import Bound, Key, cheapest_bound, cheapest_sets
from iris_ray.slots.core.devices import DeviceKey, Runner
from iris_ray.slots.core.eviction import EvictableSlots, EvictionPlan, EvictionSearch
from iris_ray.slots.core.fleet import DevicePool, Index, RunnerOrDevice, SlotFleet, runner_of
from iris_ray.slots.core.models import ModelSpec

MOST_MISLED = 8
"""How many bounds may be too low for a model's size in one decision, before it gets an index of its own size."""
MOST_PLANS = 32
"""How many exact plans one decision compares. If many slots share a device at one price, all bounds are too low."""
MOST_SIZES = 24
"""How many indexes one pool may have, since each of them takes in every change."""


@dataclass(slots=True, eq=False)
class EvictionIndex(Index):
    """Finds the cheapest eviction for models that need at least so many bytes on each device.

    Attributes:
        evictable: the slots that could be evicted.
        least_need: bytes on each device.
        misled: how many bounds were too low in the last decision because the model needs more than ``least_need``.
    """

    evictable: EvictableSlots
    least_need: int
    misled: int = field(init=False, default=0)

    @abstractmethod
    def catch_up(self) -> None:
        """Rank the items that have changed by their new bounds."""

    @abstractmethod
    def cheapest(self, item: RunnerOrDevice, bound: Key, spec: ModelSpec) -> EvictionPlan | None:
        """Return an item's best plan for one model."""

    def find(self, spec: ModelSpec, avoid: frozenset[str]) -> tuple[Runner, EvictionPlan] | None:
        """Return the cheapest plan and its runner; None: there is none. It may be to wait for slots that end."""
        self.catch_up()
        self.misled = 0
        plans: dict[RunnerOrDevice, EvictionPlan] = {}

        def exact(item: RunnerOrDevice, bound: Key) -> Key | None:
            runner_id = runner_of(item)
            if runner_id in avoid:
                return None
            plan = self.cheapest(item, bound, spec)
            if plan:
                plans[item] = plan
                if plan.key == bound:
                    return bound
            self.misled += all(slot.identity != spec.identity for slot in self.fleet.on_runner(runner_id))
            return plan.key if plan else None

        found = self.ranking.best(exact, MOST_PLANS)
        return None if found is None else (self.fleet.runners[runner_of(found[1])], plans[found[1]])


@dataclass(slots=True, eq=False)
class DeviceEvictionIndex(EvictionIndex):
    """Ranks devices, for slots that use one device."""

    def catch_up(self) -> None:
        """See `EvictionIndex`."""
        for key in self.changed_devices():
            step = self.evictable.view(key).least(self.least_need, 1) if self.usable(key) else None
            self.ranking.put(key, None if step is None else step.key)

    def cheapest(self, item: RunnerOrDevice, bound: Key, spec: ModelSpec) -> EvictionPlan | None:
        """See `EvictionIndex`."""
        assert not isinstance(item, str)
        view, devices, need = self.evictable.view_for(item, spec.identity), (item[1],), spec.memory[1]
        step = view.least(need, 1)
        if step is not None and step.slots is not None:
            return EvictionPlan(step.key, devices, step.slots)
        search = EvictionSearch(self.fleet.prices)
        search.try_devices(devices, [view], need)
        return search.best


@dataclass(slots=True, eq=False)
class RunnerEvictionIndex(EvictionIndex):
    """Ranks runners, for slots that use several devices."""

    _bounds: dict[str, list[Bound | None]] = field(init=False, default_factory=dict)
    """The bound of each device, by runner; None: room can't be made there."""
    _order: dict[str, list[Bound]] = field(init=False, default_factory=dict)
    """The devices where room can be made, by runner, the lowest bound first."""

    def forget_runners(self) -> None:
        """See `Index`."""
        Index.forget_runners(self)
        self._bounds.clear()
        self._order.clear()

    def catch_up(self) -> None:
        """See `EvictionIndex`."""
        changed = self.changed_devices()
        for key in changed:
            if bounds := self._bounds.get(key[0]):
                bounds[key[1]] = self._bound_of(key)
        for runner_id in {key[0] for key in changed}:
            self.ranking.put(runner_id, cheapest_bound(self._sort(runner_id), self.pool.degree))

    def _sort(self, runner_id: str) -> list[Bound]:
        order = self._order[runner_id] = sorted(filter(None, self._bounds_on(runner_id)))
        return order

    def _bounds_on(self, runner_id: str) -> list[Bound | None]:
        known = self._bounds.get(runner_id)
        if known is not None:
            return known
        runner = self.usable(runner_id)
        if runner is None:
            return []
        keys = [(runner_id, device) for device in range(len(runner.devices))]
        return self._bounds.setdefault(runner_id, [self._bound_of(key) for key in keys])

    def _bound_of(self, key: DeviceKey) -> Bound | None:
        step = self.evictable.view(key).least(self.least_need, self.pool.degree)
        return None if step is None else (step.key, key[1])

    def cheapest(self, item: RunnerOrDevice, bound: Key, spec: ModelSpec) -> EvictionPlan | None:
        """See `EvictionIndex`."""
        assert isinstance(item, str)
        runner, need = self.fleet.runners[item], spec.memory[self.pool.degree]
        search = EvictionSearch(self.fleet.prices)
        order = self._order.get(item) or self._sort(item)
        for least, devices in cheapest_sets(runner, order, self.pool.degree):
            if not search.may_improve(least):
                break
            views = [self.evictable.view_for((item, device), spec.identity) for device in devices]
            search.try_devices(devices, views, need)
            if search.best is not None and search.best.key == least:
                break
        return search.best


_least_need = attrgetter("least_need")


@dataclass(slots=True, eq=False)
class EvictionIndexes:
    """The indexes of one pool, by ``least_need``."""

    fleet: SlotFleet
    pool: DevicePool
    evictable: EvictableSlots
    _indexes: list[EvictionIndex] = field(default_factory=list)

    def find(self, spec: ModelSpec, avoid: frozenset[str]) -> tuple[Runner, EvictionPlan] | None:
        """Return the cheapest plan for a model and its runner; None: there is none."""
        need = spec.memory[self.pool.degree]
        place = bisect_right(self._indexes, need, key=_least_need)
        if place == 0:
            del self._indexes[: max(0, len(self._indexes) - MOST_SIZES + 1)]
            return self._add(0, need).find(spec, avoid)
        index = self._indexes[place - 1]
        found = index.find(spec, avoid)
        if index.misled > MOST_MISLED and index.least_need < need and len(self._indexes) < MOST_SIZES:
            self._add(place, need)
        return found

    def _add(self, place: int, need: int) -> EvictionIndex:
        kind = DeviceEvictionIndex if self.pool.degree == 1 else RunnerEvictionIndex
        index = kind(self.fleet, self.pool, self.evictable, need)
        self._indexes.insert(place, index)
        return index
