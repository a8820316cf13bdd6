"""What a model can know of the request that it answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A request, or a call of a session, that a model answers.

    Attributes:
        request_id: its id, the same each time it runs.
        attempt: how often it was given to a slot, this time included. From 2 on it may have run before, in part or
            whole. A session's call is never repeated.
    """

    request_id: str
    attempt: int = 1


_CURRENT: Final[ContextVar[SlotRequest | None]] = ContextVar("slot request", default=None)


def slot_request() -> SlotRequest | None:
    """Return the request that the calling model answers, or None outside a model's ``__call__``.

    It works in functions, coroutines and generators. Threads that a model starts have none.

    Example::

        def __call__(self, payload):
            request = slot_request()
            if request.attempt > 1 and self.has_stored(request.request_id):
                return "stored already"
    """
    return _CURRENT.get()


@contextmanager
def answering(request: SlotRequest) -> Iterator[None]:
    """Have `slot_request` return a request in this thread, and in what it starts in an event loop."""
    _CURRENT.set(request)
    try:
        yield
    finally:
        _CURRENT.set(None)
