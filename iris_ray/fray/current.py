"""Fray's current client: the one module that touches private parts of Fray, checked on 0.2.20 and 0.2.227.

Fray keeps the client in a context variable, and new threads begin without its value. In such a thread, Fray would look
for a cluster of Iris by the ``IRIS_*`` variables, which our tasks have, too, and then silently run everything in the
process itself.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from iris_ray.errors import FrayMissingError

if TYPE_CHECKING:
    from fray.client import Client

_VARIABLE = "_current_client_var"


def require_fray() -> None:
    """Raise FrayMissingError if Fray is not installed, or another package has its name."""
    try:
        importlib.import_module("fray.client")
    except ImportError as error:
        raise FrayMissingError(
            f"Fray can't be imported ({error}); install it with: pip install marin-fray. The"
            " package fray is a different one"
        ) from error


@contextlib.contextmanager
def as_current_client(client: "Client") -> Iterator[None]:
    """Make a client Fray's current one, in every thread of this process, until the context ends."""
    theirs: Any = importlib.import_module("fray.current_client")  # the package also has a function of that name
    before = getattr(theirs, _VARIABLE)
    setattr(theirs, _VARIABLE, contextvars.ContextVar(_VARIABLE, default=client))
    try:
        with theirs.set_current_client(client):
            yield
    finally:
        setattr(theirs, _VARIABLE, before)
