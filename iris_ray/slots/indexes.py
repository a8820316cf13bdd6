"""Where slots fit, kept up to date as devices change, so that a decision does not look at every runner.

The items of an index are single devices if a slot needs one, else runners. Indexes look again at what has changed when
they are asked, and only then. `eviction_indexes.py` has those that know what room costs.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from iris_ray.model.constraints import Constraint
from iris_ray.slots.devices import DeviceKey, DeviceKind, DeviceSet, Runner
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.ranking import Key, Ranking

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
    _usable: dict[str, Runner | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ranking = Ranking()

    def changed_devices(self) -> set[DeviceKey]:
        """Return the devices to look at again, once."""
        changes, there = self.fleet.changes, self.fleet.devices()
        changed = changes.since(self._read)
        self._read = changes.end
        if changed is None:
            self.ranking.clear()
            changed = set(there)
        if self._runner_changes != changes.runner_changes:
            self._runner_changes = changes.runner_changes
            self.forget_runners()
            for key in [key for key in changed if key not in there]:  # its runner is gone, or is there again with fewer
                self.ranking.drop(key if self.pool.degree == 1 else key[0])
                changed.discard(key)
        return changed

    def forget_runners(self) -> None:
        """Forget what is known of runners: one has come, gone, opened or closed."""
        self._usable.clear()

    def put(self, item: Item, bound: Key | None) -> None:
        """Rank an item, or drop it."""
        if bound is None:
            self.ranking.drop(item)
        else:
            self.ranking.put(item, bound)

    def usable(self, runner_id: str) -> Runner | None:
        """Return the runner if it can take slots now."""
        if runner_id not in self._usable:
            self._usable[runner_id] = self._look_at(runner_id)
        return self._usable[runner_id]

    def _look_at(self, runner_id: str) -> Runner | None:
        runner, pool = self.fleet.runners.get(runner_id), self.pool
        if runner is None or runner_id in self.fleet.closed:
            return None
        return runner if runner.kind is pool.kind and runner.satisfies(pool.constraints) else None


@dataclass(slots=True, eq=False)
class FreeIndex(Index):
    """Finds the devices with the most bytes free now, which nobody was promised. One serves all models of a pool."""

    def find(self, need: int, avoid: frozenset[str]) -> tuple[Runner, DeviceSet] | None:
        """Return free devices with at least ``need`` bytes each: those whose fullest one has the most free."""
        changed = self.changed_devices()
        items: set[DeviceKey] | set[str] = changed if self.pool.degree == 1 else {key[0] for key in changed}
        for item in items:
            room = self._most_room(item)
            self.put(item, None if room is None else (-room[0], 0, 0.0))
        found = self.ranking.best(lambda item, bound: None if runner_of(item) in avoid else bound)
        if found is None or -found[0][0] < need:
            return None
        room = self._most_room(found[1])
        assert room is not None, f"{found[1]} has changed meanwhile"
        return self.fleet.runners[runner_of(found[1])], room[1]

    def _most_room(self, item: Item) -> tuple[int, DeviceSet] | None:
        runner = self.usable(runner_of(item))
        if runner is None:
            return None
        if not isinstance(item, str):
            return (self.fleet.ledger.free_now_on(*item), (item[1],)) if allows_alone(runner, item[1]) else None
        free, degree = self.fleet.ledger.free_now(runner.runner_id), self.pool.degree
        if runner.legal_sets is None:
            freest = sorted(range(len(free)), key=free.__getitem__, reverse=True)[:degree]
            return (free[freest[-1]], tuple(sorted(freest))) if len(freest) == degree else None
        rooms = [(min(free[device] for device in devices), devices) for devices in runner.sets(degree)]
        return max(rooms, key=lambda room: room[0], default=None)


def runner_of(item: Item) -> str:
    """Return the id of an item's runner."""
    return item if isinstance(item, str) else item[0]


def allows_alone(runner: Runner, device: int) -> bool:
    """Return whether a slot can use a device without others."""
    return runner.legal_sets is None or (device,) in runner.legal_sets
