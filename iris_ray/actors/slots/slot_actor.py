"""The process of one slot: it loads a user's model, and runs requests and the calls of sessions on it."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
from ray import cloudpickle

from iris_ray.actors.host.process_tree import stat_of
from iris_ray.actors.slots.held_sessions import HeldSessions
from iris_ray.actors.slots.loaded_model import LoadedModel
from iris_ray.actors.slots.messages import NotHeld
from iris_ray.actors.slots.pieces import Piece, packed, packed_error
from iris_ray.actors.wire.task_files import TaskFiles


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told apart from a later one of the same pid by when it began."""

    pid: int
    began: float


def join_task() -> None:
    """Have this process end with the task that keeps its host, whatever becomes of the SlotManager."""
    files, stat = TaskFiles.of_this_task(), stat_of(os.getpid())
    if files is not None and stat is not None:
        files.add_member(stat.pid, stat.started)


class SlotActor:
    """Holds one instance of the user's class. Ray runs its methods in one event loop.

    Args:
        variables: environment variables to set first, such as those that name its devices.
        seats: requests and sessions at a time.
    """

    def __init__(self, variables: Mapping[str, str], seats: int) -> None:
        os.environ.update(variables)
        join_task()
        self._model = LoadedModel(seats)
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._sessions = HeldSessions()

    async def identity(self) -> ProcessIdentity:
        """Return which process this is."""
        return ProcessIdentity(os.getpid(), psutil.Process().create_time())

    async def watch(self) -> None:
        """Never return: the call fails when this process is gone."""
        await asyncio.Event().wait()

    async def load(self, pickled: bytes) -> str | None:
        """Make an instance of the user's class and load it. Return why that failed, or None."""
        return await self._model.load(pickled)

    async def unload(self) -> None:
        """Let the user's object tidy up."""
        await self._model.unload()

    async def stop(self, request_id: str, reason: str) -> None:
        """Stop serving a request, or a session. What runs in a thread goes on, but nobody waits for it."""
        self._sessions.stop(request_id, reason)
        if call := self._calls.get(request_id):
            call.cancel()

    # -- requests, which the SlotManager passes on ------------------------------------------------

    async def serve(self, request_id: str, payload: bytes) -> Piece | None:
        """Return the answer to a request, a list if it comes in pieces; None if it was stopped."""
        answer: list[Piece] = []
        await self._until_stopped(request_id, self._answer(payload, answer))
        return answer[0] if answer else None

    async def stream(self, request_id: str, payload: bytes) -> AsyncIterator[Piece]:
        """Yield the answer to a request piece by piece; one that does not come in pieces is one piece."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue(maxsize=16)
        feeding = asyncio.ensure_future(self._until_stopped(request_id, self._feed(payload, pieces)))
        feeding.add_done_callback(lambda _: asyncio.ensure_future(pieces.put(None)))
        while (piece := await pieces.get()) is not None:
            yield piece

    async def _until_stopped(self, request_id: str, work: Any) -> None:
        call = self._calls[request_id] = asyncio.ensure_future(work)
        try:
            await asyncio.wait([call])
        finally:
            del self._calls[request_id]

    async def _answer(self, payload: bytes, found: list[Piece]) -> None:
        try:
            found.append(packed(await self._model.answer(cloudpickle.loads(payload))))
        except Exception as error:
            found.append(packed_error(error))

    async def _feed(self, payload: bytes, pieces: "asyncio.Queue[Piece | None]") -> None:
        try:
            async for piece in self._model.pieces(cloudpickle.loads(payload)):
                await pieces.put(packed(piece))
        except Exception as error:
            await pieces.put(packed_error(error))

    # -- sessions, whose clients call directly ----------------------------------------------------

    async def open_session(self, session_id: str) -> None:
        """Take calls of a session from now on."""
        self._sessions.open(session_id)

    async def session_over(self, session_id: str) -> None:
        """Return once a session that was stopped has no call left."""
        await self._sessions.wait_over(session_id)

    async def call(self, session_id: str, payload: Any) -> Any:
        """Return the answer to a call of a session: the value, `NotHeld`, or a `Piece` with what the model raised."""
        session = self._sessions.get(session_id)
        if isinstance(session, NotHeld):
            return session
        async with session:
            try:
                return await self._model.answer(payload)
            except Exception as error:
                return packed_error(error)

    async def call_in_pieces(self, session_id: str, payload: Any) -> AsyncIterator[Any]:
        """As `call`, piece by piece."""
        session = self._sessions.get(session_id)
        if isinstance(session, NotHeld):
            yield session
            return
        async with session:
            try:
                async for piece in self._model.pieces(payload):
                    yield piece
            except Exception as error:
                yield packed_error(error)
