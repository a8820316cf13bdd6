"""Why sessions are over, for clients that have not heard of it yet."""

from dataclasses import dataclass, field

MOST = 10_000
"""Sessions. Of those that ended before, it is only known that they are over."""


@dataclass(slots=True, eq=False)
class Reasons:
    """The most recent ones, by session id."""

    _by_id: dict[str, str] = field(default_factory=dict)

    def note(self, session_id: str, reason: str) -> None:
        """Keep the first reason that is given for a session."""
        self._by_id.setdefault(session_id, reason)
        if len(self._by_id) > MOST:
            del self._by_id[next(iter(self._by_id))]

    def of(self, session_id: str) -> str:
        """Return why a session is over."""
        return self._by_id.get(session_id, "it has ended")
