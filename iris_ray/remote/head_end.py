"""The end of a tunnel on the head: it runs commands of ``iris-ray`` and connects to addresses in the cluster.

Both ends exchange frames, each of one channel, which is a command or a connection.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from iris_ray.actors.calls.ray_internals import delete_packages, fetch_package, logs_directory
from iris_ray.errors import SessionError
from iris_ray.framing import Frame, Frames
from iris_ray.remote.seal import Seal, SealedFile

if TYPE_CHECKING:
    from iris_ray.sessions.channels import ByteChannel, RunningCommand

WINDOW = 1 << 20
"""The limit for the bytes of a channel that are under way in one direction; its reader grants the next ones."""
CHUNK_BYTES = 64 << 10
"""The limit for the bytes of a frame of data."""
PING_S = 10.0
"""The longest interval between two frames from one end."""
SILENCE_S = 60.0
"""The time after which an end that has heard nothing gives up."""
MOST_FILE_BYTES = 16 << 20
"""The size after which the next file to the person begins."""
BRISK_S, SLOW_S = 0.01, 0.2
"""The shortest and the longest pause between two looks for a package. Pauses grow while none comes."""
GRACE_S = 5.0
"""The time in which a command whose channel is closed may end by itself."""
LAST_S = 1.0
"""The time in which the person's end closes a file before its follower is woken, and sends no more packages."""


class Kind:
    """The kinds of frames."""

    OPEN, DATA, ERR, END, OVER, CREDIT, RESIZE, SIGNAL, CLOSE = b"o", b"d", b"e", b"n", b"v", b"c", b"r", b"s", b"x"
    """Of a channel. Facts: of OPEN a command or address; of CREDIT a number of bytes; of OVER an error, or an exit code
    and whether a connection was reset."""
    PING, NEXT, OPENED, TAKEN, BYE = b"P", b"N", b"O", b"T", b"B"
    """Of the tunnel. Facts: of NEXT and OPENED the number of a file. TAKEN: a package was read.
    BYE: this end has ended; the head's says why."""


class Credit:
    """The number of bytes of a channel that may still be sent."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._changed = asyncio.Event()

    async def spend(self, size: int) -> None:
        """Wait until this number of bytes, at most `WINDOW`, may be sent."""
        while self._left < size:
            self._changed.clear()
            await self._changed.wait()
        self._left -= size

    def add(self, size: int) -> None:
        self._left += size
        self._changed.set()


def package_name(word: str, number: int) -> str:
    """Return the name of the package of this number from the person's end of the tunnel of this word."""
    return f"{word}-{number}.zip"


def file_name(word: str, number: int) -> str:
    """Return the name of the file of this number from the head's end."""
    return f"{word}-{number}.tunnel"


def serve_tunnel(word: str, other: str) -> Iterator[tuple[str, str]]:
    """Be the head's end of a tunnel. Yield the id of the node that has the files, once the first one exists.

    Args:
        word: of the tunnel.
        other: `Seal.public` of the person's end; that of this end is yielded, too.
    """
    import ray

    seal = Seal(is_head=True)
    seal.meet(other)
    with Downstream(logs_directory(), word, seal) as downstream:
        yield ray.get_runtime_context().get_node_id(), seal.public
        asyncio.run(HeadEnd(word, downstream, seal).run())


class Downstream:
    """The files by which frames travel to the person.

    A file that is followed can't tell its reader that it has ended. So a byte is written to it after the person's end
    has opened the next file: the dashboard, which follows it for the person, then notices the closed connection.
    """

    def __init__(self, directory: Path, word: str, seal: Seal) -> None:
        self._directory = directory
        self._word = word
        self._seal = seal
        self._number = 0
        self._files: dict[int, tuple[int, SealedFile]] = {}
        self._size = 0
        try:
            self._begin()
        except OSError:
            self.drop(self._number + 1)
            raise

    def __enter__(self) -> "Downstream":
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(2):
            time.sleep(LAST_S / 2)
            self._wake(list(self._files))
        self.drop(self._number + 1)

    def send(self, frame: Frame) -> None:
        self._size += self._write(self._number, frame)
        if self._size > MOST_FILE_BYTES:
            before = self._number
            self._begin()
            self._write(before, Frame.of(Kind.NEXT, number=self._number))

    def drop(self, before: int) -> None:
        """Delete the files before this number, which the person's end has read."""
        old = [number for number in self._files if number < before]
        self._wake(old)
        for number in old:
            os.close(self._files.pop(number)[0])
            with contextlib.suppress(FileNotFoundError):
                self._path(number).unlink()

    def _begin(self) -> None:
        self._number += 1
        path = self._path(self._number)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._files[self._number] = file, SealedFile(self._seal, self._number)
        self._size = 0
        self._write(self._number, Frame(Kind.PING))  # the dashboard answers once the file has bytes

    def _write(self, number: int, frame: Frame) -> int:
        """Append a frame to a file. Return the number of bytes."""
        file, sealed = self._files[number]
        data = rest = memoryview(sealed.sealed(frame))
        while rest:
            rest = rest[os.write(file, rest) :]
        return len(data)

    def _wake(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with contextlib.suppress(OSError):  # the disk is full
                self._write(number, Frame(Kind.PING))

    def _path(self, number: int) -> Path:
        return self._directory / file_name(self._word, number)


class HeadEnd:
    """Reads the packages of one tunnel, and serves its channels.

    Args:
        word: of the tunnel.
        downstream: the files to the person.
        seal: of this end.
    """

    def __init__(self, word: str, downstream: Downstream, seal: Seal) -> None:
        self._word = word
        self._seal = seal
        self._send = downstream.send
        self._downstream = downstream
        self._channels: dict[int, _Channel] = {}
        self._is_over = False

    async def run(self) -> None:
        """Serve until the person's end ends the tunnel, or is silent for `SILENCE_S`.

        Raises:
            SessionError: this end has failed. The person's end is told why, if that can still be written.
        """
        why = "the head has heard nothing for too long"
        try:
            await self._receive()
        except Exception as error:
            why = str(error) or repr(error)
            raise SessionError(f"the head's end of a tunnel has failed: {why}") from error
        finally:
            await asyncio.gather(*(channel.close() for channel in list(self._channels.values())))
            with contextlib.suppress(OSError):  # the disk is full, and the person's end notices the silence
                self._send(Frame.of(Kind.BYE, error=why))
            if not self._is_over:  # a package may be under way
                await asyncio.sleep(LAST_S)
            delete_packages(f"{self._word}-")

    async def _receive(self) -> None:
        number, heard_at, frames = 1, time.monotonic(), Frames()
        pinged_at = heard_at
        while not self._is_over:
            if time.monotonic() - pinged_at > PING_S:
                pinged_at = time.monotonic()
                self._send(Frame(Kind.PING))
            name = package_name(self._word, number)
            data = await asyncio.to_thread(fetch_package, f"gcs://{name}")
            silent_s = time.monotonic() - heard_at
            if data is None:
                if silent_s > SILENCE_S:
                    return
                await asyncio.sleep(min(max(silent_s / 20, BRISK_S), SLOW_S))
                continue
            await asyncio.to_thread(delete_packages, name)
            try:
                data = self._seal.opened(data, number)
            except SessionError as error:
                for channel in self._channels:
                    self._send(Frame.of(Kind.OVER, channel, error=str(error)))
                return
            self._send(Frame(Kind.TAKEN))
            number, heard_at = number + 1, time.monotonic()
            for frame in frames.feed(data):
                self._take(frame)

    def _take(self, frame: Frame) -> None:
        channel = self._channels.get(frame.channel)
        if frame.kind == Kind.BYE:
            self._is_over = True
        elif frame.kind == Kind.OPENED:
            self._downstream.drop(frame.facts["number"])
        elif frame.kind == Kind.OPEN:
            self._channels[frame.channel] = _Channel(frame, self._send, self._channels.pop)
        elif channel is not None:  # else it is over
            channel.take(frame)


class _Channel:
    """One command or connection.

    Args:
        opens: the frame that opens it.
        send: sends a frame to the person's end.
        forget: is called with the number of the channel and None when it is over.
    """

    def __init__(self, opens: Frame, send: Callable[[Frame], None], forget: Callable[[int, None], object]) -> None:
        self._number = opens.channel
        self._send = send
        self._forget = forget
        self._credit = Credit()
        self._given: asyncio.Queue[bytes] = asyncio.Queue()
        self._closing: asyncio.Task[None] | None = None
        self._is_command = "words" in opens.facts
        self._beginning = asyncio.create_task(_begun(opens.facts))
        self._task = asyncio.create_task(self._serve())

    def take(self, frame: Frame) -> None:
        """Carry out a frame."""
        command = self._begun_command
        if frame.kind in (Kind.DATA, Kind.END):
            self._given.put_nowait(frame.data)
        elif frame.kind == Kind.CREDIT:
            self._credit.add(frame.facts["size"])
        elif frame.kind == Kind.CLOSE and self._closing is None:
            self._closing = asyncio.create_task(self.close())
        elif frame.kind == Kind.RESIZE and command is not None:
            command.resize(frame.facts["size"])
        elif frame.kind == Kind.SIGNAL and command is not None:
            command.signal(frame.facts["number"])

    async def close(self) -> None:
        """End the command with its whole process tree, or the connection."""
        await asyncio.wait([self._beginning])
        if (command := self._begun_command) is not None:
            command.signal(signal.SIGTERM)
            await asyncio.wait([self._task], timeout=GRACE_S)
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._beginning.exception() is None:
            await self._beginning.result().drop()

    @property
    def _begun_command(self) -> "RunningCommand | None":
        """The command, once it has begun; None for a connection."""
        began = self._beginning.done() and self._beginning.exception() is None
        return cast("RunningCommand", self._beginning.result()) if began and self._is_command else None

    async def _serve(self) -> None:
        said: dict[str, object] = {"error": "it was closed"}
        channel: ByteChannel | None = None
        writing: asyncio.Task[None] | None = None
        try:
            channel = await asyncio.shield(self._beginning)
            writing = asyncio.create_task(self._write_to(channel))
            piece = None
            while piece is None or not piece.over:
                piece = await channel.read(0 if piece is None else piece.number)
                for kind, data in ((Kind.DATA, piece.out), (Kind.ERR, piece.err)):
                    if data:
                        await self._credit.spend(len(data))
                        self._send(Frame(kind, self._number, data))
            said = {"code": piece.exit_code, "reset": piece.was_reset}
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # a SessionError, or no room for a thread
            said = {"error": str(error)}
            if channel is not None:
                await channel.drop()
        finally:
            if writing is not None:
                writing.cancel()
            self._send(Frame.of(Kind.OVER, self._number, **said))
            self._forget(self._number, None)

    async def _write_to(self, channel: "ByteChannel") -> None:
        """Hand over the bytes from the person, as fast as they are taken, up to their end."""
        for number in itertools.count(1):
            data = await self._given.get()
            await channel.write(number, data)
            if not data:
                return
            self._send(Frame.of(Kind.CREDIT, self._number, size=len(data)))


async def _begun(facts: dict[str, Any]) -> "ByteChannel":
    """Begin a command of ``iris-ray`` or a connection.

    Raises:
        OSError, RuntimeError, subprocess.SubprocessError: it can't begin.
    """
    from iris_ray.sessions.channels import PortConnection, RunningCommand, started

    if "words" in facts:
        words = [sys.executable, "-m", "iris_ray", *facts["words"]]
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "TERM": facts["term"]}
        return await started(RunningCommand.start, words, environ, os.getcwd(), "", facts["size"], facts["input"])
    host, port = facts["host"], facts["port"]
    try:
        return await started(PortConnection.to, host, port)
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno) if error.errno else error
        raise SessionError(f"{host} can't be reached at port {port}: {why}") from None
