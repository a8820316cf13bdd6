"""An instance of a user's class that answers."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from ray import cloudpickle

_END: Final = object()


class LoadedModel:
    """Holds the instance. What isn't a coroutine runs in threads.

    The class may have ``load()`` and ``unload()``, and must have ``__call__(payload)``: a function, a coroutine, or a
    generator of either kind.

    Args:
        seats: how many threads.
    """

    def __init__(self, seats: int) -> None:
        self._threads = ThreadPoolExecutor(seats, thread_name_prefix="request")
        self._model: Any = None

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

    async def answer(self, payload: Any) -> Any:
        """Return the answer, a list if it comes in pieces."""
        answer = await self._begin(payload)
        return [piece async for piece in self._each(answer)] if _in_pieces(answer) else answer

    async def pieces(self, payload: Any) -> AsyncIterator[Any]:
        """Yield the answer piece by piece; one that does not come in pieces is one piece."""
        answer = await self._begin(payload)
        if not _in_pieces(answer):
            yield answer
            return
        async for piece in self._each(answer):
            yield piece

    async def _begin(self, payload: Any) -> Any:
        call = self._model.__call__
        if inspect.iscoroutinefunction(call):
            return await call(payload)
        if inspect.isasyncgenfunction(call):
            return call(payload)
        return await self._run(lambda: call(payload))

    async def _each(self, answer: Any) -> AsyncIterator[Any]:
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
