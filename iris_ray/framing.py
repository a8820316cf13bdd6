"""Framed streams: JSON facts and bytes in frames, each with its kind, its channel and its length.

`Frame` and `Frames` need no socket: a tunnel writes frames to files. `Connection` sends them over a socket between two
processes that share a token. Each proves to the other that it knows the token before either reads a frame, so that a
stranger costs a few bytes and a few seconds. The token itself does not travel, and nothing is unpickled.
"""

import contextlib
import hmac
import json
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from iris_ray.fair_limits import Places

FACTS = b"{"
"""The kind of a frame that has JSON facts."""
MOST_FRAME_BYTES = 1 << 28
"""A longer frame makes no sense."""
PROOF_S = 10.0
"""The time within which both ends must prove that they know the token."""
MOST_STRANGERS = 256
"""The limit for connections that have not proved the token; one more costs the address that has most its oldest one."""
MOST_AT_ONCE = 32
"""The limit for connections that are accepted before others are looked at."""
SILENCE_S = 60
"""The time after which a connection counts as lost whose other end has vanished without a word."""
POLL_S = 0.02
"""The interval between two checks whether a wait still makes sense."""
LOOK_S = 1.0
"""The interval between two checks for an other end that has vanished."""

_HEAD = struct.Struct(">cII")
_PROOF_BYTES = 32
_PROBES = 4
_UNACKNOWLEDGED, _LAST_HEARD, _INFO_BYTES = 24, 56, 60  # offsets in Linux's tcp_info: packets; milliseconds


class ConnectionLost(ConnectionError):
    """The other end is gone, doesn't know the token, makes no sense, is late, or is not wanted any more."""


def always() -> bool:
    return True


class Frame(NamedTuple):
    """One frame.

    Attributes:
        kind: what it carries; one byte.
        channel: the number of its channel; 0: the connection itself.
        data: its bytes.
    """

    kind: bytes
    channel: int = 0
    data: bytes = b""

    @staticmethod
    def of(kind: bytes, channel: int = 0, /, **facts: object) -> "Frame":
        return Frame(kind, channel, json.dumps(facts).encode())

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that it carries.

        Raises:
            ConnectionLost: it carries something else.
        """
        try:
            found = json.loads(self.data)
        except (ValueError, RecursionError) as error:
            raise ConnectionLost(f"a frame makes no sense: {error}") from error
        if not isinstance(found, dict):
            raise ConnectionLost("a frame makes no sense: it has no facts")
        return found

    def packed(self) -> bytes:
        return _HEAD.pack(self.kind, self.channel, len(self.data)) + self.data


def _unpack_head(data: "bytes | bytearray") -> tuple[bytes, int, int]:
    """Return the kind, the channel and the length of the frame that begins here."""
    kind, channel, size = _HEAD.unpack_from(data)
    if size > MOST_FRAME_BYTES:
        raise ConnectionLost(f"a frame of {size:,} bytes makes no sense")
    return kind, channel, size


class Frames:
    """Takes bytes as they come apart, and yields whole frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with these bytes.

        Raises:
            ConnectionLost: a frame is too long.
        """
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            kind, channel, size = _unpack_head(self._rest)
            end = _HEAD.size + size
            if len(self._rest) < end:
                return
            found = Frame(kind, channel, bytes(self._rest[_HEAD.size : end]))
            del self._rest[:end]
            yield found


class Connection:
    """One end of a connection between two processes that know the same token. Several threads may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._is_tcp = sock.family != socket.AF_UNIX
        sock.setblocking(False)
        if self._is_tcp:
            for level, option, value in (
                (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, SILENCE_S // 3)),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, SILENCE_S // 6)),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
            ):
                sock.setsockopt(level, option, value)

    def prove(self, token: str, calls: bool, within_s: float = PROOF_S) -> None:
        """Prove to the other end that this one knows the token, and have it prove the same.

        Args:
            token: the secret of both.
            calls: whether this end has called the other, which listens.
            within_s: the limit for all of it, however the bytes come.

        Raises:
            ConnectionLost: the other end does not know the token. The connection is closed.
        """
        deadline = time.monotonic() + within_s
        try:
            for _ in self.proving(token, calls):
                self._wait(select.POLLIN, always, deadline)
        except ConnectionLost:
            self.close()
            raise

    def proving(self, token: str, calls: bool) -> Iterator[None]:
        """Prove like `prove`, but never wait: yield where bytes from the other end are still missing."""
        mine = secrets.token_bytes(_PROOF_BYTES)
        self._send_at_once(mine)
        theirs = yield from self._coming(_PROOF_BYTES)
        self._send_at_once(_proof(token, calls, mine, theirs))
        proof = yield from self._coming(_PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(token, not calls, theirs, mine)):
            raise ConnectionLost("the other end does not know the token")

    def _send_at_once(self, data: bytes) -> None:
        """Send bytes that fit into the empty buffer of a new connection."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def _coming(self, size: int) -> Generator[None, None, bytes]:
        """Return bytes that are no frame; yield where they have not come yet."""
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except BlockingIOError:
                yield
                continue
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not part:
                raise ConnectionLost("the other end has closed the connection")
            data += part
        return bytes(data)

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- frames --------------------------------------------------------------------------------------------------------

    def say(self, **facts: object) -> None:
        """Send facts. Raise like `send`."""
        self.send(Frame.of(FACTS, **facts))

    def send(self, frame: Frame, wanted: Callable[[], bool] = always) -> None:
        """Send a frame.

        Args:
            frame: it has at most `MOST_FRAME_BYTES`.
            wanted: whether the frame is still of use; asked again and again.

        Raises:
            ConnectionLost: the frame can't be sent, or is not wanted any more.
        """
        self.send_bytes(frame.packed(), wanted)

    def receive(self, wanted: Callable[[], bool] = always, deadline: float = math.inf) -> Frame:
        """Return the next frame.

        Args:
            wanted: whether the frame is still of use; asked again and again.
            deadline: when to give up, in the time of `time.monotonic`. Bytes that keep coming are taken after it, too.

        Raises:
            ConnectionLost: no frame has come, or it makes no sense.
        """
        kind, channel, size = _unpack_head(self._receive_bytes(_HEAD.size, wanted, deadline))
        return Frame(kind, channel, self._receive_bytes(size, wanted, deadline))

    def hear(self) -> dict[str, Any]:
        """Return the facts of the next frame. Raise like `receive`, also if that frame has none."""
        frame = self.receive()
        if frame.kind != FACTS:
            raise ConnectionLost(f"a frame of kind {frame.kind!r} came in place of facts")
        return frame.facts

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def send_bytes(
        self, data: "bytes | memoryview", wanted: Callable[[], bool] = always, deadline: float = math.inf
    ) -> None:
        """Send bytes that are no frame. Raise like `send`."""
        left = memoryview(data)
        with self._sending:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, wanted, deadline)
                except OSError as error:
                    raise ConnectionLost(str(error)) from error

    def receive_into(self, left: memoryview, wanted: Callable[[], bool] = always, deadline: float = math.inf) -> None:
        """Fill a buffer with bytes that are no frame. Raise like `receive`."""
        while left:
            try:
                count = self._socket.recv_into(left)
            except BlockingIOError:  # what has come already is taken, whether it is wanted or not
                self._wait(select.POLLIN, wanted, deadline)
                continue
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not count:
                raise ConnectionLost("the other end has closed the connection")
            left = left[count:]

    def _receive_bytes(self, size: int, wanted: Callable[[], bool], deadline: float) -> bytes:
        data = bytearray(size)
        self.receive_into(memoryview(data), wanted, deadline)
        return bytes(data)

    def _wait(self, event: int, wanted: Callable[[], bool], deadline: float) -> None:
        """Wait a moment until bytes can be sent or received."""
        pause_s = LOOK_S if wanted is always and deadline == math.inf else POLL_S
        try:
            look = select.poll()
            look.register(self._socket, event)
            if look.poll(pause_s * 1000):
                return
        except ValueError:
            raise ConnectionLost("the connection is closed at this end") from None
        if not wanted():
            raise ConnectionLost("not wanted any more")
        if time.monotonic() > deadline:
            raise ConnectionLost("no answer in time")
        self.require_other_end()

    # -- the other end -------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the other end has not closed the connection, as far as this end knows."""
        try:
            look = select.poll()
            look.register(self._socket, select.POLLIN)
            return not look.poll(0) or self._socket.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):  # a socket that is closed here has no number
            return False

    def require_other_end(self) -> None:
        """Raise ConnectionLost if the other end has not acknowledged what was sent for `SILENCE_S`.

        The kernel acknowledges for a process that does not read. With its own limit, `TCP_USER_TIMEOUT`, that process
        would lose its connection. Where nothing is on its way, the kernel's keep-alive notices who has vanished.
        """
        if self._is_tcp:
            try:
                info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            unacknowledged, silent_ms = (struct.unpack_from("I", info, at)[0] for at in (_UNACKNOWLEDGED, _LAST_HEARD))
            if unacknowledged and silent_ms > SILENCE_S * 1000:
                raise ConnectionLost(f"the other end has been silent for {silent_ms // 1000} s")

    def end_sending(self) -> None:
        """Tell the other end that no more frames come. Its own are still received."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """End the connection, whichever process or thread still uses it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close this process's end, while a fork goes on with its own."""
        self._socket.close()


def _proof(token: str, calls: bool, mine: bytes, theirs: bytes) -> bytes:
    role = b"calls" if calls else b"listens"
    return hmac.digest(token.encode(), role + mine + theirs, "sha256")


Taken = TypeVar("Taken", bound=Connection)


class Door(Generic[Taken]):
    """Takes connections whose other end proves the token. A stranger costs a descriptor for `PROOF_S`, and no thread.

    Args:
        listener: listens.
        token: the secret of both.
        make: makes a connection of a socket.
    """

    def __init__(self, listener: socket.socket, token: str, make: Callable[[socket.socket], Taken]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._token = token
        self._make = make
        self._strangers: Places[Taken] = Places(MOST_STRANGERS)
        self._proving: dict[int, tuple[Taken, Iterator[None], float]] = {}  # by descriptor, the oldest first

    def next(self) -> Taken:
        """Wait for a connection whose other end knows the token, and return it."""
        while True:
            if (found := self.look(LOOK_S if self._strangers else None)) is not None:
                return found

    def look(self, within_s: float | None) -> Taken | None:
        """Return a connection whose other end knows the token; None if none comes at once. Wait for something to come.

        Args:
            within_s: how long to wait; None: for ever.
        """
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for descriptor in self._proving:
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(None if within_s is None else within_s * 1000)]
        for descriptor in ready:
            if descriptor != self._listener.fileno() and (proven := self._proven(descriptor)) is not None:
                return proven
        if self._listener.fileno() in ready:
            self._accept()
        now = time.monotonic()
        for descriptor, (connection, _, deadline) in list(self._proving.items()):
            if now <= deadline:
                break
            self._forget(descriptor)
            connection.end()
        return None

    def _proven(self, descriptor: int) -> Taken | None:
        """Take what a stranger has sent. Return its connection if it knows the token; else None."""
        connection, proving, _ = self._proving[descriptor]
        try:
            next(proving)
        except StopIteration:
            self._forget(descriptor)
            return connection
        except ConnectionLost:
            self._forget(descriptor)
            connection.end()
        return None

    def close(self) -> None:
        """Close this process's copies of all sockets. If a fork has others, those stay open."""
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
                connection = self._make(accepted)
            except BlockingIOError:
                return
            except OSError:  # the other end is gone already, or this process has too many open files
                time.sleep(POLL_S)
                return
            if (dropped := self._strangers.add(connection, address[0] if address else "")) is not None:
                del self._proving[dropped.fileno()]
                dropped.end()
            proving = connection.proving(self._token, calls=False)  # begins with the first bytes that come
            self._proving[connection.fileno()] = connection, proving, time.monotonic() + PROOF_S

    def _forget(self, descriptor: int) -> None:
        self._strangers.remove(self._proving.pop(descriptor)[0])
