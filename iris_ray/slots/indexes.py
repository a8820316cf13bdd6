"""Where slots fit, kept up to date as devices change, so that a decision does not look at every runner.

The items of an index are single devices if a slot needs one, else runners. Indexes look again at what has changed when
they are asked, and only then.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from iris_ray.slots.changes import DeviceKey
from iris_ray.slots.devices import DeviceSet, Runner
from iris_ray.slots.evictable import EvictableSlots
from iris_ray.slots.eviction import EvictionPlan, EvictionSearch, sum_of
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.models import ModelSpec
from iris_ray.slots.ranking import Key, Ranking

Item = str | DeviceKey


@dataclass(slots=True, eq=False)
class _Index:
    fleet: SlotFleet
    spec: ModelSpec
    degree: int
    ranking: Ranking[Item] = field(init=False)
    _read: int = field(init=False, default=0)
    _runner_changes: int = field(init=False, default=0)
    _charges: dict[DeviceKey, int | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ranking = Ranking()

    def changed_items(self) -> Iterable[Item]:
        """Return the items to look at again, once."""
        changes = self.fleet.changes
        if self._runner_changes != changes.runner_changes:
            self._runner_changes = changes.runner_changes
            self._charges.clear()
        changed = changes.since(self._read)
        self._read = changes.end
        if changed is None:
            self.ranking.clear()
            changed = set(self.fleet.devices())
        return changed if self.degree == 1 else {key[0] for key in changed}

    def charge(self, key: DeviceKey) -> int | None:
        """Return the bytes that a slot keeps from others on a device; None: it can't be there, even alone."""
        if key not in self._charges:
            self._charges[key] = self._compute_charge(key)
        return self._charges[key]

    def _compute_charge(self, key: DeviceKey) -> int | None:
        runner = self.usable_runner(key[0])
        if runner is None or runner.devices[key[1]].memory < self.spec.memory[self.degree]:
            return None
        alone = self.degree == 1 and runner.legal_sets is not None
        return (
            None if alone and (key[1],) not in runner.sets(1) else charges(runner, (key[1],), self.spec, self.degree)[0]
        )

    def usable_runner(self, runner_id: str) -> Runner | None:
        """Return the runner if it can take slots of the model."""
        runner = self.fleet.runners.get(runner_id)
        usable = (
            runner is not None
            and runner.kind is self.spec.kind
            and runner_id not in self.fleet.closed
            and runner.satisfies(self.spec.constraints)
        )
        return runner if usable else None


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
        return self.fleet.runners[runner_of(found[1])], room[1]

    def _most_room(self, item: Item) -> tuple[int, DeviceSet] | None:
        runner = self.usable_runner(runner_of(item))
        if runner is None:
            return None
        if not isinstance(item, str):
            legal = runner.legal_sets is None or (item[1],) in runner.legal_sets
            return (self.fleet.ledger.free_now_on(*item), (item[1],)) if legal else None
        free = self.fleet.ledger.free_now(runner.runner_id)
        if runner.legal_sets is None:
            freest = sorted(range(len(free)), key=lambda device: -free[device])[: self.degree]
            return (free[freest[-1]], tuple(sorted(freest))) if len(freest) == self.degree else None
        rooms = [(min(free[device] for device in devices), devices) for devices in runner.sets(self.degree)]
        return max(rooms, key=lambda room: room[0], default=None)


@dataclass(slots=True, eq=False)
class EvictionIndex(_Index):
    """Finds the cheapest eviction that makes room for a slot of one model."""

    evictable: EvictableSlots
    _plans: dict[Item, EvictionPlan] = field(default_factory=dict)

    def find(self, skip: Callable[[Item], bool]) -> tuple[Runner, EvictionPlan] | None:
        """Return the cheapest plan, which may evict nothing if memory is about to be free; None: there is none."""
        for item in self.changed_items():
            least = self._least_on_runner(item) if isinstance(item, str) else self._least(item)
            if least is None:
                self.ranking.drop(item)
            else:
                self.ranking.put(item, least)
        found = self.ranking.best(self._settle, skip)
        return None if found is None else (self.fleet.runners[runner_of(found[1])], self._plans[found[1]])

    def _least(self, key: DeviceKey) -> Key | None:
        """Return a key that no plan for the device is below; None: there is no plan."""
        charge = self.charge(key)
        return None if charge is None else self.evictable.view(key, self.spec.identity).least(charge, self.degree)

    def _least_on_runner(self, runner_id: str) -> Key | None:
        runner = self.usable_runner(runner_id)
        singles = [self._least((runner_id, device)) for device in range(len(runner.devices))] if runner else []
        best = sorted(single for single in singles if single is not None)[: self.degree]
        return sum_of(best) if len(best) == self.degree else None

    def _least_together(self, runner_id: str, devices: DeviceSet) -> Key | None:
        singles = [self._least((runner_id, device)) for device in devices]
        possible = [single for single in singles if single is not None]
        return sum_of(possible) if len(possible) == len(singles) else None

    def _settle(self, item: Item) -> Key | None:
        """Find the item's best plan, and return its key."""
        runner = self.fleet.runners[runner_of(item)]
        search = EvictionSearch(self.fleet.prices)
        sets = runner.sets(self.degree) if isinstance(item, str) else [(item[1],)]
        estimates = ((self._least_together(runner.runner_id, devices), devices) for devices in sets)
        for least, devices in sorted((key, devices) for key, devices in estimates if key is not None):
            if search.best is None or least < search.best.key:
                views = [self.evictable.view((runner.runner_id, device), self.spec.identity) for device in devices]
                search.try_devices(devices, views, charges(runner, devices, self.spec, self.degree))
        if search.best is None:
            return None
        self._plans[item] = search.best
        return search.best.key


def charges(runner: Runner, devices: Sequence[int], spec: ModelSpec, degree: int) -> tuple[int, ...]:
    """Return the bytes that a slot on ``degree`` devices keeps from others on each of these."""
    return tuple(runner.devices[device].charge(spec.memory[degree]) for device in devices)


def runner_of(item: Item) -> str:
    """Return the id of an item's runner."""
    return item if isinstance(item, str) else item[0]
