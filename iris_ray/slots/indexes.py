"""Where slots fit, kept up to date as devices change, so that a decision does not look at every runner.

The items of an index are single devices if a slot needs one, else runners. Indexes look again at what has changed when
they are asked, and only then. `eviction_indexes.py` has those that know what room costs.
"""

from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from iris_ray.model.constraints import Constraint
from iris_ray.slots.devices import DeviceKey, DeviceKind, DeviceSet, Runner
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.ranking import Ranking

Item = str | DeviceKey


class Pool(NamedTuple):
    """Which runners count, and how many devices of one of them.

    Attributes:
        kind: what the devices are.
        constraints: what the runners' attributes satisfy.
        degree: how many devices a slot has.
    """

    kind: DeviceKind
    constraints: tuple[Constraint, ...]
    degree: int


@dataclass(slots=True, eq=False)
class Index:
    """What all indexes have. They read the fleet's changes, each from where it was."""

    fleet: SlotFleet
    pool: Pool
    ranking: Ranking[Item] = field(init=False)
    _read: int = field(init=False, default=0)
    _runner_changes: int = field(init=False, default=-1)
    _usable: dict[Item, Runner | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ranking = Ranking()

    def changed_devices(self) -> set[DeviceKey]:
        """Return the devices to look at again, once."""
        changes = self.fleet.changes
        changed = changes.since(self._read)
        self._read = changes.end
        if changed is None:
            self.ranking.clear()
            changed = set(self.fleet.devices())
        if self._runner_changes != changes.runner_changes:
            self._runner_changes = changes.runner_changes
            self.forget_runners()
            self._drop_lost(changed)
        return changed

    def _drop_lost(self, changed: set[DeviceKey]) -> None:
        """Drop devices whose runner is gone, or is there again with fewer."""
        for key in changed.difference(self.fleet.devices()):
            self.ranking.put(key if self.pool.degree == 1 else key[0], None)
            changed.discard(key)

    def forget_runners(self) -> None:
        """Forget what is known of runners: one has come, gone, opened or closed."""
        self._usable.clear()

    def usable(self, item: Item) -> Runner | None:
        """Return an item's runner if slots can go there now."""
        try:
            return self._usable[item]
        except KeyError:
            return self._usable.setdefault(item, self._look_at(item))

    def _look_at(self, item: Item) -> Runner | None:
        if not isinstance(item, str):
            runner = self.usable(item[0])
            return runner if runner and _allows_alone(runner, item[1]) else None
        runner, pool = self.fleet.runners.get(item), self.pool
        if runner is None or item in self.fleet.closed:
            return None
        return runner if runner.kind is pool.kind and runner.satisfies(pool.constraints) else None


@dataclass(slots=True, eq=False)
class FreeIndex(Index):
    """Finds the devices with the most bytes free now, which nobody was promised. One serves all models of a pool."""

    def find(self, need: int, avoid: frozenset[str]) -> tuple[Runner, DeviceSet] | None:
        """Return free devices with at least ``need`` bytes each: those whose fullest one has the most free."""
        self._catch_up()
        if avoid:
            found = self.ranking.best(lambda item, bound: None if runner_of(item) in avoid else bound)
        else:
            found = self.ranking.first()
        if found is None or -found[0][0] < need:
            return None
        return self.fleet.runners[runner_of(found[1])], self._freest(found[1])

    def find_on(self, runner_id: str, need: int) -> DeviceSet | None:
        """Return the best free devices of one runner, or None."""
        self._catch_up()
        count = len(self.fleet.runners[runner_id].devices)
        items: list[Item] = [(runner_id, device) for device in range(count)] if self.pool.degree == 1 else [runner_id]
        room, item = max(((self._room(item) or 0, item) for item in items), key=itemgetter(0))
        return self._freest(item) if room >= need else None

    def _catch_up(self) -> None:
        changed = self.changed_devices()
        items: set[DeviceKey] | set[str] = changed if self.pool.degree == 1 else {key[0] for key in changed}
        for item in items:
            room = self._room(item)
            self.ranking.put(item, None if room is None else (-room, 0, 0.0))

    def _room(self, item: Item) -> int | None:
        """Return what the fullest device of the best set has free; None: there is no set."""
        runner = self.usable(item)
        if runner is None:
            return None
        if not isinstance(item, str):
            return self.fleet.ledger.free_now_on(*item)
        free, degree = self.fleet.ledger.free_now(item), self.pool.degree
        if runner.legal_sets is None:
            return sorted(free)[-degree] if len(free) >= degree else None
        return max((min([free[device] for device in devices]) for devices in runner.sets(degree)), default=None)

    def _freest(self, item: Item) -> DeviceSet:
        """Return the set of devices whose fullest one has the most free."""
        if not isinstance(item, str):
            return (item[1],)
        runner, free, degree = self.fleet.runners[item], self.fleet.ledger.free_now(item), self.pool.degree
        if runner.legal_sets is None:
            return tuple(sorted(sorted(range(len(free)), key=free.__getitem__, reverse=True)[:degree]))
        return max(runner.sets(degree), key=lambda devices: min([free[device] for device in devices]))


def runner_of(item: Item) -> str:
    """Return the id of an item's runner."""
    return item if isinstance(item, str) else item[0]


def _allows_alone(runner: Runner, device: int) -> bool:
    """Return whether a slot can use a device without others."""
    return runner.legal_sets is None or (device,) in runner.legal_sets
