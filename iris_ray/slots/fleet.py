"""All runners and slots. Only the methods of `SlotFleet` change them, and the ledger with them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from iris_ray.errors import IllegalTransitionError
from iris_ray.slots.changes import ChangeLog
from iris_ray.slots.devices import DeviceKey, Runner
from iris_ray.slots.ledger import Ledger
from iris_ray.slots.models import ModelSpec, SlotIdentity
from iris_ray.slots.slot import USES_MEMORY, Allocation, Slot, SlotState


@dataclass(slots=True, eq=False)
class SlotFleet:
    """Runners, slots and what is booked.

    Attributes:
        runners: by id.
        slots: by id; those that are gone are not here.
        closed: ids of runners that take no new slots.
        prices: what it costs to evict one slot, by identity: milliseconds of loading that will be paid again, most
            likely. 0 if it isn't here.
        ledger: what is booked.
        expected: runners that come and go; those that are there included.
        changes: on which devices something has changed.
        changed: identities of slots that have become ready, ended, or have a seat again, until somebody looks at them.
    """

    runners: dict[str, Runner] = field(default_factory=dict)
    expected: tuple[Runner, ...] = ()
    slots: dict[str, Slot] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    prices: dict[SlotIdentity, int] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    changes: ChangeLog = field(default_factory=ChangeLog)
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
        """Return the slots that serve this, oldest first."""
        return list(self._of_identity.get(identity, {}).values())

    def in_state(self, state: SlotState) -> list[Slot]:
        """Return the slots in a state, those that have been in it for longest first."""
        return list(self._in_state[state].values())

    # -- runners ----------------------------------------------------------------------------------

    def add_runner(self, runner: Runner) -> None:
        """Add a runner without slots.

        Raises:
            IllegalTransitionError: there is one of that id.
        """
        if runner.runner_id in self.runners:
            raise IllegalTransitionError(f"there is a runner {runner.runner_id} already")
        self.runners[runner.runner_id] = runner
        self.ledger.open(runner)
        for device in range(len(runner.devices)):
            self._on_device[runner.runner_id, device] = {}
        self._touch_runner(runner.runner_id)

    def expect(self, runners: Iterable[Runner]) -> None:
        """Know which runners may come."""
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
        """Say whether a runner takes new slots."""
        (self.closed.discard if is_open else self.closed.add)(runner_id)
        self._touch_runner(runner_id)

    # -- slots ------------------------------------------------------------------------------------

    def plan(self, slot_id: str, spec: ModelSpec, place: Allocation, now: float) -> Slot:
        """Promise a place to a new slot. It starts once `start` finds that nobody uses the place any more."""
        slot = Slot(slot_id, spec, place, now, last_activity=now)
        self.adopt(slot)
        return slot

    def adopt(self, slot: Slot) -> None:
        """Take over a slot as it is, and book what it holds."""
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

        Nothing was created for a slot that is only planned: it is gone at once.
        """
        slot = self.slots[slot_id]
        if slot.state is SlotState.PLANNED:
            self.end(slot_id)
            return
        self._move(slot, state)
        self.ledger.promise(slot.allocation, -1)
        self._note(slot)

    def end(self, slot_id: str) -> Slot:
        """Free what a slot held: its process is gone, or never was."""
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
        """Note that a request runs on a slot no more."""
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
        """Say how many requests a slot may serve at a time for now."""
        slot.most_together = most_together

    def claim(self, slot_id: str, claimed: bool) -> None:
        """Say whether a slot is kept for a target of replicas."""
        slot = self.slots[slot_id]
        if slot.claimed is not claimed:
            slot.claimed = claimed
            self.changes.add(slot.allocation.keys)

    def set_prices(self, prices: Mapping[SlotIdentity, int]) -> None:
        """Set what it costs to evict one slot of these identities, in milliseconds of loading."""
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
        """Assert what must hold after every step: no device is over-committed, and the books agree with the slots."""
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
