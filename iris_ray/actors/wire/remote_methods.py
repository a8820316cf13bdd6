"""Calls an actor's methods as if the object behind it were here, with their types."""

from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from ray.actor import ActorHandle

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
