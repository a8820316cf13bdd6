"""The callers who wait for an answer, and what they get."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from iris_ray.actors.slots.messages import Ask
from iris_ray.actors.slots.pieces import Piece, packed_error
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
from iris_ray.slots.instructions import Refusal

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
    """Return what a refusal raises."""
    return _ERRORS[refusal](reason)


@dataclass(slots=True, eq=False)
class Waiting:
    """One caller. Pieces of the answer go into a queue; after the last comes the end, or an error.

    Attributes:
        ask: what was asked.
        streams: whether pieces are wanted as they come.
        begun: whether the caller has had a piece, so that the request can't be repeated unnoticed.
    """

    ask: Ask
    streams: bool = False
    begun: bool = False
    _pieces: "asyncio.Queue[Piece | None]" = field(default_factory=asyncio.Queue)

    def give(self, piece: Piece) -> None:
        """Hand over a piece, or the whole answer."""
        self.begun = True
        self._pieces.put_nowait(piece)

    def end(self, error: IrisError | None = None) -> None:
        """Say that nothing more comes, or why."""
        if error is not None:
            self._pieces.put_nowait(packed_error(error))
        self._pieces.put_nowait(None)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


def cancelled(request_id: str) -> JobCancelledError:
    """Return what a caller gets whose request was cancelled."""
    return JobCancelledError(f"request {request_id} was cancelled")
