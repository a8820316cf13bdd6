"""A person's end of a tunnel to the head of a cluster of which only the dashboard can be reached."""

import asyncio
import contextlib
import io
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from iris_ray.errors import SessionError
from iris_ray.framing import Frame, Frames
from iris_ray.remote.cluster_call import ClusterCall, send_call
from iris_ray.remote.frames import (
    BYE,
    CHUNK_BYTES,
    CLOSE,
    CREDIT,
    DATA,
    END,
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
    WINDOW,
    Credit,
)
from iris_ray.remote.head_end import file_name, package_name, serve_tunnel
from iris_ray.remote.ray_jobs import RayJobs
from iris_ray.sessions.client import follow
from iris_ray.sessions.core import CommandLine, Piece, Size
from iris_ray.sessions.port_forward import carry

FOLLOW_S = 0.05
"""The dashboard looks so often for what the head's end has written."""
MOST_PACKAGE_BYTES = 1 << 20
MOST_PACKAGES = 4
"""So many packages are on the way at most: the GCS keeps them until they are taken."""
AGAIN_S = 1.0
REQUEST_S = 20.0

T = TypeVar("T")


class Tunnel:
    """A tunnel; use it with ``async with``. At its end all commands and connections end.

    Args:
        jobs: the jobs of the cluster, whose dashboard is the way.

    Raises:
        NoClusterError, TokenRefusedError, VersionMismatchError, RayJobError: the head's end can't be started.
    """

    def __init__(self, jobs: RayJobs) -> None:
        self._jobs = jobs
        self._word = f"iris-ray-{secrets.token_hex(16)}"
        self._channels: dict[int, TunnelChannel] = {}
        self._pending: list[bytes] = []
        self._there_is_more = asyncio.Event()
        self._room = asyncio.Event()
        self._taken = 0
        self._opened = 0
        self._heard_at = time.monotonic()
        self._trouble: SessionError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._call: ClusterCall | None = None

    async def __aenter__(self) -> Self:
        self._call = await asyncio.to_thread(send_call, self._jobs, "tunnel", serve_tunnel, self._word)
        try:
            self._node_id: str = await asyncio.to_thread(self._call.answer)
        except BaseException:
            self._stop()
            raise
        self._url, access = self._jobs._access
        self._http = aiohttp.ClientSession(**access)
        self._heard_at = time.monotonic()
        work = (self._receive(), self._deliver(), self._ping())
        self._tasks = [asyncio.create_task(self._watched(one)) for one in work]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        receiving, delivering, pinging = self._tasks
        pinging.cancel()
        self._send(Frame(BYE))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                while self._pending and self._trouble is None:
                    await asyncio.sleep(FOLLOW_S)
        for task in (receiving, delivering):
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._http.close()

    async def run(self, command: CommandLine) -> "TunnelChannel":
        """Run a command of ``iris-ray`` on the head; its words are those after ``iris-ray``."""
        return self._open(
            words=command.words, size=command.size, input=command.takes_input or command.size is not None,
            term=command.term,
        )  # fmt: skip

    async def connect(self, host: str, port: int) -> "TunnelChannel":
        """Connect from the head to an address."""
        return self._open(host=host, port=port)

    def _open(self, **facts: object) -> "TunnelChannel":
        if self._trouble is not None:
            raise self._trouble
        self._opened += 1
        channel = self._channels[self._opened] = TunnelChannel(self._opened, self._send)
        self._send(Frame.of(OPEN, self._opened, **facts))
        return channel

    def _send(self, frame: Frame) -> None:
        self._pending.append(frame.packed())
        self._there_is_more.set()

    def _stop(self) -> None:
        if self._call is not None:
            with contextlib.suppress(Exception):  # it ends by itself, as nobody talks to it
                self._jobs.stop(self._call.run_id)

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work; if it fails, all channels are lost."""
        try:
            await work
        except Exception as error:
            if not isinstance(error, SessionError):
                error = SessionError(f"the way through the dashboard has failed: {error!r}")
            self._trouble = error
            for channel in self._channels.values():
                channel.lose(error)
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._send(Frame(PING))

    # -- to the head --------------------------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        number = 0
        while True:
            await self._there_is_more.wait()
            data = bytearray()
            while self._pending and len(data) < MOST_PACKAGE_BYTES:
                data += self._pending.pop(0)
            if not self._pending:
                self._there_is_more.clear()
            number += 1
            while number - self._taken > MOST_PACKAGES:
                self._room.clear()
                await self._room.wait()
            await self._put(package_name(self._word, number), bytes(data))

    async def _put(self, name: str, data: bytes) -> None:
        deadline = time.monotonic() + SILENCE_S
        while True:
            try:
                async with self._http.put(
                    f"{self._url}/api/packages/gcs/{name}",
                    data=io.BytesIO(data),
                    timeout=aiohttp.ClientTimeout(REQUEST_S),
                ) as answer:
                    if answer.status == 200:
                        return
                    why = f"status {answer.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                why = type(error).__name__
            if time.monotonic() > deadline:
                raise SessionError(f"the dashboard at {self._url} takes nothing any more ({why})")
            await asyncio.sleep(AGAIN_S)

    # -- from the head ------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        number, frames, known = 1, Frames(), 0
        while True:
            follows, why = None, "it has closed the connection"
            try:
                async with contextlib.aclosing(self._followed(number, known)) as pieces:
                    async for data in pieces:
                        known += len(data)
                        self._heard_at = time.monotonic()
                        if (follows := self._take_all(frames.feed(data))) is not None:
                            break
            except (aiohttp.ClientError, TimeoutError) as error:
                why = type(error).__name__
            if follows is not None:
                number, frames, known = follows, Frames(), 0
                self._send(Frame.of(OPENED, number=number))
                continue
            if time.monotonic() - self._heard_at > SILENCE_S:
                raise SessionError(f"the dashboard at {self._url} does not answer any more ({why})")
            await asyncio.sleep(AGAIN_S)

    async def _followed(self, number: int, known: int) -> AsyncGenerator[bytes, None]:
        """Yield what a file has, without its first bytes, and what comes to it, as it comes."""
        asked = {
            "node_id": self._node_id, "filename": file_name(self._word, number), "lines": "-1",
            "interval": str(FOLLOW_S),
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(None, sock_connect=REQUEST_S, sock_read=SILENCE_S)
        async with self._http.get(f"{self._url}/api/v0/logs/stream", params=asked, timeout=timeout) as answer:
            answer.raise_for_status()
            seen = 0
            async for data in answer.content.iter_any():
                new = data[max(0, known - seen) :]
                seen += len(data)
                if new:
                    yield new

    def _take_all(self, frames: Iterable[Frame]) -> int | None:
        """Do what frames say. Return the number of the file that follows, if one does."""
        for frame in frames:
            if frame.kind == NEXT:
                return int(frame.facts["number"])
            if frame.kind == TAKEN:
                self._taken = int(frame.facts["number"])
                self._room.set()
            elif (channel := self._channels.get(frame.channel)) is not None:
                channel.take(frame)
                if frame.kind == OVER:
                    del self._channels[frame.channel]
        return None


class TunnelChannel:
    """A command or a connection at the other end of a tunnel.

    Args:
        number: of the channel.
        send: sends a frame to the head's end.
    """

    def __init__(self, number: int, send: Callable[[Frame], None]) -> None:
        self._number = number
        self._send = send
        self._credit = Credit()
        self._came: asyncio.Queue[Frame | SessionError] = asyncio.Queue()

    def take(self, frame: Frame) -> None:
        """Take a frame of this channel."""
        if frame.kind == CREDIT:
            self._credit.add(frame.facts["size"])
        else:
            self._came.put_nowait(frame)

    def lose(self, error: SessionError) -> None:
        """Raise the error for the reader of this channel: the tunnel is lost."""
        self._came.put_nowait(error)
        self._credit.add(WINDOW)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces as they come, up to the last one.

        Raises:
            SessionError: the tunnel is lost, or the head can't begin it.
        """
        number = 0
        while True:
            came = await self._came.get()
            if isinstance(came, SessionError):
                raise came
            number += 1
            if came.kind == OVER:
                if "error" in came.facts:
                    raise SessionError(came.facts["error"])
                yield Piece(number, over=True, exit_code=came.facts["code"])
                return
            yield Piece(number, came.data) if came.kind == DATA else Piece(number, err=came.data)
            self._send(Frame.of(CREDIT, self._number, size=len(came.data)))

    async def write(self, data: bytes) -> None:
        """Hand bytes over, and wait until they may be on the way; no bytes mean the end."""
        for at in range(0, len(data), CHUNK_BYTES):
            part = data[at : at + CHUNK_BYTES]
            await self._credit.spend(len(part))
            self._send(Frame(DATA, self._number, part))
        if not data:
            self._send(Frame(END, self._number))

    def resize(self, size: Size) -> None:
        self._send(Frame.of(RESIZE, self._number, size=size))

    def signal(self, number: int) -> None:
        self._send(Frame.of(SIGNAL, self._number, number=int(number)))

    def close(self) -> None:
        self._send(Frame(CLOSE, self._number))


class TunnelInThread:
    """A tunnel for code that has no event loop of its own; `close` ends it.

    Args:
        jobs: as for `Tunnel`; raises like it.
    """

    def __init__(self, jobs: RayJobs) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="iris_ray.tunnel", daemon=True)
        self._thread.start()
        self._tunnel = Tunnel(jobs)
        self._carrying: set[asyncio.Task[None]] = set()
        try:
            self._do(self._tunnel.__aenter__())
        except BaseException:
            self._end_thread()
            raise

    def connect(self, host: str, port: int) -> socket.socket:
        """Return a socket whose other end is a connection from the head to an address."""
        ours, its = socket.socketpair()

        async def begin() -> None:
            reader, writer = await asyncio.open_connection(sock=its)
            task = asyncio.create_task(self._carry(await self._tunnel.connect(host, port), reader, writer))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

        self._do(begin())
        return ours

    async def _carry(self, channel: TunnelChannel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await carry(channel, reader, writer)
        except (SessionError, ConnectionError):  # the reader of the socket sees its end
            pass
        finally:
            writer.close()

    def output_of(self, *words: str) -> bytes:
        """Return what a command of ``iris-ray`` prints on the head.

        Raises:
            SessionError: it fails, or the tunnel does; the message is what it says.
        """

        async def run() -> bytes:
            parts: dict[bool, list[bytes]] = {False: [], True: []}
            channel = await self._tunnel.run(CommandLine(words))
            code = await follow(channel, lambda data, is_err: parts[is_err].append(data))
            if code:
                raise SessionError(b"".join(parts[True]).decode(errors="replace").strip().removeprefix("iris-ray: "))
            return b"".join(parts[False])

        return self._do(run())

    def close(self) -> None:
        """End the tunnel with its connections."""
        self._do(self._close())
        self._end_thread()

    async def _close(self) -> None:
        for task in self._carrying:
            task.cancel()
        if self._carrying:
            await asyncio.wait(self._carrying)
        await self._tunnel.__aexit__(None, None, None)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_thread(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
