"""One TCP connection between a person's process and a held host: JSON facts, and bytes of streams.

Both sides prove that they know the host's token, as `multiprocessing` does; the token itself does not travel.
"""

import contextlib
import json
import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

FACTS, OUT, ERR, INPUT, FILE = b"{", b"o", b"e", b"i", b"f"
"""The first byte of a message: what it carries."""
MOST_BYTES = 1 << 28
"""A longer message is no message of ours."""
INTRODUCTION_S = 10
"""Both sides show within so long that they know the token."""
SILENCE_S = 60
"""A connection whose other end is gone without a word is lost after so long."""


class Wire:
    """Messages over a connection.

    Args:
        connected: the connection.
        token: of the host.
        is_host: whether this is the host's side.

    Raises:
        OSError: the other side does not know the token, or does not answer.
    """

    def __init__(self, connected: socket.socket, token: str, is_host: bool) -> None:
        connected.settimeout(None)
        if connected.family != socket.AF_UNIX:  # through a dashboard the connection begins as a pair of sockets here
            _watch_for_silence(connected)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", INTRODUCTION_S, 0))
        self._socket = connected
        self._messages: Connection = Connection(os.dup(connected.fileno()))
        steps = (deliver_challenge, answer_challenge) if is_host else (answer_challenge, deliver_challenge)
        try:
            for step in steps:
                step(self._messages, token.encode())
        except (AuthenticationError, EOFError, AssertionError) as error:
            self.close()
            raise ConnectionRefusedError("the other side does not know the token") from error
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, **facts: object) -> None:
        """Send facts."""
        self._messages.send_bytes(json.dumps(facts).encode())

    def send(self, kind: bytes, data: bytes) -> None:
        """Send bytes of a stream, or a file."""
        self._messages.send_bytes(kind + data)

    def receive(self) -> tuple[bytes, Any]:
        """Return the next message: its kind, and its facts or bytes.

        Raises:
            EOFError: the other side has closed.
            OSError: the connection is lost.
        """
        message = self._messages.recv_bytes(MOST_BYTES)
        kind = message[:1]
        return kind, json.loads(message) if kind == FACTS else message[1:]

    def hear(self) -> dict[str, Any]:
        """Return the next message, which is to be facts. Raise like `receive`."""
        kind, facts = self.receive()
        if kind != FACTS:
            raise OSError(f"a message of kind {kind!r} came in place of facts")
        found: dict[str, Any] = facts
        return found

    def end_sending(self) -> None:
        """Tell the other side that nothing more comes. What it says is still heard."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """End the connection, whichever process or thread still uses it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close this process's end, while a fork goes on with its own."""
        self._messages.close()
        self._socket.close()


def _watch_for_silence(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENCE_S // 3),
        (socket.TCP_KEEPINTVL, SILENCE_S // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
