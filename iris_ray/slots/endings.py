"""How slots end: one that is told to finishes what it serves, is cut off if that takes long, and is deleted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from iris_ray.slots.active_requests import ActiveRequests
from iris_ray.slots.defects import Defects
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.instructions import DeleteSlot, Instruction
from iris_ray.slots.models import SlotIdentity
from iris_ray.slots.served_models import ServedModel
from iris_ray.slots.serving_policy import CONVERGE_S, ServingPolicy
from iris_ray.slots.sessions import Sessions
from iris_ray.slots.slot import Slot, SlotState


@dataclass(frozen=True, slots=True)
class Ending:
    """A slot that is about to end.

    Attributes:
        since: when it was told to.
        reason: why.
        cuts_off: whether it ends after `ServingPolicy.drain_s` although requests run there.
    """

    since: float
    reason: str
    cuts_off: bool


@dataclass(slots=True, eq=False)
class Endings:
    """The slots that end. See `Reconciler`, whose parts these are."""

    policy: ServingPolicy
    models: Mapping[SlotIdentity, ServedModel]
    sessions: Sessions
    fleet: SlotFleet
    defects: Defects
    _ending: dict[str, Ending] = field(default_factory=dict)
    """The slots that end, by id."""
    _ordered: dict[str, float] = field(default_factory=dict)
    """When their deletion was last ordered."""

    @property
    def active(self) -> ActiveRequests:
        """The requests and sessions that slots serve."""
        return self.sessions.active

    def drain(self, slot: Slot, now: float, reason: str = "it is wanted no more", cuts_off: bool = True) -> None:
        """Let a slot end once its requests have. One that is planned is gone at once."""
        before = self._ending.get(slot.slot_id)
        if slot.wanted:
            self.fleet.retire(slot.slot_id, SlotState.DRAINING)
            self._note_end(slot, Ending(now, reason, cuts_off))
        elif before is not None and cuts_off and not before.cuts_off:
            self._note_end(slot, Ending(now, reason, cuts_off))

    def fail(self, slot: Slot, reason: str, now: float) -> Iterator[Instruction]:
        """Have a slot end whose load has failed, or which has crashed. Its requests wait again."""
        yield from self.active.lose(slot, reason, now, crashed=slot.state is SlotState.READY)
        if model := self.models.get(slot.identity):
            runner_id = slot.allocation.runner_id
            if slot.ready_at is None:
                model.note_failed_load(runner_id, reason, self.policy, now)
            else:
                model.note_crash(runner_id, slot.ready_at, reason, self.policy, now)
        self.fleet.retire(slot.slot_id, SlotState.FAILED)
        self._note_end(slot, Ending(now, reason, cuts_off=True))

    def end_idle_slots(self, now: float) -> Iterator[Instruction]:
        """Let the slots end that nobody has used for long."""
        for slot in self.fleet.in_state(SlotState.READY):
            yield from self.defects.contained(slot.identity, self._end_if_idle(slot, now))

    def _end_if_idle(self, slot: Slot, now: float) -> Iterator[Instruction]:
        yield from ()
        idle = not slot.active and not slot.claimed
        if idle and now - slot.last_activity >= self.policy.idle_s and not self.active.queue.waiting(slot.identity):
            self.drain(slot, now, "it was idle for long")

    def end_hung_slots(self, model: ServedModel, now: float) -> None:
        """End the slots that serve only what was told to stop, and goes on for longer than a new slot takes to load."""
        patience_s = max(self.policy.drain_s, model.load_s)
        for slot in self.fleet.of_identity(model.spec.identity):
            if self.active.all_stopped(slot, now - patience_s):
                self.drain(slot, now, f"others wait, and all that runs there was told to stop {patience_s:.0f} s ago")

    def _note_end(self, slot: Slot, ending: Ending) -> None:
        if slot.slot_id in self.fleet.slots:
            self._ending[slot.slot_id] = ending

    def end_long_loads(self, now: float) -> Iterator[Instruction]:
        for slot in self.fleet.in_state(SlotState.STARTING):
            assert slot.started_at is not None, f"slot {slot.slot_id} was never started"
            if now - slot.started_at <= self.policy.load_s:
                break  # the others have started later
            why = f"it did not load within {self.policy.load_s:g} s"
            yield from self.defects.contained(slot.identity, self.fail(slot, why, now))

    def cut_off(self, now: float) -> Iterator[Instruction]:
        """Have the requests of slots that have had long enough to end wait again, before slots are looked for."""
        for slot_id, ending in self._ending.items():
            slot = self.fleet.slots.get(slot_id)
            if slot is not None and slot.active and self._may_cut_off(slot, ending, now):
                lost = self.active.lose(slot, f"slot {slot_id} had to end: {ending.reason}", now)
                yield from self.defects.contained(slot.identity, lost)

    def _may_cut_off(self, slot: Slot, ending: Ending, now: float) -> bool:
        """Return whether a slot has had long enough. If it ends for another model, requests of callers who wait stay.

        Otherwise a request that takes longer than `ServingPolicy.drain_s` would never be done beside models in demand.
        """
        long_ago = now - self.policy.drain_s
        return (ending.cuts_off and ending.since <= long_ago) or self.active.all_stopped(slot, long_ago)

    def delete(self, now: float) -> Iterator[Instruction]:
        """Order the end of slots that have no requests left; again if it isn't confirmed."""
        for slot_id, ending in list(self._ending.items()):
            slot = self.fleet.slots.get(slot_id)
            if slot is None:
                del self._ending[slot_id]
                self._ordered.pop(slot_id, None)
                continue
            yield from self.defects.contained(slot.identity, self._end(slot, ending, now))

    def _end(self, slot: Slot, ending: Ending, now: float) -> Iterator[Instruction]:
        yield from self.sessions.stop_on(slot, ending.reason, now)
        if not slot.active and now - self._ordered.get(slot.slot_id, float("-inf")) >= CONVERGE_S:
            self._ordered[slot.slot_id] = now
            yield DeleteSlot(slot.slot_id, slot.allocation.runner_id, ending.reason)
