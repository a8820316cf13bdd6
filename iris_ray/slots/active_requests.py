"""The requests that slots serve now, and what becomes of them if their slot is lost."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from iris_ray.slots.fleet import SlotFleet
from iris_ray.slots.instructions import EndRequest, Instruction, Refusal, RefuseRequest, RequeueRequest, StartRequest
from iris_ray.slots.models import ModelSpec, SlotIdentity
from iris_ray.slots.request_queue import RequestQueue, Turn, begun
from iris_ray.slots.requests import Request
from iris_ray.slots.slot import Slot
from iris_ray.slots.warm_slots import choose_warm_slot


@dataclass(slots=True)
class Active:
    """One request that a slot serves.

    Attributes:
        request: the request, or session.
        turn: where it was in the queue.
        slot_id: the slot.
        most_together: how many requests may run on its slot, itself included.
        begun_at: when the slot got it.
        used_at: of a session: when it was last used.
        heard_at: of a session: when its client was last heard of.
        granted: of a session: whether its client has it, so that it is not begun again.
        given_up: whether its client has cancelled the request or closed the session.
        stopped: why it was told to stop, or "".
        stopped_at: when it was told so.
    """

    request: Request
    turn: Turn
    slot_id: str
    most_together: int
    begun_at: float
    used_at: float
    heard_at: float
    granted: bool = False
    given_up: bool = False
    stopped: str = ""
    stopped_at: float = 0.0

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody is to hear of its loss. A session may be stopped before its client has it."""
        return not self.given_up and not (self.stopped and self.granted)


@dataclass(slots=True)
class ActiveRequests:
    """Gives requests to slots.

    Attributes:
        by_id: the requests that slots serve.
        most_attempts: how often a request is given to a slot.
    """

    fleet: SlotFleet
    queue: RequestQueue
    most_attempts: int
    by_id: dict[str, Active] = field(default_factory=dict)

    def dispatch(self, identity: SlotIdentity, now: float) -> Iterator[Instruction]:
        """Give requests that wait for this to slots with a seat, until one of both runs out."""
        slots = self.fleet.of_identity(identity)
        while slots and self.queue.waiting(identity):
            spec = slots[-1].spec  # older ones may end because they have another one
            most = self.most_together(self.queue.first(identity), spec)
            slot = choose_warm_slot(slots, most, self.fleet.requests_on)
            if slot is None:
                return
            request, turn = self.queue.take(identity)
            request = begun(request)
            self.fleet.begin_request(slot.slot_id, request.request_id, now)
            self.fleet.limit(slot, min(most, slot.most_together))
            self.by_id[request.request_id] = Active(request, turn, slot.slot_id, most, now, now, now)
            yield StartRequest(request, slot.slot_id)

    def most_together(self, request: Request, spec: ModelSpec) -> int:
        """Return how many requests may run on a slot if this one does.

        One of those that ran on a slot that crashed may crash the next one, too. They run in smaller groups then, and
        one by one after two crashes or if they have only one attempt left. So the request that crashes slots uses up no
        last attempts but its own.
        """
        usual = spec.requests_at_a_time
        if not request.crashes:
            return usual
        alone = request.crashes > 1 or request.attempt >= self.most_attempts - 1
        return 1 if alone else math.isqrt(usual)

    def stop(self, active: Active, reason: str, now: float) -> Instruction:
        """Have a slot stop what it serves. It has its seat until it has ended."""
        if not active.stopped:
            active.stopped, active.stopped_at = reason, now
        return EndRequest(active.request.request_id, active.slot_id, active.stopped)

    def all_stopped(self, slot: Slot, before: float) -> bool:
        """Return whether a slot serves nothing but what was told to stop before that time."""
        served = [self.by_id[request_id] for request_id in slot.active]
        return bool(served) and all(each.stopped and each.stopped_at <= before for each in served)

    def end(self, request_id: str, slot_id: str, now: float) -> bool:
        """Note that a request is over; return False if that is no news."""
        active = self.by_id.get(request_id)
        if active is None or active.slot_id != slot_id:
            return False
        del self.by_id[request_id]
        self.fleet.end_request(slot_id, request_id, now)
        self._lift_limit(self.fleet.slots[slot_id])
        return True

    def _lift_limit(self, slot: Slot) -> None:
        """Let a slot serve as many requests as those that are left allow."""
        usual = slot.spec.requests_at_a_time
        if slot.most_together < usual:
            self.fleet.limit(slot, min([self.by_id[each].most_together for each in slot.active], default=usual))

    def lose(self, slot: Slot, reason: str, now: float, crashed: bool = False) -> Iterator[Instruction]:
        """Take a slot's requests back: its process is gone or useless. Those that may be repeated wait again.

        ``crashed``: whether one of them may be the cause.
        """
        for request_id in sorted(slot.active):
            active = self.by_id.pop(request_id)
            self.fleet.remove_request(slot, request_id)
            if crashed:
                active.request = replace(active.request, crashes=active.request.crashes + 1)
            if active.is_waited_for:
                yield self._after_loss(active, reason, now)

    def _after_loss(self, active: Active, reason: str, now: float) -> Instruction:
        request = active.request
        if active.granted:
            return RefuseRequest(request.request_id, Refusal.LOST, reason)
        if not request.retriable:
            why = f"{reason}; it may have run in part, and must not be repeated"
        elif request.attempt >= self.most_attempts:
            why = f"{reason}; that was the last of {self.most_attempts} attempts"
        elif request.deadline is not None and request.deadline <= now:
            why = f"{reason}; its deadline has passed"
        else:
            self.queue.put_back(request, active.turn)
            return RequeueRequest(request, reason)
        return RefuseRequest(request.request_id, Refusal.LOST, f"request {request.request_id}: {why}")
