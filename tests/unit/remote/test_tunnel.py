"""The way to a head through its dashboard: commands, terminals and connections, over a stand-in for the dashboard."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from iris_ray.errors import SessionError
from iris_ray.framing import Frame
from iris_ray.remote import head_end, laptop_end
from iris_ray.remote.calls import HeadCall
from iris_ray.remote.laptop_end import Tunnel, TunnelChannel
from iris_ray.remote.seal import Seal
from iris_ray.sessions.channels import reset_when_closed
from iris_ray.sessions.client import follow
from iris_ray.sessions.core import CommandLine, Piece, Size

WAIT_S = 60.0
Story = Callable[[Tunnel, "Dashboard"], Awaitable[None]]


class Dashboard:
    """What the dashboard does for a tunnel: it keeps packages, and follows files.

    Attributes:
        packages: by name, as the GCS has them.
        breaks: connections that follow a file end when it is set.
        url: where it serves.
        public: the public key of the head's end.
        seen: the bytes of all packages and files.
        has_room: whether it keeps packages.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.packages: dict[str, bytes] = {}
        self.most_packages = 0
        self.has_room = True
        self.breaks = asyncio.Event()
        self.followed = 0
        self.url = ""
        self.head: threading.Thread | None = None
        self.public = ""
        self.seen = b""

    @property
    def _access(self) -> tuple[str, dict[str, Any]]:
        return self.url, {}

    def answer(self, _: object) -> tuple[str, str]:
        return "a-node", self.public

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.put("/api/packages/gcs/{name}", self._put), web.get("/api/v0/logs/stream", self._follow)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0])
        yield
        await runner.cleanup()

    async def _put(self, request: web.Request) -> web.Response:
        if not self.has_room:
            return web.Response()
        self.packages[request.match_info["name"]] = await request.read()
        self.seen += self.packages[request.match_info["name"]]
        self.most_packages = max(self.most_packages, len(self.packages))
        return web.Response()

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        assert (request.query["node_id"], request.query["lines"]) == ("a-node", "-1")
        self.followed += 1
        response = web.StreamResponse()
        with open(self.logs / request.query["filename"], "rb") as file:
            await response.prepare(request)
            while True:
                if data := file.read(1 << 16):
                    self.seen += data
                    await response.write(data)
                elif self.breaks.is_set():
                    self.breaks.clear()
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                else:
                    await asyncio.sleep(0.01)


@pytest.fixture
def through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Story], None]:
    """Play a story with a tunnel to a head that is a thread of this process."""

    def play(story: Story) -> None:
        async def main() -> None:
            dashboard = Dashboard(tmp_path)

            def delete(beginning: str) -> None:
                for name in [name for name in dashboard.packages if name.startswith(beginning)]:
                    del dashboard.packages[name]

            def serve(word: str, other: str) -> None:
                seal = Seal(is_head=True)
                seal.meet(other)
                with head_end.Downstream(tmp_path, word, seal) as downstream:
                    dashboard.public = seal.public
                    begun.set()
                    asyncio.run(head_end.HeadEnd(word, downstream, seal).run())

            def send(_: object, name: str, function: Any) -> Dashboard:
                assert (name, function.func) == ("tunnel", head_end.serve_tunnel)
                dashboard.head = threading.Thread(target=serve, args=function.args)
                dashboard.head.start()
                assert begun.wait(WAIT_S)
                return dashboard

            begun = threading.Event()
            monkeypatch.setattr(head_end, "fetch_package", lambda uri: dashboard.packages.get(uri[len("gcs://") :]))
            monkeypatch.setattr(head_end, "delete_packages", delete)
            monkeypatch.setattr(head_end, "LAST_S", 0.1)
            monkeypatch.setattr(HeadCall, "send", send)
            async with dashboard.served():
                async with asyncio.timeout(WAIT_S), Tunnel(dashboard) as tunnel:  # type: ignore[arg-type]
                    await story(tunnel, dashboard)
                assert dashboard.head is not None
                await asyncio.to_thread(dashboard.head.join, WAIT_S)
                assert not dashboard.head.is_alive()
            assert dashboard.packages == {}
            assert [*tmp_path.iterdir()] == []

        asyncio.run(main())

    return play


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], CommandLine]:
    """Make a command of ``iris-ray`` that does what a text of Python says."""
    home = tmp_path_factory.mktemp("head")
    (home / "iris_ray.py").write_text("import sys; exec(sys.argv[1])")
    monkeypatch.setenv("PYTHONPATH", str(home))
    monkeypatch.setattr(head_end, "sys", type("Sys", (), {"executable": sys.executable}))
    monkeypatch.chdir(home)

    def make(text: str, **more: Any) -> CommandLine:
        return CommandLine((text,), **more)

    return make


async def output_of(channel: TunnelChannel, given: AsyncIterator[bytes] | None = None) -> tuple[int, bytes, bytes]:
    parts: dict[bool, bytes] = {False: b"", True: b""}

    def show(data: bytes, is_err: bool) -> None:
        parts[is_err] += data

    return await follow(channel, show, given), parts[False], parts[True]


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def test_command_has_streams_and_exit_code_of_its_own(
    through: Callable[[Story], None], command: Callable[..., CommandLine]
) -> None:
    text = "import sys; print(sys.stdin.read()[::-1], end=''); print('trouble', file=sys.stderr); sys.exit(5)"

    async def story(tunnel: Tunnel, _: Dashboard) -> None:
        channel = tunnel.run(command(text, takes_input=True))
        assert await output_of(channel, once(b"stressed")) == (5, b"desserts", b"trouble\n")
        channel = tunnel.run(command("import sys; print(sys.stdin.read() == '')"))
        assert await output_of(channel) == (0, b"True\n", b"")

    through(story)


def test_much_travels_both_ways_whole_and_bounded(
    through: Callable[[Story], None], command: Callable[..., CommandLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_end, "MOST_FILE_BYTES", 1 << 20)
    data = os.urandom(6 << 20)

    async def story(tunnel: Tunnel, dashboard: Dashboard) -> None:
        copies = "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"
        channel = tunnel.run(command(copies, takes_input=True))
        assert await output_of(channel, once(data)) == (0, data, b"")
        assert dashboard.followed >= 6, "one file after the other"
        assert dashboard.most_packages <= laptop_end.MOST_PACKAGES
        assert len([*dashboard.logs.iterdir()]) <= 3

    through(story)


def test_broken_connection_loses_and_doubles_nothing(
    through: Callable[[Story], None], command: Callable[..., CommandLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laptop_end, "AGAIN_S", 0.05)
    counts = "import time\nfor n in range(40): print(n, flush=True); time.sleep(0.02)"

    async def story(tunnel: Tunnel, dashboard: Dashboard) -> None:
        channel = tunnel.run(command(counts))
        seen = b""
        async for piece in channel.pieces():
            seen += piece.out
            if b"9" in piece.out:
                dashboard.breaks.set()
        assert seen == b"".join(b"%d\n" % n for n in range(40))
        assert dashboard.followed > 1

    through(story)


def test_terminal_has_size_keys_and_ctrl_c(
    through: Callable[[Story], None], command: Callable[..., CommandLine]
) -> None:
    text = """if True:
        import os, signal, sys
        def say(*_): print(os.isatty(0), *os.get_terminal_size(0), flush=True)
        signal.signal(signal.SIGWINCH, say)
        def stop(*_):
            print('stopped', flush=True)
            sys.exit(7)
        signal.signal(signal.SIGINT, stop)
        say()
        print(os.environ['TERM'], input()[::-1], flush=True)
        while True: signal.pause()
    """

    async def story(tunnel: Tunnel, _: Dashboard) -> None:
        channel = tunnel.run(command(text, size=Size(24, 80), term="vt100"))
        seen, code = b"", None
        answers: list[tuple[bytes, Callable[[], Awaitable[None] | None]]] = [
            (b"True 80 24", lambda: channel.write(b"abc\n")),
            (b"vt100 cba", lambda: channel.resize(Size(50, 120))),
            (b"True 120 50", lambda: channel.write(b"\x03")),
        ]
        async for piece in channel.pieces():
            seen, code = seen + piece.out, piece.exit_code
            if answers and answers[0][0] in seen:
                done = answers.pop(0)[1]()
                if done is not None:
                    await done
        assert b"stopped" in seen
        assert code == 7

    through(story)


def test_end_of_tunnel_ends_commands(
    through: Callable[[Story], None], command: Callable[..., CommandLine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("pid") / "pid"
    text = (
        f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); print('on', flush=True); time.sleep(600)"
    )

    async def story(tunnel: Tunnel, _: Dashboard) -> None:
        channel = tunnel.run(command(text))
        assert (await anext(channel.pieces())).out.startswith(b"on")

    through(story)
    assert not Path(f"/proc/{file.read_text()}").exists()


def test_readers_of_logs_and_packages_read_nothing_and_type_nothing(
    through: Callable[[Story], None], command: Callable[..., CommandLine], tmp_path: Path
) -> None:
    typed = tmp_path.with_name(f"{tmp_path.name}-typed")

    async def story(tunnel: Tunnel, dashboard: Dashboard) -> None:
        text = f"import sys\nprint('a-secret', flush=True)\nopen({str(typed)!r}, 'w').write(sys.stdin.readline())"
        channel = tunnel.run(command(text, takes_input=True))
        pieces = channel.pieces()
        assert (await anext(pieces)).out.startswith(b"a-secret")
        assert b"a-secret" not in dashboard.seen
        assert b"print" not in dashboard.seen
        stranger = Frame(head_end.Kind.DATA, 1, b"rm -rf\n").packed()
        for number in range(1, 20):
            dashboard.packages.setdefault(head_end.package_name(tunnel._word, number), stranger)
        with pytest.raises(SessionError, match="somebody else has written"):
            await output_of(channel)
        dashboard.has_room = False  # a last package may come when the head's end has gone, and stays
        dashboard.packages.clear()

    through(story)
    assert not typed.exists() or typed.read_text() == ""


def test_connections_carry_bytes_and_say_why_they_fail(through: Callable[[Story], None]) -> None:
    async def story(tunnel: Tunnel, _: Dashboard) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.read())[::-1])
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        channels = [tunnel.connect("127.0.0.1", port) for _ in range(3)]
        for number, channel in enumerate(channels):
            await channel.write(b"message %d" % number)
        for channel in reversed(channels):
            await channel.write(b"")
        for number, channel in enumerate(channels):
            came = [piece async for piece in channel.pieces()]
            assert b"".join(piece.out for piece in came) == (b"message %d" % number)[::-1]
            assert came[-1].over
        server.close()
        await server.wait_closed()
        with pytest.raises(SessionError, match="Connection refused"):
            await anext((tunnel.connect("127.0.0.1", port)).pieces())

    through(story)


@contextlib.asynccontextmanager
async def forwarded(tunnel: Tunnel, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a port of this machine whose connections the tunnel carries to another one."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tunnel.begin_carrying("127.0.0.1", port, reader, writer)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with contextlib.closing(writer):
            yield reader, writer


def test_connection_that_is_reset_at_head_is_reset_here(through: Callable[[Story], None]) -> None:
    async def story(tunnel: Tunnel, _: Dashboard) -> None:
        async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"half of it")
            await reader.readexactly(len(b"question"))
            reset_when_closed(writer.get_extra_info("socket"), True)
            writer.close()

        async with (
            await asyncio.start_server(resets, "127.0.0.1", 0) as server,
            forwarded(tunnel, server.sockets[0].getsockname()[1]) as (reader, writer),
        ):
            assert await reader.readexactly(4) == b"half"
            writer.write(b"question")
            with pytest.raises(ConnectionResetError):
                await reader.read()

    through(story)


def test_connections_of_lost_tunnel_are_reset_at_both_ends(
    through: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laptop_end, "AGAIN_S", 0.05)
    monkeypatch.setattr(laptop_end, "SILENCE_S", 1.0)
    monkeypatch.setattr(head_end, "SILENCE_S", 1.0)

    async def story(tunnel: Tunnel, dashboard: Dashboard) -> None:
        ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                writer.write(b"half of it")
                try:
                    ended.set_result(await reader.read())
                except ConnectionError as error:
                    ended.set_exception(error)

        async with (
            await asyncio.start_server(serve, "127.0.0.1", 0) as server,
            forwarded(tunnel, server.sockets[0].getsockname()[1]) as (reader, writer),
        ):
            writer.write(b"half a question")
            assert await reader.readexactly(4) == b"half"
            tunnel._url = "http://127.0.0.1:9"
            dashboard.breaks.set()
            for read in (reader.read(), ended):
                with pytest.raises(ConnectionResetError):
                    await read

    through(story)


def test_dashboard_that_is_gone_loses_all_channels(
    through: Callable[[Story], None], command: Callable[..., CommandLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laptop_end, "AGAIN_S", 0.05)

    async def story(tunnel: Tunnel, dashboard: Dashboard) -> None:
        channel = tunnel.run(command("import time; print('on', flush=True); time.sleep(600)"))
        pieces = channel.pieces()
        assert (await anext(pieces)).out.startswith(b"on")
        monkeypatch.setattr(laptop_end, "SILENCE_S", 1.0)  # not before: a busy machine may start a command later
        monkeypatch.setattr(head_end, "SILENCE_S", 3.0)  # the laptop's end notices first
        tunnel._url = "http://127.0.0.1:9"
        dashboard.breaks.set()
        with pytest.raises(SessionError, match=r"has stopped answering|no longer accepts"):
            await output_of(channel)
        with pytest.raises(SessionError, match=r"has stopped answering|no longer accepts"):
            tunnel.connect("127.0.0.1", 9)

    through(story)


def test_reader_that_waits_holds_its_command_up_and_no_other(
    through: Callable[[Story], None], command: Callable[..., CommandLine]
) -> None:
    async def story(tunnel: Tunnel, dashboard: Dashboard) -> None:
        much = tunnel.run(command("import sys\nwhile True: sys.stdout.write('x' * 65536)"))
        few = tunnel.run(command("print('through')"))
        assert await output_of(few) == (0, b"through\n", b"")
        await asyncio.sleep(0.5)
        sizes = sum(path.stat().st_size for path in dashboard.logs.iterdir())
        assert sizes < 2 * head_end.WINDOW
        much.close()
        last = [piece async for piece in _ignoring_close(much)]
        assert last

    async def _ignoring_close(channel: TunnelChannel) -> AsyncIterator[Piece]:
        with contextlib.suppress(SessionError):
            async for piece in channel.pieces():
                yield piece

    through(story)
