"""Where slots fit, kept up to date as devices change, so that a decision does not look at every runner.

The items of an index are single devices if a slot needs one, else runners. Indexes look again at what has changed when
they are asked, and only then.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from iris_ray.slots.devices import DeviceSet, Runner
from iris_ray.slots.evictable import EvictableSlots
from iris_ray.slots.eviction import EvictionPlan, EvictionSearch, estimate
from iris_ray.slots.fleet import DeviceKey, SlotFleet
from iris_ray.slots.models import ModelSpec
from iris_ray.slots.ranking import Key, Ranking

Item = str | DeviceKey


@dataclass(slots=True, eq=False)
class _Index:
    fleet: SlotFleet
    spec: ModelSpec
    degree: int
    changed: set[DeviceKey] = field(init=False)
    ranking: Ranking[Item] = field(init=False)

    def __post_init__(self) -> None:
        self.changed = self.fleet.watch()
        self.ranking = Ranking()

    def close(self) -> None:
        """Stop watching the fleet."""
        self.fleet.unwatch(self.changed)

    def changed_items(self) -> set[Item]:
        """Return the items to look at again, once."""
        items: set[Item] = set(self.changed) if self.degree == 1 else {key[0] for key in self.changed}
        self.changed.clear()
        return items

    def runner(self, item: Item) -> Runner | None:
        """Return the item's runner if it can take slots of the model."""
        runner = self.fleet.runners.get(_runner_id(item))
        usable = (
            runner is not None
            and runner.kind is self.spec.kind
            and runner.runner_id not in self.fleet.closed
            and runner.satisfies(self.spec.constraints)
        )
        return runner if usable else None

    def sets(self, item: Item, runner: Runner) -> Iterable[DeviceSet]:
        """Return the sets of devices that the item stands for."""
        if isinstance(item, str):
            return runner.sets(self.degree)
        single = (item[1],)
        return (single,) if runner.legal_sets is None or single in runner.legal_sets else ()


class FreeIndex(_Index):
    """Finds the devices with the most bytes free now, which nobody was promised. One serves all models of a pool."""

    def find(self, need: int, skip: Callable[[Item], bool]) -> tuple[Runner, DeviceSet] | None:
        """Return free devices with at least ``need`` bytes each: those whose fullest one has the most free."""
        for item in self.changed_items():
            room = self._most_room(item)
            if room is None:
                self.ranking.drop(item)
            else:
                self.ranking.put(item, (-room[0], 0, 0.0), exact=True)
        found = self.ranking.best(lambda item: None, skip)
        if found is None or -found[0][0] < need:
            return None
        room = self._most_room(found[1])
        assert room is not None, f"{found[1]} has changed meanwhile"
        return self.fleet.runners[_runner_id(found[1])], room[1]

    def _most_room(self, item: Item) -> tuple[int, DeviceSet] | None:
        runner = self.runner(item)
        if runner is None:
            return None
        free = self.fleet.ledger.free_now(runner.runner_id)
        if self.degree > 1 and runner.legal_sets is None:
            freest = sorted(range(len(free)), key=lambda device: -free[device])[: self.degree]
            return (free[freest[-1]], tuple(sorted(freest))) if len(freest) == self.degree else None
        rooms = [(min(free[device] for device in devices), devices) for devices in self.sets(item, runner)]
        return max(rooms, key=lambda room: room[0], default=None)


@dataclass(slots=True, eq=False)
class EvictionIndex(_Index):
    """Finds the cheapest eviction that makes room for a slot of one model."""

    evictable: EvictableSlots
    _plans: dict[Item, EvictionPlan] = field(default_factory=dict)

    def find(self, skip: Callable[[Item], bool]) -> tuple[Runner, EvictionPlan] | None:
        """Return the cheapest plan, which may evict nothing if memory is about to be free; None: there is none."""
        for item in self.changed_items():
            self._plans.pop(item, None)
            least = self._least(item)
            if least is None:
                self.ranking.drop(item)
            else:
                self.ranking.put(item, least)
        found = self.ranking.best(self._settle, skip)
        return None if found is None else (self.fleet.runners[_runner_id(found[1])], self._plans[found[1]])

    def _least(self, item: Item) -> Key | None:
        """Return a key that no plan for the item is below."""
        runner = self.runner(item)
        if runner is None:
            return None
        if not isinstance(item, str):
            possible = any(self.sets(item, runner))
            return self._estimate(runner, (item[1],)) if possible else None
        singles = (self._estimate(runner, (device,)) for device in range(len(runner.devices)))
        best = sorted(single for single in singles if single is not None)[: self.degree]
        if len(best) < self.degree:
            return None
        return sum(key[0] for key in best), sum(key[1] for key in best), best[0][2]

    def _settle(self, item: Item) -> Key | None:
        """Find the item's best plan, and return its key."""
        runner = self.fleet.runners[_runner_id(item)]
        search = EvictionSearch(self.fleet.prices, self.spec.identity)
        estimates = ((self._estimate(runner, devices), devices) for devices in self.sets(item, runner))
        for least, devices in sorted((key, devices) for key, devices in estimates if key is not None):
            if search.best is None or least < search.best.key:
                views = [self.evictable.view((runner.runner_id, device)) for device in devices]
                search.try_devices(devices, views, charges(runner, devices, self.spec))
        if search.best is None:
            return None
        self._plans[item] = search.best
        return search.best.key

    def _estimate(self, runner: Runner, devices: DeviceSet) -> Key | None:
        need = self.spec.memory[self.degree]
        if any(runner.devices[device].memory < need for device in devices):
            return None
        views = (self.evictable.view((runner.runner_id, device)) for device in devices)
        return estimate(views, [runner.devices[device].charge(need) for device in devices])


def charges(runner: Runner, devices: Sequence[int], spec: ModelSpec) -> tuple[int, ...]:
    """Return the bytes that a slot of the model keeps from others on each of these devices."""
    return tuple(runner.devices[device].charge(spec.memory[len(devices)]) for device in devices)


def _runner_id(item: Item) -> str:
    return item if isinstance(item, str) else item[0]
