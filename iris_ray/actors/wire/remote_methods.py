"""Calls an actor's methods as if the object behind it were here."""

from typing import Any, TypeVar, cast

from ray.actor import ActorHandle

Behind = TypeVar("Behind")


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
