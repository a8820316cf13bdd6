"""A laptop's tunnel through Ray's packages and log files: a connection, one that is reset there, and a command.

The dashboard is a stand-in, in a process in which no operation fails. Both ends of the tunnel are in this process.
"""

import asyncio
import contextlib
import io
import os
import select
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from iris_ray.errors import SessionError
from iris_ray.remote import head_end, laptop_end
from iris_ray.remote.calls import HeadCall
from iris_ray.remote.head_end import Downstream, HeadEnd
from iris_ray.remote.laptop_end import Tunnel
from iris_ray.remote.seal import Seal
from iris_ray.sessions import channels
from iris_ray.sessions.channels import PortConnection, reset_when_closed
from iris_ray.sessions.client import follow
from iris_ray.sessions.core import CommandLine, Piece
from iris_ray.sessions.port_forward import LOOPBACK
from tests.proofs.every_operation.operations import Operations, StoreIsAwayError
from tests.proofs.every_operation.runs import Said, Scenario

SENT = b"asked" * 20_000
BROKEN_OFF = b"reset" + bytes(50_000)
"""The server resets a connection that has sent this, once it has sent half of it back."""
PRINTED = bytes(100_000)
KILLED = 137, 143
"""The exit codes of a command that ended with the tunnel, or of which nothing more is known."""
SILENT_S = 2.0
STARTED_S = 10.0
fork, pipe = os.fork, os.pipe


def tunnel() -> Scenario:
    return Scenario(
        "tunnel",
        _prepare,
        lambda place, said, operations: asyncio.run(_act(place, said, operations)),
        _judge,
        (OSError, SessionError, StoreIsAwayError),
        {"a reset looks like an end": _end_cleanly, "a part of an upload looks whole": _take_part_for_whole},
    )


def _prepare(place: Path) -> None:
    for name in ("logs", "packages"):
        (place / name).mkdir()
    script = place / "python"
    script.write_text('#!/bin/sh\nexec sh -c "$3"\n')
    script.chmod(0o700)


# -- other machines ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _elsewhere(work: Any, place: Path, operations: Operations) -> Any:
    """Do work in a process that stands for another machine, until this one has ended. Give the port of its listener."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        alive, ends = pipe()
        pid = fork()
        if pid == 0:
            operations.disarm()
            os.setpgid(0, 0)
            os.close(ends)
            with contextlib.suppress(BaseException):
                work(place, listener, alive)
            os._exit(0)
        os.close(alive)
        port = listener.getsockname()[1]
    try:
        yield port
    finally:
        os.close(ends)
        os.waitpid(pid, 0)


def _serve(place: Path, listener: socket.socket, alive: int) -> None:
    """Send back what comes, once its end has come, and note that it was taken for whole."""
    with open(place / "taken", "ab", buffering=0) as taken:
        while listener.fileno() in select.select([listener.fileno(), alive], [], [])[0]:
            connection = listener.accept()[0]
            with contextlib.suppress(OSError), connection:
                came = b""
                while data := connection.recv(1 << 16):
                    came += data
                taken.write(f"{int(came in (SENT, BROKEN_OFF))} {len(came)}\n".encode())
                if came == BROKEN_OFF:
                    connection.sendall(came[: len(came) // 2])
                    reset_when_closed(connection, True)
                else:
                    connection.sendall(came)
        taken.write(b"over\n")


def _dashboard(place: Path, listener: socket.socket, alive: int) -> None:
    """Do what the dashboard does for a tunnel: keep packages, and follow files."""

    async def put(request: web.Request) -> web.Response:
        whole = await request.read()
        part = place / "packages" / f".{request.match_info['name']}"
        part.write_bytes(whole)
        part.rename(part.with_name(request.match_info["name"]))
        return web.Response()

    async def log(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            file = open(place / "logs" / request.query["filename"], "rb")  # noqa: SIM115
        except FileNotFoundError:
            raise web.HTTPNotFound from None
        with file:
            await response.prepare(request)
            while True:
                if data := file.read(1 << 16):
                    await response.write(data)
                elif os.fstat(file.fileno()).st_nlink == 0:
                    return response
                else:
                    await asyncio.sleep(0.005)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.put("/api/packages/gcs/{name}", put), web.get("/api/v0/logs/stream", log)])
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(alive, over.set)
        await over.wait()

    asyncio.run(serve())


class _Packages:
    """The packages in the GCS, as the head's process reaches them."""

    def __init__(self, place: Path, operations: Operations) -> None:
        self._place = place / "packages"
        self._do = operations.do
        self._listdir, self._remove = os.listdir, os.unlink

    def fetch(self, uri: str) -> bytes | None:
        found: bytes | None = self._do("kv read", self._fetch, uri.removeprefix("gcs://"))
        return found

    def delete(self, beginning: str) -> None:
        self._do("kv write", self._delete, beginning)

    def _fetch(self, name: str) -> bytes | None:
        try:
            with io.FileIO(str(self._place / name)) as file:
                return file.readall()
        except FileNotFoundError:
            return None

    def _delete(self, beginning: str) -> None:
        for name in self._listdir(self._place):
            if name.startswith(beginning):
                self._remove(self._place / name)


# -- both ends of the tunnel -------------------------------------------------------------------------------------------


class _Jobs:
    """The way to the head, whose end of the tunnel is a task of this process."""

    def __init__(self, place: Path, url: str) -> None:
        self._place = place
        self._access: tuple[str, dict[str, Any]] = url, {}
        self.head: asyncio.Task[None] | None = None

    def send(self, _: object, name: str, function: "partial[Any]") -> "_Jobs":
        word, other = function.args
        seal = Seal(is_head=True)
        seal.meet(other)
        self._public = seal.public
        self.head = asyncio.create_task(self._serve(word, Downstream(self._place / "logs", word, seal), seal))
        return self

    async def _serve(self, word: str, downstream: Downstream, seal: Seal) -> None:
        with downstream:
            await HeadEnd(word, downstream, seal).run()

    def answer(self, _: object) -> tuple[str, str]:
        return "a-node", self._public

    def stop(self) -> None: ...


def _quicken(place: Path) -> None:
    """Let both ends wait less, and have a shell run the head's commands."""
    shell = type("Sys", (), {"executable": str(place / "python")})
    for name, value in {"SILENCE_S": SILENT_S, "PING_S": 0.2, "LAST_S": 0.05, "SLOW_S": 0.01, "sys": shell}.items():
        setattr(head_end, name, value)
    for name, value in {"SILENCE_S": SILENT_S, "PING_S": 0.2, "AGAIN_S": 0.05}.items():
        setattr(laptop_end, name, value)


async def _act(place: Path, said: Said, operations: Operations) -> None:
    packages = _Packages(place, operations)
    _quicken(place)
    setattr(head_end, "fetch_package", packages.fetch)  # noqa: B010
    setattr(head_end, "delete_packages", packages.delete)  # noqa: B010
    with _elsewhere(_dashboard, place, operations) as dashboard, _elsewhere(_serve, place, operations) as there:
        jobs = _Jobs(place, f"http://{LOOPBACK}:{dashboard}")
        HeadCall.send = jobs.send  # type: ignore[method-assign, assignment]
        try:
            async with Tunnel(jobs) as tunnel:  # type: ignore[arg-type]
                async with _forwarded(tunnel, there) as here:
                    for sent in (SENT, BROKEN_OFF):
                        with contextlib.suppress(ConnectionError):
                            said("connection", *await asyncio.wait_for(_exchanged(here, sent), 10.0))
                with contextlib.suppress(SessionError):
                    said("command", *await asyncio.wait_for(_run(tunnel), 10.0))
        finally:
            if jobs.head is not None:
                await asyncio.wait([jobs.head], timeout=10.0)
                jobs.head.result()


@contextlib.asynccontextmanager
async def _forwarded(tunnel: Tunnel, there: int) -> AsyncIterator[int]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            tunnel.begin_carrying(LOOPBACK, there, reader, writer)
        except SessionError:
            writer.transport.abort()

    async with await asyncio.start_server(accept, LOOPBACK, 0) as server:
        yield server.sockets[0].getsockname()[1]


async def _exchanged(here: int, sent: bytes) -> tuple[int, bool]:
    """Return how many bytes came back up to a clean end, and whether they are those that were sent."""
    reader, writer = await asyncio.open_connection(LOOPBACK, here)
    try:
        writer.write(sent)
        writer.write_eof()
        found = await reader.read()
        return len(found), found == sent
    finally:
        writer.close()


async def _run(tunnel: Tunnel) -> tuple[int, int]:
    parts: list[bytes] = []
    command = CommandLine((f"head -c {len(PRINTED)} /dev/zero; exit 3",))
    code = await follow(tunnel.run(command), lambda data, is_err: parts.append(data))
    return code, len(b"".join(parts))


def _judge(place: Path, said: list[list[Any]]) -> None:
    for what, *found in said:
        if what == "command":
            was_killed = found[0] in KILLED
            assert was_killed or found == [3, len(PRINTED)], f"the command ended with {found}"
        else:
            assert found == [len(SENT), True], f"a connection ended cleanly after {found[0]} bytes"
    taken = place / "taken"
    deadline = time.monotonic() + STARTED_S
    while taken.exists() and b"over\n" not in taken.read_bytes():
        assert time.monotonic() < deadline, "a connection is still open on the head"
        time.sleep(0.01)
    lines = taken.read_text().split("\n") if taken.exists() else []
    parts = [line for line in lines if line.startswith("0 ")]
    assert not parts, f"the server took a part for the whole: {parts}"


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _end_cleanly() -> None:
    last = PortConnection._last_piece

    def ended(connection: PortConnection) -> Piece:
        return last(connection)._replace(was_reset=False)

    setattr(PortConnection, "_last_piece", ended)  # noqa: B010


def _take_part_for_whole() -> None:
    setattr(channels, "reset_when_closed", lambda connection, resets: None)  # noqa: B010
