"""Answers of actors. A missing answer is a value, not an exception."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError, RuntimeEnvSetupError

ANSWER_TIMEOUT_S = 5.0
"""How long a healthy actor may take to answer a call that needs no work."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An actor did not answer.

    Attributes:
        reason: what happened, in words.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Gone(Unreachable):
    """Ray says that the actor's process has ended, or can't be reached at the moment. Its host may still be there."""


@dataclass(frozen=True, slots=True)
class KilledForMemory(Gone):
    """Ray has killed the actor's process, because the memory of its host was nearly used up."""


@dataclass(frozen=True, slots=True)
class Unfit(Unreachable):
    """The host answers, but can't take a task: another process holds its chips, or its disk is full or faulty.

    Attributes:
        node_id: the host's id in Ray.
        why: the same as part of a sentence about the host.
        ours: whether the host is not to blame: another task of iris_ray holds its chips. It is avoided for a while.
    """

    node_id: str
    why: str
    ours: bool = False


@dataclass(frozen=True, slots=True)
class SetupFailed(Unreachable):
    """Hosts of a slice can't set up the runtime environment, or import a module of ``preload``.

    Attributes:
        hosts: their indexes.
        works_elsewhere: whether another host of the slice could.
    """

    hosts: tuple[int, ...]
    works_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class NotReserved(Unreachable):
    """Ray has not reserved the resources. This says nothing about the hosts."""


async def answer(call: Awaitable[Any], name: str, timeout_s: float | None) -> Any:
    """Await an actor's answer.

    Args:
        call: the call's reference or coroutine.
        name: the actor's name, for the reason of a missing answer.
        timeout_s: seconds to wait; None: for ever.

    Returns:
        The answer, or `Unreachable` if there is none: the actor is gone, or did not answer in time.

    Raises:
        Exception: what the actor's method raised, or `RuntimeEnvSetupError`.
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
    except RayError as error:  # the actor, or what it sent, is lost
        return Gone(f"{name} is gone ({type(error).__name__})")
    except TimeoutError:
        return Unreachable(f"{name} did not answer within {timeout_s:g} s")


# -- remote methods ----------------------------------------------------------------------------------------------------
# Calls an actor's methods as if the object behind it were here, with their types.

Behind = TypeVar("Behind")
P = ParamSpec("P")
T = TypeVar("T")


class Reference(Protocol[T]):
    """Ray's `ObjectRef` of an answer, with the type of the answer."""

    def __await__(self) -> Generator[Any, None, T]: ...

    def future(self) -> "Future[T]":
        """Return a future of the answer."""


class _RemoteMethods:
    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name).remote


def remote_methods(handle: ActorHandle, behind: type[Behind]) -> Behind:
    """Return what has the asynchronous methods of an actor's class. To call one asks the actor.

    Args:
        handle: the actor.
        behind: its class.
    """
    return cast(Behind, _RemoteMethods(handle))


@overload
def remote_method(
    handle: ActorHandle, of: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
) -> Callable[P, Reference[T]]: ...


@overload
def remote_method(handle: ActorHandle, of: Callable[Concatenate[Any, P], T]) -> Callable[P, Reference[T]]: ...


def remote_method(handle: ActorHandle, of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method of an actor and returns Ray's reference to the answer.

    Args:
        handle: the actor.
        of: the method, as its class has it.
    """

    def call(*args: Any, **keywords: Any) -> Any:
        return getattr(handle, of.__name__).remote(*args, **keywords)

    return call
