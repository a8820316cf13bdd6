"""All runners and slots, the ledger of their memory, and indexes of free devices. Only `SlotFleet` changes slots."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, sub
from typing import NamedTuple

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.constraints import Constraint
from iris_ray.slots.core.bounds import Ranking
from iris_ray.slots.core.devices import DeviceKey, DeviceKind, DeviceSet, Runner
from iris_ray.slots.core.instructions import DeviceChangeLog
from iris_ray.slots.core.models import ModelSpec, SlotIdentity
from iris_ray.slots.core.slot import USES_MEMORY, Allocation, Slot, SlotState

ALARM_SHARE = 0.05
"""The part of a device's memory by which observed use may exceed the booked bytes before it is worth an alarm."""


@dataclass(slots=True)
class _Books:
    memory: tuple[int, ...]
    promised: list[int] = field(init=False)
    used: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.promised, self.used = [0] * len(self.memory), [0] * len(self.memory)


@dataclass(slots=True)
class Ledger:
    """The books of all runners: which bytes of each device are promised, and which are in use.

    *Promised* are the bytes of slots that are to stay, planned ones included. *In use* are the bytes of slots whose
    process may exist. A device can be promised to a slot before its predecessor is gone, but no process starts before
    the bytes are really free. Neither sum ever exceeds the device. Observed use of memory only raises `alarms`.
    """

    _books: dict[str, _Books] = field(default_factory=dict)

    def open(self, runner: Runner) -> None:
        """Open empty books for a new runner."""
        self._books[runner.runner_id] = _Books(tuple(device.memory for device in runner.devices))

    def close(self, runner_id: str) -> None:
        """Forget a runner that is gone, and its books."""
        del self._books[runner_id]

    def promise(self, place: Allocation, sign: int = 1) -> None:
        """Promise a place to a slot, or with sign -1 take the promise back."""
        books = self._books[place.runner_id]
        _add(place, books.promised, books.memory, sign)

    def use(self, place: Allocation, sign: int = 1) -> None:
        """Book a place for a process that is about to start, or with sign -1 free it: the process is gone."""
        books = self._books[place.runner_id]
        _add(place, books.used, books.memory, sign)

    def can_start(self, place: Allocation) -> bool:
        """Return whether the place's bytes are free of all processes that may exist."""
        books = self._books[place.runner_id]
        for device, need in place.needs:  # noqa: SIM110 — faster than all() with a generator
            if books.used[device] + need > books.memory[device]:
                return False
        return True

    def unpromised(self, runner_id: str) -> list[int]:
        """Return the bytes of each device that are promised to no slot. Slots that end may still use some of them."""
        books = self._books[runner_id]
        return [memory - promised for memory, promised in zip(books.memory, books.promised, strict=True)]

    def unpromised_on(self, runner_id: str, device: int) -> int:
        """Return the bytes of one device that are promised to no slot."""
        books = self._books[runner_id]
        return books.memory[device] - books.promised[device]

    def free_now_on(self, runner_id: str, device: int) -> int:
        """Return the bytes of one device that are neither promised nor in use."""
        books = self._books[runner_id]
        return books.memory[device] - max(books.promised[device], books.used[device])

    def free_now(self, runner_id: str) -> list[int]:
        """Return the bytes of each device that are neither promised nor in use."""
        books = self._books[runner_id]
        return list(map(sub, books.memory, map(max, books.promised, books.used)))

    def used(self, runner_id: str) -> Sequence[int]:
        """Return the bytes of each device that processes may use."""
        return tuple(self._books[runner_id].used)

    def alarms(self, runner_id: str, observed: Mapping[int, int]) -> Iterator[str]:
        """Yield an alarm for each device whose observed use clearly exceeds the booked bytes."""
        books = self._books[runner_id]
        for device, seen in sorted(observed.items()):
            booked = books.used[device]
            if seen > booked + ALARM_SHARE * books.memory[device]:
                yield f"runner {runner_id}: device {device} uses {seen:,} bytes, but slots have only {booked:,} booked"


def _add(place: Allocation, sums: list[int], memory: Sequence[int], sign: int) -> None:
    for device, need in place.needs:
        total = sums[device] + sign * need
        if not 0 <= total <= memory[device]:
            where = f"device {device} of runner {place.runner_id}"
            raise IllegalTransitionError(f"{total:,} of {memory[device]:,} bytes of {where} can't be booked")
        sums[device] = total


# -- fleet -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SlotFleet:
    """Runners, slots and the ledger.

    Attributes:
        runners: by id.
        slots: by id; without those that are gone.
        closed: ids of runners that take no new slots.
        prices: the price of evicting one slot, by identity: milliseconds of loading × demand; 0 if missing.
        expected: runners that come and go, including those that are there.
        changes: the devices on which something has changed.
        changed: identities of slots that have become ready, ended, or have a seat again; the reader clears it.
    """

    runners: dict[str, Runner] = field(default_factory=dict)
    expected: tuple[Runner, ...] = ()
    slots: dict[str, Slot] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    prices: dict[SlotIdentity, int] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    changes: DeviceChangeLog = field(default_factory=DeviceChangeLog)
    changed: dict[SlotIdentity, None] = field(default_factory=dict)
    _requests_on: Counter[str] = field(default_factory=Counter)
    _on_device: dict[DeviceKey, dict[str, Slot]] = field(default_factory=dict)
    _of_identity: dict[SlotIdentity, dict[str, Slot]] = field(default_factory=dict)
    _in_state: dict[SlotState, dict[str, Slot]] = field(default_factory=lambda: {state: {} for state in SlotState})

    # -- looking ----------------------------------------------------------------------------------

    def devices(self) -> Collection[DeviceKey]:
        """Return the keys of all devices."""
        return self._on_device.keys()

    def on_device(self, key: DeviceKey) -> Iterable[Slot]:
        """Return the slots on a device."""
        return self._on_device[key].values()

    def on_runner(self, runner_id: str) -> list[Slot]:
        """Return the slots of a runner, oldest first."""
        keys = [(runner_id, device) for device in range(len(self.runners[runner_id].devices))]
        return list({slot.slot_id: slot for key in keys for slot in self._on_device[key].values()}.values())

    def requests_on(self, runner_id: str) -> int:
        """Return how many requests run on a runner."""
        return self._requests_on[runner_id]

    def of_identity(self, identity: SlotIdentity) -> list[Slot]:
        """Return the slots of this identity, oldest first."""
        return list(self._of_identity.get(identity, {}).values())

    def in_state(self, state: SlotState) -> list[Slot]:
        """Return the slots in a state, in the order in which they entered it."""
        return list(self._in_state[state].values())

    # -- runners ----------------------------------------------------------------------------------

    def add_runner(self, runner: Runner) -> None:
        """Add a runner without slots.

        Raises:
            IllegalTransitionError: there is a runner of that id.
        """
        if runner.runner_id in self.runners:
            raise IllegalTransitionError(f"there is a runner {runner.runner_id} already")
        self.runners[runner.runner_id] = runner
        self.ledger.open(runner)
        for device in range(len(runner.devices)):
            self._on_device[runner.runner_id, device] = {}
        self._touch_runner(runner.runner_id)

    def expect(self, runners: Iterable[Runner]) -> None:
        """Set which runners may come."""
        self.expected = tuple(runners)
        self.changes.runner_changes += 1

    def remove_runner(self, runner_id: str) -> list[Slot]:
        """Remove a runner that is gone, and return its slots, which are gone with it."""
        lost = self.on_runner(runner_id)
        for slot in lost:
            self.end(slot.slot_id)
        self._touch_runner(runner_id)
        for device in range(len(self.runners.pop(runner_id).devices)):
            del self._on_device[runner_id, device]
        del self._requests_on[runner_id]
        self.ledger.close(runner_id)
        self.closed.discard(runner_id)
        return lost

    def set_open(self, runner_id: str, is_open: bool) -> None:
        """Set whether a runner takes new slots."""
        (self.closed.discard if is_open else self.closed.add)(runner_id)
        self._touch_runner(runner_id)

    # -- slots ------------------------------------------------------------------------------------

    def plan(self, slot_id: str, spec: ModelSpec, place: Allocation, now: float) -> Slot:
        """Promise a place to a new slot. `start` starts it when no process uses the place any more."""
        slot = Slot(slot_id, spec, place, now, last_activity=now)
        self.adopt(slot)
        return slot

    def adopt(self, slot: Slot) -> None:
        """Take over a slot in its present state, and book its bytes."""
        if slot.wanted:
            self.ledger.promise(slot.allocation)
        if slot.state in USES_MEMORY:
            self.ledger.use(slot.allocation)
        self.slots[slot.slot_id] = self._in_state[slot.state][slot.slot_id] = slot
        for key in slot.allocation.keys:
            self._on_device[key][slot.slot_id] = slot
        self._of_identity.setdefault(slot.identity, {})[slot.slot_id] = slot
        if slot.active:
            self._requests_on[slot.allocation.runner_id] += len(slot.active)
        self.changes.add(slot.allocation.keys)

    def start(self, slot_id: str, now: float) -> bool:
        """Start a planned slot if its place is really free; return whether it is."""
        slot = self.slots[slot_id]
        if not self.ledger.can_start(slot.allocation):
            return False
        self._move(slot, SlotState.STARTING)
        self.ledger.use(slot.allocation)
        slot.started_at = now
        self.changes.add(slot.allocation.keys)
        return True

    def set_ready(self, slot_id: str, now: float) -> None:
        """Note that a slot can serve."""
        slot = self.slots[slot_id]
        self._move(slot, SlotState.READY)
        slot.ready_at = slot.last_activity = now
        self._note(slot)

    def retire(self, slot_id: str, state: SlotState) -> None:
        """Have a slot end: DRAINING or FAILED. Its place is free for promises, and in use until `end`.

        A slot that is only planned has no process: it is gone at once.
        """
        slot = self.slots[slot_id]
        if slot.state is SlotState.PLANNED:
            self.end(slot_id)
            return
        self._move(slot, state)
        self.ledger.promise(slot.allocation, -1)
        self._note(slot)

    def end(self, slot_id: str) -> Slot:
        """Free a slot's bytes: its process is gone, or was never created."""
        slot = self.slots.pop(slot_id)
        if slot.wanted:
            self.ledger.promise(slot.allocation, -1)
        if slot.state in USES_MEMORY:
            self.ledger.use(slot.allocation, -1)
        del self._in_state[slot.state][slot_id]
        slot.move_to(SlotState.GONE)
        for key in slot.allocation.keys:
            del self._on_device[key][slot_id]
        if slot.active:
            self._requests_on[slot.allocation.runner_id] -= len(slot.active)
        of_identity = self._of_identity[slot.identity]
        del of_identity[slot_id]
        if not of_identity:
            del self._of_identity[slot.identity]
        self._note(slot)
        return slot

    def begin_request(self, slot_id: str, request_id: str, now: float) -> None:
        """Give a request to a slot.

        Raises:
            IllegalTransitionError: the slot has no seat free.
        """
        slot = self.slots[slot_id]
        if slot.free_seats < 1:
            raise IllegalTransitionError(f"slot {slot_id} has no seat for request {request_id}")
        slot.active.add(request_id)
        self._requests_on[slot.allocation.runner_id] += 1
        slot.last_activity = now
        self.changes.add(slot.allocation.keys)

    def end_request(self, slot_id: str, request_id: str, now: float) -> None:
        """Note that a request no longer runs on a slot."""
        slot = self.slots[slot_id]
        self.remove_request(slot, request_id)
        slot.last_activity = now
        self._note(slot)

    def remove_request(self, slot: Slot, request_id: str) -> None:
        """Remove a request from a slot, which may be gone already."""
        slot.active.remove(request_id)
        if slot.slot_id in self.slots:
            self._requests_on[slot.allocation.runner_id] -= 1

    def limit(self, slot: Slot, most_together: int) -> None:
        """Set how many requests a slot may serve at a time for now."""
        slot.most_together = most_together

    def claim(self, slot_id: str, claimed: bool) -> None:
        """Set whether a slot is kept for a target of replicas."""
        slot = self.slots[slot_id]
        if slot.claimed is not claimed:
            slot.claimed = claimed
            self.changes.add(slot.allocation.keys)

    def set_prices(self, prices: Mapping[SlotIdentity, int]) -> None:
        """Set the prices of evicting one slot of these identities."""
        for identity, price in prices.items():
            if self.prices.get(identity, 0) != price:
                self.prices[identity] = price
                for slot in self.of_identity(identity):
                    self.changes.add(slot.allocation.keys)

    def _note(self, slot: Slot) -> None:
        self.changes.add(slot.allocation.keys)
        self.changed[slot.identity] = None

    def _move(self, slot: Slot, state: SlotState) -> None:
        del self._in_state[slot.state][slot.slot_id]
        slot.move_to(state)
        self._in_state[state][slot.slot_id] = slot

    def _touch_runner(self, runner_id: str) -> None:
        self.changes.runner_changes += 1
        self.changes.add([(runner_id, device) for device in range(len(self.runners[runner_id].devices))])

    def check(self) -> None:
        """Assert that no device is over-committed, and that the books agree with the slots."""
        for runner_id, runner in self.runners.items():
            promised, used = [0] * len(runner.devices), [0] * len(runner.devices)
            for slot in self.on_runner(runner_id):
                for device, need in slot.allocation.needs:
                    promised[device] += need if slot.wanted else 0
                    used[device] += need if slot.state in USES_MEMORY else 0
            for number, hardware in enumerate(runner.devices):
                assert max(promised[number], used[number]) <= hardware.memory, f"{runner_id}: {number} over-committed"
            served = sum(len(slot.active) for slot in self.on_runner(runner_id))
            assert self.requests_on(runner_id) == served, f"{runner_id}: the count of its requests is wrong"
            left = [hardware.memory - amount for hardware, amount in zip(runner.devices, promised, strict=True)]
            assert self.ledger.unpromised(runner_id) == left, f"{runner_id}: the promises are not those of its slots"
            assert list(self.ledger.used(runner_id)) == used, f"{runner_id}: the books are not those of its slots"
        for slot in self.slots.values():
            most = min(slot.most_together, slot.spec.requests_at_a_time)
            assert len(slot.active) <= most, f"{slot.slot_id}: too many requests"
            assert not slot.active or slot.state is not SlotState.PLANNED, f"{slot.slot_id}: nothing can run on it"


# -- indexes -----------------------------------------------------------------------------------------------------------

RunnerOrDevice = str | DeviceKey
"""An item of an index: a single device if a slot needs one, else a runner."""


class DevicePool(NamedTuple):
    """Which runners count, and how many of their devices a slot has (``degree``)."""

    kind: DeviceKind
    constraints: tuple[Constraint, ...]
    degree: int


@dataclass(slots=True, eq=False)
class Index:
    """Ranks items by room, so that a decision does not look at every runner.

    An index reads the fleet's changes when it is asked, and only then. `eviction_indexes.py` ranks by price.
    """

    fleet: SlotFleet
    pool: DevicePool
    ranking: Ranking[RunnerOrDevice] = field(init=False)
    _read: int = field(init=False, default=0)
    _runner_changes: int = field(init=False, default=-1)
    _usable: dict[RunnerOrDevice, Runner | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ranking = Ranking()

    def changed_devices(self) -> set[DeviceKey]:
        """Return the devices that have changed since the last call."""
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
        """Drop devices whose runner is gone, or is back with fewer devices."""
        for key in changed.difference(self.fleet.devices()):
            self.ranking.put(key if self.pool.degree == 1 else key[0], None)
            changed.discard(key)

    def forget_runners(self) -> None:
        """Forget which runners are usable: one has come, gone, opened or closed."""
        self._usable.clear()

    def usable(self, item: RunnerOrDevice) -> Runner | None:
        """Return an item's runner if slots can go there now."""
        try:
            return self._usable[item]
        except KeyError:
            return self._usable.setdefault(item, self._look_at(item))

    def _look_at(self, item: RunnerOrDevice) -> Runner | None:
        if not isinstance(item, str):
            runner = self.usable(item[0])
            return runner if runner and _allows_alone(runner, item[1]) else None
        runner, pool = self.fleet.runners.get(item), self.pool
        if runner is None or item in self.fleet.closed:
            return None
        return runner if runner.kind is pool.kind and runner.satisfies(pool.constraints) else None


@dataclass(slots=True, eq=False)
class FreeIndex(Index):
    """Finds the devices with the most bytes that are free now and promised to no slot."""

    def find(self, need: int, avoid: frozenset[str]) -> tuple[Runner, DeviceSet] | None:
        """Return devices with at least ``need`` bytes free each: the set whose fullest device has the most free."""
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
        items: list[RunnerOrDevice] = (
            [(runner_id, device) for device in range(count)] if self.pool.degree == 1 else [runner_id]
        )
        room, item = max(((self._room(item) or 0, item) for item in items), key=itemgetter(0))
        return self._freest(item) if room >= need else None

    def _catch_up(self) -> None:
        changed = self.changed_devices()
        items: set[DeviceKey] | set[str] = changed if self.pool.degree == 1 else {key[0] for key in changed}
        for item in items:
            room = self._room(item)
            self.ranking.put(item, None if room is None else (-room, 0, 0.0))

    def _room(self, item: RunnerOrDevice) -> int | None:
        """Return the free bytes of the fullest device of the best set; None: there is no set."""
        runner = self.usable(item)
        if runner is None:
            return None
        if not isinstance(item, str):
            return self.fleet.ledger.free_now_on(*item)
        free, degree = self.fleet.ledger.free_now(item), self.pool.degree
        if runner.legal_sets is None:
            return sorted(free)[-degree] if len(free) >= degree else None
        return max((min([free[device] for device in devices]) for devices in runner.sets(degree)), default=None)

    def _freest(self, item: RunnerOrDevice) -> DeviceSet:
        """Return the set of devices whose fullest one has the most free."""
        if not isinstance(item, str):
            return (item[1],)
        runner, free, degree = self.fleet.runners[item], self.fleet.ledger.free_now(item), self.pool.degree
        if runner.legal_sets is None:
            return tuple(sorted(sorted(range(len(free)), key=free.__getitem__, reverse=True)[:degree]))
        return max(runner.sets(degree), key=lambda devices: min([free[device] for device in devices]))


def runner_of(item: RunnerOrDevice) -> str:
    """Return the id of the runner of an item."""
    return item if isinstance(item, str) else item[0]


def _allows_alone(runner: Runner, device: int) -> bool:
    return runner.legal_sets is None or (device,) in runner.legal_sets
