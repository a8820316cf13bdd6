"""Asks actors once. A missing answer is a value, not an exception.

mypy checks the arguments and the answer of each call against the actor's interface. Ray's own typed handles
(`ray.method`, `ActorProxy`) would not do: they know neither optional nor keyword arguments, and mypy then refuses calls
of such a method within the actor's class.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from ray.exceptions import OutOfMemoryError, RayError, RayTaskError, RuntimeEnvSetupError

from iris_ray.actors.protocol.answers import Gone, KilledForMemory, Unreachable
from iris_ray.actors.protocol.marks import DEADLINE
from iris_ray.actors.protocol.services import addressed

Behind = TypeVar("Behind")
P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ANSWER_TIMEOUT_S = 5.0
"""The time in which a healthy actor answers a call that needs no work."""


async def answer(call: Awaitable[T], name: str, timeout_s: float | None) -> T | Unreachable:
    """Await an actor's answer.

    Args:
        call: the call's reference or coroutine.
        name: the actor's name, for the reason of a missing answer.
        timeout_s: seconds to wait; None: for ever.

    Returns:
        The answer, or `Unreachable` if the actor is gone or did not answer in time.

    Raises:
        Exception: the error that the actor's method raised, or `RuntimeEnvSetupError`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except RayTaskError as error:
        raise error.cause from None
    except RuntimeEnvSetupError:
        raise
    except OutOfMemoryError:
        return KilledForMemory(f"{name}: Ray killed processes there, because the host's memory was nearly used up")
    except RayError as error:  # the actor or its answer is lost
        return Gone(f"{name} is gone ({type(error).__name__})")
    except TimeoutError:
        return Unreachable(f"{name} did not answer within {timeout_s:g} s")


class Reference(Protocol[T]):
    """Ray's `ObjectRef` of an answer, with the type of the answer."""

    def __await__(self) -> Generator[Any, None, T]: ...

    def future(self) -> "Future[T]":
        """Return a future of the answer."""


class References(Protocol[T_co]):
    """Ray's generator of references to the pieces of an answer, for threads and for event loops."""

    def __iter__(self) -> Iterator[Any]: ...

    def __aiter__(self) -> AsyncIterator[Awaitable[T_co]]: ...

    def completed(self) -> Any:
        """Return a reference that is ready once all pieces are there."""


class Actor(Generic[Behind]):
    """An actor, or an object of this process that acts as one. It can be sent to other processes.

    Each call names a method of ``Behind``: the Protocol of the actor's interface, or the actor's class where callers
    may import that. So `await pool.ask_once(PoolInterface.assign, order)` calls ``assign(order)`` in the pool.

    Args:
        handle: Ray's handle of the actor.
        name: the actor's name in messages.
        options: Ray's options for each call.
    """

    def __init__(self, handle: Any, name: str = "the actor", options: Mapping[str, Any] | None = None) -> None:
        self.handle = handle
        self.name = name
        self._options = dict(options or {})

    @classmethod
    def here(cls, behind: Behind, name: str) -> Self:
        """Return an object of this process as if it were an actor."""
        return cls(_Here(behind), name)

    def with_options(self, **options: Any) -> "Actor[Behind]":
        """Return the same actor with more of Ray's options for each call, such as ``max_task_retries``."""
        return Actor(self.handle, self.name, self._options | options)

    @overload
    def call(
        self, method: Callable[Concatenate[Behind, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Reference[T]: ...

    @overload
    def call(
        self, method: Callable[Concatenate[Behind, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Reference[T]: ...

    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and return Ray's reference to the answer at once."""
        name, args, named = addressed(method, args, kwargs)
        remote = getattr(self.handle, name)
        if self._options:
            remote = remote.options(**self._options)
        return remote.remote(*args, **named)

    @overload
    def stream(
        self, method: Callable[Concatenate[Behind, P], AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> References[T]: ...

    @overload
    def stream(
        self, method: Callable[Concatenate[Behind, P], Iterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> References[T]: ...

    def stream(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method that yields the pieces of its answer, and return references to the pieces at once."""
        return self.with_options(num_returns="streaming").call(method, *args, **kwargs)

    async def ask_once(
        self, method: Callable[Concatenate[Behind, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | Unreachable:
        """Return the answer, or `Unreachable` if none comes within the method's deadline (see `marks.within`).

        Raises:
            Exception: the error that the actor's method raised, or `RuntimeEnvSetupError`.
        """
        return await self.ask_within(getattr(method, DEADLINE, ANSWER_TIMEOUT_S), method, *args, **kwargs)

    async def ask_within(
        self,
        deadline_s: float | None,
        method: Callable[Concatenate[Behind, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T | Unreachable:
        """Return the answer like `ask_once`, within the caller's deadline in seconds; None: wait for ever."""
        return await answer(self.call(method, *args, **kwargs), self.name, deadline_s)


class _Here:
    """Stands for an actor's handle. As with an actor, a call goes on if its caller no longer waits for the answer."""

    def __init__(self, behind: object) -> None:
        self._behind = behind
        self._running: set[asyncio.Future[Any]] = set()

    @property
    def serve(self) -> SimpleNamespace:
        """Take a service's call: the object has the method itself."""
        return SimpleNamespace(
            remote=lambda _, method, args, kwargs: self._begin(getattr(self._behind, method), *args, **kwargs)
        )

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._begin, getattr(self._behind, name)))

    def _begin(self, method: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> "asyncio.Future[T]":
        call = asyncio.ensure_future(method(*args, **kwargs))
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        reply = asyncio.shield(call)
        reply.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be that nobody waits
        return reply
