"""Requests from their arrival to their end: the queue, the slots that serve them, and the sessions among them."""

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Final

from iris_ray.errors import SlotQueueFullError
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.instructions import (
    EndRequest,
    Instruction,
    Refusal,
    RefuseRequest,
    RequeueRequest,
    StartRequest,
)
from iris_ray.slots.core.models import ModelSpec, Request
from iris_ray.slots.core.policy import REPORT_S, ServingPolicy
from iris_ray.slots.core.slot import Slot

Turn = tuple[bool, int, str]
"""A request's place in the queue, smaller first: whether it lacks priority, the number of its arrival, and its id."""
_NO_TURN: Final[Turn] = (True, sys.maxsize, "")


@dataclass(slots=True)
class RequestQueue:
    """The requests that wait: first come, first served, those with priority before the others.

    Args:
        most: how many may wait at once.
        most_bytes: how many bytes these may have. One request may always wait.

    Attributes:
        changed: models for which requests have begun to wait, or wait no more; the reader clears it.
    """

    most: int
    most_bytes: int
    changed: dict[str, None] = field(default_factory=dict, init=False)
    _requests: dict[str, Request] = field(default_factory=dict)
    _turns: dict[str, Turn] = field(default_factory=dict)
    _waiting: dict[str, list[Turn]] = field(default_factory=dict)
    _deadlines: list[tuple[float, str]] = field(default_factory=list)
    _arrivals: int = 0
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. None of its id may wait already.

        Raises:
            SlotQueueFullError: the limit of requests or of bytes is reached.
        """
        if len(self._requests) >= self.most:
            raise SlotQueueFullError(f"{self.most:,} requests wait already, which is the limit; try again in a moment")
        if self._requests and self._bytes + request.size > self.most_bytes:
            raise SlotQueueFullError(
                f"{self._bytes:,} bytes of requests wait already, and this one has {request.size:,}; the limit is "
                f"{self.most_bytes:,}. Try again in a moment"
            )
        self._arrivals += 1
        self._insert(request, (not request.priority, self._arrivals, request.request_id))

    def first(self, name: str) -> Request:
        """Return the first request for a model."""
        return self._requests[self._waiting[name][0][2]]

    def take(self, name: str) -> tuple[Request, Turn]:
        """Remove the first request for a model, and return it with its turn, for `put_back`."""
        turn = self._waiting[name][0]
        return self._take(turn[2]), turn

    def put_back(self, request: Request, turn: Turn) -> None:
        """Let a request wait again in its old turn, because its slot is lost. The limit does not apply."""
        self._insert(request, turn)

    def remove(self, request_id: str) -> Request:
        """Remove a request that waits. A slot may be superfluous now."""
        self.changed[self._requests[request_id].model] = None
        return self._take(request_id)

    def _take(self, request_id: str) -> Request:
        turn = self._turns.pop(request_id)
        request = self._requests.pop(request_id)
        self._bytes -= request.size
        waiting = self._waiting[request.model]
        del waiting[bisect_left(waiting, turn)]
        if not waiting:
            del self._waiting[request.model]
        return request

    def expired(self, now: float) -> list[Request]:
        """Remove the requests whose deadline has passed, and return them."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline == deadline:
                found.append(self.remove(request_id))
        return found

    def next_deadline(self) -> float | None:
        """Return when the next request expires, or None. That request may have left the queue already."""
        return self._deadlines[0][0] if self._deadlines else None

    def waiting(self, name: str) -> int:
        """Return how many requests for a model wait."""
        return len(self._waiting.get(name, ()))

    def oldest(self, name: str) -> float:
        """Return when the longest-waiting request for a model arrived; infinity if none waits."""
        turns = self._waiting.get(name, [])
        usual = bisect_left(turns, (True, 0, ""))  # the first without priority
        ends = [turns[place] for place in {0, usual} if place < len(turns)]
        return min((self._requests[turn[2]].arrived_at for turn in ends), default=float("inf"))

    def models(self) -> list[str]:
        """Return the models for which requests wait."""
        return list(self._waiting)

    def in_turn(self, among: Iterable[str]) -> list[str]:
        """Return models in the order of their first requests' turns; those for which no request waits come last."""
        return sorted(among, key=lambda name: self._waiting[name][0] if name in self._waiting else _NO_TURN)

    def of_model(self, name: str) -> list[Request]:
        """Return the requests for a model, in order."""
        return [self._requests[turn[2]] for turn in self._waiting.get(name, ())]

    def __iter__(self) -> Iterator[Request]:
        yield from (self._requests[turn[2]] for turn in sorted(self._turns.values()))

    def _insert(self, request: Request, turn: Turn) -> None:
        self._requests[request.request_id] = request
        self._bytes += request.size
        self._turns[request.request_id] = turn
        self.changed[request.model] = None
        insort(self._waiting.setdefault(request.model, []), turn)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.request_id))
            if len(self._deadlines) > 2 * len(self._requests) + 1000:  # most of those have left
                found = ((each.deadline, each.request_id) for each in self._requests.values())
                self._deadlines = [(when, request_id) for when, request_id in found if when is not None]
                heapify(self._deadlines)


def slots_wanted(waiting: int, free_seats: int, spec: ModelSpec) -> int:
    """Return how many more slots give every waiting request a seat. ``free_seats`` includes those of starting slots."""
    return max(0, -(-(waiting - free_seats) // spec.requests_at_a_time))


# -- active requests ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Active:
    """One request or session that a slot serves.

    Attributes:
        turn: its place in the queue, before it began.
        most_together: how many requests may run on its slot, including this one.
        begun_at: when the slot got it.
        used_at: when the session was last used.
        heard_at: when the session's client was last heard of.
        silent: how many looks in a row have found nothing new of that client.
        granted: whether the client has the session, so that it is not begun again.
        given_up: whether the client has cancelled the request or closed the session.
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
    silent: int = 0
    granted: bool = False
    given_up: bool = False
    stopped: str = ""
    stopped_at: float = 0.0

    @property
    def is_waited_for(self) -> bool:
        """Whether a client has to be told if it is lost. A session may be stopped before its client has it."""
        return not self.given_up and not (self.stopped and self.granted)


@dataclass(slots=True)
class ActiveRequests:
    """The requests that slots serve now (``by_id``). Each is given to a slot at most ``most_attempts`` times.

    Attributes:
        stopped: the requests that were told to stop, by id.
        sessions: the sessions among them, by model and id.
    """

    fleet: SlotFleet
    queue: RequestQueue
    most_attempts: int
    by_id: dict[str, Active] = field(default_factory=dict)
    stopped: dict[str, Active] = field(default_factory=dict)
    sessions: dict[str, dict[str, Active]] = field(default_factory=dict)

    def dispatch(self, name: str, now: float) -> Iterator[Instruction]:
        """Give waiting requests for a model to slots, until either requests or seats are used up."""
        slots = self.fleet.of_model(name)
        while slots.ready and self.queue.waiting(name):
            spec = next(reversed(slots.all.values())).spec  # older ones may end because they have another one
            most = self.most_together(self.queue.first(name), spec)
            slot = slots.best_seat(most, self.fleet.requests_on)
            if slot is None:
                return
            request, turn = self.queue.take(name)
            request = replace(request, attempt=request.attempt + 1)
            self.fleet.begin_request(slot.slot_id, request.request_id, now)
            self.fleet.limit(slot, min(most, slot.most_together))
            made = self.by_id[request.request_id] = Active(request, turn, slot.slot_id, most, now, now, now)
            if request.is_session:
                self.sessions.setdefault(name, {})[request.request_id] = made
            yield StartRequest(request, slot.slot_id)

    def most_together(self, request: Request, spec: ModelSpec) -> int:
        """Return how many requests may run on a slot if this one does.

        If a slot has crashed, one of its requests may crash the next slot as well. So these requests run in smaller
        groups, and alone after two crashes or on their last attempt. Thus a request that crashes slots uses up no
        other request's last attempt.
        """
        usual = spec.requests_at_a_time
        if not request.crashes:
            return usual
        alone = request.crashes > 1 or request.attempt >= self.most_attempts - 1
        return 1 if alone else math.isqrt(usual)

    def stop(self, active: Active, reason: str, now: float) -> Instruction:
        """Have a slot stop serving a request. The request keeps its seat until it has ended."""
        if not active.stopped:
            active.stopped, active.stopped_at = reason, now
            self.stopped[active.request.request_id] = active
            self.fleet.to_look[active.slot_id] = None
        return EndRequest(active.request.request_id, active.slot_id, active.stopped)

    def stopped_at(self, slot: Slot) -> float:
        """Return when the last request of a slot was told to stop; infinity if one was not, or none runs there."""
        served = [self.by_id[request_id] for request_id in slot.active]
        return max([each.stopped_at if each.stopped else math.inf for each in served], default=math.inf)

    def end(self, request_id: str, slot_id: str, now: float) -> bool:
        """Note that a request is over; return False if it was over, or on another slot, already."""
        active = self.by_id.get(request_id)
        if active is None or active.slot_id != slot_id:
            return False
        self._forget(active)
        self.fleet.end_request(slot_id, request_id, now)
        self._lift_limit(self.fleet.slots[slot_id])
        return True

    def _forget(self, active: Active) -> None:
        request = active.request
        del self.by_id[request.request_id]
        self.stopped.pop(request.request_id, None)
        if request.is_session:
            of_model = self.sessions[request.model]
            del of_model[request.request_id]
            if not of_model:
                del self.sessions[request.model]

    def _lift_limit(self, slot: Slot) -> None:
        """Let a slot serve as many requests as its remaining ones allow."""
        usual = slot.spec.requests_at_a_time
        if slot.most_together < usual:
            self.fleet.limit(slot, min([self.by_id[each].most_together for each in slot.active], default=usual))

    def lose(self, slot: Slot, reason: str, now: float, crashed: bool = False) -> Iterator[Instruction]:
        """Take back the requests of a slot whose process is gone or useless. Those that may be repeated wait again.

        ``crashed``: whether one of the requests may be the cause.
        """
        for request_id in sorted(slot.active):
            active = self.by_id[request_id]
            self._forget(active)
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


# -- sessions ----------------------------------------------------------------------------------------------------------

CLOSED = "it was closed"


@dataclass(slots=True)
class Sessions:
    """The sessions among the active requests: when they give their seats back. They end as stopped requests do.

    The client of a session calls the slot directly, and only reports here that it uses the session.
    """

    active: ActiveRequests
    policy: ServingPolicy

    def on(self, slot: Slot) -> list[Active]:
        """Return the sessions that have a seat on a slot."""
        found = [self.active.by_id[request_id] for request_id in sorted(slot.active)]
        return [each for each in found if each.request.is_session]

    def renew(self, used: Mapping[str, float], now: float) -> None:
        """Note that a client has these sessions, and when it used each."""
        for session_id, used_at in used.items():
            if found := self.active.by_id.get(session_id):
                found.granted, found.silent = True, 0
                found.heard_at, found.used_at = now, max(found.used_at, min(used_at, now))

    def stop_unused(self, now: float) -> Iterator[Instruction]:
        """Look at all sessions: stop those that were unused for too long, or whose client is silent.

        Both follow from what clients have reported and from the number of looks, one in `REPORT_S`. If this process was
        frozen, the reports from that time are still on their way.
        """
        for each in [each for of_model in self.active.sessions.values() for each in of_model.values()]:
            each.silent += 1
            if not each.stopped and (reason := self._unused(each)):
                yield self.active.stop(each, reason, now)

    def stop_on(self, slot: Slot, reason: str, now: float) -> Iterator[Instruction]:
        """Stop the sessions on a slot that has to end."""
        for each in self.on(slot):
            if not each.stopped:
                yield self.active.stop(each, f"slot {slot.slot_id} has to end: {reason}", now)

    def call_back(self, name: str, now: float) -> Iterator[Instruction]:
        """Stop the oldest session of a model for which other requests have waited long.

        Only a session that has had its seat for `ServingPolicy.ageing_s` is stopped, and only after the last one that
        was stopped has ended or has used up `ServingPolicy.drain_s`.
        """
        sessions = self.active.sessions.get(name, {}).values()
        long = [each for each in sessions if not each.stopped and each.begun_at + self.policy.ageing_s <= now]
        if long and not any(each.stopped and now - each.stopped_at < self.policy.drain_s for each in sessions):
            oldest = min(long, key=lambda each: (each.begun_at, each.turn))
            yield self.active.stop(oldest, f"others have waited for {name} for {self.policy.ageing_s:g} s", now)

    def _unused(self, session: Active) -> str:
        idle_s = session.request.idle_s
        assert idle_s is not None, "a session has a limit"
        if session.heard_at - session.used_at >= idle_s:
            return f"it was not used for {idle_s:g} s"
        is_silent = (session.silent - 1) * REPORT_S >= self.policy.silence_s
        return f"its client was silent for {self.policy.silence_s:g} s" if is_silent else ""
