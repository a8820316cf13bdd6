"""Brings the slots to their wanted state: the one owner of all slots, requests and books."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from iris_ray.errors import SlotQueueFullError
from iris_ray.slots.core import events as ev
from iris_ray.slots.core.allocator import Allocator
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.instructions import AskRunner, DeleteSlot, Instruction, RaiseAlarm, Refusal, RefuseRequest
from iris_ray.slots.core.models import Request
from iris_ray.slots.core.policy import ACTIVITY_S, RECHECK_S, REPORT_S, ServingPolicy
from iris_ray.slots.core.request_queue import CLOSED, ActiveRequests, RequestQueue, Sessions
from iris_ray.slots.core.served_models import ServedModel
from iris_ray.slots.core.slot import USES_MEMORY, Slot, SlotState
from iris_ray.slots.core.slot_planner import Defects, Endings, EndsHow, IdleLimit, SlotPlanner


@dataclass(slots=True, eq=False)
class Reconciler:
    """Takes events and returns instructions. It never waits: a long load is a slot in the state STARTING.

    Whatever the event was, the same work follows it (`slot_planner.py`). `Tick` may come at any time, and must come
    when `wakeup` says; nothing depends on its being punctual.

    Args:
        policy: what operators chose.
        new_id: returns an id that no slot ever had.
    """

    policy: ServingPolicy
    new_id: Callable[[], str]
    fleet: SlotFleet = field(default_factory=SlotFleet)
    models: dict[str, ServedModel] = field(default_factory=dict)
    queue: RequestQueue = field(init=False)
    active: ActiveRequests = field(init=False)
    sessions: Sessions = field(init=False)
    allocator: Allocator = field(init=False)
    _planner: SlotPlanner = field(init=False)
    _endings: Endings = field(init=False)
    _defects: Defects = field(init=False)
    _drained: set[str] = field(default_factory=set)
    _unknown: set[str] = field(default_factory=set)
    """Runners that get no slots, because they have not reported yet, or have reported unknown processes."""
    _joined_at: dict[str, float] = field(default_factory=dict)
    _asked_at: float = -inf
    _aged_at: float = -inf
    _handled_at: float = -inf
    _complained_at: float = -inf

    def __post_init__(self) -> None:
        self.queue = RequestQueue(self.policy.most_waiting, self.policy.most_waiting_bytes)
        self.active = ActiveRequests(self.fleet, self.queue, self.policy.most_attempts)
        self.allocator = Allocator(self.fleet, self.policy.placement)
        self.sessions = Sessions(self.active, self.policy)
        self._defects = Defects(self.models)
        staleness = self.allocator.staleness
        self._endings = Endings(self.policy, self.models, self.sessions, self.fleet, staleness, self._defects)
        self._planner = SlotPlanner(
            self.policy, self.new_id, self.models, self.sessions, self.allocator, self._endings, self._defects
        )

    def handle(self, event: ev.Event, now: float) -> list[Instruction]:
        """Take an event, and return the instructions that follow. ``now`` must not go backwards."""
        self._handled_at = now
        done = [*(_HANDLERS[type(event)](self, event, now) or ()), *self._at_intervals(now)]
        return [*done, *self._planner.due_instructions(now), *self._complain(now)]

    def wakeup(self) -> float:
        """Return when a `Tick` is due if no event comes before."""
        times = [self._handled_at + RECHECK_S, self._planner.next_time()]
        if (deadline := self.queue.next_deadline()) is not None:
            times.append(deadline)
        if len(self.queue):
            times.append(self.allocator.next_change())
        return min(time for time in times if time > self._handled_at)

    def check(self) -> None:
        """Assert that slots, requests and books agree, as they must after every event."""
        self.fleet.check()
        for request_id, active in self.active.by_id.items():
            assert request_id in self.fleet.slots[active.slot_id].active, f"{request_id} is not on its slot"
            assert request_id not in self.queue, f"{request_id} runs and waits"
        on_slots = [request_id for slot in self.fleet.slots.values() for request_id in slot.active]
        assert sorted(on_slots) == sorted(self.active.by_id), "slots serve what nobody knows of"

    # -- runners ----------------------------------------------------------------------------------

    def _runner_joined(self, event: ev.RunnerJoined, now: float) -> Iterator[Instruction]:
        runner_id = event.runner.runner_id
        if runner_id in self.fleet.runners:
            yield from self._runner_lost(ev.RunnerLost(runner_id), now)
        self.fleet.add_runner(event.runner)
        self._joined_at[runner_id] = now
        self._unknown.add(runner_id)
        self._set_open(runner_id)
        for model in self.models.values():
            if model.prewarm:
                model.to_prewarm.add(runner_id)
                self._planner.agenda.wait_for_room(model.spec.name)
        yield AskRunner(runner_id)

    def _runners_expected(self, event: ev.RunnersExpected, now: float) -> Iterator[Instruction]:
        self.fleet.expect(event.runners, event.problems)
        yield from self._planner.refuse_what_fits_nowhere()

    def _runner_lost(self, event: ev.RunnerLost, now: float) -> Iterator[Instruction]:
        if event.runner_id in self.fleet.runners:
            self._drained.discard(event.runner_id)
            self._unknown.discard(event.runner_id)
            del self._joined_at[event.runner_id]
            for model in self.models.values():
                model.loaded_on.pop(event.runner_id, None)
            for slot in self.fleet.remove_runner(event.runner_id):
                lost = self.active.lose(slot, f"runner {event.runner_id} is lost", now)
                yield from self._defects.contained(slot.model, lost)

    def _runner_closed(self, event: ev.RunnerClosed, now: float) -> None:
        if event.runner_id in self.fleet.runners:
            (self._drained.add if event.closed else self._drained.discard)(event.runner_id)
            self._set_open(event.runner_id)
            for slot in self.fleet.on_runner(event.runner_id) if event.closed else []:
                self._endings.drain(slot, now, event.reason)

    def _runner_reported(self, event: ev.RunnerReported, now: float) -> Iterator[Instruction]:
        if event.as_of < self._joined_at.get(event.runner_id, inf):
            return  # the runner is lost, or was asked before it was, and has come back
        here = {slot.slot_id: slot for slot in self.fleet.on_runner(event.runner_id)}
        strangers = [slot_id for slot_id in event.slots if slot_id not in here]
        (self._unknown.add if strangers else self._unknown.discard)(event.runner_id)
        self._set_open(event.runner_id)
        for slot_id in strangers:
            yield DeleteSlot(slot_id, event.runner_id, "the runner has no slot of this id")
        for slot_id, slot in here.items():
            expected = slot.state in USES_MEMORY and slot.started_at is not None and slot.started_at < event.as_of
            if expected and slot_id not in event.slots:
                yield from self._slot_ended(ev.SlotEnded(slot_id), now)
        for text in self.fleet.books[event.runner_id].alarms(event.observed):
            yield RaiseAlarm(text)

    def _set_open(self, runner_id: str) -> None:
        is_open = runner_id not in self._drained | self._unknown
        if is_open is (runner_id in self.fleet.closed):
            self.fleet.set_open(runner_id, is_open)

    # -- models -----------------------------------------------------------------------------------

    def _model_registered(self, event: ev.ModelRegistered, now: float) -> Iterator[Instruction]:
        name, before = event.spec.name, self.models.get(event.spec.name)
        for slot in self.fleet.slots_of(name):
            has_other_code = before is not None and before.code != event.code and slot.state is not SlotState.PLANNED
            if slot.spec != event.spec or has_other_code:
                self._endings.drain(slot, now, "its model was registered again", EndsHow.FINISHES)
        if before is not None and before.spec != event.spec:
            self.allocator.forget(before.spec)
        model = ServedModel(event.spec, event.replicas, event.prewarm, event.load_s, event.code)
        if before is not None:
            model.load_s, model.demand, model.loaded_on = before.load_s, before.demand, before.loaded_on
        model.to_prewarm = set(self.fleet.runners) if event.prewarm else set()
        self.models[name] = model
        self._planner.agenda.note([name])
        yield from self._planner.refuse_what_fits_nowhere()

    def _model_removed(self, event: ev.ModelRemoved, now: float) -> Iterator[Instruction]:
        if model := self.models.pop(event.model, None):
            for request in self.queue.of_model(event.model):
                self.queue.remove(request.request_id)
                yield RefuseRequest(request.request_id, Refusal.UNKNOWN_MODEL, f"{event.model} is served no more")
            for slot in self.fleet.slots_of(event.model):
                self._endings.drain(slot, now, "its model was removed", EndsHow.FINISHES)
            self.fleet.prices.pop(event.model, None)
            self.allocator.forget(model.spec)
            self._defects.forget(event.model)

    # -- requests ---------------------------------------------------------------------------------

    def _request_arrived(self, event: ev.RequestArrived, now: float) -> Iterator[Instruction]:
        request = event.request
        refused = self._refusal(request, now)
        if refused is None:
            try:
                self.queue.add(request)
                self.models[request.model].arrivals += 1
            except SlotQueueFullError as error:
                refused = Refusal.QUEUE_FULL, str(error)
        if refused is not None:
            yield RefuseRequest(request.request_id, *refused)

    def _refusal(self, request: Request, now: float) -> tuple[Refusal, str] | None:
        model = self.models.get(request.model)
        if model is None:
            known = ", ".join(sorted(map(str, self.models))) or "none"
            return Refusal.UNKNOWN_MODEL, f"there is no model {request.model}; there are: {known}"
        if request.request_id in self.queue or request.request_id in self.active.by_id:
            return (
                Refusal.DUPLICATE,
                f"request {request.request_id} was submitted already; give each request its own id",
            )
        if request.deadline is not None and request.deadline <= now:
            return Refusal.EXPIRED, f"the deadline of request {request.request_id} has passed"
        if why := self._planner.why_not_loaded(model, now):
            return Refusal.LOAD_FAILED, why
        why = self.allocator.fits_nowhere(model.spec)
        return (Refusal.FITS_NOWHERE, why) if why else None

    def _request_cancelled(self, event: ev.RequestCancelled, now: float) -> Iterator[Instruction]:
        if event.request_id in self.queue:
            self.queue.remove(event.request_id)
        elif active := self.active.by_id.get(event.request_id):
            active.given_up = True
            yield self.active.stop(
                active, CLOSED if active.request.is_session else "its caller no longer waits for it", now
            )

    def _request_ended(self, event: ev.RequestEnded, now: float) -> None:
        is_over = self.active.end(event.request_id, event.slot_id, now)
        if is_over and (model := self.models.get(self.fleet.slots[event.slot_id].model)):
            model.crashes = 0

    def _sessions_renewed(self, event: ev.SessionsRenewed, now: float) -> None:
        self.sessions.renew(event.used, now)

    # -- slots ------------------------------------------------------------------------------------

    def _slot_ready(self, event: ev.SlotReady, now: float) -> Iterator[Instruction]:
        slot = self.fleet.slots.get(event.slot_id)
        if slot is not None and slot.state is SlotState.STARTING:
            assert slot.started_at is not None, f"slot {slot.slot_id} was never started"
            self.fleet.set_ready(slot.slot_id, now)
            if model := self.models.get(slot.model):
                model.note_ready(slot.allocation.runner_id, now - slot.started_at)
                self.fleet.set_prices({slot.model: model.price})
            serve = self._planner.dispatch(slot.model, now)  # first: even a slot that is to leave serves once
            yield from self._defects.contained(slot.model, serve)

    def _slot_failed(self, event: ev.SlotFailed, now: float) -> Iterator[Instruction]:
        slot = self.fleet.slots.get(event.slot_id)
        if slot is not None and slot.state in (SlotState.STARTING, SlotState.READY):
            yield from self._endings.fail(slot, event.reason, now)

    def _slot_ended(self, event: ev.SlotEnded, now: float) -> Iterator[Instruction]:
        slot = self.fleet.slots.get(event.slot_id)
        if slot is None or slot.state is SlotState.PLANNED:
            return
        if slot.wanted:
            cause = f" ({event.why})" if event.why else ""
            yield from self._endings.fail(slot, f"the process of slot {slot.slot_id} ended by itself{cause}", now)
        yield from self._forget(slot, now)

    def _forget(self, slot: Slot, now: float) -> Iterator[Instruction]:
        crashed = slot.state is SlotState.DRAINING  # its end is ordered only when no requests are left
        yield from self.active.lose(slot, f"slot {slot.slot_id} has ended", now, crashed)
        self.fleet.end(slot.slot_id)

    def _slot_evicted(self, event: ev.SlotEviction, now: float) -> None:
        if slot := self.fleet.slots.get(event.slot_id):
            self._endings.drain(slot, now)

    # -- time -------------------------------------------------------------------------------------

    def _at_intervals(self, now: float) -> Iterator[Instruction]:
        """Do what is due after any event: while other events come all the time, there is no `Tick`."""
        if now >= self._asked_at + REPORT_S:
            self._asked_at = now
            yield from map(AskRunner, self.fleet.runners)
            yield from self.sessions.stop_unused(now)
            yield from self._endings.end_idle_slots(now, IdleLimit.OWN)
        if now >= self._aged_at + ACTIVITY_S:
            self._aged_at = now
            for model in self.models.values():
                model.age_demand()
            self.fleet.set_prices({name: model.price for name, model in self.models.items()})
            yield from self._endings.end_idle_slots(now, IdleLimit.POLICY)

    def _complain(self, now: float) -> Iterator[Instruction]:
        """Raise an alarm if `Policy.stale_at` fails, at most every `ACTIVITY_S`, for it is asked all the time."""
        if now >= self._complained_at + ACTIVITY_S and (problem := self.allocator.staleness.take_problem()):
            self._complained_at = now
            yield RaiseAlarm(problem)


_HANDLERS: dict[type, Callable[[Reconciler, Any, float], Iterator[Instruction] | None]] = {
    ev.RunnerJoined: Reconciler._runner_joined,
    ev.RunnersExpected: Reconciler._runners_expected,
    ev.RunnerLost: Reconciler._runner_lost,
    ev.RunnerClosed: Reconciler._runner_closed,
    ev.RunnerReported: Reconciler._runner_reported,
    ev.ModelRegistered: Reconciler._model_registered,
    ev.ModelRemoved: Reconciler._model_removed,
    ev.RequestArrived: Reconciler._request_arrived,
    ev.RequestCancelled: Reconciler._request_cancelled,
    ev.RequestEnded: Reconciler._request_ended,
    ev.SessionsRenewed: Reconciler._sessions_renewed,
    ev.SlotReady: Reconciler._slot_ready,
    ev.SlotFailed: Reconciler._slot_failed,
    ev.SlotEnded: Reconciler._slot_ended,
    ev.SlotEviction: Reconciler._slot_evicted,
    ev.Tick: lambda core, event, now: None,
}


# -- idle runners ------------------------------------------------------------------------------------------------------
# Jobs that wait may have the hosts of runners that are idle.

_GOING = (SlotState.DRAINING, SlotState.FAILED)


def needs_room(core: Reconciler) -> bool:
    """Return whether requests wait for a slot, or a model has fewer slots than its replicas."""
    if len(core.queue):
        return True
    return any(core.fleet.of_model(name).wanted < model.replicas for name, model in core.models.items())


def idle_runners(core: Reconciler, now: float) -> set[str]:
    """Return the runners whose slots are all unused: stale, or about to end without requests."""
    staleness = core.allocator.staleness

    def is_stale(slot: Slot) -> bool:
        if slot.active or slot.claimed or slot.ready_at is None:
            return False
        return staleness.evictable_at(slot) <= now

    def is_idle(slot: Slot) -> bool:
        return not slot.active if slot.state in _GOING else slot.state is SlotState.READY and is_stale(slot)

    return {runner_id for runner_id in core.fleet.runners if all(map(is_idle, core.fleet.on_runner(runner_id)))}
