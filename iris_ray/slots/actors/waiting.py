"""The callers that wait for answers in a SlotManager, and their clients."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from iris_ray.errors import (
    InvalidSlotError,
    IrisError,
    JobCancelledError,
    ModelUnavailableError,
    RequestExpiredError,
    RequestLostError,
    SlotQueueFullError,
    UnknownNameError,
)
from iris_ray.slots.actors.messages import Ask, packed_error
from iris_ray.slots.actors.streams import Batch, Pieces, StreamEnd, Untaken
from iris_ray.slots.core.instructions import Refusal

_ERRORS: Final[dict[Refusal, type[IrisError]]] = {
    Refusal.DUPLICATE: InvalidSlotError,
    Refusal.UNKNOWN_MODEL: UnknownNameError,
    Refusal.QUEUE_FULL: SlotQueueFullError,
    Refusal.FITS_NOWHERE: InvalidSlotError,
    Refusal.EXPIRED: RequestExpiredError,
    Refusal.LOAD_FAILED: ModelUnavailableError,
    Refusal.LOST: RequestLostError,
}


def error_of(refusal: Refusal, reason: str) -> IrisError:
    """Return the error of a refusal."""
    return _ERRORS[refusal](reason)


@dataclass(slots=True, eq=False)
class WaitingCaller:
    """One caller, and the pieces of its answer that are here. The last one is an error if the answer is not complete.

    Attributes:
        streams: takes the pieces as they come; None: the caller wants the whole answer.
        begun: whether the caller has had a piece, so that the request can't be repeated unnoticed.
    """

    ask: Ask
    streams: "ClientStreams | None" = None
    begun: bool = False
    _untaken: Untaken = field(default_factory=Untaken)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """Whether the caller has been given the end, so that no slot has to run the request."""
        return self._ended.is_set()

    def give(self, pieces: Pieces) -> None:
        """Hand over pieces, or the whole answer. Pieces after the end are dropped."""
        if not pieces or self.is_over:
            return
        self.begun = True
        self._untaken.pieces += pieces
        if self.streams is not None:
            self.streams.note(self.ask.request_id, self._untaken)

    def end(self, error: IrisError | None = None) -> None:
        """End the answer, with an error if it is not complete."""
        if error is not None and not self.is_over:
            self._untaken.pieces.append(packed_error(error))
        self._ended.set()

    async def answer(self) -> StreamEnd:
        """Wait for the end. Return it with the pieces that are left."""
        await self._ended.wait()
        return self._untaken.end()


@dataclass(slots=True, eq=False)
class ClientStreams:
    """The streams of one client whose pieces it may take.

    Attributes:
        calls: the number of its calls that use them.
    """

    calls: int = 0
    _latest: object = None
    _ready: dict[str, Untaken] = field(default_factory=dict)
    _has_some: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, request_id: str, untaken: Untaken) -> None:
        """Note that a stream has pieces."""
        self._ready[request_id] = untaken
        self._has_some.set()

    def forget(self, request_id: str) -> None:
        """Note that a stream has ended."""
        self._ready.pop(request_id, None)

    async def take(self, timeout_s: float) -> Batch:
        """Return the pieces of all streams; nothing if there are none within ``timeout_s``.

        A client makes one call at a time. So when it makes another one, nobody waits for the answer of the first.
        """
        self._latest = this = object()
        self._has_some.set()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._ready and self._latest is this:
                    self._has_some.clear()
                    await self._has_some.wait()
        except TimeoutError:
            return {}
        if self._latest is not this:
            return {}
        ready, self._ready = self._ready, {}
        return {request_id: untaken.take() for request_id, untaken in ready.items()}


@dataclass(slots=True, eq=False)
class Clients:
    """The clients that have requests, and how often in a row the manager looked for a sign of each in vain.

    It counts looks, not seconds: a manager that stands still for a minute hears of no client.

    Attributes:
        most_in_vain: how many looks in a row may be in vain before the client counts as gone.
    """

    most_in_vain: float
    _in_vain: dict[str, int] = field(default_factory=dict)

    def heard(self, client_id: str) -> None:
        """Note a sign of life of a client."""
        self._in_vain[client_id] = 0

    def look(self, with_requests: Collection[str]) -> set[str]:
        """Return which of these clients are gone or frozen. Forget all others, which have no requests."""
        self._in_vain = {name: looks + 1 for name, looks in self._in_vain.items() if name in with_requests}
        return {name for name, looks in self._in_vain.items() if looks > self.most_in_vain}


def cancelled(request_id: str) -> JobCancelledError:
    """Return the error of a cancelled request."""
    return JobCancelledError(f"request {request_id} was cancelled")
