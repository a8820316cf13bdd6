"""Why requests and sessions were stopped, for whoever has not heard of it yet."""

from dataclasses import dataclass, field

MOST = 10_000
"""Of those that were stopped before, nothing is known any more."""


@dataclass(slots=True, eq=False)
class Reasons:
    """The most recent ones, by id."""

    _by_id: dict[str, str] = field(default_factory=dict)

    def note(self, request_id: str, reason: str) -> None:
        """Keep the first reason that is given for one."""
        self._by_id.setdefault(request_id, reason)
        if len(self._by_id) > MOST:
            del self._by_id[next(iter(self._by_id))]

    def knows(self, request_id: str) -> bool:
        """Return whether one was stopped."""
        return request_id in self._by_id

    def forget(self, request_id: str) -> bool:
        """Forget one; return whether it was known."""
        return self._by_id.pop(request_id, None) is not None

    def of(self, request_id: str) -> str:
        """Return why one is over."""
        return self._by_id.get(request_id, "it has ended")
