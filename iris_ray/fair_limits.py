"""Limits that nobody can use up alone: places that go from the owner that has most, and turns that owners take.

An owner is whatever is known of who asks: an address, a key, a session, a user's name.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

BACKLOG = 1024
"""Connections to a listener that the kernel keeps until they are accepted. Linux drops the first packet of one more,
and its sender waits at least a second. The kernel's own limit, `net.core.somaxconn`, is 4,096 since Linux 5.4."""


class Places(Generic[T]):
    """Things of owners, such as connections of addresses. Where there is no room for one more, an old one has to go.

    It is the oldest thing of the owner that has most. So an owner that has few keeps them, however many another one
    brings.

    Args:
        most: the limit for things. Without one, somebody else says when one has to go: `take_one`.
    """

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self._owners: dict[T, str] = {}  # the oldest thing first
        self._things: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[T]:
        return iter(self._owners)

    def add(self, thing: T, owner: str) -> T | None:
        """Add a thing. Return the one that has lost its place to it; None if there was room."""
        lost = self.take_one() if len(self._owners) >= self.most else None
        self._owners[thing] = owner
        self._things.setdefault(owner, {})[thing] = None
        return lost

    def take_one(self) -> T | None:
        """Take the place of the oldest thing of the owner that has most. Return the thing; None if there is none."""
        if not self._owners:
            return None
        most = max(self._things.values(), key=len)
        thing = next(iter(most))
        self.remove(thing)
        return thing

    def remove(self, thing: T) -> None:
        """Remove a thing, if it still has a place."""
        if (owner := self._owners.pop(thing, None)) is not None:
            del self._things[owner][thing]
            if not self._things[owner]:
                del self._things[owner]


def leaves_room(held: int, free: int) -> bool:
    """Return whether an owner of ``held`` places may take one of the ``free`` ones: only if it holds fewer.

    An owner that is alone therefore holds at most half of all places, and another one's first request finds a place.
    """
    return held < free


class Turns:
    """Admits requests up to a limit, as `leaves_room` says. If requests wait, their owners take turns.

    Args:
        most: the limit for requests at a time.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn of this owner, and hold it."""
        if self._may(owner):
            self._held[owner] += 1
        else:
            came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(came)
            try:
                await came
            except asyncio.CancelledError:
                if came.done() and not came.cancelled():  # the turn came as the caller left
                    self._give_back(owner)
                raise
        try:
            yield
        finally:
            self._give_back(owner)

    def _may(self, owner: str) -> bool:
        return leaves_room(self._held[owner], self._most - self._held.total())

    def _give_back(self, owner: str) -> None:
        """Give free places to owners that wait, first to the one that has waited longest for its next turn."""
        self._held[owner] -= 1
        self._held += Counter()  # drops those that hold none
        for waits in list(self._waiting):
            line = self._waiting[waits]
            while line and line[0].done():  # its caller has left
                line.popleft()
            if line and self._may(waits):
                self._held[waits] += 1
                line.popleft().set_result(None)
                self._waiting[waits] = self._waiting.pop(waits)  # after all others
            if not line:
                del self._waiting[waits]
