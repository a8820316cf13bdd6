"""A person's end of a tunnel to the head of a cluster of which only the dashboard can be reached."""

import asyncio
import contextlib
import io
import itertools
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import aiohttp

from iris_ray.actors.calls.asking_again import ask_again
from iris_ray.actors.protocol.services import module_of
from iris_ray.errors import SessionError
from iris_ray.framing import Frame
from iris_ray.remote.calls import HeadCall
from iris_ray.remote.head_end import (
    CHUNK_BYTES,
    PING_S,
    SILENCE_S,
    WINDOW,
    Credit,
    Kind,
    file_name,
    package_name,
    serve_tunnel,
)
from iris_ray.remote.ray_jobs import RayJobs
from iris_ray.remote.seal import Seal, SealedFile

if TYPE_CHECKING:
    from iris_ray.sessions.core import CommandLine, Piece, Size

FOLLOW_S = 0.05
"""The interval at which the dashboard looks for new bytes from the head's end."""
MOST_PACKAGE_BYTES = 1 << 20
MOST_PACKAGES = 4
"""The limit for packages under way: the GCS keeps them until they are taken."""
AGAIN_S = 1.0
SILENT = aiohttp.ClientError, TimeoutError
"""The errors of a dashboard that may answer later."""
REQUEST_S = 20.0

T = TypeVar("T")


class Tunnel:
    """A tunnel, whose other end this starts; use it with ``async with``. At its end all commands and connections end.

    Args:
        jobs: the jobs of the cluster through whose dashboard it leads.
        more: further arguments of `HeadCall.send`, such as a directory for the commands.

    Raises:
        NoClusterError, TokenRefusedError, VersionMismatchError, RayJobError: the head's end can't be started.
        ServiceUnavailableError: the service of sessions, whose streams and messages this uses, was taken out.
    """

    def __init__(self, jobs: RayJobs, **more: Any) -> None:
        module_of("sessions", "core")
        self._word = f"iris-ray-{secrets.token_hex(16)}"
        self._jobs = jobs
        self._channels: dict[int, TunnelChannel] = {}
        self._pending: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_PACKAGES)
        self._opened = 0
        self._trouble: SessionError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._carrying: set[asyncio.Task[None]] = set()
        self._seal = Seal(is_head=False)
        call = HeadCall.send(jobs, "tunnel", partial(serve_tunnel, self._word, self._seal.public), **more)
        try:
            self._node_id, other = call.answer(tuple[str, str])
            self._seal.meet(other)
        except BaseException:
            call.stop()
            raise

    async def __aenter__(self) -> Self:
        self._url, access = self._jobs._access
        self._http = aiohttp.ClientSession(**access)
        self._heard_at = time.monotonic()
        self._tasks = [asyncio.create_task(self._watched(work)) for work in (self._receive(), self._deliver())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(Frame(Kind.BYE))
        with contextlib.suppress(TimeoutError):
            if self._trouble is None:
                async with asyncio.timeout(AGAIN_S):
                    await self._pending.join()
        ending = [*self._tasks, *self._carrying]
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        await self._http.close()

    def run(self, command: "CommandLine") -> "TunnelChannel":
        """Run a command of ``iris-ray`` on the head, given the words after ``iris-ray``."""
        takes_input = command.takes_input or command.size is not None
        return self._open(words=command.words, size=command.size, input=takes_input, term=command.term)

    def connect(self, host: str, port: int) -> "TunnelChannel":
        """Connect from the head to an address."""
        return self._open(host=host, port=port)

    def begin_carrying(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry bytes between a connection to this process and one from the head to an address, until either ends."""
        from iris_ray.sessions.port_forward import carry

        async def work() -> None:
            with contextlib.closing(writer), contextlib.suppress(SessionError, ConnectionError):  # the reader sees it
                await carry(self.connect(host, port), reader, writer)

        task = asyncio.create_task(work())
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    def _open(self, **facts: object) -> "TunnelChannel":
        if self._trouble is not None:
            raise self._trouble
        self._opened += 1
        channel = self._channels[self._opened] = TunnelChannel(self._opened, self._send)
        self._send(Frame.of(Kind.OPEN, self._opened, **facts))
        return channel

    def _send(self, frame: Frame) -> None:
        self._pending.put_nowait(frame.packed())

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

    # -- to the head --------------------------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        """Send pending frames in packages, and a ping when there are none for a while."""
        for number in itertools.count(1):
            try:
                async with asyncio.timeout(PING_S):
                    parts = [await self._pending.get()]
            except TimeoutError:
                self._send(Frame(Kind.PING))
                parts = [await self._pending.get()]
            while not self._pending.empty() and sum(map(len, parts)) < MOST_PACKAGE_BYTES:
                parts.append(self._pending.get_nowait())
            await self._room.acquire()
            await self._put(package_name(self._word, number), self._seal.sealed(b"".join(parts), number))
            for _ in parts:
                self._pending.task_done()

    async def _put(self, name: str, data: bytes) -> None:
        async def put() -> None:
            url, timeout = f"{self._url}/api/packages/gcs/{name}", aiohttp.ClientTimeout(REQUEST_S)
            async with self._http.put(url, data=io.BytesIO(data), timeout=timeout, raise_for_status=True):
                pass

        try:
            await ask_again(put, *SILENT, within_s=SILENCE_S, pause_s=AGAIN_S)
        except SILENT as error:
            raise SessionError(f"the dashboard at {self._url} no longer accepts data ({error!r})") from None

    # -- from the head ------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        file, known = SealedFile(self._seal, 1), 0
        while True:
            follows, why = None, "it has closed the connection"
            try:
                async with contextlib.aclosing(self._followed(file.number, known)) as pieces:
                    async for data in pieces:
                        known += len(data)
                        self._heard_at = time.monotonic()
                        if (follows := self._take_all(file.opened(data))) is not None:
                            break
            except SILENT as error:
                why = type(error).__name__
            if follows is not None:
                file, known = SealedFile(self._seal, follows), 0
                self._send(Frame.of(Kind.OPENED, number=follows))
                continue
            if time.monotonic() - self._heard_at > SILENCE_S:
                raise SessionError(f"the dashboard at {self._url} has stopped answering ({why})")
            await asyncio.sleep(AGAIN_S)

    async def _followed(self, number: int, known: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a file except the first ``known``, and further bytes as they are appended."""
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
        """Carry out frames. Return the number of the file that follows, if one does."""
        for frame in frames:
            if frame.kind == Kind.NEXT:
                return int(frame.facts["number"])
            if frame.kind == Kind.BYE:
                raise SessionError(f"the head's end of the tunnel has ended ({frame.facts['error']}); open another one")
            if frame.kind == Kind.TAKEN:
                self._room.release()
            elif (channel := self._channels.get(frame.channel)) is not None:
                channel.take(frame)
                if frame.kind == Kind.OVER:
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
        if frame.kind == Kind.CREDIT:
            self._credit.add(frame.facts["size"])
        else:
            self._came.put_nowait(frame)

    def lose(self, error: SessionError) -> None:
        """Raise the error for the reader of this channel: the tunnel is lost."""
        self._came.put_nowait(error)
        self._credit.add(WINDOW)

    async def pieces(self) -> AsyncIterator["Piece"]:
        """Yield pieces as they come, up to the last one.

        Raises:
            SessionError: the tunnel is lost, or the head can't begin it.
        """
        from iris_ray.sessions.core import Piece

        number = 0
        while True:
            came = await self._came.get()
            if isinstance(came, SessionError):
                raise came
            number += 1
            if came.kind == Kind.OVER:
                if "error" in came.facts:
                    raise SessionError(came.facts["error"])
                yield Piece(number, over=True, exit_code=came.facts["code"], was_reset=came.facts["reset"])
                return
            yield Piece(number, came.data) if came.kind == Kind.DATA else Piece(number, err=came.data)
            self._send(Frame.of(Kind.CREDIT, self._number, size=len(came.data)))

    async def write(self, data: bytes) -> None:
        """Hand bytes over, and wait until they may be sent; no bytes mean the end."""
        for at in range(0, len(data), CHUNK_BYTES):
            part = data[at : at + CHUNK_BYTES]
            await self._credit.spend(len(part))
            self._send(Frame(Kind.DATA, self._number, part))
        if not data:
            self._send(Frame(Kind.END, self._number))

    def resize(self, size: "Size") -> None:
        self._send(Frame.of(Kind.RESIZE, self._number, size=size))

    def signal(self, number: int) -> None:
        self._send(Frame.of(Kind.SIGNAL, self._number, number=int(number)))

    def close(self) -> None:
        self._send(Frame(Kind.CLOSE, self._number))


class TunnelInThread:
    """A tunnel for code that has no event loop of its own; `close` ends it. Raises like `Tunnel`.

    Args:
        jobs: as for `Tunnel`.
    """

    def __init__(self, jobs: RayJobs) -> None:
        self._tunnel = Tunnel(jobs)
        self._over = asyncio.Event()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="iris_ray.tunnel", daemon=True)
        self._thread.start()

    async def _serve(self) -> None:
        async with self._tunnel:
            self._loop.set_result(asyncio.get_running_loop())
            await self._over.wait()

    def connect(self, host: str, port: int) -> socket.socket:
        """Return a socket whose other end is a connection from the head to an address."""
        ours, its = socket.socketpair()

        async def begin() -> None:
            self._tunnel.begin_carrying(host, port, *await asyncio.open_connection(sock=its))

        self._do(begin())
        return ours

    def output_of(self, *words: str) -> bytes:
        """Return the output of a command of ``iris-ray`` on the head.

        Raises:
            SessionError: the command fails, with its last message; or the tunnel does.
        """
        from iris_ray.sessions.client import follow
        from iris_ray.sessions.core import CommandLine

        async def run() -> bytes:
            parts: dict[bool, list[bytes]] = {False: [], True: []}
            channel = self._tunnel.run(CommandLine(words))
            code = await follow(channel, lambda data, is_err: parts[is_err].append(data))
            if code:
                raise SessionError(b"".join(parts[True]).decode(errors="replace").strip().removeprefix("iris-ray: "))
            return b"".join(parts[False])

        return self._do(run())

    def close(self) -> None:
        """End the tunnel with its connections."""
        self._loop.result().call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop.result()).result()
