"""The bytes of one command or connection of a session. A piece is read only when the person's process asks for it.

Only the last piece is kept here, in case its answer is lost. Unread output stays in the kernel, so a command that
prints faster than its reader reads has to wait, as for a slow terminal.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import termios
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from iris_ray.errors import CommandNotFoundError, SessionError
from iris_ray.processes.bare import bare_command
from iris_ray.processes.tree import TOKEN_VARIABLE
from iris_ray.sessions import keeper
from iris_ray.sessions.core import CHUNK_BYTES, POLL_S, Piece, Size

START_S = 30.0
"""The limit for the start of a command by its keeper; seconds."""
CONNECT_S = 10.0
LOOK_S = 0.2
"""The interval between two checks whether a write that waits for its reader is still of use; seconds."""

Channel = TypeVar("Channel", bound="ByteChannel")


class ByteChannel(ABC):
    """Bytes in both directions, through descriptors of this process.

    Args:
        sources: the descriptors that are read: of stdout and stderr, of a terminal, or of a connection.
        into: the descriptor for input, which may be one of the sources; None: input is dropped.

    Attributes:
        task_ended: whether it is over, or about to be, because the task's attempt has ended.
        is_closed: whether the person has closed it.
    """

    def __init__(self, sources: Sequence[int], into: int | None) -> None:
        self._sources: list[int | None] = list(sources)
        self._into = into
        self._own = {*sources, *(() if into is None else (into,))}
        self._last = Piece(0)
        self._written = 0
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self.task_ended = self.is_closed = self._was_reset = False
        for descriptor in self._own:
            os.set_blocking(descriptor, False)

    @property
    def over(self) -> bool:
        """Whether its last piece has been read."""
        return self._last.over

    async def read(self, after: int) -> Piece:
        """Return the piece after the one of this number; see `SessionInterface.read`."""
        async with self._reading:
            if after >= self._last.number and not self.over:
                self._last = (await self._next())._replace(number=self._last.number + 1)
                if self.over:
                    self._into = None  # a write that waits comes to its end
                    async with self._writing:
                        self._close()
            return self._last

    async def write(self, number: int, data: bytes) -> None:
        """Hand bytes over; see `SessionInterface.write`."""
        async with self._writing:
            if number <= self._written:
                return
            rest = memoryview(data)
            while rest and self._into is not None:
                try:
                    rest = rest[os.write(self._into, rest) :]
                except BlockingIOError:
                    await _ready((), (self._into,), LOOK_S)
                except OSError as error:  # nobody reads it
                    self._was_reset |= isinstance(error, ConnectionError)
                    self._into = None
            if not data and self._into is not None:
                self._end_input(self._into)
                self._into = None
            self._written = number

    @abstractmethod
    def end(self) -> None:
        """End the command or connection of this channel. The last piece comes after that."""

    async def drop(self) -> None:
        """End the command or connection, and drop the pieces that nobody has read."""
        self.end()
        while not self.over:
            await self.read(self._last.number)

    @abstractmethod
    def _is_done(self) -> bool:
        """Return whether no more bytes come after those in the sources."""

    @abstractmethod
    def _end_input(self, into: int) -> None:
        """Tell the other side that no more bytes come."""

    def _besides(self) -> Collection[int]:
        """Return descriptors besides the sources whose bytes `_hear` takes."""
        return ()

    def _hear(self) -> None: ...  # noqa: B027 — most channels have nothing besides

    def _last_piece(self) -> Piece:
        return Piece(0, over=True, task_ended=self.task_ended, was_reset=self._was_reset)

    def _close(self) -> None:
        for descriptor in self._own:
            os.close(descriptor)

    async def _next(self) -> Piece:
        """Return the next piece, or an empty one if no bytes come within `POLL_S`."""
        deadline = asyncio.get_running_loop().time() + POLL_S
        while True:
            is_done = self._is_done()  # asked before the sources are read, so that no bytes before the end are lost
            if any(data := [self._read(place) for place in range(len(self._sources))]):
                return Piece(0, data[0], b"".join(data[1:]))
            if is_done:
                return self._last_piece()
            left_s = deadline - asyncio.get_running_loop().time()
            watched = [source for source in self._sources if source is not None]
            if watched := [*watched, *self._besides()]:
                if left_s <= 0 or not await _ready(watched, (), left_s):
                    return Piece(0)
                self._hear()

    def _read(self, place: int) -> bytes:
        """Return the bytes that a source has now. Forget the source at its end."""
        source = self._sources[place]
        if source is None:
            return b""
        try:
            if data := os.read(source, CHUNK_BYTES):
                return data
        except BlockingIOError:
            return b""
        except OSError as error:  # a terminal that no process has open any more, or a connection that was reset
            self._was_reset |= isinstance(error, ConnectionError)
        self._sources[place] = None
        return b""


def reset_when_closed(connection: socket.socket, resets: bool) -> None:
    """Choose what the other end of a connection sees when this one is closed, or its process dies.

    Args:
        connection: the connection.
        resets: True for a reset: bytes may be missing. False for an end: all bytes were sent.
    """
    with contextlib.suppress(OSError):  # it is closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", resets, 0))


class PortConnection(ByteChannel):
    """A connection to a port of this host. The server sees its end only if the person has sent one, else a reset."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        super().__init__([connected.fileno()], connected.fileno())

    @staticmethod
    def to(host: str, port: int) -> "PortConnection":
        """Connect to an address. This blocks.

        Raises:
            OSError: nothing answers there.
        """
        refused: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            connection = socket.socket(family, kind, protocol)
            try:
                reset_when_closed(connection, True)  # before it is open: this process may die at any time
                connection.settimeout(CONNECT_S)
                connection.connect(address)
                return PortConnection(connection)
            except OSError as error:
                connection.close()
                refused = error
        raise refused or OSError(f"no address of {host}")

    @staticmethod
    def open(port: int, address: str) -> "PortConnection":
        """Connect to a port on this host's loopback or, if nothing listens there, on its address.  This blocks.

        Raises:
            SessionError: nothing listens on either.
        """
        refused: OSError | None = None
        for host in ("127.0.0.1", "::1", address):
            try:
                return PortConnection.to(host, port)
            except OSError as error:
                refused = refused or error
        raise SessionError(
            f"nothing listens on port {port} of {address}, the task's host ({refused}); start the server first, and see"
            " that it listens on that port"
        )

    def end(self) -> None:
        self._sources, self._was_reset = [None], True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # wakes a read that waits; the server is sent nothing

    def _is_done(self) -> bool:
        return self._sources == [None]

    def _end_input(self, into: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        reset_when_closed(self._socket, False)

    def _close(self) -> None:
        self._socket.close()


class RunningCommand(ByteChannel):
    """A command with its whole process tree, under a `keeper`.

    Args:
        control, lines: the socket to its keeper, and the lines from it.
        sources, into: as for `ByteChannel`.
        on_terminal: whether they are its terminal.
    """

    def __init__(
        self,
        control: socket.socket,
        lines: keeper.Lines,
        sources: Sequence[int],
        into: int | None,
        on_terminal: bool,
    ) -> None:
        self._control = control
        self._lines = lines
        self._on_terminal = on_terminal
        self._gone = False
        self._exit_code: int | None = None
        control.setblocking(False)
        super().__init__(sources, into)

    @staticmethod
    def start(
        words: Sequence[str],
        environ: Mapping[str, str],
        directory: str,
        token: str,
        size: Size | None = None,
        takes_input: bool = False,
    ) -> "RunningCommand":
        """Start a command. This blocks for some 50 ms.

        Args:
            words: the program and its arguments.
            environ: its variables.
            directory: its working directory.
            token: of the task, for its keeper: the host ends that with the attempt, if it has to.
            size: of its terminal; None: it has none.
            takes_input: whether it gets input; otherwise its stdin is empty. A command with a terminal always does.

        Raises:
            CommandNotFoundError: there is no such program, or it can't be started.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as its:
            into: int | None = None
            if size is None:
                pipes = [_pipe(ours, its) for _ in range(2)]
                sources, streams = [read for read, _ in pipes], [subprocess.DEVNULL, *(write for _, write in pipes)]
                if takes_input:
                    streams[0], into = _pipe(its, ours)
            else:
                into, slave = os.openpty()
                ours.callback(os.close, into)
                its.callback(os.close, slave)
                termios.tcsetwinsize(into, size)
                sources, streams = [into], [slave] * 3
            control, its_control = socket.socketpair()
            ours.callback(control.close)
            its.callback(its_control.close)
            wanted = {"command": list(words), "environ": dict(environ), "directory": directory}
            lines = _start_keeper(
                control, its_control, streams, {TOKEN_VARIABLE: token}, wanted | {"terminal": size is not None}
            )
            command = RunningCommand(control, lines, sources, into, size is not None)
            ours.pop_all()
            return command

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def resize(self, size: Size) -> None:
        """Change the size of its terminal."""
        if self._on_terminal and self._into is not None:
            termios.tcsetwinsize(self._into, size)

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(f"{number}\n".encode())

    def _is_done(self) -> bool:
        return self._gone

    def _besides(self) -> Collection[int]:
        return () if self._gone else (self._control.fileno(),)

    def _hear(self) -> None:
        lines = () if self._gone else self._lines.read()
        if lines is None:
            self._gone = True
        for line in lines or ():
            self._exit_code = json.loads(line)["exit_code"]

    def _last_piece(self) -> Piece:
        return Piece(0, over=True, exit_code=self._exit_code, task_ended=self.task_ended)

    def _end_input(self, into: int) -> None:
        if not self._on_terminal:
            self._own.discard(into)
            os.close(into)

    def _close(self) -> None:
        self._control.close()
        super()._close()


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """Return the two ends of a pipe, each of which is closed by a stack."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


def _start_keeper(
    control: socket.socket,
    its_control: socket.socket,
    streams: Sequence[int],
    environ: Mapping[str, str],
    wanted: Mapping[str, object],
) -> keeper.Lines:
    """Start a keeper with these streams and further variables, and send it the command. Return its further lines.

    Raises:
        CommandNotFoundError: the command can't be started.
    """
    descriptor = its_control.fileno()
    stdin, stdout, stderr = streams
    subprocess.run(
        [*bare_command(keeper.__file__), str(descriptor)],
        stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=[descriptor], env={**os.environ, **environ}, check=True,
    )  # fmt: skip
    its_control.close()
    control.settimeout(START_S)
    lines = keeper.Lines(control)
    try:
        control.sendall(json.dumps(wanted).encode() + b"\n")
        answer = lines.wait()
    except OSError:
        answer = None
    found = (
        {"error": "the process that was to start it has ended, or does not answer"}
        if answer is None
        else json.loads(answer)
    )
    if "error" in found:
        command, directory = wanted["command"], wanted["directory"]
        assert isinstance(command, list)
        raise CommandNotFoundError(
            f"{command[0]!r} can't be started in {directory} on the task's host: {found['error']}; it runs with the"
            " task's PATH, and no shell reads it: for one, give sh -c '…'"
        )
    return lines


async def started(start: Callable[..., Channel], *arguments: Any) -> Channel:
    """Start a channel in a thread of its own, and return it. If this call is cancelled, drop it once it has started.

    `asyncio.to_thread` is of no use here: if there is no room for a thread, it raises but leaves the call in its queue.
    A thread that becomes free would then start a channel that nobody closes.

    Raises:
        RuntimeError: there is no room for a thread. Nothing was started.
    """
    thread = ThreadPoolExecutor(1)
    try:
        starting = asyncio.get_running_loop().run_in_executor(thread, partial(start, *arguments))
    finally:
        thread.shutdown(wait=False)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        dropping = asyncio.ensure_future(_dropped(starting))
        _DROPPING.add(dropping)
        dropping.add_done_callback(_DROPPING.discard)
        raise


_DROPPING = set[asyncio.Future[None]]()
"""asyncio holds only weak references."""


async def _dropped(starting: asyncio.Future[Channel]) -> None:
    with contextlib.suppress(OSError, RuntimeError, subprocess.SubprocessError):  # it has not started
        await (await starting).drop()


async def _ready(readers: Collection[int], writers: Collection[int], timeout_s: float) -> bool:
    """Wait until one of these descriptors can be read or written. Return False after ``timeout_s``."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    try:
        for descriptor in readers:
            loop.add_reader(descriptor, wake)
        for descriptor in writers:
            loop.add_writer(descriptor, wake)
        await asyncio.wait([woken], timeout=timeout_s)
        return woken.done()
    finally:
        for descriptor in readers:
            loop.remove_reader(descriptor)
        for descriptor in writers:
            loop.remove_writer(descriptor)
