"""The process of one slot: it loads a user's model and runs requests on it."""

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import psutil
from ray import cloudpickle

from iris_ray.actors.host.process_tree import stat_of
from iris_ray.actors.slots.pieces import Piece, packed, packed_error
from iris_ray.actors.wire.task_files import TaskFiles

_END: Final = object()


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

    The class may have ``load()`` and ``unload()``, and must have ``__call__(payload)``: a function, a coroutine, or a
    generator of either kind. What isn't a coroutine runs in threads, as many as the slot takes requests at a time.

    Args:
        variables: environment variables to set first, such as those that name its devices.
        seats: requests at a time.
    """

    def __init__(self, variables: Mapping[str, str], seats: int) -> None:
        os.environ.update(variables)
        join_task()
        self._threads = ThreadPoolExecutor(seats, thread_name_prefix="request")
        self._model: Any = None
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def identity(self) -> ProcessIdentity:
        """Return which process this is."""
        return ProcessIdentity(os.getpid(), psutil.Process().create_time())

    async def watch(self) -> None:
        """Never return: the call fails when this process is gone."""
        await asyncio.Event().wait()

    async def load(self, pickled: bytes) -> str | None:
        """Make an instance of the user's class and load it. Return why that failed, or None."""
        try:
            made, keywords = cloudpickle.loads(pickled)
            self._model = await self._run(lambda: made(**keywords))
            if hasattr(self._model, "load"):
                await self._run(self._model.load)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    async def unload(self) -> None:
        """Let the user's object tidy up."""
        if hasattr(self._model, "unload"):
            await self._run(self._model.unload)

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

    async def stop(self, request_id: str) -> None:
        """Stop serving a request. What runs in a thread goes on, but nobody waits for it."""
        if call := self._calls.get(request_id):
            call.cancel()

    async def _until_stopped(self, request_id: str, work: Any) -> None:
        call = self._calls[request_id] = asyncio.ensure_future(work)
        try:
            await asyncio.wait([call])
        finally:
            del self._calls[request_id]

    async def _answer(self, payload: bytes, found: list[Piece]) -> None:
        try:
            answer = await self._begin(payload)
            found.append(packed([each async for each in self._pieces(answer)] if _in_pieces(answer) else answer))
        except Exception as error:
            found.append(packed_error(error))

    async def _feed(self, payload: bytes, pieces: "asyncio.Queue[Piece | None]") -> None:
        try:
            answer = await self._begin(payload)
            if _in_pieces(answer):
                async for piece in self._pieces(answer):
                    await pieces.put(packed(piece))
            else:
                await pieces.put(packed(answer))
        except Exception as error:
            await pieces.put(packed_error(error))

    async def _begin(self, payload: bytes) -> Any:
        call, value = self._model.__call__, cloudpickle.loads(payload)
        if inspect.iscoroutinefunction(call):
            return await call(value)
        if inspect.isasyncgenfunction(call):
            return call(value)
        return await self._run(lambda: call(value))

    async def _pieces(self, answer: Any) -> AsyncIterator[Any]:
        if isinstance(answer, AsyncIterator):
            async for piece in answer:
                yield piece
        else:
            while (piece := await self._run(lambda: next(answer, _END))) is not _END:
                yield piece

    async def _run(self, function: Any) -> Any:
        result = await asyncio.get_running_loop().run_in_executor(self._threads, function)
        return await result if inspect.iscoroutine(result) else result


def _in_pieces(answer: Any) -> bool:
    return isinstance(answer, AsyncIterator | Iterator)
