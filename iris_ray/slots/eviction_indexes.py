"""The cheapest eviction on any runner, for models of any size.

An index ranks devices or runners by what room for *at least* so many bytes costs, whoever needs it. For one model that
is a lower bound: it may need more bytes, and slots of its own are not evicted for it. So exact prices are computed from
the front, until no other one can be lower. Models of similar sizes share an index. One for which too many have to be
computed gets an index of its own size, where bounds are closer.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from iris_ray.slots.device_sets import cheapest_bound, cheapest_sets
from iris_ray.slots.devices import DeviceKey, DeviceSet, Runner
from iris_ray.slots.evictable import EvictableSlots
from iris_ray.slots.eviction import EvictionPlan, EvictionSearch
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.indexes import Index, Item, Pool, allows_alone, runner_of
from iris_ray.slots.models import ModelSpec
from iris_ray.slots.ranking import Key

MOST_MISLED = 8
"""Bounds that may be too low for a model's size in one decision, before it gets an index of its own size."""
MOST_SIZES = 24
"""Indexes for one pool. Each of them takes in every change."""


@dataclass(slots=True, eq=False)
class EvictionIndex(Index):
    """Finds the cheapest eviction for models that need at least so many bytes on each device.

    Attributes:
        evictable: what could be evicted.
        least_need: bytes on each device.
        misled: how many bounds were too low in the last decision because the model is larger.
    """

    evictable: EvictableSlots
    least_need: int
    misled: int = field(init=False, default=0)
    _bounds: dict[str, list[Key | None]] = field(init=False, default_factory=dict)
    """Of each device, by runner, if a slot needs several."""

    def forget_runners(self) -> None:
        """See `Index`."""
        Index.forget_runners(self)
        self._bounds.clear()

    def find(self, spec: ModelSpec, avoid: frozenset[str]) -> tuple[Runner, EvictionPlan] | None:
        """Return the cheapest plan, which may evict nothing if memory is about to be free; None: there is none."""
        (self._catch_up_devices if self.pool.degree == 1 else self._catch_up_runners)(self.changed_devices())
        plans: dict[Item, EvictionPlan] = {}

        def exact(item: Item, bound: Key) -> Key | None:
            if runner_of(item) in avoid:
                return None
            if plan := self._cheapest(item, bound, spec):
                plans[item] = plan
                if plan.key == bound:
                    return bound
            self.misled += all(slot.identity != spec.identity for slot in self.fleet.on_runner(runner_of(item)))
            return plan.key if plan else None

        self.misled = 0
        found = self.ranking.best(exact)
        return None if found is None else (self.fleet.runners[runner_of(found[1])], plans[found[1]])

    def _catch_up_devices(self, changed: set[DeviceKey]) -> None:
        for key in changed:
            self.put(key, self._bound(key))

    def _catch_up_runners(self, changed: set[DeviceKey]) -> None:
        for key in changed:
            if key[0] in self._bounds:
                self._bounds[key[0]][key[1]] = self._bound(key)
        for runner_id in {key[0] for key in changed}:
            self.put(runner_id, cheapest_bound(self._bounds_on(runner_id), self.pool.degree))

    def _bounds_on(self, runner_id: str) -> list[Key | None]:
        runner = self.usable(runner_id)
        if runner is None:
            return []
        known = self._bounds.get(runner_id)
        if known is None:
            known = self._bounds[runner_id] = [
                self._bound((runner_id, device)) for device in range(len(runner.devices))
            ]
        return known

    def _bound(self, key: DeviceKey) -> Key | None:
        """Return a key that no plan for the device is below, whoever needs it; None: nobody has room there."""
        runner = self.usable(key[0])
        if runner is None or (self.pool.degree == 1 and not allows_alone(runner, key[1])):
            return None
        step = self.evictable.view(key).least(self.least_need, self.pool.degree)
        return None if step is None else step.key

    def _cheapest(self, item: Item, bound: Key, spec: ModelSpec) -> EvictionPlan | None:
        """Return an item's best plan for one model."""
        runner, need = self.fleet.runners[runner_of(item)], spec.memory[self.pool.degree]
        search = EvictionSearch(self.fleet.prices)
        for least, devices in self._sets(runner, item, bound):
            if not search.may_improve(least):
                break
            views = [self.evictable.view_for((runner.runner_id, device), spec.identity) for device in devices]
            search.try_devices(devices, views, need)
            if search.best is not None and search.best.key == least:
                break
        return search.best

    def _sets(self, runner: Runner, item: Item, bound: Key) -> Iterable[tuple[Key, DeviceSet]]:
        if isinstance(item, str):
            return cheapest_sets(runner, self._bounds_on(item), self.pool.degree)
        return [(bound, (item[1],))]


@dataclass(slots=True, eq=False)
class EvictionIndexes:
    """The indexes of one pool, by the bytes that their models need at least."""

    fleet: SlotFleet
    pool: Pool
    evictable: EvictableSlots
    _indexes: list[EvictionIndex] = field(default_factory=list)

    def find(self, spec: ModelSpec, avoid: frozenset[str]) -> tuple[Runner, EvictionPlan] | None:
        """Return the cheapest plan for a model, and its runner; None: there is none."""
        need = spec.memory[self.pool.degree]
        place = bisect_right(self._indexes, need, key=lambda each: each.least_need)
        if place == 0:
            del self._indexes[: len(self._indexes) - MOST_SIZES + 1]
            return self._add(0, need).find(spec, avoid)
        index = self._indexes[place - 1]
        found = index.find(spec, avoid)
        if index.misled > MOST_MISLED and index.least_need < need and len(self._indexes) < MOST_SIZES:
            self._add(place, need)
        return found

    def _add(self, place: int, need: int) -> EvictionIndex:
        index = EvictionIndex(self.fleet, self.pool, self.evictable, need)
        self._indexes.insert(place, index)
        return index
