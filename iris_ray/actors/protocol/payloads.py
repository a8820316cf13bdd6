"""Functions, results and exceptions of users stay pickled until they arrive.

The pool may be unable to import the modules of user code, and must not run user code.
"""

import pickle
from dataclasses import replace
from typing import Any, SupportsIndex, TypeAlias

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from iris_ray.errors import RemoteUserError
from iris_ray.model.outcomes import TaskEnd

Payload: TypeAlias = "bytes | ray.ObjectRef[bytes]"
"""A pickled object, or a reference to one in Ray's object store."""
INLINE_BYTES = 100_000
"""Larger payloads go through the object store: Ray would store them again with every call that takes them."""


def stored_if_large(payload: Payload) -> Payload:
    """Return the payload or, if it is large, a reference to it. Each node fetches it once.

    The stored payload lives as long as this process.
    """
    if not isinstance(payload, bytes) or len(payload) <= INLINE_BYTES:
        return payload
    return ray.put(payload)


def load(payload: Payload) -> Any:
    return cloudpickle.loads(payload if isinstance(payload, bytes) else ray.get(payload))


async def fetched(payload: Payload) -> bytes:
    """Return the pickled object itself."""
    return payload if isinstance(payload, bytes) else await payload


def with_stored_payload(end: TaskEnd) -> TaskEnd:
    """Return a task's end with a large result moved into the object store, where it lives as long as this process."""
    return end if end.payload is None else replace(end, payload=stored_if_large(end.payload))


async def with_fetched_payload(end: TaskEnd | None) -> TaskEnd | None:
    """Return a task's end with its result; None if the result was lost with the actor of the task's host."""
    if end is None or end.payload is None or isinstance(end.payload, bytes):
        return end
    try:
        return replace(end, payload=await end.payload)
    except RayError:
        return None


class Pickled:
    """A pickled value that unpickles as the value itself."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        takes_buffers = protocol.__index__() >= 5  # Ray copies a buffer once, and bytes twice
        return cloudpickle.loads, (pickle.PickleBuffer(self._payload) if takes_buffers else self._payload,)


class PickledError(Exception):
    """A pickled user's exception that unpickles as the exception itself, or as `RemoteUserError`."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(payload)
        self._payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (self._payload,)


class Rebuilt:
    """An exception that unpickles without a call of its ``__init__``."""

    def __init__(self, error: Exception) -> None:
        self._parts = type(error), error.args, vars(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_without_init, self._parts


def _made_without_init(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


def rebuild_error(payload: bytes) -> Exception:
    """Return the user's exception; a `RemoteUserError` if it can't be unpickled here, such as for a missing class."""
    try:
        error = cloudpickle.loads(payload)
    except Exception as why:
        return RemoteUserError(f"the task raised an exception that can't be rebuilt here: {why}")
    return error if isinstance(error, Exception) else RemoteUserError(repr(error))
