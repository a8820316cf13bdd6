"""Messages between the processes of a job: a JSON header, then the raw bytes of arrays. Nothing is unpickled.

Both ends of a connection prove that they know the job's token before anything else is read.
"""

import hmac
import json
import math
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 — gives NumPy the types of JAX: bfloat16 and its kin
import numpy as np

POLL_S = 0.02
"""The interval between two looks whether a wait still makes sense."""
CONNECT_S = 5.0
"""How long it may take to connect, and to prove the token."""
MOST_HEADER_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_PROOF_BYTES = 32

Leaves = list[np.ndarray[Any, Any]]
Header = dict[str, Any]


class ConnectionLost(Exception):
    """The other end is gone, or the answer is not wanted any more, or did not come in time."""


def always() -> bool:
    return True


class Connection:
    """One end of a connection between two processes that have the same token."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(POLL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def to(address: str, token: str) -> "Connection":
        """Connect to a process.

        Raises:
            ConnectionLost: nobody listens there who knows the token.
        """
        host, _, port = address.rpartition(":")
        try:
            connection = Connection(socket.create_connection((host.strip("[]"), int(port)), CONNECT_S))
        except OSError as error:
            raise ConnectionLost(f"{address}: {error}") from error
        connection.prove(token, "calls")
        return connection

    def prove(self, token: str, role: str) -> None:
        """Prove to the other end that this one knows the token, and have it prove the same.

        Args:
            token: the secret of the job.
            role: ``calls``, or ``listens``.

        Raises:
            ConnectionLost: the other end does not know it. The connection is closed.
        """
        other, deadline = "listens" if role == "calls" else "calls", time.monotonic() + CONNECT_S
        try:
            mine = secrets.token_bytes(_PROOF_BYTES)
            self._send_all(mine, always, deadline)
            theirs = self._receive_exactly(_PROOF_BYTES, always, deadline)
            self._send_all(_proof(token, role, mine, theirs), always, deadline)
            proof = self._receive_exactly(_PROOF_BYTES, always, deadline)
            if not hmac.compare_digest(proof, _proof(token, other, theirs, mine)):
                raise ConnectionLost("the other end does not know the token of this job")
        except ConnectionLost:
            self.close()
            raise

    def send(
        self, header: Header, leaves: Sequence[np.ndarray[Any, Any]] = (), wanted: Callable[[], bool] = always
    ) -> None:
        """Send a message.

        Raises:
            ConnectionLost: it can't be sent, or is not wanted any more.
        """
        arrays = [np.ascontiguousarray(leaf).reshape(leaf.shape) for leaf in leaves]
        head = json.dumps({**header, "arrays": [[leaf.dtype.name, leaf.shape] for leaf in arrays]}).encode()
        self._send_all(_LENGTH.pack(len(head)) + head, wanted)
        for array in arrays:
            self._send_all(array.reshape(-1).view(np.uint8).data, wanted)

    def receive(self, wanted: Callable[[], bool] = always, seconds: float = math.inf) -> tuple[Header, Leaves]:
        """Return the next message.

        Args:
            wanted: whether the message is still of use; asked again and again.
            seconds: how long to wait.

        Raises:
            ConnectionLost: no message came, or it makes no sense.
        """
        deadline = time.monotonic() + seconds
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size, wanted, deadline))
        if length > MOST_HEADER_BYTES:
            raise ConnectionLost(f"a header of {length:,} bytes makes no sense")
        try:
            header = json.loads(self._receive_exactly(length, wanted, deadline))
            leaves = [np.empty(tuple(shape), _dtype(name)) for name, shape in header.pop("arrays")]
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConnectionLost(f"a header makes no sense: {error}") from error
        for leaf in leaves:
            self._receive_into(memoryview(leaf.reshape(-1).view(np.uint8).data), wanted, deadline)
        return header, leaves

    @property
    def is_open(self) -> bool:
        """Whether the other end has not closed the connection, as far as this end knows."""
        try:
            look = select.poll()
            look.register(self._socket, select.POLLIN)
            return not look.poll(0) or self._socket.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):  # a socket that is closed here has no number
            return False

    def close(self) -> None:
        self._socket.close()

    def _send_all(self, data: "bytes | memoryview", wanted: Callable[[], bool], deadline: float = math.inf) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                self._check(wanted, deadline)
                continue
            except OSError as error:
                raise ConnectionLost(str(error)) from error

    def _receive_exactly(self, size: int, wanted: Callable[[], bool], deadline: float) -> bytes:
        data = bytearray(size)
        self._receive_into(memoryview(data), wanted, deadline)
        return bytes(data)

    def _receive_into(self, left: memoryview, wanted: Callable[[], bool], deadline: float) -> None:
        while left:
            try:
                count = self._socket.recv_into(left)
            except TimeoutError:  # the messages that have come already are taken
                self._check(wanted, deadline)
                continue
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not count:
                raise ConnectionLost("the other end has closed the connection")
            left = left[count:]

    @staticmethod
    def _check(wanted: Callable[[], bool], deadline: float) -> None:
        if not wanted():
            raise ConnectionLost("not wanted any more")
        if time.monotonic() > deadline:
            raise ConnectionLost("no answer in time")


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError("arrays of objects don't travel")
    return dtype


def _proof(token: str, role: str, mine: bytes, theirs: bytes) -> bytes:
    return hmac.digest(token.encode(), role.encode() + mine + theirs, "sha256")
