"""Messages between the processes of a job: a frame of facts, then the raw bytes of arrays."""

import math
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 — gives NumPy the types of JAX: bfloat16 and its kin
import numpy as np

from iris_ray.framing import FACTS, Connection, ConnectionLost, Frame, always

CONNECT_S = 5.0
"""How long it may take to connect, and to prove the token."""

Leaves = list[np.ndarray[Any, Any]]
Header = dict[str, Any]


class ArrayConnection(Connection):
    """A connection that carries arrays."""

    @staticmethod
    def to(address: str, token: str) -> "ArrayConnection":
        """Connect to a process.

        Raises:
            ConnectionLost: no process that knows the token listens there.
        """
        host, _, port = address.rpartition(":")
        try:
            connection = ArrayConnection(socket.create_connection((host.strip("[]"), int(port)), CONNECT_S))
        except OSError as error:
            raise ConnectionLost(f"{address}: {error}") from error
        connection.prove(token, calls=True, within_s=CONNECT_S)
        return connection

    def send_message(
        self, header: Header, leaves: Sequence[np.ndarray[Any, Any]] = (), wanted: Callable[[], bool] = always
    ) -> None:
        """Send a message. Raise like `send`."""
        arrays = [np.ascontiguousarray(leaf).reshape(leaf.shape) for leaf in leaves]
        kinds = [[leaf.dtype.name, leaf.shape] for leaf in arrays]
        self.send(Frame.of(FACTS, **header, arrays=kinds), wanted)
        for array in arrays:
            self.send_bytes(array.reshape(-1).view(np.uint8).data, wanted)

    def receive_message(self, wanted: Callable[[], bool] = always, seconds: float = math.inf) -> tuple[Header, Leaves]:
        """Return the next message.

        Args:
            wanted: whether the message is still of use; asked again and again.
            seconds: how long to wait.

        Raises:
            ConnectionLost: no message has come, or it makes no sense.
        """
        deadline = time.monotonic() + seconds
        header = self.receive(wanted, deadline).facts
        try:
            leaves = [np.empty(tuple(shape), _dtype(name)) for name, shape in header.pop("arrays")]
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConnectionLost(f"a header makes no sense: {error}") from error
        for leaf in leaves:
            self.receive_into(memoryview(leaf.reshape(-1).view(np.uint8).data), wanted, deadline)
        return header, leaves


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError("arrays of objects don't travel")
    return dtype
