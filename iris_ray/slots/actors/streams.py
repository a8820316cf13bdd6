"""The way of a stream's pieces from a model's slot to the SlotManager, and from there to the client.

A stream is one call. It returns a `StreamEnd`: the pieces that are left when the model has ended. All earlier pieces
are fetched by another call, ``take``, which waits until there are some, and returns those of all streams together.
The SlotManager keeps one such call waiting in each slot, and a client with streams keeps one waiting in the
SlotManager. So the number of messages does not grow with the number of pieces: while one answer is on its way, pieces
gather for the next one. A piece that comes alone leaves at once.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from iris_ray.slots.actors.messages import AnswerPiece

MOST_PIECES: Final = 64
"""The limit for the pieces of a stream that its caller has not read yet. Then the model waits."""
READ_AT_ONCE: Final = 32
"""The number of pieces after which a caller reports that it has read them."""

Pieces = tuple[AnswerPiece, ...]
Batch = Mapping[str, Pieces]
"""The next pieces of streams, by the ids of their requests."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of a stream.

    Attributes:
        taken: the number of its pieces that calls of ``take`` have returned. One such answer may still be on its way.
        pieces: the pieces after these.
    """

    taken: int
    pieces: Pieces


Arrived = Pieces | BaseException | Future[StreamEnd] | asyncio.Future[StreamEnd]
"""What a reader of a stream gets: its next pieces, the error that ends it, or its call, which is done."""


@dataclass(slots=True, eq=False)
class Stream:
    """A stream as its reader sees it. Its end may arrive before the last pieces that were taken.

    Attributes:
        is_over: whether all of it has been read.
        unreported: the number of pieces whose reading has not been reported to the SlotManager.
    """

    is_over: bool = False
    unreported: int = 0
    _came: int = 0
    _end: StreamEnd | None = None

    def read(self, arrived: Arrived) -> Pieces:
        """Return the pieces that can be read now; raise the error that has arrived."""
        found: Pieces = ()
        if isinstance(arrived, tuple):
            found, self._came = arrived, self._came + len(arrived)
        elif isinstance(arrived, BaseException):
            raise arrived
        else:
            self._end = arrived.result()
        if self._end is None or self._came < self._end.taken:
            return found
        self.is_over = True
        return (*found, *self._end.pieces)


@dataclass(slots=True, eq=False)
class Untaken:
    """The pieces of a stream that nobody has taken yet.

    Attributes:
        taken: the number of pieces that were taken.
    """

    pieces: list[AnswerPiece] = field(default_factory=list)
    taken: int = 0

    def take(self) -> Pieces:
        """Return the pieces, and count them as taken."""
        found = tuple(self.pieces)
        self.pieces.clear()
        self.taken += len(found)
        return found

    def end(self) -> StreamEnd:
        """Return the end of the stream."""
        return StreamEnd(self.taken, self.take())


# -- in a slot ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Sent(Untaken):
    """A stream in its slot.

    Attributes:
        read: the number of pieces that its caller has read.
        is_unwanted: whether nobody reads it any more.
    """

    read: int = 0
    is_unwanted: bool = False

    @property
    def has_room(self) -> bool:
        return self.is_unwanted or self.taken + len(self.pieces) - self.read < MOST_PIECES


class Outbox:
    """The pieces that the models of a slot have made, until the SlotManager takes them. Several threads use it."""

    def __init__(self) -> None:
        self._streams: dict[str, _Sent] = {}
        self._ready: dict[str, _Sent] = {}
        lock = threading.Lock()
        self._has_some = threading.Condition(lock)
        self._has_room = threading.Condition(lock)

    def begin(self, request_id: str) -> None:
        """Begin a stream."""
        with self._has_room:
            self._streams[request_id] = _Sent()

    def put(self, request_id: str, piece: AnswerPiece, *, is_last: bool = False) -> None:
        """Add a piece. Wait while `MOST_PIECES` have not been read, unless it is the last one."""
        sent = self._streams[request_id]
        with self._has_room:
            if not is_last:
                self._has_room.wait_for(lambda: sent.has_room)
            if not sent.is_unwanted:
                sent.pieces.append(piece)
                self._ready[request_id] = sent
                self._has_some.notify()

    def end(self, request_id: str) -> StreamEnd:
        """End a stream. Its last pieces can't be taken any more."""
        with self._has_some:
            self._ready.pop(request_id, None)
            return self._streams.pop(request_id).end()

    def note_read(self, request_id: str, pieces: int) -> None:
        """Note that the caller has read this number of further pieces."""
        with self._has_room:
            if sent := self._streams.get(request_id):
                sent.read += pieces
                self._has_room.notify_all()

    def drop(self, request_id: str) -> None:
        """Drop all further pieces of a stream: nobody reads them."""
        with self._has_room:
            if sent := self._streams.get(request_id):
                sent.is_unwanted = True
                self._has_room.notify_all()

    def take(self) -> Batch:
        """Return the pieces of all streams. Wait until there are some."""
        with self._has_some:
            self._has_some.wait_for(lambda: self._ready)
            ready, self._ready = self._ready, {}
            return {request_id: sent.take() for request_id, sent in ready.items()}


# -- in the SlotManager ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SlotStreams:
    """Reads the streams of one slot.

    Args:
        take: calls `SlotActor.take`.
    """

    take: Callable[[], Any]
    _readers: dict[str, Callable[[Arrived], None]] = field(default_factory=dict)
    _taking: "asyncio.Task[None] | None" = None

    async def read(self, request_id: str, call: Any, give: Callable[[Pieces], None]) -> None:
        """Give the pieces of a stream as they come, until its end.

        Args:
            call: Ray's reference to the `StreamEnd`.

        Raises:
            RayError: the slot can't be reached.
        """
        arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        self._readers[request_id] = arrived.put_nowait
        ended = asyncio.ensure_future(call)
        ended.add_done_callback(arrived.put_nowait)
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(self._take())
        stream = Stream()
        try:
            while not stream.is_over:
                give(stream.read(await arrived.get()))
        finally:
            del self._readers[request_id]
            ended.cancel()  # nobody reads its error

    async def _take(self) -> None:
        try:
            while True:
                for request_id, pieces in (await self.take()).items():
                    if reader := self._readers.get(request_id):
                        reader(pieces)
        except Exception as error:  # the slot is gone, or its answer is lost, and pieces with it
            for reader in self._readers.values():
                reader(error)
