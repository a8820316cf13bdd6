"""What is done after every event: requests get slots, slots get places, and what is over ends.

Only models are looked at for which something may have changed (`agenda.py`). A defect that shows with one of them keeps
no other one waiting (`defects.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from iris_ray.slots.active_requests import ActiveRequests
from iris_ray.slots.agenda import Agenda
from iris_ray.slots.allocator import Allocator
from iris_ray.slots.decisions import Place, Requirement
from iris_ray.slots.defects import Defects
from iris_ray.slots.endings import Endings
from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.instructions import CreateSlot, Instruction, Refusal, RefuseRequest
from iris_ray.slots.models import SlotIdentity
from iris_ray.slots.request_queue import RequestQueue
from iris_ray.slots.requests import Request
from iris_ray.slots.served_models import ServedModel
from iris_ray.slots.serving_policy import CONVERGE_S, ServingPolicy
from iris_ray.slots.sessions import Sessions
from iris_ray.slots.slot import Slot, SlotState
from iris_ray.slots.warm_slots import seats, slots_wanted


@dataclass(slots=True, eq=False)
class Converger:
    """Brings slots and requests together. See `Reconciler`, whose parts these are."""

    policy: ServingPolicy
    new_id: Callable[[], str]
    models: Mapping[SlotIdentity, ServedModel]
    sessions: Sessions
    allocator: Allocator
    endings: Endings
    defects: Defects
    agenda: Agenda = field(default_factory=Agenda)
    _looked_at_all: float = float("-inf")

    @property
    def fleet(self) -> SlotFleet:
        """All slots."""
        return self.allocator.fleet

    @property
    def active(self) -> ActiveRequests:
        """The requests and sessions that slots serve."""
        return self.sessions.active

    @property
    def queue(self) -> RequestQueue:
        """The requests that wait."""
        return self.active.queue

    def converge(self, now: float) -> Iterator[Instruction]:
        """Yield all that is to be done now."""
        yield from self._refuse(self.queue.expired(now), Refusal.EXPIRED, "it did not begin before its deadline")
        yield from self.endings.end_long_loads(now)
        yield from self.endings.cut_off(now)
        yield from self._serve(self._to_look_at(now), now)
        yield from self.endings.delete(now)
        yield from self._start_planned(now)

    def look_at_all(self) -> None:
        """Look at all models after the next event."""
        self.agenda.note(self.models)
        self.agenda.note(self.queue.identities())

    def _to_look_at(self, now: float) -> list[SlotIdentity]:
        """Return the models for which something may have changed."""
        agenda = self.agenda
        for changed in (self.queue.changed, self.fleet.changed):
            agenda.note(changed)
            changed.clear()
        if agenda.waits_for_room and self.allocator.has_gained(now):
            agenda.note(agenda.waits_for_room)
        if now >= self._looked_at_all + CONVERGE_S:
            self._looked_at_all = now
            self.look_at_all()
        return agenda.take(now)

    def _serve(self, identities: Collection[SlotIdentity], now: float) -> Iterator[Instruction]:
        """Bring the slots and requests of some models together, step by step. A defect ends the steps of its model."""
        for step in (self.active.dispatch, self._move_late_plans, self._serve_queue, self._keep_slots):
            in_turn, identities = self.queue.in_turn(identities), []
            for identity in in_turn:
                if (yield from self.defects.contained(identity, step(identity, now))):
                    identities.append(identity)

    def _next_look(self, model: ServedModel, now: float) -> float:
        """Return when a model has to be looked at again though nothing happens; infinity: it has not."""
        identity = model.spec.identity
        times = [model.not_before, self.queue.oldest(identity) + self.policy.ageing_s]
        times += [self._late_at(slot, model) for slot in self.fleet.of_identity(identity)]
        return min((time for time in times if time > now), default=float("inf"))

    # -- more slots -------------------------------------------------------------------------------

    def _serve_queue(self, identity: SlotIdentity, now: float) -> Iterator[Instruction]:
        if not self.queue.waiting(identity):
            return
        if (model := self.models.get(identity)) is None:
            why = f"{identity} is served no more"
            yield from self._refuse(self.queue.of_identity(identity), Refusal.UNKNOWN_MODEL, why)
            return
        if why := self.why_not_loaded(model, now):
            yield from self._refuse(self.queue.of_identity(identity), Refusal.LOAD_FAILED, why)
            return
        slots = self.fleet.of_identity(identity)
        most = self.active.most_together(self.queue.first(identity), model.spec)
        free = seats(slots, most, lambda slot: self._is_late(slot, model, now))
        late = [slot for slot in slots if self._is_late(slot, model, now)]
        avoid = model.avoids(now).union(slot.allocation.runner_id for slot in late)
        wanted = slots_wanted(self.queue.waiting(identity), free, model.spec)
        starving = free == 0 and self._has_waited_long(identity, now)
        evict_busy = starving and not any(slot.has_seat for slot in slots)
        for _ in range(wanted):
            if not self._add_slot(model, Requirement(model.spec, avoid, evict_busy), now):
                break
            starving = evict_busy = False
            model.note_long_loads(now - slot.started_at for slot in late if slot.started_at is not None)
        if starving:
            self.endings.end_hung_slots(model, now)
            yield from self.sessions.call_back(identity, now)

    def _has_waited_long(self, identity: SlotIdentity, now: float) -> bool:
        """Return whether the oldest request has waited for so long that busy slots of others give way."""
        return self.queue.oldest(identity) + self.policy.ageing_s <= now

    def _move_late_plans(self, identity: SlotIdentity, now: float) -> Iterator[Instruction]:
        """Plan slots elsewhere that could not start for long: what they are to replace does not end."""
        yield from ()
        if (model := self.models.get(identity)) is None:
            return
        for slot in self.fleet.of_identity(identity):
            late = slot.state is SlotState.PLANNED and self._is_late(slot, model, now)
            if not late:
                continue
            if (place := self._better_place(slot, model, now)) is None:
                self.agenda.wait_for_room(identity)
            else:
                model.stuck[slot.allocation.runner_id] = now + self.policy.avoid_runner_s
                self.endings.drain(slot, now)
                self._plan(model, place, now)

    def _better_place(self, slot: Slot, model: ServedModel, now: float) -> Place | None:
        """Return where a planned slot could start at once, else a place on another runner, or None."""
        free = self.allocator.decide(Requirement(model.spec, model.avoids(now)), now)
        if isinstance(free, Place) and not free.evict and self.fleet.ledger.can_start(free.allocation):
            return free
        starving = self._has_waited_long(slot.identity, now)
        avoid = model.avoids(now) | model.stuck_on(now) | {slot.allocation.runner_id}
        decision = self.allocator.decide(Requirement(model.spec, avoid, starving), now)
        return decision if isinstance(decision, Place) else None

    def why_not_loaded(self, model: ServedModel, now: float) -> str:
        """Return why requests for a model are refused: no slot of it is ready, and loads fail; "": they are not."""
        identity = model.spec.identity
        if not model.has_given_up(self.policy, now):
            return ""
        if any(slot.state is SlotState.READY for slot in self.fleet.of_identity(identity)):
            return ""
        return f"{identity} could not be loaded: {model.last_failure}"

    def _keep_slots(self, identity: SlotIdentity, now: float) -> Iterator[Instruction]:
        """Keep the slots that a model has whether there are requests or not."""
        yield from ()
        if model := self.models.get(identity):
            self._keep_replicas(model, now)
            self._prewarm(model, now)
            self.agenda.look_again(identity, self._next_look(model, now))

    def _keep_replicas(self, model: ServedModel, now: float) -> None:
        slots = [slot for slot in self.fleet.of_identity(model.spec.identity) if slot.wanted]
        while len(slots) < model.replicas:
            made = self._add_slot(model, Requirement(model.spec, model.avoids(now)), now)
            if made is None:
                break
            slots.append(made)
        for number, slot in enumerate(slots):
            self.fleet.claim(slot.slot_id, number < model.replicas)

    def _prewarm(self, model: ServedModel, now: float) -> None:
        """Give new runners a slot of the model, if they have room without evicting."""
        if not model.to_prewarm:
            return
        slots = self.fleet.of_identity(model.spec.identity)
        served = {slot.allocation.runner_id for slot in slots if slot.wanted}
        ends = {slot.allocation.runner_id for slot in slots if not slot.wanted}  # their room may be what is needed
        model.to_prewarm = {runner_id for runner_id in model.to_prewarm if runner_id in self.fleet.runners}
        open_now = sorted(model.to_prewarm - self.fleet.closed - ends)
        for runner_id in open_now:
            if runner_id not in served and (place := self.allocator.free_place_on(runner_id, model.spec)):
                self._plan(model, place, now)
        model.to_prewarm.difference_update(open_now)
        if model.to_prewarm:
            self.agenda.wait_for_room(model.spec.identity)

    def _add_slot(self, model: ServedModel, requirement: Requirement, now: float) -> Slot | None:
        """Plan one more slot, unless there is no place or loads of the model pause."""
        if model.not_before > now:
            what = "the load failed" if model.failures else f"{model.crashes} slots in a row have crashed"
            model.waits_for = f"{what}: {model.last_failure}; the next load is tried in a moment"
            return None
        decision = self.allocator.decide(requirement, now)
        if requirement.avoid and not isinstance(decision, Place):
            decision = self.allocator.decide(requirement._replace(avoid=frozenset()), now)
        if not isinstance(decision, Place):
            model.waits_for = decision.reason
            self.agenda.wait_for_room(model.spec.identity)
            return None
        model.waits_for = ""
        return self._plan(model, decision, now)

    def _plan(self, model: ServedModel, place: Place, now: float) -> Slot:
        for slot_id in place.evict:
            why = f"its memory is needed for {model.spec.identity}"
            self.endings.drain(self.fleet.slots[slot_id], now, why, cuts_off=False)
        return self.fleet.plan(self.new_id(), model.spec, place.allocation, now)

    def _start_planned(self, now: float) -> Iterator[Instruction]:
        for slot in self.fleet.in_state(SlotState.PLANNED):
            yield from self.defects.contained(slot.identity, self._start_if_free(slot, now))

    def _start_if_free(self, slot: Slot, now: float) -> Iterator[Instruction]:
        if self.fleet.start(slot.slot_id, now):
            yield CreateSlot(slot.slot_id, slot.spec, slot.allocation)

    def _is_late(self, slot: Slot, model: ServedModel, now: float) -> bool:
        """Return whether a slot waits for its place, or loads, for so long that one should be tried elsewhere."""
        return now >= self._late_at(slot, model)

    def _late_at(self, slot: Slot, model: ServedModel) -> float:
        if slot.state not in (SlotState.PLANNED, SlotState.STARTING):
            return float("inf")
        since = slot.created_at if slot.started_at is None else slot.started_at
        return since + max(self.policy.late_s, self.policy.late_factor * model.load_s)

    def _refuse(self, requests: list[Request], refusal: Refusal, why: str) -> Iterator[Instruction]:
        for request in requests:
            if request.request_id in self.queue:
                self.queue.remove(request.request_id)
            yield RefuseRequest(request.request_id, refusal, f"request {request.request_id}: {why}")
