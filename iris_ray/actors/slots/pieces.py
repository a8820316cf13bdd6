"""Values of users on their way between a client and a slot. Only these two open them; a SlotManager passes bytes on."""

import traceback
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from iris_ray.errors import RemoteUserError

MOST_PIECES = 64
"""Of one stream that wait for their caller, in the SlotManager and in the slot. While there are so many, the model
waits."""
TAKEN_AT_ONCE = 16
"""A caller says after so many pieces that it has taken them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer, or all of it, or the exception that a model raised.

    Attributes:
        data: by cloudpickle.
        raised: whether it is an exception.
    """

    data: bytes
    raised: bool = False

    def open(self) -> Any:
        """Return the value, or raise the exception."""
        value = cloudpickle.loads(self.data)
        if self.raised:
            raise value
        return value


def packed(value: Any) -> Piece:
    """Return a value as it travels."""
    return Piece(cloudpickle.dumps(value))


def packed_error(error: BaseException) -> Piece:
    """Return an exception as it travels; one that can't be pickled becomes a `RemoteUserError` with its traceback."""
    try:
        data = cloudpickle.dumps(error)
        cloudpickle.loads(data)
    except Exception:
        data = cloudpickle.dumps(RemoteUserError("".join(traceback.format_exception(error))))
    return Piece(data, raised=True)
