"""The end of a tunnel on the head: it runs commands of ``iris-ray`` and connects to addresses in the cluster."""

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from iris_ray.actors.calls.ray_internals import delete_packages, fetch_package, logs_directory
from iris_ray.framing import Frame, Frames
from iris_ray.processes.subtree import as_shells_say, end_with_parent
from iris_ray.remote.frames import (
    BYE,
    CHUNK_BYTES,
    CLOSE,
    CREDIT,
    DATA,
    END,
    ERR,
    NEXT,
    OPEN,
    OPENED,
    OVER,
    PING,
    PING_S,
    RESIZE,
    SIGNAL,
    SILENCE_S,
    TAKEN,
    Credit,
)

MOST_FILE_BYTES = 16 << 20
"""What travels to the person lies in a file for a while; after so many bytes the next file begins."""
BRISK_S, SLOW_S = 0.01, 0.2
"""Pauses between two looks for the next package: the longer nothing has come, the longer."""
CONNECT_S = 10.0
GRACE_S = 5.0
"""A command whose channel is closed has so long to end by itself."""
LAST_S = 1.0
"""The person's end has so long to close the file before what follows it is woken."""


def package_name(word: str, number: int) -> str:
    """Return the name of the package of this number from the person's end of the tunnel of this word."""
    return f"{word}-{number}.zip"


def file_name(word: str, number: int) -> str:
    """Return the name of the file of this number from the head's end."""
    return f"{word}-{number}.tunnel"


def serve_tunnel(word: str) -> Iterator[str]:
    """Be the head's end of a tunnel. Yield the id of the node that has the files, once the first one is there."""
    import ray

    with _Downstream(logs_directory(), word) as downstream:
        yield ray.get_runtime_context().get_node_id()
        asyncio.run(_End(word, downstream).run())


class _Downstream:
    """The files by which frames travel to the person.

    A file that is followed can't tell its reader that nothing more comes. So a byte is written to it once the person's
    end has gone over to the next one: what follows it for the person meets the closed connection, and ends.
    """

    def __init__(self, directory: Path, word: str) -> None:
        self._directory = directory
        self._word = word
        self._number = 0
        self._files: dict[int, int] = {}
        self._size = 0
        self._begin()

    def __enter__(self) -> "_Downstream":
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(2):
            time.sleep(LAST_S / 2)
            self._wake(list(self._files))
        self.drop(self._number + 1)

    def send(self, frame: Frame) -> None:
        data = frame.packed()
        self._write(data)
        self._size += len(data)
        if self._size > MOST_FILE_BYTES:
            before = self._number
            self._begin()
            os.write(self._files[before], Frame.of(NEXT, number=self._number).packed())

    def drop(self, before: int) -> None:
        """Delete the files before this number: the person's end has read them."""
        old = [number for number in self._files if number < before]
        self._wake(old)
        for number in old:
            os.close(self._files.pop(number))
            with contextlib.suppress(FileNotFoundError):
                self._path(number).unlink()

    def _begin(self) -> None:
        self._number += 1
        path = self._path(self._number)
        self._files[self._number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size = 0
        self._write(Frame(PING).packed())  # the dashboard answers once there is something

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._files[self._number], rest) :]

    def _wake(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with contextlib.suppress(OSError):  # the disk is full
                os.write(self._files[number], Frame(PING).packed())

    def _path(self, number: int) -> Path:
        return self._directory / file_name(self._word, number)


class _End:
    def __init__(self, word: str, downstream: _Downstream) -> None:
        self._word = word
        self._send = downstream.send
        self._downstream = downstream
        self._channels: dict[int, _Channel] = {}
        self._is_over = False

    async def run(self) -> None:
        """Serve until the person's end says so, or is silent for too long."""
        pinging = asyncio.create_task(self._ping())
        try:
            await self._receive()
        finally:
            pinging.cancel()
            await asyncio.gather(*(channel.close() for channel in list(self._channels.values())))
            await asyncio.to_thread(delete_packages, f"{self._word}-")

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._send(Frame(PING))

    async def _receive(self) -> None:
        number, heard_at, frames = 1, time.monotonic(), Frames()
        while not self._is_over:
            name = package_name(self._word, number)
            data = await asyncio.to_thread(fetch_package, f"gcs://{name}")
            silent_s = time.monotonic() - heard_at
            if data is None:
                if silent_s > SILENCE_S:
                    return
                await asyncio.sleep(min(max(silent_s / 20, BRISK_S), SLOW_S))
                continue
            await asyncio.to_thread(delete_packages, name)
            self._send(Frame.of(TAKEN, number=number))
            number, heard_at = number + 1, time.monotonic()
            for frame in frames.feed(data):
                self._take(frame)

    def _take(self, frame: Frame) -> None:
        channel = self._channels.get(frame.channel)
        if frame.kind == BYE:
            self._is_over = True
        elif frame.kind == OPENED:
            self._downstream.drop(frame.facts["number"])
        elif frame.kind == OPEN:
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
        self._process: asyncio.subprocess.Process | None = None
        self._terminal: int | None = None
        self._closing: asyncio.Task[None] | None = None
        facts = opens.facts
        work = self._run(facts) if "words" in facts else self._connect(facts["host"], facts["port"])
        self._task = asyncio.create_task(self._do(work))

    async def _do(self, work: Coroutine[Any, Any, int | None]) -> None:
        said: dict[str, object] = {"error": "it was closed"}
        try:
            said = {"code": await work}
        except OSError as error:
            said = {"error": error.strerror or str(error)}
        finally:
            self._send(Frame.of(OVER, self._number, **said))
            self._forget(self._number, None)

    def take(self, frame: Frame) -> None:
        """Do what a frame says."""
        if frame.kind in (DATA, END):
            self._given.put_nowait(frame.data)
        elif frame.kind == CREDIT:
            self._credit.add(frame.facts["size"])
        elif frame.kind == RESIZE and self._terminal is not None:
            _set_size(self._terminal, frame.facts["size"])
        elif frame.kind == SIGNAL:
            self._signal(frame.facts["number"])
        elif frame.kind == CLOSE and self._closing is None:
            self._closing = asyncio.create_task(self.close())

    async def close(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            self._signal(signal.SIGTERM)
            await asyncio.wait([self._task], timeout=GRACE_S)
            self._signal(signal.SIGKILL)
        self._task.cancel()
        await asyncio.wait([self._task])

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _connect(self, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:  # a TimeoutError is one, too
            why = "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno) if error.errno else error
            raise ConnectionError(f"{host} can't be reached at port {port}: {why}") from None
        taking = asyncio.create_task(self._hand_over(writer))
        try:
            with contextlib.suppress(ConnectionError):
                await self._copy(reader.read, DATA)
        finally:
            taking.cancel()
            writer.close()

    async def _hand_over(self, writer: asyncio.StreamWriter) -> None:
        """Give what comes from the person to a stream, as fast as it takes it, up to its end."""
        with contextlib.suppress(ConnectionError):
            while data := await self._given.get():
                writer.write(data)
                await writer.drain()
                self._send(Frame.of(CREDIT, self._number, size=len(data)))
            if writer.can_write_eof():
                writer.write_eof()

    async def _copy(self, read: Callable[[int], Awaitable[bytes]], kind: bytes) -> None:
        """Send what can be read, as fast as the person takes it, up to its end."""
        while data := await read(CHUNK_BYTES):
            await self._credit.spend(len(data))
            self._send(Frame(kind, self._number, data))

    async def _run(self, facts: dict[str, Any]) -> int:
        """Run a command of ``iris-ray``, and return its exit code."""
        words = [sys.executable, "-m", "iris_ray", *facts["words"]]
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "TERM": facts["term"]}
        if facts["size"] is not None:
            return await self._run_on_terminal(words, environ, facts["size"])
        stdin = asyncio.subprocess.PIPE if facts["input"] else asyncio.subprocess.DEVNULL
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, stdin=stdin, stdout=pipe, stderr=pipe, env=environ, start_new_session=True,
            preexec_fn=end_with_parent,
        )  # fmt: skip
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        taking = None if process.stdin is None else asyncio.create_task(self._hand_over(process.stdin))
        try:
            await asyncio.gather(self._copy(process.stdout.read, DATA), self._copy(process.stderr.read, ERR))
            return as_shells_say(await process.wait())
        finally:
            if taking is not None:
                taking.cancel()

    async def _run_on_terminal(self, words: Sequence[str], environ: dict[str, str], size: Sequence[int]) -> int:
        ours, its = os.openpty()
        _set_size(ours, size)

        def settle() -> None:
            end_with_parent()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=its, stdout=its, stderr=its, env=environ, start_new_session=True, preexec_fn=settle
            )
        finally:
            os.close(its)
        os.set_blocking(ours, False)
        self._terminal = ours
        taking = asyncio.create_task(self._type(ours))
        try:
            await self._copy(lambda size: _read_terminal(ours, size), DATA)
            return as_shells_say(await self._process.wait())
        finally:
            self._terminal = None
            taking.cancel()
            await asyncio.wait([taking])
            os.close(ours)

    async def _type(self, terminal: int) -> None:
        with contextlib.suppress(OSError):  # its program has ended
            while data := await self._given.get():
                rest = memoryview(data)
                while rest:
                    try:
                        rest = rest[os.write(terminal, rest) :]
                    except BlockingIOError:
                        await asyncio.sleep(BRISK_S)
                self._send(Frame.of(CREDIT, self._number, size=len(data)))


async def _read_terminal(terminal: int, size: int) -> bytes:
    """Return what a program has written to its terminal; nothing once no process has that open any more."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(terminal, size)
        except BlockingIOError:
            pass
        except OSError:
            return b""
        there = asyncio.Event()
        loop.add_reader(terminal, there.set)
        try:
            await there.wait()
        finally:
            loop.remove_reader(terminal)


def _set_size(terminal: int, size: Sequence[int]) -> None:
    rows, columns = size
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
