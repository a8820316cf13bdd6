"""An instance of a user's class that answers."""

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ray import cloudpickle

from iris_ray.actors.slots.model_call import ModelCall, ModelLoop


class LoadedModel:
    """Holds the instance.

    The class may have ``load()`` and ``unload()``, and must have ``__call__(payload)``: a function, a coroutine, or a
    generator of either kind. What is a coroutine runs in one event loop, the rest in the thread that asks.
    """

    def __init__(self) -> None:
        self.loop = ModelLoop()
        self._model: Any = None

    def load(self, pickled: bytes) -> str | None:
        """Make an instance of the user's class and load it. Return why that failed, or None."""
        try:
            made, keywords = cloudpickle.loads(pickled)
            self._model = made(**keywords)
            self._run_if_there("load")
        except (Exception, asyncio.CancelledError) as error:
            return "".join(traceback.format_exception_only(error)).strip()
        return None

    def unload(self) -> None:
        """Let the user's object tidy up."""
        self._run_if_there("unload")

    def answer(self, payload: Any, call: ModelCall) -> Any:
        """Return the answer, a list if it comes in pieces."""
        answer = self._begin(payload, call)
        if isinstance(answer, AsyncIterator):
            return call.wait(_all(answer))
        return list(call.each(answer)) if isinstance(answer, Iterator) else answer

    def pieces(self, payload: Any, call: ModelCall) -> Iterator[Any]:
        """Yield the answer piece by piece; one that does not come in pieces is one piece."""
        answer = self._begin(payload, call)
        if isinstance(answer, AsyncIterator):
            yield from call.wait_each(answer)
        elif isinstance(answer, Iterator):
            yield from call.each(answer)
        else:
            yield answer

    def _begin(self, payload: Any, call: ModelCall) -> Any:
        answer = self._model(payload)
        return call.wait(answer) if inspect.iscoroutine(answer) else answer

    def _run_if_there(self, name: str) -> None:
        if hasattr(self._model, name):
            result = getattr(self._model, name)()
            if inspect.iscoroutine(result):
                ModelCall(self.loop).wait(result)


async def _all(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]
