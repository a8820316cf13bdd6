"""User objects that pass through our processes unopened.

The pool need not be able to import what user code can, and must not run it: results and exceptions stay pickled until
they arrive where they are wanted.
"""

from typing import Any, TypeAlias

import ray
from ray import cloudpickle

from iris_ray.errors import RemoteUserError

Payload: TypeAlias = "bytes | ray.ObjectRef[bytes]"
"""Something pickled, or where it is in Ray's object store."""
INLINE_BYTES = 100_000
"""What is larger goes through the object store: Ray would put it there anew with every call that it travels in."""


def stored_if_large(payload: Payload) -> Payload:
    """Return the payload itself, or a reference to it that lasts as long as this process: each node fetches it once."""
    if not isinstance(payload, bytes) or len(payload) <= INLINE_BYTES:
        return payload
    return ray.put(payload)


def load(payload: Payload) -> Any:
    """What was pickled; from the object store if it is there."""
    return cloudpickle.loads(payload if isinstance(payload, bytes) else ray.get(payload))


class Pickled:
    """A value that becomes itself again where it arrives."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self._payload,)


class PickledError(Exception):
    """A user's exception, pickled like `Pickled`."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(payload)
        self._payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (self._payload,)


class Rebuilt:
    """An exception that is put together again without calling its ``__init__``."""

    def __init__(self, error: Exception) -> None:
        self._parts = type(error), error.args, vars(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return put_together, self._parts


def put_together(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


def rebuild_error(payload: bytes) -> Exception:
    """The user's exception, or a stand-in where its class can't be imported."""
    try:
        error = cloudpickle.loads(payload)
    except Exception as why:
        return RemoteUserError(f"the task raised an exception that can't be rebuilt here: {why}")
    return error if isinstance(error, Exception) else RemoteUserError(repr(error))
