"""The requests that wait: first come, first served, priority before the others, by model."""

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Final

from iris_ray.errors import InvalidSlotError, SlotQueueFullError
from iris_ray.slots.models import SlotIdentity
from iris_ray.slots.requests import Request

Turn = tuple[bool, int, str]
"""Whether it goes after those with priority, when it came in, and its id. Smaller goes first."""
_NO_TURN: Final[Turn] = (True, sys.maxsize, "")


@dataclass(slots=True)
class RequestQueue:
    """Requests in the order in which they are served.

    Args:
        most: how many may wait at once.
        most_bytes: how many bytes these may have. One request may always wait.

    Attributes:
        changed: what requests have begun to wait for, until somebody looks at it.
    """

    most: int = 10_000
    most_bytes: int = 2**30
    changed: dict[SlotIdentity, None] = field(default_factory=dict, init=False)
    _requests: dict[str, Request] = field(default_factory=dict)
    _turns: dict[str, Turn] = field(default_factory=dict)
    _waiting: dict[SlotIdentity, list[Turn]] = field(default_factory=dict)
    _deadlines: list[tuple[float, str]] = field(default_factory=list)
    _arrivals: int = 0
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidSlotError: a request of this id waits already.
            SlotQueueFullError: so many wait, or so many bytes, that no more are taken.
        """
        if request.request_id in self._requests:
            raise InvalidSlotError(f"request {request.request_id} waits already; give each request an id of its own")
        if len(self._requests) >= self.most:
            raise SlotQueueFullError(f"{self.most:,} requests wait already, which is the limit; try again in a moment")
        if self._requests and self._bytes + request.size > self.most_bytes:
            raise SlotQueueFullError(
                f"{self._bytes:,} bytes of requests wait already, and this one has {request.size:,}; the limit is "
                f"{self.most_bytes:,}. Try again in a moment"
            )
        self._arrivals += 1
        self._insert(request, (not request.priority, self._arrivals, request.request_id))

    def first(self, identity: SlotIdentity) -> Request:
        """Return the request whose turn it is among those that wait for this."""
        return self._requests[self._waiting[identity][0][2]]

    def take(self, identity: SlotIdentity) -> tuple[Request, Turn]:
        """Remove the request whose turn it is, and return it with its turn, for `put_back`."""
        turn = self._waiting[identity][0]
        return self.remove(turn[2]), turn

    def put_back(self, request: Request, turn: Turn) -> None:
        """Let a request wait again, where it was: its runner is lost. The limit does not apply."""
        self._insert(request, turn)

    def remove(self, request_id: str) -> Request:
        """Remove a request that waits. No trace of it is left."""
        turn = self._turns.pop(request_id)
        request = self._requests.pop(request_id)
        self._bytes -= request.size
        waiting = self._waiting[request.identity]
        del waiting[bisect_left(waiting, turn)]
        if not waiting:
            del self._waiting[request.identity]
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
        """Return when the next request expires, or None. It may have left already."""
        return self._deadlines[0][0] if self._deadlines else None

    def waiting(self, identity: SlotIdentity) -> int:
        """Return how many requests for this wait."""
        return len(self._waiting.get(identity, ()))

    def oldest(self, identity: SlotIdentity) -> float:
        """Return when the longest-waiting request for this arrived; infinity if none waits."""
        turns = self._waiting.get(identity, [])
        usual = bisect_left(turns, (True, 0, ""))  # the first without priority
        ends = [turns[place] for place in {0, usual} if place < len(turns)]
        return min((self._requests[turn[2]].arrived_at for turn in ends), default=float("inf"))

    def identities(self) -> list[SlotIdentity]:
        """Return what requests wait for."""
        return list(self._waiting)

    def in_turn(self, among: Iterable[SlotIdentity]) -> list[SlotIdentity]:
        """Return these in the order of the turns of the first requests that wait for them; others come last."""
        return sorted(among, key=lambda identity: self._waiting[identity][0] if identity in self._waiting else _NO_TURN)

    def of_identity(self, identity: SlotIdentity) -> list[Request]:
        """Return the requests that wait for this, in order."""
        return [self._requests[turn[2]] for turn in self._waiting.get(identity, ())]

    def __iter__(self) -> Iterator[Request]:
        yield from (self._requests[turn[2]] for turn in sorted(self._turns.values()))

    def _insert(self, request: Request, turn: Turn) -> None:
        self._requests[request.request_id] = request
        self._bytes += request.size
        self._turns[request.request_id] = turn
        self.changed[request.identity] = None
        insort(self._waiting.setdefault(request.identity, []), turn)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.request_id))
            if len(self._deadlines) > 2 * len(self._requests) + 1000:  # most of those have left
                found = ((each.deadline, each.request_id) for each in self._requests.values())
                self._deadlines = [(when, request_id) for when, request_id in found if when is not None]
                heapify(self._deadlines)


def begun(request: Request) -> Request:
    """Return the request as a slot gets it: one attempt more."""
    return replace(request, attempt=request.attempt + 1)
