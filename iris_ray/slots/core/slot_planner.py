"""The work after every event: give requests to slots, places to slots, and end the slots that are over.

It looks only at models for which something may have changed (`ModelAgenda`). A defect that shows with one model holds
up no other one (`Defects`).
"""

import heapq
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from iris_ray.model.containment import SetAside, by_a_defect, others_go_on
from iris_ray.slots.core.allocator import Allocator, Place, SlotRequirement
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.instructions import CreateSlot, DeleteSlot, Instruction, RaiseAlarm, Refusal, RefuseRequest
from iris_ray.slots.core.models import Request, SlotIdentity
from iris_ray.slots.core.policy import RECHECK_S, ServingPolicy
from iris_ray.slots.core.request_queue import ActiveRequests, RequestQueue, Sessions, seats, slots_wanted
from iris_ray.slots.core.served_models import ServedModel
from iris_ray.slots.core.slot import Slot, SlotState


@dataclass(slots=True, eq=False)
class ModelAgenda:
    """The models to look at, in the order in which they were noted: something has changed, or their time has come.

    Attributes:
        waits_for_room: the models for which there was no place; to look at when a device has more room.
    """

    waits_for_room: dict[SlotIdentity, None] = field(default_factory=dict)
    _noted: dict[SlotIdentity, None] = field(default_factory=dict)
    _times: list[tuple[float, SlotIdentity]] = field(default_factory=list)
    _next: dict[SlotIdentity, float] = field(default_factory=dict)

    def note(self, identities: Iterable[SlotIdentity]) -> None:
        """Look at these models after this event."""
        self._noted.update(dict.fromkeys(identities))

    def wait_for_room(self, identity: SlotIdentity) -> None:
        """Look at this model when a device has more room."""
        self.waits_for_room[identity] = None

    def look_again(self, identity: SlotIdentity, when: float) -> None:
        """Look at this model at a time, or before."""
        if when < self._next.get(identity, float("inf")):
            self._next[identity] = when
            heapq.heappush(self._times, (when, identity))

    def next_time(self) -> float:
        """Return when the next look is due without an event; by then it may be superfluous."""
        return self._times[0][0] if self._times else float("inf")

    def take(self, now: float) -> list[SlotIdentity]:
        """Return the models to look at now, and forget that they were noted."""
        while self._times and self._times[0][0] <= now:
            when, identity = heapq.heappop(self._times)
            if self._next.get(identity) == when:
                del self._next[identity]
                self._noted[identity] = None
        taken = list(self._noted)
        self._noted.clear()
        for identity in taken:
            self.waits_for_room.pop(identity, None)
        return taken


@dataclass(slots=True, eq=False)
class Defects:
    """Contains defects of iris_ray that show with one model: an alarm tells each once, and all other models go on."""

    models: Mapping[SlotIdentity, ServedModel]
    _told: dict[SlotIdentity, SetAside] = field(default_factory=dict)

    def contained(self, identity: SlotIdentity, work: Iterator[Instruction]) -> Generator[Instruction, None, bool]:
        """Yield the instructions for a model, up to an exception. Return whether there was none."""
        try:
            yield from work
        except Exception as error:
            aside = SetAside(str(identity), f"it can't be served now, {by_a_defect(error)}")
            if model := self.models.get(identity):
                model.waits_for = f"{aside.why}. {others_go_on('models', 'SlotManager')}"
            if self._told.get(identity) != aside:
                self._told[identity] = aside
                yield RaiseAlarm(f"{aside}\n{''.join(traceback.format_exception(error))}")
            return False
        return True


# -- endings -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ending:
    """A slot that has been told to end.

    Attributes:
        since: when it was told.
        reason: why.
        cuts_off: whether it ends after `ServingPolicy.drain_s` even if requests still run there.
    """

    since: float
    reason: str
    cuts_off: bool


@dataclass(slots=True, eq=False)
class Endings:
    """How slots end: a slot finishes its requests, is cut off if that takes long, and is deleted.

    The fields are parts of `Reconciler`.
    """

    policy: ServingPolicy
    models: Mapping[SlotIdentity, ServedModel]
    sessions: Sessions
    fleet: SlotFleet
    defects: Defects
    _ending: dict[str, Ending] = field(default_factory=dict)
    """By slot id."""
    _ordered: dict[str, float] = field(default_factory=dict)
    """When a slot's deletion was last ordered, by slot id."""

    @property
    def active(self) -> ActiveRequests:
        """The requests and sessions that slots serve."""
        return self.sessions.active

    def drain(self, slot: Slot, now: float, reason: str = "it is wanted no more", cuts_off: bool = True) -> None:
        """Let a slot end after its last request. A slot that is only planned is gone at once."""
        before = self._ending.get(slot.slot_id)
        if slot.wanted:
            self.fleet.retire(slot.slot_id, SlotState.DRAINING)
            self._note_end(slot, Ending(now, reason, cuts_off))
        elif before is not None and cuts_off and not before.cuts_off:
            self._note_end(slot, Ending(now, reason, cuts_off))

    def fail(self, slot: Slot, reason: str, now: float) -> Iterator[Instruction]:
        """End a slot that has failed to load or has crashed. Its requests wait again."""
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
        """End the slots that have been idle for `ServingPolicy.idle_s`."""
        for slot in self.fleet.in_state(SlotState.READY):
            yield from self.defects.contained(slot.identity, self._end_if_idle(slot, now))

    def _end_if_idle(self, slot: Slot, now: float) -> Iterator[Instruction]:
        yield from ()
        idle = not slot.active and not slot.claimed
        if idle and now - slot.last_activity >= self.policy.idle_s and not self.active.queue.waiting(slot.identity):
            self.drain(slot, now, "it was idle for long")

    def end_hung_slots(self, model: ServedModel, now: float) -> None:
        """End a model's slots whose requests were all told to stop, and run on for longer than a new slot loads."""
        patience_s = max(self.policy.drain_s, model.load_s)
        for slot in self.fleet.of_identity(model.spec.identity):
            if self.active.all_stopped(slot, now - patience_s):
                self.drain(slot, now, f"others wait, and all that runs there was told to stop {patience_s:.0f} s ago")

    def _note_end(self, slot: Slot, ending: Ending) -> None:
        if slot.slot_id in self.fleet.slots:
            self._ending[slot.slot_id] = ending

    def end_long_loads(self, now: float) -> Iterator[Instruction]:
        """Fail the slots that have not loaded within `ServingPolicy.load_s`."""
        for slot in self.fleet.in_state(SlotState.STARTING):
            assert slot.started_at is not None, f"slot {slot.slot_id} was never started"
            if now - slot.started_at <= self.policy.load_s:
                break  # the others have started later
            why = f"it did not load within {self.policy.load_s:g} s"
            yield from self.defects.contained(slot.identity, self.fail(slot, why, now))

    def cut_off(self, now: float) -> Iterator[Instruction]:
        """Take the requests of slots whose time to end is up: they wait again, and may get another slot at once."""
        for slot_id, ending in self._ending.items():
            slot = self.fleet.slots.get(slot_id)
            if slot is not None and slot.active and self._may_cut_off(slot, ending, now):
                lost = self.active.lose(slot, f"slot {slot_id} had to end: {ending.reason}", now)
                yield from self.defects.contained(slot.identity, lost)

    def _may_cut_off(self, slot: Slot, ending: Ending, now: float) -> bool:
        """Return whether a slot's time to end is up. A slot that ends for another model finishes its requests first.

        Otherwise a request that takes longer than `ServingPolicy.drain_s` would never finish beside models in demand.
        """
        long_ago = now - self.policy.drain_s
        return (ending.cuts_off and ending.since <= long_ago) or self.active.all_stopped(slot, long_ago)

    def delete(self, now: float) -> Iterator[Instruction]:
        """Order the end of slots that have no requests left; repeat the order until the end is confirmed."""
        for slot_id, ending in list(self._ending.items()):
            slot = self.fleet.slots.get(slot_id)
            if slot is None:
                del self._ending[slot_id]
                self._ordered.pop(slot_id, None)
                continue
            yield from self.defects.contained(slot.identity, self._end(slot, ending, now))

    def _end(self, slot: Slot, ending: Ending, now: float) -> Iterator[Instruction]:
        yield from self.sessions.stop_on(slot, ending.reason, now)
        if not slot.active and now - self._ordered.get(slot.slot_id, float("-inf")) >= RECHECK_S:
            self._ordered[slot.slot_id] = now
            yield DeleteSlot(slot.slot_id, slot.allocation.runner_id, ending.reason)


# -- slot planner ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SlotPlanner:
    """Brings slots and requests together. The fields are parts of `Reconciler`."""

    policy: ServingPolicy
    new_id: Callable[[], str]
    models: Mapping[SlotIdentity, ServedModel]
    sessions: Sessions
    allocator: Allocator
    endings: Endings
    defects: Defects
    agenda: ModelAgenda = field(default_factory=ModelAgenda)
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

    def due_instructions(self, now: float) -> Iterator[Instruction]:
        """Yield the instructions for all that is due now."""
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
        agenda = self.agenda
        for changed in (self.queue.changed, self.fleet.changed):
            agenda.note(changed)
            changed.clear()
        if agenda.waits_for_room and self.allocator.has_gained(now):
            agenda.note(agenda.waits_for_room)
        if now >= self._looked_at_all + RECHECK_S:
            self._looked_at_all = now
            self.look_at_all()
        return agenda.take(now)

    def _serve(self, identities: Collection[SlotIdentity], now: float) -> Iterator[Instruction]:
        """Take these models through all steps. A model with which a defect shows takes no further step."""
        for step in (self.active.dispatch, self._move_late_plans, self._serve_queue, self._keep_slots):
            in_turn, identities = self.queue.in_turn(identities), []
            for identity in in_turn:
                if (yield from self.defects.contained(identity, step(identity, now))):
                    identities.append(identity)

    def _next_look(self, model: ServedModel, now: float) -> float:
        """Return when a model has to be looked at again without an event; infinity: never."""
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
            if not self._add_slot(model, SlotRequirement(model.spec, avoid, evict_busy), now):
                break
            starving = evict_busy = False
            model.note_long_loads(now - slot.started_at for slot in late if slot.started_at is not None)
        if starving:
            self.endings.end_hung_slots(model, now)
            yield from self.sessions.call_back(identity, now)

    def _has_waited_long(self, identity: SlotIdentity, now: float) -> bool:
        """Return whether the oldest request has waited so long that busy slots of other models give way."""
        return self.queue.oldest(identity) + self.policy.ageing_s <= now

    def _move_late_plans(self, identity: SlotIdentity, now: float) -> Iterator[Instruction]:
        """Plan a slot elsewhere if it could not start for long, because a slot in its place does not end."""
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
        free = self.allocator.decide(SlotRequirement(model.spec, model.avoids(now)), now)
        if isinstance(free, Place) and not free.evict and self.fleet.ledger.can_start(free.allocation):
            return free
        starving = self._has_waited_long(slot.identity, now)
        avoid = model.avoids(now) | model.stuck_on(now) | {slot.allocation.runner_id}
        decision = self.allocator.decide(SlotRequirement(model.spec, avoid, starving), now)
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
        yield from ()
        if model := self.models.get(identity):
            self._keep_replicas(model, now)
            self._prewarm(model, now)
            self.agenda.look_again(identity, self._next_look(model, now))

    def _keep_replicas(self, model: ServedModel, now: float) -> None:
        slots = [slot for slot in self.fleet.of_identity(model.spec.identity) if slot.wanted]
        while len(slots) < model.replicas:
            made = self._add_slot(model, SlotRequirement(model.spec, model.avoids(now)), now)
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

    def _add_slot(self, model: ServedModel, requirement: SlotRequirement, now: float) -> Slot | None:
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
