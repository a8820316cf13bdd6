"""The sessions that have a seat on a slot, as its process sees them: who may call it, and whose calls run."""

import threading
from dataclasses import dataclass, field

from iris_ray.actors.slots.messages import NotHeld
from iris_ray.actors.slots.reasons import Reasons


@dataclass(slots=True, eq=False)
class HeldSessions:
    """All of them, by id, and how many calls each has. Several threads use it."""

    _calls: dict[str, int] = field(default_factory=dict)
    _over: Reasons = field(default_factory=Reasons)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def open(self, session_id: str) -> None:
        """Give a session its seat, unless it was stopped before that."""
        with self._changed:
            if not self._over.knows(session_id):
                self._calls[session_id] = 0

    def begin_call(self, session_id: str) -> NotHeld | None:
        """Count a call; return why the session may not make it, or None. Its client makes one at a time."""
        with self._changed:
            if session_id not in self._calls or self._over.knows(session_id):
                return NotHeld(self._over.of(session_id))
            self._calls[session_id] += 1
            return None

    def end_call(self, session_id: str) -> None:
        """Count a call no more."""
        with self._changed:
            self._calls[session_id] -= 1
            self._changed.notify_all()

    def stop(self, session_id: str, reason: str) -> None:
        """Let a session call no more, and return once it has no call left."""
        with self._changed:
            self._over.note(session_id, reason)
            self._changed.wait_for(lambda: not self._calls.get(session_id))
            self._calls.pop(session_id, None)
