"""One call of a user's model, which another thread may stop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

from iris_ray.slots.actors.messages import StopReasons
from iris_ray.slots.actors.streams import MOST_PIECES


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A request, or a call of a session, that a model answers.

    Attributes:
        request_id: its id, the same each time it runs.
        attempt: how often it was given to a slot, including this time. From 2 on it may have run before, in part or
            whole. A session's call is never repeated.
    """

    request_id: str
    attempt: int = 1


_CURRENT: Final[ContextVar[SlotRequest | None]] = ContextVar("slot request", default=None)


def slot_request() -> SlotRequest | None:
    """Return the request that the calling model answers, or None outside a model's ``__call__``.

    It works in functions, coroutines and generators, but not in threads that a model starts.

    Example::

        def __call__(self, payload):
            request = slot_request()
            if request.attempt > 1 and self.has_stored(request.request_id):
                return "stored already"
    """
    return _CURRENT.get()


@contextmanager
def answering(request: SlotRequest) -> Iterator[None]:
    """Have `slot_request` return a request in this thread, and in the coroutines that it starts in an event loop."""
    _CURRENT.set(request)
    try:
        yield
    finally:
        _CURRENT.set(None)


_END: Final = object()


class StoppedError(Exception):
    """The call was stopped."""


class ModelLoop:
    """The event loop of a model's coroutines, in a thread of its own. It starts with the first coroutine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def do(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the loop's thread, and don't wait for it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="model's event loop", daemon=True).start()
        self._loop.call_soon_threadsafe(function, *arguments)


class ModelCall:
    """One call of a model, which another thread may stop; a call without coroutines only between two pieces."""

    def __init__(self, loop: ModelLoop) -> None:
        self._loop = loop
        self._stopped = False
        self._task: asyncio.Task[Any] | None = None

    def stop(self) -> None:
        """End the call soon. The thread that waits for it gets a `StoppedError` then."""
        self._stopped = True
        self._loop.do(self._cancel)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of the model and return its result."""
        ended: Future[asyncio.Task[Any]] = Future()
        self._loop.do(self._begin, coroutine, ended.set_result)
        return self._result(ended.result())

    def wait_each(self, pieces: AsyncIterator[Any]) -> Iterator[Any]:
        """Yield the pieces of the model's asynchronous generator, which runs as one task to its end.

        The generator waits while `MOST_PIECES` have not been taken.
        """
        arrived: SimpleQueue[Any] = SimpleQueue()
        room = asyncio.Semaphore(MOST_PIECES)
        ended: Future[asyncio.Task[Any]] = Future()

        def end(task: asyncio.Task[Any]) -> None:
            ended.set_result(task)
            arrived.put(_END)

        self._loop.do(self._begin, _feed(pieces, arrived, room), end)
        try:
            while (piece := arrived.get()) is not _END:
                yield piece
                self._loop.do(room.release)
        except GeneratorExit:
            self.stop()
            raise
        self._result(ended.result())

    def each(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """Yield the pieces of the model's generator."""
        for piece in pieces:
            if self._stopped:
                raise StoppedError
            yield piece

    def _begin(self, coroutine: Coroutine[Any, Any, Any], then: Callable[[asyncio.Task[Any]], None]) -> None:
        self._task = asyncio.ensure_future(coroutine)
        self._task.add_done_callback(then)
        if self._stopped:
            self._task.cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _result(self, task: asyncio.Task[Any]) -> Any:
        if task.cancelled() and self._stopped:
            raise StoppedError
        return task.result()


@dataclass(slots=True, eq=False)
class RunningCalls:
    """The calls that run, by id, so that they can be stopped."""

    loop: ModelLoop
    _by_id: dict[str, ModelCall] = field(default_factory=dict)
    _stopped: StopReasons = field(default_factory=StopReasons)
    _over: StopReasons = field(default_factory=StopReasons)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self, request: SlotRequest) -> Iterator[ModelCall]:
        """Register a call while it runs, and set the request that it answers."""
        call, call_id = ModelCall(self.loop), request.request_id
        with self._lock:
            self._by_id[call_id] = call
            self._over.forget(call_id)
            if self._stopped.forget(call_id):
                call.stop()
        try:
            with answering(request):
                yield call
        except asyncio.CancelledError as error:  # the waiting thread would take it for a stopped call
            raise RuntimeError("the model raised CancelledError") from error
        finally:
            with self._lock:
                del self._by_id[call_id]
                self._over.note(call_id, "over")

    def stop(self, call_id: str) -> None:
        """Stop a call, even if it has not begun yet. If it is over, a later call with its id is not concerned."""
        with self._lock:
            if call := self._by_id.get(call_id):
                call.stop()
            elif not self._over.knows(call_id):
                self._stopped.note(call_id, "stopped")


async def _feed(pieces: AsyncIterator[Any], arrived: SimpleQueue[Any], room: asyncio.Semaphore) -> None:
    async for piece in pieces:
        await room.acquire()
        arrived.put(piece)
