"""All runners and slots, and the books of their memory. Only `SlotFleet` changes slots."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice
from operator import sub

from iris_ray.errors import IllegalTransitionError
from iris_ray.slots.core.devices import DeviceKind, Runner
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.slot import USES_MEMORY, WANTED, Allocation, Slot, SlotState

ALARM_SHARE = 0.05
"""The part of a device's memory by which observed use may exceed the booked bytes before it is worth an alarm."""


@dataclass(slots=True)
class Books:
    """The bytes of each device of a runner: which are promised to slots, and which are in use.

    *Promised* are the bytes of slots that are to stay, planned ones included. *In use* are the bytes of slots whose
    process may exist. A device can be promised to a slot before its predecessor is gone, but no process starts before
    the bytes are really free. Neither sum ever exceeds the device. Observed use of memory only raises `alarms`.
    """

    runner: Runner
    memory: tuple[int, ...] = field(init=False)
    promised: list[int] = field(init=False)
    used: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = tuple([device.memory for device in self.runner.devices])
        self.promised, self.used = [0] * len(self.memory), [0] * len(self.memory)

    def promise(self, place: Allocation, sign: int = 1) -> None:
        """Promise a place to a slot, or with sign -1 take the promise back."""
        self._add(place, self.promised, sign)

    def use(self, place: Allocation, sign: int = 1) -> None:
        """Book a place for a process that is about to start, or with sign -1 free it: the process is gone."""
        self._add(place, self.used, sign)

    def can_start(self, place: Allocation) -> bool:
        """Return whether the place's bytes are free of all processes that may exist."""
        for device, need in place.needs:  # noqa: SIM110 — faster than all() with a generator
            if self.used[device] + need > self.memory[device]:
                return False
        return True

    def can_promise(self, place: Allocation) -> bool:
        """Return whether the place's bytes are promised to no slot."""
        return all(self.promised[device] + need <= self.memory[device] for device, need in place.needs)

    def unpromised(self) -> list[int]:
        """Return the bytes of each device that are promised to no slot. Slots that end may still use some of them."""
        return list(map(sub, self.memory, self.promised))

    def free_now(self) -> list[int]:
        """Return the bytes of each device that are neither promised nor in use."""
        return list(map(sub, self.memory, map(max, self.promised, self.used)))

    def alarms(self, observed: Mapping[int, int]) -> Iterator[str]:
        """Yield an alarm for each device whose observed use clearly exceeds the booked bytes."""
        for device, seen in sorted(observed.items()):
            if seen > (booked := self.used[device]) + ALARM_SHARE * self.memory[device]:
                use = f"device {device} uses {seen:,} bytes, but slots have only {booked:,} booked"
                yield f"runner {self.runner.runner_id}: {use}"

    def _add(self, place: Allocation, sums: list[int], sign: int) -> None:
        for device, need in place.needs:
            total, most = sums[device] + sign * need, self.memory[device]
            if not 0 <= total <= most:
                where = f"device {device} of runner {place.runner_id}"
                raise IllegalTransitionError(f"{total:,} of {most:,} bytes of {where} can't be booked")
            sums[device] = total


# -- fleet -------------------------------------------------------------------------------------------------------------

MOST_COMPARED = 8
"""How many slots with the fewest requests are compared when one is chosen for a request."""


@dataclass(slots=True, eq=False)
class ModelSlots:
    """The slots of one model. The cost of a request does not depend on their number.

    Attributes:
        all: the slots by id, oldest first.
        coming: planned and loading slots.
        ready: serving slots, by the number of their requests; the one that was used last comes last.
        wanted: how many are to stay.
        claimed: how many of these are claimed as replicas.
    """

    all: dict[str, Slot] = field(default_factory=dict)
    coming: dict[str, Slot] = field(default_factory=dict)
    ready: dict[int, dict[str, Slot]] = field(default_factory=dict)
    wanted: int = 0
    claimed: int = 0

    def add(self, slot: Slot) -> None:
        """Take in a slot in its present state."""
        self.wanted += slot.wanted
        self.claimed += slot.claimed and slot.wanted
        if slot.state is SlotState.READY:
            self.ready.setdefault(len(slot.active), {})[slot.slot_id] = slot
        elif slot.state in (SlotState.PLANNED, SlotState.STARTING):
            self.coming[slot.slot_id] = slot

    def drop(self, slot: Slot) -> None:
        """Undo `add`, before the slot changes."""
        self.wanted -= slot.wanted
        self.claimed -= slot.claimed and slot.wanted
        if slot.state is SlotState.READY:
            alike = self.ready[len(slot.active)]
            del alike[slot.slot_id]
            if not alike:
                del self.ready[len(slot.active)]
        else:
            self.coming.pop(slot.slot_id, None)

    def best_seat(self, most: int, requests_on: Mapping[str, int]) -> Slot | None:
        """Return the slot to which a request should go, or None if no slot has a seat.

        It is the slot with the fewest requests. Of those that were used last, so that others become stale, it is one
        on the runner with the fewest requests.

        Args:
            most: how many requests may run on the slot, including this one.
            requests_on: how many requests run on each runner.
        """
        for number in sorted(self.ready):
            if number >= most:
                break
            free = (slot for slot in reversed(self.ready[number].values()) if slot.seats_for(most) > 0)
            first = list(islice(free, MOST_COMPARED))
            if first:
                return min(first, key=lambda slot: (requests_on[slot.allocation.runner_id], -slot.last_activity))
        return None

    def has_seat(self, seats: int) -> bool:
        """Return whether a slot serves fewer requests than it has seats, though those there may have to run alone."""
        return any(number < seats for number in self.ready)


_NO_SLOTS = ModelSlots()


@dataclass(slots=True, eq=False)
class FleetChanges:
    """The changes since the last look, in order. The reader clears them.

    Attributes:
        runners: ids of runners that have come, gone, opened or closed, or whose slots or promises have changed.
        used: slots on which requests have begun or ended, by id.
        idle: the slots of ``used``, for a second reader: some of them may be idle now.
    """

    runners: dict[str, None] = field(default_factory=dict)
    used: dict[str, Slot] = field(default_factory=dict)
    idle: dict[str, Slot] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SlotFleet:
    """Runners, slots and the books of the runners' memory.

    Attributes:
        runners: by id.
        slots: by id. A slot that is gone is left out.
        closed: ids of runners that take no new slots.
        prices: the price of evicting one slot, by model: milliseconds of loading × demand; 0 if missing.
        books: the memory of each runner.
        expected: the runners that come and go, present ones included.
        problems: why an expected runner does not come, by the kind of its devices.
        runner_changes: how often a runner has come, gone, opened or closed.
        requests_on: how many requests run on each runner.
        changed: models of which a slot has become ready, has ended or has a seat again; the reader clears it.
        to_look: slots that may have to start, to end, or to stay after all; the reader clears it.
        watchers: where every change is noted.
    """

    runners: dict[str, Runner] = field(default_factory=dict)
    expected: tuple[Runner, ...] = ()
    problems: Mapping[DeviceKind, str] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    prices: dict[str, int] = field(default_factory=dict)
    books: dict[str, Books] = field(default_factory=dict)
    runner_changes: int = 0
    requests_on: Counter[str] = field(default_factory=Counter)
    changed: dict[str, None] = field(default_factory=dict)
    to_look: dict[str, None] = field(default_factory=dict)
    watchers: list["FleetChanges"] = field(default_factory=list)
    _on_runner: dict[str, dict[str, Slot]] = field(default_factory=dict)
    _of_model: dict[str, ModelSlots] = field(default_factory=dict)
    _alone: int = 0
    """How many slots are of models that are to be alone."""

    # -- looking ----------------------------------------------------------------------------------

    def on_runner(self, runner_id: str) -> list[Slot]:
        """Return the slots of a runner, oldest first."""
        return list(self._on_runner[runner_id].values())

    def of_model(self, name: str) -> ModelSlots:
        """Return the slots of a model. Only look at them."""
        return self._of_model.get(name, _NO_SLOTS)

    def slots_of(self, name: str) -> list[Slot]:
        """Return the slots of a model, oldest first."""
        return list(self.of_model(name).all.values())

    def has_rules_for(self, spec: ModelSpec) -> bool:
        """Return whether there may be slots anywhere beside which there may be none of a model."""
        return bool(spec.group or spec.alone or self._alone)

    def excluded(self, runner_id: str, spec: ModelSpec) -> list[Slot]:
        """Return the slots of a runner beside which there may be none of a model: see `ModelSpec.excludes`."""
        if not self.has_rules_for(spec):
            return []
        return [slot for slot in self._on_runner[runner_id].values() if spec.excludes(slot.spec)]

    # -- runners ----------------------------------------------------------------------------------

    def add_runner(self, runner: Runner) -> None:
        """Add a runner without slots.

        Raises:
            IllegalTransitionError: there is a runner of that id.
        """
        if runner.runner_id in self.runners:
            raise IllegalTransitionError(f"there is a runner {runner.runner_id} already")
        self.runners[runner.runner_id] = runner
        self.books[runner.runner_id] = Books(runner)
        self._on_runner[runner.runner_id] = {}
        self._touch_runner(runner.runner_id)

    def expect(self, runners: Iterable[Runner], problems: Mapping[DeviceKind, str]) -> None:
        """Set which runners may come, and why others do not."""
        self.expected, self.problems = tuple(runners), problems
        self.runner_changes += 1

    def remove_runner(self, runner_id: str) -> list[Slot]:
        """Remove a runner that is gone, and return its slots, which are gone with it."""
        lost = self.on_runner(runner_id)
        for slot in lost:
            self.end(slot.slot_id)
        del self.runners[runner_id], self.books[runner_id], self._on_runner[runner_id], self.requests_on[runner_id]
        self.closed.discard(runner_id)
        self._touch_runner(runner_id)
        return lost

    def set_open(self, runner_id: str, is_open: bool) -> None:
        """Set whether a runner takes new slots."""
        (self.closed.discard if is_open else self.closed.add)(runner_id)
        self._touch_runner(runner_id)

    # -- slots ------------------------------------------------------------------------------------

    def plan(self, slot_id: str, spec: ModelSpec, place: Allocation, now: float, asked_at: float = math.inf) -> Slot:
        """Promise a place to a new slot. `start` starts it when no process uses the place any more."""
        slot = Slot(slot_id, spec, place, now, last_activity=now, asked_at=asked_at)
        self.adopt(slot)
        return slot

    def adopt(self, slot: Slot) -> None:
        """Take over a slot in its present state, and book its bytes."""
        if slot.wanted:
            self.books[slot.allocation.runner_id].promise(slot.allocation)
        if slot.state in USES_MEMORY:
            self.books[slot.allocation.runner_id].use(slot.allocation)
        self.slots[slot.slot_id] = self._on_runner[slot.allocation.runner_id][slot.slot_id] = slot
        of_model = self._of_model.setdefault(slot.model, ModelSlots())
        of_model.all[slot.slot_id] = slot
        of_model.add(slot)
        self._alone += slot.spec.alone
        self.requests_on[slot.allocation.runner_id] += len(slot.active)
        self.to_look[slot.slot_id] = None
        self._touch(slot.allocation.runner_id)

    def start(self, slot_id: str, now: float) -> bool:
        """Start a planned slot if its place is really free, and no older plan waits for it; return whether it is."""
        slot, place = self.slots[slot_id], self.slots[slot_id].allocation
        books, excluded = self.books[place.runner_id], self.excluded(place.runner_id, slot.spec)
        if not books.can_start(place) or excluded or self._delays_others(slot):
            return False
        self._move(slot, SlotState.STARTING)
        books.use(place)
        slot.started_at = now
        return True

    def _delays_others(self, slot: Slot) -> bool:
        """Return whether an older plan would wait for longer if a planned slot started now.

        The older one waits for what goes already. It must not wait for what has begun to go since, to make room for
        younger ones that start before it: they could take turns for ever.
        """
        beside = [other for other in self.on_runner(slot.allocation.runner_id) if other is not slot]
        planned = [other for other in beside if other.state is SlotState.PLANNED]
        older = [other for other in planned if (other.created_at, other.asked_at) < (slot.created_at, slot.asked_at)]
        memory = self.runners[slot.allocation.runner_id].devices
        for device, need in slot.allocation.needs:
            since = min([other.created_at for other in older if other.allocation.on(device)], default=math.inf)
            for other in beside:
                stays = other.wanted and other.state is not SlotState.PLANNED
                if stays or other in older or (not other.wanted and other.going_since > since):
                    need += other.allocation.on(device)
            if since < math.inf and need > memory[device].memory:
                return True
        return False

    def set_ready(self, slot_id: str, now: float) -> None:
        """Note that a slot can serve."""
        slot = self.slots[slot_id]
        slot.ready_at = slot.last_activity = now
        self._move(slot, SlotState.READY, slot.leaving)
        self.changed[slot.model] = None

    def leave(self, slot_id: str, now: float) -> None:
        """Free a slot's place for promises, though it goes on until `retire`."""
        slot = self.slots[slot_id]
        slot.going_since = now
        self._move(slot, slot.state, leaving=True)

    def stay(self, slot_id: str) -> None:
        """Let a slot stay that was to leave or to end, and promise its place to it again. It has seats if it is ready.

        Raises:
            IllegalTransitionError: the place is promised to another slot.
        """
        slot = self.slots[slot_id]
        slot.stuck = False
        self._move(slot, SlotState.READY if slot.state is SlotState.DRAINING else slot.state)
        self.changed[slot.model] = None

    def retire(self, slot_id: str, state: SlotState, now: float = -math.inf) -> None:
        """Have a slot end: DRAINING or FAILED. Its place is free for promises, and in use until `end`.

        A slot that is only planned has no process: it is gone at once.
        """
        slot = self.slots[slot_id]
        if slot.state is SlotState.PLANNED:
            self.end(slot_id)
        else:
            slot.going_since = now if slot.wanted else slot.going_since
            self._move(slot, state)
            self.changed[slot.model] = None

    def end(self, slot_id: str) -> Slot:
        """Free a slot's bytes: its process is gone, or was never created."""
        slot, runner_id = self.slots[slot_id], self.slots[slot_id].allocation.runner_id
        if slot.state in USES_MEMORY:
            self.books[slot.allocation.runner_id].use(slot.allocation, -1)
        del self.slots[slot_id], self._on_runner[runner_id][slot_id]
        self._move(slot, SlotState.GONE)
        self._alone -= slot.spec.alone
        self.requests_on[runner_id] -= len(slot.active)
        of_model = self._of_model[slot.model]
        del of_model.all[slot_id]
        if not of_model.all:
            del self._of_model[slot.model]
        self.changed[slot.model] = None
        return slot

    def begin_request(self, slot_id: str, request_id: str, now: float) -> None:
        """Give a request to a slot.

        Raises:
            IllegalTransitionError: the slot has no seat free.
        """
        slot = self.slots[slot_id]
        if slot.free_seats < 1:
            raise IllegalTransitionError(f"slot {slot_id} has no seat for request {request_id}")
        of_model = self._of_model[slot.model]
        of_model.drop(slot)
        slot.active[request_id] = slot.last_activity = now
        of_model.add(slot)
        self.requests_on[slot.allocation.runner_id] += 1
        self._note_use(slot)

    def end_request(self, slot_id: str, request_id: str, now: float) -> None:
        """Note that a request no longer runs on a slot."""
        slot = self.slots[slot_id]
        slot.last_activity = now
        self.remove_request(slot, request_id)
        self.changed[slot.model] = None

    def remove_request(self, slot: Slot, request_id: str) -> None:
        """Remove a request from a slot, which may be gone already."""
        if slot.slot_id not in self.slots:
            del slot.active[request_id]
            return
        of_model = self._of_model[slot.model]
        of_model.drop(slot)
        del slot.active[request_id]
        of_model.add(slot)
        self.requests_on[slot.allocation.runner_id] -= 1
        if slot.leaving or slot.ends:
            self.to_look[slot.slot_id] = None
        self._note_use(slot)

    def limit(self, slot: Slot, most_together: int) -> None:
        """Set how many requests a slot may serve at a time for now."""
        slot.most_together = most_together

    def claim(self, slot_id: str, claimed: bool) -> None:
        """Set whether a slot is kept for a target of replicas."""
        slot = self.slots[slot_id]
        if slot.claimed is not claimed:
            of_model = self._of_model[slot.model]
            of_model.drop(slot)
            slot.claimed = claimed
            of_model.add(slot)
            self._touch(slot.allocation.runner_id)

    def give_up(self, slot_id: str) -> None:
        """Note that nobody counts on the end of a slot any more."""
        self.slots[slot_id].stuck = True
        self._touch(self.slots[slot_id].allocation.runner_id)

    def set_prices(self, prices: Mapping[str, int]) -> None:
        """Set the prices of evicting one slot of these models."""
        for name, price in prices.items():
            if self.prices.get(name, 0) != price:
                self.prices[name] = price
                for slot in self.of_model(name).all.values():
                    self._touch(slot.allocation.runner_id)

    def _move(self, slot: Slot, state: SlotState, leaving: bool = False) -> None:
        """Change a slot's state, and book or free its promise. Slots beside it may start, or stay, after that."""
        of_model, wanted = self._of_model[slot.model], slot.wanted
        of_model.drop(slot)
        if state is not slot.state:
            slot.move_to(state)
        slot.leaving = leaving
        of_model.add(slot)
        if slot.wanted is not wanted:
            self.books[slot.allocation.runner_id].promise(slot.allocation, 1 if slot.wanted else -1)
        runner_id = slot.allocation.runner_id
        for other in self._on_runner[runner_id].values():
            if other.state is not SlotState.READY or other.leaving:
                self.to_look[other.slot_id] = None
        self._touch(runner_id)

    def _touch(self, runner_id: str) -> None:
        for watcher in self.watchers:
            watcher.runners[runner_id] = None

    def _note_use(self, slot: Slot) -> None:
        for watcher in self.watchers:
            watcher.used[slot.slot_id] = slot
            watcher.idle[slot.slot_id] = slot

    def _touch_runner(self, runner_id: str) -> None:
        self.runner_changes += 1
        self._touch(runner_id)

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
            assert self.requests_on[runner_id] == served, f"{runner_id}: the count of its requests is wrong"
            for state in (USES_MEMORY, WANTED):
                together = [slot for slot in self.on_runner(runner_id) if slot.state in state]
                together = [slot for slot in together if slot.wanted or state is USES_MEMORY]
                for one, other in combinations(together, 2):
                    assert not one.spec.excludes(other.spec), f"{runner_id}: {one.model} together with {other.model}"
            booked = self.books[runner_id].promised, self.books[runner_id].used
            assert booked == (promised, used), f"{runner_id}: the books are not those of its slots"
        for slot in self.slots.values():
            most = min(slot.most_together, slot.spec.requests_at_a_time)
            assert len(slot.active) <= most, f"{slot.slot_id}: too many requests"
            assert not slot.active or slot.state is not SlotState.PLANNED, f"{slot.slot_id}: nothing can run on it"
        for name, of_model in self._of_model.items():
            anew = ModelSlots(of_model.all)
            for slot in of_model.all.values():
                anew.add(slot)
            counted = [(each.coming, each.ready, each.wanted, each.claimed) for each in (anew, of_model)]
            assert counted[0] == counted[1], f"{name}: its slots are not counted well"
