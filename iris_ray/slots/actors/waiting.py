"""The callers who wait for answers in a SlotManager, and their clients."""

import asyncio
from collections.abc import AsyncIterator, Collection
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
from iris_ray.slots.actors.messages import MOST_PIECES, AnswerPiece, Ask, packed_error
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
    """One caller. Pieces of the answer go into a queue; after the last piece comes the end, or an error.

    `give` waits while the caller has `MOST_PIECES` to take.

    Attributes:
        streams: whether the caller wants pieces as they come.
        begun: whether the caller has had a piece, so that the request can't be repeated unnoticed.
    """

    ask: Ask
    streams: bool = False
    begun: bool = False
    _pieces: "asyncio.Queue[AnswerPiece | None]" = field(default_factory=asyncio.Queue)
    _over: bool = False
    _untaken: int = 0
    _has_room: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """Whether the caller has been given the end, so that no slot has to run the request."""
        return self._over

    async def give(self, piece: AnswerPiece) -> None:
        """Hand over a piece, or the whole answer. Pieces after the end are dropped."""
        self.begun = True
        while self._untaken >= MOST_PIECES and not self._over:
            self._has_room.clear()
            await self._has_room.wait()
        if not self._over:
            self._untaken += 1
            self._pieces.put_nowait(piece)

    def taken(self, pieces: int) -> None:
        """Note that the caller has taken so many more pieces of a stream."""
        self._untaken -= pieces
        self._has_room.set()

    def end(self, error: IrisError | None = None) -> None:
        """End the answer, with an error if it is not complete."""
        self._over = True
        self._has_room.set()
        if error is not None:
            self._pieces.put_nowait(packed_error(error))
        self._pieces.put_nowait(None)

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        """Yield the pieces as they come."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


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
