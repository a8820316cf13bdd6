"""The sessions that have a seat on a slot, as its process sees them: who may call it, and whose calls run."""

import asyncio
from dataclasses import dataclass, field
from typing import Self

from iris_ray.actors.slots.messages import NotHeld
from iris_ray.actors.slots.reasons import Reasons


@dataclass(slots=True, eq=False)
class HeldSession:
    """One session. Its calls run one after the other, in the order in which they came: it has one seat."""

    calls: int = 0
    stopped: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __aenter__(self) -> Self:
        self.calls += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._turn.release()
        self._leave()

    def stop(self) -> None:
        """Take no more calls."""
        self.stopped = True
        if not self.calls:
            self.over.set()

    def _leave(self) -> None:
        self.calls -= 1
        if self.stopped and not self.calls:
            self.over.set()


@dataclass(slots=True, eq=False)
class HeldSessions:
    """All of them, by id."""

    _held: dict[str, HeldSession] = field(default_factory=dict)
    _reasons: Reasons = field(default_factory=Reasons)

    def open(self, session_id: str) -> None:
        """Give a session its seat."""
        self._held[session_id] = HeldSession()

    def get(self, session_id: str) -> HeldSession | NotHeld:
        """Return a session that may call, or why it may not."""
        session = self._held.get(session_id)
        if session is None or session.stopped:
            return NotHeld(self._reasons.of(session_id))
        return session

    def stop(self, session_id: str, reason: str) -> None:
        """Let a session call no more. Nothing happens if there is none of this id."""
        if session := self._held.get(session_id):
            self._reasons.note(session_id, reason)
            session.stop()

    async def wait_over(self, session_id: str) -> None:
        """Wait until a session has been stopped and has no call left, and take its seat."""
        await self._held[session_id].over.wait()
        del self._held[session_id]
