"""The work after every event: give requests to slots, places to slots, and start, end or keep the slots.

It looks only at models and slots that may have changed (`SlotAgenda`). A defect that one model shows holds up no other
model (`Defects`).
"""

import heapq
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from typing import Final

from iris_ray.model.containment import SetAside, by_a_defect, others_go_on
from iris_ray.slots.core.allocator import Allocator, Place, SlotRequirement
from iris_ray.slots.core.eviction import AT_ONCE, hold_up
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.instructions import CreateSlot, DeleteSlot, Instruction, RaiseAlarm, Refusal, RefuseRequest
from iris_ray.slots.core.models import Request
from iris_ray.slots.core.policy import RECHECK_S, ServingPolicy, Staleness
from iris_ray.slots.core.request_queue import ActiveRequests, RequestQueue, Sessions, slots_wanted
from iris_ray.slots.core.served_models import ServedModel
from iris_ray.slots.core.slot import Slot, SlotState


@dataclass(slots=True, eq=False)
class SlotAgenda:
    """Names of models, or ids of slots, to look at, in the order in which they were noted: something changed, or their
    time has come.

    Attributes:
        waits_for_room: the models for which there was no place; to look at when a device has more room.
    """

    waits_for_room: dict[str, None] = field(default_factory=dict)
    _noted: dict[str, None] = field(default_factory=dict)
    _times: list[tuple[float, str]] = field(default_factory=list)
    _next: dict[str, float] = field(default_factory=dict)

    def note(self, items: Iterable[str]) -> None:
        """Look at these after this event."""
        self._noted.update(dict.fromkeys(items))

    def take_over(self, noted: dict[str, None]) -> None:
        """Look at these after this event, and clear the dict that held them."""
        self._noted.update(noted)
        noted.clear()

    def wait_for_room(self, item: str) -> None:
        """Look at this model when a device has more room."""
        self.waits_for_room[item] = None

    def look_again(self, item: str, when: float) -> None:
        """Look at this one at a time, or before."""
        if when < self._next.get(item, inf):
            self._next[item] = when
            heapq.heappush(self._times, (when, item))

    def next_time(self) -> float:
        """Return the time of the next look, if no event comes first."""
        return self._times[0][0] if self._times else inf

    def take(self, now: float) -> list[str]:
        """Return what to look at now, and forget that it was noted."""
        while self._times and self._times[0][0] <= now:
            when, item = heapq.heappop(self._times)
            if self._next.get(item) == when:
                del self._next[item]
                self._noted[item] = None
        taken = list(self._noted)
        self._noted.clear()
        for item in taken:
            self.waits_for_room.pop(item, None)
        return taken


@dataclass(slots=True, eq=False)
class Defects:
    """Contains defects of iris_ray that show with one model: an alarm tells each once, and all other models go on."""

    models: Mapping[str, ServedModel]
    _told: dict[str, SetAside] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        """Forget what was told about a model that is served no more."""
        self._told.pop(name, None)

    def contained(self, name: str, work: Iterator[Instruction]) -> Generator[Instruction, None, bool]:
        """Yield the instructions for a model, up to an exception. Return whether there was none."""
        try:
            yield from work
        except Exception as error:
            aside = SetAside(name, f"it can't be served now, {by_a_defect(error)}")
            if model := self.models.get(name):
                model.waits_for = f"{aside.why}. {others_go_on('models', 'SlotManager')}"
            if self._told.get(name) != aside:
                self._told[name] = aside
                yield RaiseAlarm(f"{aside}\n{''.join(traceback.format_exception(error))}")
            return False
        return True


# -- endings -----------------------------------------------------------------------------------------------------------


class EndsHow(IntEnum):
    """How a slot ends; a later one of these overrules an earlier one.

    A request that takes longer than `ServingPolicy.drain_s` would never finish beside models in demand, or would be
    lost when its model is registered anew, if slots were always cut off.
    """

    GIVES_WAY = 1
    """The slot finishes its requests, however long they take, and stays if no model needs its memory any more."""
    FINISHES = 2
    """It finishes its requests, however long they take."""
    CUTS_OFF = 3
    """It ends after `ServingPolicy.drain_s` even if requests still run there."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A slot that has been told to end, or to leave.

    Attributes:
        since: when it was told.
        reason: why.
    """

    since: float
    reason: str
    how: EndsHow


class IdleLimit(Enum):
    """How long a model's slots may be idle: a limit of its own, or the one of `ServingPolicy`."""

    OWN = "own"
    POLICY = "policy"


@dataclass(slots=True, eq=False)
class Endings:
    """Starts planned slots, and ends slots: one finishes its requests, is cut off if that takes long, and is deleted.

    The fields are parts of `Reconciler`.
    """

    policy: ServingPolicy
    models: Mapping[str, ServedModel]
    sessions: Sessions
    fleet: SlotFleet
    staleness: Staleness
    defects: Defects
    active: ActiveRequests = field(init=False)
    agenda: SlotAgenda = field(default_factory=SlotAgenda)
    _ending: dict[str, Ending] = field(default_factory=dict)
    """By slot id."""
    _ordered: dict[str, float] = field(default_factory=dict)
    """When a slot's deletion was last ordered, by slot id."""

    def __post_init__(self) -> None:
        self.active = self.sessions.active

    # -- why they end -----------------------------------------------------------------------------

    def drain(
        self, slot: Slot, now: float, reason: str = "it is wanted no more", how: EndsHow = EndsHow.CUTS_OFF
    ) -> None:
        """Let a slot end after its last request. A slot that is only planned is gone at once."""
        if not slot.ends:
            self.fleet.retire(slot.slot_id, SlotState.DRAINING, now)
            self._note_end(slot, Ending(now, reason, how))
        elif how > self._ending[slot.slot_id].how:
            self._note_end(slot, Ending(now, reason, how))

    def give_way(self, slot: Slot, reason: str, now: float) -> None:
        """Let a slot make room for another model: at once, but not before it has been ready for its residency.

        A slot that still loads goes on if requests wait for it.
        """
        loads = slot.state is SlotState.STARTING and self.active.queue.waiting(slot.model) > 0
        if loads or (slot.state is SlotState.READY and now < self.staleness.resident_until(slot)):
            self.fleet.leave(slot.slot_id, now)
            self._note_end(slot, Ending(now, reason, EndsHow.GIVES_WAY))
        else:
            self.drain(slot, now, reason, EndsHow.GIVES_WAY)

    def fail(self, slot: Slot, reason: str, now: float) -> Iterator[Instruction]:
        """End a slot that has failed to load or has crashed. Its requests wait again."""
        yield from self.active.lose(slot, reason, now, crashed=slot.state is SlotState.READY)
        if model := self.models.get(slot.model):
            runner_id = slot.allocation.runner_id
            if slot.ready_at is None:
                lasted_s = 0.0 if slot.started_at is None else now - slot.started_at
                model.note_failed_load(runner_id, reason, self.policy, now, lasted_s)
                for other in self.fleet.slots_of(slot.model):
                    if other.state is SlotState.PLANNED:  # it would load at once, without the pause
                        self.drain(other, now)
            else:
                model.note_crash(runner_id, slot.ready_at, reason, self.policy, now)
        self.fleet.retire(slot.slot_id, SlotState.FAILED, now)
        self._note_end(slot, Ending(now, reason, EndsHow.CUTS_OFF))

    def end_idle_slots(self, now: float, limit: IdleLimit) -> Iterator[Instruction]:
        """End the slots that have been idle for `ModelSpec.idle_s`, or for `ServingPolicy.idle_s`."""
        for name, model in list(self.models.items()):
            own = model.spec.idle_s
            if (own is not None) is (limit is IdleLimit.OWN):
                idle_s = self.policy.idle_s if own is None else own
                yield from self.defects.contained(name, self._end_idle(name, idle_s, now))

    def _end_idle(self, name: str, idle_s: float, now: float) -> Iterator[Instruction]:
        yield from ()
        if self.active.queue.waiting(name):
            return
        for slot in list(self.fleet.of_model(name).ready.get(0, {}).values()):
            if not slot.claimed and now - slot.last_activity >= idle_s:
                self.drain(slot, now, f"it was idle for {idle_s:g} s")

    def end_hung_slots(self, model: ServedModel, now: float) -> None:
        """End a model's slots whose requests were all told to stop, and run on for longer than a new slot loads."""
        patience_s = max(self.policy.drain_s, model.load_s)
        for slot_id in dict.fromkeys(each.slot_id for each in self.active.stopped.values()):
            slot = self.fleet.slots[slot_id]
            if slot.model == model.spec.name and self.active.stopped_at(slot) + patience_s <= now:
                self.drain(slot, now, f"others wait, and all that runs there was told to stop {patience_s:.0f} s ago")

    def _note_end(self, slot: Slot, ending: Ending) -> None:
        if slot.slot_id in self.fleet.slots:
            self._ending[slot.slot_id] = ending
            self.agenda.note([slot.slot_id])

    # -- how they end ----------------------------------------------------------------------------

    def look_at(self, slot_ids: Iterable[str], now: float) -> Iterator[Instruction]:
        """Start, keep or end these slots, as far as they can be now."""
        for slot_id in slot_ids:
            if slot := self.fleet.slots.get(slot_id):
                if not (yield from self.defects.contained(slot.model, self._look_at(slot, now))):
                    self.agenda.look_again(slot_id, now + RECHECK_S)
            else:
                self._ending.pop(slot_id, None)
                self._ordered.pop(slot_id, None)

    def _look_at(self, slot: Slot, now: float) -> Iterator[Instruction]:
        if self._may_stay(slot):
            self.fleet.stay(slot.slot_id)
            del self._ending[slot.slot_id]
        match slot.state:
            case SlotState.PLANNED:
                if self.fleet.start(slot.slot_id, now):
                    self.agenda.look_again(slot.slot_id, now + self._load_s(slot))
                    yield CreateSlot(slot.slot_id, slot.spec, slot.allocation)
            case SlotState.STARTING:
                assert slot.started_at is not None, f"slot {slot.slot_id} was never started"
                if slot.started_at + self._load_s(slot) <= now:
                    yield from self.fail(slot, f"it did not load within {self._load_s(slot):g} s", now)
            case SlotState.READY if slot.leaving:
                when = self.staleness.resident_until(slot)
                self.agenda.look_again(slot.slot_id, when)
                if when <= now:
                    self.drain(slot, now, self._ending[slot.slot_id].reason, EndsHow.GIVES_WAY)
            case SlotState.DRAINING | SlotState.FAILED:
                yield from self._end(slot, self._ending[slot.slot_id], now)

    def _load_s(self, slot: Slot) -> float:
        return self.policy.load_s if slot.spec.load_s is None else slot.spec.load_s

    def _may_stay(self, slot: Slot) -> bool:
        """Return whether a slot that gives way to another model stays: nobody needs its memory any more."""
        ending = self._ending.get(slot.slot_id)
        if ending is None or ending.how is not EndsHow.GIVES_WAY or slot.slot_id in self._ordered:
            return False
        if slot.ends and slot.ready_at is None:  # its load was given up
            return False
        model, place = self.models.get(slot.model), slot.allocation
        served = model is not None and model.spec == slot.spec and place.runner_id not in self.fleet.closed
        has_room = served and self.fleet.books[place.runner_id].can_promise(place)
        return has_room and not any(each.wanted for each in self.fleet.excluded(place.runner_id, slot.spec))

    def _end(self, slot: Slot, ending: Ending, now: float) -> Iterator[Instruction]:
        yield from self.sessions.stop_on(slot, ending.reason, now)
        if slot.active:
            told = ending.since if ending.how is EndsHow.CUTS_OFF else inf
            since = min(told, self.active.stopped_at(slot))
            if since + self.policy.drain_s > now:
                self.agenda.look_again(slot.slot_id, since + self.policy.drain_s)
                return
            yield from self.active.lose(slot, f"slot {slot.slot_id} had to end: {ending.reason}", now)
        if now >= self._ordered.get(slot.slot_id, -inf) + RECHECK_S:
            self._ordered[slot.slot_id] = now
            yield DeleteSlot(slot.slot_id, slot.allocation.runner_id, ending.reason)
        self.agenda.look_again(slot.slot_id, self._ordered[slot.slot_id] + RECHECK_S)


# -- slot planner ------------------------------------------------------------------------------------------------------

MOST_ROUNDS: Final = 20
"""The limit for rounds of looks after one event: a look at a model or slot may ask for another round."""
MOVES_AFTER: Final = 4
"""The factor by which a slot waits longer for a running request than for an idle slot before it moves."""


@dataclass(slots=True, eq=False)
class SlotPlanner:
    """Brings slots and requests together. The fields are parts of `Reconciler`."""

    policy: ServingPolicy
    new_id: Callable[[], str]
    models: Mapping[str, ServedModel]
    sessions: Sessions
    allocator: Allocator
    endings: Endings
    defects: Defects
    fleet: SlotFleet = field(init=False)
    active: ActiveRequests = field(init=False)
    queue: RequestQueue = field(init=False)
    agenda: SlotAgenda = field(default_factory=SlotAgenda)
    _looked_at_all: float = -inf

    def __post_init__(self) -> None:
        self.fleet, self.active, self.queue = self.allocator.fleet, self.sessions.active, self.sessions.active.queue

    def due_instructions(self, now: float) -> Iterator[Instruction]:
        """Yield the instructions for all that is due now."""
        yield from self._refuse(self.queue.expired(now), Refusal.EXPIRED, "it did not begin before its deadline")
        if now >= self._looked_at_all + RECHECK_S:
            self._looked_at_all = now
            self.look_at_all()
        for _ in range(MOST_ROUNDS):
            self.endings.agenda.take_over(self.fleet.to_look)
            yield from self.endings.look_at(self.endings.agenda.take(now), now)
            models = self._to_look_at(now)
            if not models and not self.fleet.to_look:
                break
            yield from self._serve(models, now)

    def look_at_all(self) -> None:
        """Look at all models that may need a slot after the next event."""
        self.agenda.note(name for name, model in self.models.items() if model.replicas or model.to_prewarm)
        self.agenda.note(self.queue.models())

    def dispatch(self, name: str, now: float) -> Iterator[Instruction]:
        """Give the free seats of a model to its requests."""
        for start in self.active.dispatch(name, now):
            if model := self.models.get(name):
                model.turn_at = now
            yield start

    def next_time(self) -> float:
        """Return the time of the next look, if no event comes first."""
        return min(self.agenda.next_time(), self.endings.agenda.next_time())

    def _to_look_at(self, now: float) -> list[str]:
        self.agenda.take_over(self.queue.changed)
        self.agenda.take_over(self.fleet.changed)
        if self.agenda.waits_for_room and self.allocator.has_gained(now):
            self.agenda.note(self.agenda.waits_for_room)
        return self.agenda.take(now)

    def _serve(self, names: list[str], now: float) -> Iterator[Instruction]:
        """Take these models through all steps. A model with which a defect shows takes no further step."""
        for step in (self.dispatch, self._serve_queue, self._keep_slots, self._prewarm):
            in_turn, names = self.queue.in_turn(names), []
            if step == self._prewarm:
                in_turn = sorted(filter(self._prewarms, in_turn), key=self._prewarm_turn)
            for name in in_turn:
                if (yield from self.defects.contained(name, step(name, now))):
                    names.append(name)

    def _next_look(self, model: ServedModel, now: float) -> float:
        """Return when a model has to be looked at again without an event; infinity: never."""
        name = model.spec.name
        times = [model.not_before, model.evicts_from, self.queue.oldest(name) + self.policy.ageing_s]
        times += [self._late_at(slot, model) for slot in self.fleet.of_model(name).coming.values()]
        return min((time for time in times if time > now), default=inf)

    # -- requests ---------------------------------------------------------------------------------

    def _serve_queue(self, name: str, now: float) -> Iterator[Instruction]:
        """Plan slots for the requests that wait although all seats have been given away."""
        coming = list(self.fleet.of_model(name).coming.values())
        waiting = self.queue.waiting(name)
        if not waiting and not coming:
            return
        if (model := self.models.get(name)) is None:
            why = f"{name} is served no more"
            yield from self._refuse(self.queue.of_model(name), Refusal.UNKNOWN_MODEL, why)
            return
        coming = self._call_off_plans(model, coming, now)
        if not waiting:
            return
        if why := self.why_not_loaded(model, now):
            yield from self._refuse(self.queue.of_model(name), Refusal.LOAD_FAILED, why)
            return
        late = [slot for slot in coming if self._is_late(slot, model, now)]
        moved = [slot for slot in late if slot.state is SlotState.PLANNED and self._move(slot, model, now)]
        loads_late = [slot for slot in late if slot.state is SlotState.STARTING]
        seats = _seats(coming) - _seats(loads_late)
        starving = len(late) == len(coming) and not moved and self._has_waited_long(name, now)
        evict_busy = starving and not self.fleet.of_model(name).has_seat(model.spec.requests_at_a_time)
        avoid = model.avoids(now).union(slot.allocation.runner_id for slot in loads_late)
        for _ in range(slots_wanted(waiting, seats, model.spec)):
            if not self._add_slot(model, self._requirement(model, avoid, evict_busy, now), now):
                break
            starving = evict_busy = False
            model.note_long_loads(now - slot.started_at for slot in loads_late if slot.started_at is not None)
        if starving:
            self.endings.end_hung_slots(model, now)
            yield from self.sessions.call_back(name, now)
        slots = self.fleet.of_model(name)
        if model.failures >= self.policy.most_load_failures and now < model.evicts_from and not slots.wanted:
            yield from self._refuse(self.queue.of_model(name), Refusal.LOAD_FAILED, model.waits_for)

    def _requirement(self, model: ServedModel, avoid: frozenset[str], starving: bool, now: float) -> SlotRequirement:
        """Return what one more slot of a model needs. Several replicas go to different runners if there is room."""
        asked_at = max(self.queue.oldest(model.spec.name), model.turn_at)
        slots = self.fleet.slots_of(model.spec.name) if model.replicas > 1 else []
        there = Counter(slot.allocation.runner_id for slot in slots if slot.wanted)
        return SlotRequirement(model.spec, avoid, starving, asked_at, model.loaded_on, there, now >= model.evicts_from)

    def _call_off_plans(self, model: ServedModel, coming: list[Slot], now: float) -> list[Slot]:
        """Drop planned slots that no request and no replica needs. Return the slots that are still to come."""
        name, seats = model.spec.name, _seats(coming)
        for slot in reversed(coming):
            left = seats - slot.spec.requests_at_a_time
            is_spare = self.fleet.of_model(name).wanted > model.replicas and self.queue.waiting(name) <= left
            if slot.state is SlotState.PLANNED and is_spare:
                self.endings.drain(slot, now)
                seats = left
        return list(self.fleet.of_model(name).coming.values())

    def _has_waited_long(self, name: str, now: float) -> bool:
        """Return whether the oldest request has waited so long that busy slots of other models give way."""
        return self.queue.oldest(name) + self.policy.ageing_s <= now

    def _move(self, slot: Slot, model: ServedModel, now: float) -> bool:
        """Plan a slot elsewhere that could not start for long, because slots in its place do not end.

        It moves to a place that is free at once; or to any if a process here does not end. If a request here runs on
        and on, it moves to a place where another one began later, but each time only after twice the time: otherwise it
        might leave every place shortly before it is free. Return whether it moves.
        """
        late_s = self._late_at(slot, model) - slot.created_at
        beside = self.fleet.on_runner(slot.allocation.runner_id)
        goes = [other for other in beside if not other.wanted and _makes_room(other, slot)]
        dead = [other for other in goes if other.ends and not other.active and other.last_activity + late_s <= now]
        for other in dead:
            self.fleet.give_up(other.slot_id)
        starving = self._has_waited_long(slot.model, now)
        decision = self.allocator.decide(self._requirement(model, model.avoids(now), starving, now), now)
        if isinstance(decision, Place):
            here = max([hold_up(other) for other in goes], default=AT_ONCE)
            there = max([hold_up(self.fleet.slots[each]) for each in decision.evict], default=AT_ONCE)
            waited = now - slot.created_at >= MOVES_AFTER * 2**slot.moves * late_s
            if dead or (there < here and (there == AT_ONCE or waited)):
                self.endings.drain(slot, now)
                self._plan(model, decision, now, slot.asked_at).moves = slot.moves + 1
                return True
        self.agenda.wait_for_room(slot.model)
        return False

    def why_not_loaded(self, model: ServedModel, now: float) -> str:
        """Return why requests for a model are refused: no slot of it is ready, and loads fail; "": they are not."""
        name = model.spec.name
        if not model.has_given_up(self.policy, now) or self.fleet.of_model(name).ready:
            return ""
        return f"{name} could not be loaded: {model.last_failure}"

    # -- slots without requests -------------------------------------------------------------------

    def _keep_slots(self, name: str, now: float) -> Iterator[Instruction]:
        yield from ()
        if model := self.models.get(name):
            self._keep_replicas(model, now)
            self.agenda.look_again(name, self._next_look(model, now))

    def _keep_replicas(self, model: ServedModel, now: float) -> None:
        name = model.spec.name
        while self.fleet.of_model(name).wanted < model.replicas:
            if not self._add_slot(model, self._requirement(model, model.avoids(now), False, now), now):
                break
        here = self.fleet.of_model(name)
        if here.claimed != min(here.wanted, model.replicas):
            for number, slot in enumerate([slot for slot in here.all.values() if slot.wanted]):
                self.fleet.claim(slot.slot_id, number < model.replicas)

    def _prewarms(self, name: str) -> bool:
        return name in self.models and bool(self.models[name].to_prewarm)

    def _prewarm_turn(self, name: str) -> tuple[int, int, str]:
        """Return the order of models that don't all fit: the fewest slots first, then the fewest bytes."""
        return self.fleet.of_model(name).wanted, *self.models[name].prewarm_turn

    def _prewarm(self, name: str, now: float) -> Iterator[Instruction]:
        """Give new runners a slot of a model, if they have room without evicting."""
        yield from ()
        model, slots = self.models[name], self.fleet.slots_of(name)
        served = {slot.allocation.runner_id for slot in slots if slot.wanted}
        ends = {slot.allocation.runner_id for slot in slots if not slot.wanted}  # their room may be what is needed
        model.to_prewarm = {runner_id for runner_id in model.to_prewarm if runner_id in self.fleet.runners}
        open_now = sorted(model.to_prewarm - self.fleet.closed - ends)
        for runner_id in open_now:
            if runner_id not in served and (place := self.allocator.free_place_on(runner_id, model.spec, now)):
                self._plan(model, place, now)
        model.to_prewarm.difference_update(open_now)
        if model.to_prewarm:
            self.agenda.wait_for_room(name)

    # -- more slots -------------------------------------------------------------------------------

    def _add_slot(self, model: ServedModel, requirement: SlotRequirement, now: float) -> Slot | None:
        """Plan one more slot, unless no place is found or loads of the model pause."""
        if model.not_before > now:
            what = "the load failed" if model.failures else f"{model.crashes} slots in a row have crashed"
            model.waits_for = f"{what}: {model.last_failure}; the next load is tried in a moment"
            return None
        decision = self.allocator.decide(requirement._replace(avoid=frozenset()), now)
        if isinstance(decision, Place) and decision.allocation.runner_id in requirement.avoid:
            elsewhere = self.allocator.decide(requirement, now)
            decision = elsewhere if isinstance(elsewhere, Place) else decision
        if not isinstance(decision, Place):
            model.waits_for = decision.reason
            if not requirement.evicts:
                model.waits_for += f"; its loads fail and evict no other model for {model.evicts_from - now:.0f} s more"
                model.waits_for += f": {model.last_failure}"
            self.agenda.wait_for_room(model.spec.name)
            return None
        model.waits_for = ""
        return self._plan(model, decision, now, requirement.asked_at)

    def _plan(self, model: ServedModel, place: Place, now: float, asked_at: float = inf) -> Slot:
        for slot_id in place.evict:
            self.endings.give_way(self.fleet.slots[slot_id], f"its memory is needed for {model.spec.name}", now)
        return self.fleet.plan(self.new_id(), model.spec, place.allocation, now, asked_at)

    def _is_late(self, slot: Slot, model: ServedModel, now: float) -> bool:
        """Return whether a slot waits for its place, or loads, too long: another one should be tried elsewhere."""
        return now >= self._late_at(slot, model)

    def _late_at(self, slot: Slot, model: ServedModel) -> float:
        since = slot.created_at if slot.started_at is None else slot.started_at
        return since + max(self.policy.late_s, self.policy.late_factor * model.load_s)

    def refuse_what_fits_nowhere(self) -> Iterator[Instruction]:
        """Refuse requests that have waited for a runner that turns out to be too small, when no other may come."""
        for model in self.models.values():
            waiting = self.queue.of_model(model.spec.name)
            if waiting and (why := self.allocator.fits_nowhere(model.spec)):
                yield from self._refuse(waiting, Refusal.FITS_NOWHERE, why)

    def _refuse(self, requests: list[Request], refusal: Refusal, why: str) -> Iterator[Instruction]:
        for request in requests:
            if request.request_id in self.queue:
                self.queue.remove(request.request_id)
            yield RefuseRequest(request.request_id, refusal, f"request {request.request_id}: {why}")


def _makes_room(other: Slot, slot: Slot) -> bool:
    """Return whether the end of another slot on its runner may be what a slot waits for."""
    beside = set(slot.allocation.devices).intersection(other.allocation.devices)
    return bool(beside) or slot.spec.excludes(other.spec)


def _seats(slots: Iterable[Slot]) -> int:
    """Return how many requests slots can take once they are ready."""
    return sum(slot.spec.requests_at_a_time for slot in slots)
