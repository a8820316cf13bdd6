"""A session beside a task: its commands, terminals and connections, and that nothing of them outlives it."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import CommandNotFoundError, SessionError, TaskNotRunningError, TooManySessionsError
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.processes.tree import TOKEN_VARIABLE
from iris_ray.sessions import channels, keeper
from iris_ray.sessions import host as host_session
from iris_ray.sessions.channels import PortConnection, RunningCommand
from iris_ray.sessions.core import CommandLine, Piece, Size
from iris_ray.sessions.host import MOST_CHANNELS, TOGETHER_S, HostSession
from iris_ray.sessions.surroundings import Surroundings
from tests.support.gangs import alive
from tests.support.processes import TOKEN, Nursery, tree
from tests.support.sessions import DAEMON, task_process
from tests.support.waiting import wait_until

TASK = TaskAttemptId("train", 2, 1)
SIZE = Size(24, 80)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working directory of the task."""
    work = tmp_path / "work"
    work.mkdir()
    return work


@pytest.fixture
def task(own_host: Path, work: Path, nursery: Nursery) -> psutil.Process:
    """A task's process on this host."""
    return task_process(nursery, own_host, work, TASK)


@contextlib.asynccontextmanager
async def session_beside(task: psutil.Process, user: str = "ann") -> AsyncIterator[HostSession]:
    """A session; everything in it is ended afterwards."""
    session = HostSession("127.0.0.1", user)
    try:
        await session.enter(TASK)
        yield session
    finally:
        await asyncio.gather(*(channel.drop() for channel in session._channels.values()))
        if session._place is not None:
            os.close(session._place)  # as at the end of its process


def run(script: str, work: Path, size: Size | None = None, takes_input: bool = False) -> RunningCommand:
    environ = {**os.environ, "PS1": "$ "}
    return RunningCommand.start(["sh", "-c", script], environ, str(work), TOKEN, size, takes_input)


async def all_of(channel: channels.ByteChannel) -> tuple[bytes, bytes, Piece]:
    """Return stdout, stderr and the last piece."""
    out = err = b""
    piece = Piece(0)
    while not piece.over:
        piece = await channel.read(piece.number)
        out, err = out + piece.out, err + piece.err
    return out, err, piece


async def until(channel: channels.ByteChannel, text: bytes, after: int = 0) -> Piece:
    """Read until this text has come; return the last piece, with all that has come."""
    found, piece = b"", Piece(after)
    while text not in found:
        piece = await channel.read(piece.number)
        assert not piece.over, found
        found += piece.out
    return piece._replace(out=found)


def daemon(work: Path) -> int:
    """Return the pid of `DAEMON`, once it runs."""
    return int(wait_until(lambda: (work / "daemon").exists() and (work / "daemon").read_text()))


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
)
async def test_commands_exit_code_is_as_shells_say(work: Path, script: str, code: int) -> None:
    _, _, last = await all_of(run(script, work))
    assert (last.exit_code, last.task_ended) == (code, False)


async def test_command_prints_all_apart_in_its_directory(work: Path) -> None:
    out, err, _ = await all_of(run("pwd; echo trouble >&2; head -c 300000 /dev/zero", work))
    assert (out, err) == (f"{work}\n".encode() + bytes(300_000), b"trouble\n")


async def test_command_reads_input_until_its_end(work: Path) -> None:
    command = run("cat; echo over", work, takes_input=True)
    await command.write(1, b"one ")
    await command.write(2, b"two ")
    await command.write(2, b"two ")  # repeated, because its answer was lost
    await command.write(3, b"")
    assert (await all_of(command))[0] == b"one two over\n"


async def test_command_without_input_reads_nothing(work: Path) -> None:
    assert (await all_of(run("cat; echo over", work)))[0] == b"over\n"


async def test_piece_whose_answer_was_lost_comes_again(work: Path) -> None:
    command = run("echo one; sleep 0.2; echo two", work)
    first = await until(command, b"one\n")
    assert (await command.read(first.number - 1)).out == b"one\n"
    assert (await all_of(command))[0] == b"one\ntwo\n"  # `all_of` begins before the first


async def test_fast_command_waits_for_its_reader(work: Path) -> None:
    command = run("i=0; while :; do i=$((i+1)); echo $i > count; head -c 1000 /dev/zero; done", work)

    def count() -> int:
        return int((work / "count").read_text() or 0)

    wait_until(lambda: (work / "count").exists() and count() > 60)
    await asyncio.sleep(0.5)
    before = count()
    await asyncio.sleep(0.5)
    assert count() == before, "the pipe is full"
    await command.read(0)
    wait_until(lambda: count() > before)
    command.end()
    assert (await all_of(command))[2].exit_code is None


async def test_writer_waits_for_command_that_reads_slowly(work: Path) -> None:
    command = run("sleep 0.5; cat | wc -c", work, takes_input=True)
    writing = asyncio.create_task(command.write(1, bytes(300_000)))
    await asyncio.sleep(0.1)
    assert not writing.done()
    await writing
    await command.write(2, b"")
    assert (await all_of(command))[0].strip() == b"300000"


async def test_end_wakes_writer_whose_command_never_reads(work: Path) -> None:
    command = run("sleep 60", work, takes_input=True)
    writing = asyncio.create_task(command.write(1, bytes(300_000)))
    await asyncio.sleep(0.1)
    command.end()
    await all_of(command)
    await asyncio.wait_for(writing, 10)


@pytest.mark.parametrize("words", [["no-such-program"], ["/etc/passwd"], ["/"]])
async def test_program_that_can_not_start_is_named(work: Path, words: list[str]) -> None:
    with pytest.raises(CommandNotFoundError, match=words[0]):
        RunningCommand.start(words, os.environ, str(work), TOKEN)


async def test_command_in_deleted_directory_is_refused(work: Path) -> None:
    shutil.rmtree(work)
    with pytest.raises(CommandNotFoundError, match=str(work)):
        run("true", work)


async def test_signal_reaches_whole_process_group(work: Path) -> None:
    command = run("trap 'echo caught; exit 5' INT; sleep 60 & echo ready; wait", work)
    seen = await until(command, b"ready")
    command.signal(signal.SIGINT)
    out, _, last = await all_of(command)
    assert (b"caught" in out, last.exit_code) == (True, 5), seen


async def test_signal_that_does_not_exist_leaves_the_keeper_alone(work: Path) -> None:
    command = run(f"{DAEMON} trap 'exit 5' INT; sleep 60 & wait", work)
    left = daemon(work)
    command.signal(999)
    command.signal(signal.SIGINT)
    assert (await all_of(command))[2].exit_code == 5
    assert not alive(left)


# -- the end of a command's processes ----------------------------------------------------------------------------------


async def test_daemon_ends_when_its_command_returns(work: Path) -> None:
    _, _, last = await all_of(run(f"{DAEMON} while [ ! -s daemon ]; do sleep 0.01; done", work))
    assert (last.exit_code, alive(daemon(work))) == (0, False)


async def test_ended_command_leaves_no_daemon(work: Path) -> None:
    command = run(f"{DAEMON} trap '' TERM HUP INT; while :; do sleep 60; done", work)
    left = daemon(work)
    command.end()
    _, _, last = await all_of(command)
    assert (last.exit_code, alive(left)) == (None, False)


def test_daemon_ends_when_sessions_process_is_killed(work: Path, nursery: Nursery) -> None:
    script = """
        import os, sys, time
        from iris_ray.sessions.channels import RunningCommand
        command = RunningCommand.start(["sh", "-c", sys.argv[1]], os.environ, sys.argv[2], "token")
        print("ready", flush=True)
        time.sleep(600)
    """
    owner = nursery.script(textwrap.dedent(script), f"{DAEMON} sleep 60", str(work))
    left = daemon(work)
    assert alive(left)
    owner.kill()
    wait_until(lambda: not alive(left))


async def test_host_finds_commands_of_an_attempt(work: Path, nursery: Nursery) -> None:
    """It ends what carries the task's token, and all below it: the keeper does, and a daemon is below the keeper."""
    task = nursery.sleeper(**{TOKEN_VARIABLE: TOKEN})
    command = run(f"{DAEMON} sleep 60", work)
    left = daemon(work)
    assert left in {one.pid for one in tree(task).search()}
    command.end()
    await all_of(command)


async def test_keeper_that_is_killed_takes_its_command_along(work: Path) -> None:
    command = run("exec sleep 60", work)
    (process,) = [one for one in psutil.process_iter(["cmdline"]) if keeper.__file__ in (one.info["cmdline"] or ())]
    process.kill()
    _, _, last = await asyncio.wait_for(all_of(command), 10)
    assert last.exit_code is None


# -- terminals ---------------------------------------------------------------------------------------------------------


async def test_terminal_has_size_and_follows_it(work: Path) -> None:
    command = run("trap 'stty size; exit' WINCH; tty; stty size; while :; do sleep 0.05; done", work, SIZE)
    seen = await until(command, b"24 80")
    assert seen.out.startswith(b"/dev/pts/")
    command.resize(Size(50, 120))
    assert b"50 120" in (await all_of(command))[0]


async def test_ctrl_c_on_terminal_interrupts_foreground_only(work: Path) -> None:
    command = RunningCommand.start(["sh", "-i"], {**os.environ, "PS1": "> "}, str(work), TOKEN, SIZE)
    await until(command, b"> ")
    await command.write(1, b"sleep 60\n")
    sleeping = await until(command, b"sleep 60", 1)
    await asyncio.sleep(0.3)
    await command.write(2, b"\x03")
    await command.write(3, b"echo still $((40+2))\n")
    await until(command, b"still 42", sleeping.number)
    await command.write(4, b"\x04")  # Ctrl-D
    assert (await all_of(command))[2].exit_code is not None


async def test_end_of_terminal_ends_its_background_jobs(work: Path) -> None:
    command = run(f"{DAEMON} sleep 60", work, SIZE)
    left = daemon(work)
    command.end()
    await all_of(command)
    assert not alive(left)


# -- connections -------------------------------------------------------------------------------------------------------


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets, and at its end a farewell; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        script = """
            import socket, sys, threading
            def serve(one):
                while data := one.recv(65536):
                    one.sendall(data)
                one.sendall(b"farewell")
                one.close()
            listening = socket.socket(fileno=int(sys.argv[1]))
            while True:
                threading.Thread(target=serve, args=[listening.accept()[0]]).start()
        """
        command = [sys.executable, "-c", textwrap.dedent(script), str(listening.fileno())]
        with subprocess.Popen(command, pass_fds=[listening.fileno()]) as server:
            yield listening.getsockname()[1]
            server.kill()


async def test_connection_carries_bytes_both_ways_with_half_close(echo: int) -> None:
    first, second = PortConnection.open(echo, "127.0.0.1"), PortConnection.open(echo, "127.0.0.1")
    await first.write(1, b"first")
    await second.write(1, bytes(100_000))
    await first.write(2, b"")
    assert (await all_of(first))[0] == b"firstfarewell"
    await second.write(2, b"")
    assert (await all_of(second))[0] == bytes(100_000) + b"farewell"


async def test_connection_that_is_ended_is_over(echo: int) -> None:
    connection = PortConnection.open(echo, "127.0.0.1")
    connection.end()
    assert (await all_of(connection))[2].over


def test_port_without_listener_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(SessionError, match=f"nothing listens on port {port}"):
            PortConnection.open(port, "127.0.0.1")


# -- sessions ----------------------------------------------------------------------------------------------------------


async def test_command_has_tasks_variables_but_not_its_chips(task: psutil.Process, work: Path) -> None:
    async with session_beside(task) as session:
        number = await session.start(CommandLine(("env",), term="xterm"))
        assert session._surroundings is not None
        files = TaskFiles(session._surroundings.environ[TaskFiles.VARIABLE])
        assert files.members.exists(), "else the host would not look for commands at the end of the task"
        out = b""
        piece = Piece(0)
        while not piece.over:
            piece = await session.read(number, piece.number)
            out += piece.out
    found = dict(line.split("=", 1) for line in out.decode().splitlines() if "=" in line)
    expected = {"WHO": "task 2", "JAX_PLATFORMS": "cpu", "TPU_VISIBLE_CHIPS": "", "TERM": "xterm"}
    assert {name: found.get(name) for name in expected} == expected
    assert found["IRIS_COORDINATOR_ADDRESS"] == "", "else iris_ray.jax.initialize() would join the task's gang"
    assert found[TOKEN_VARIABLE] == TOKEN
    assert not {"MEGASCALE_NUM_SLICES", TaskFiles.VARIABLE} & found.keys()
    assert shutil.which("python", path=found["PATH"]) == str(Path(sys.executable).with_name("python"))


async def test_end_of_tasks_attempt_ends_commands(task: psutil.Process, work: Path) -> None:
    async with session_beside(task) as session:
        number = await session.start(CommandLine(("sh", "-c", f"{DAEMON} sleep 60")))
        left = daemon(work)
        task.kill()
        assert await session.task_ended()
        piece = Piece(0)
        while not piece.over:
            piece = await session.read(number, piece.number)
        assert (piece.task_ended, alive(left)) == (True, False)
        with pytest.raises(TaskNotRunningError):
            await session.start(CommandLine(("true",)))


async def test_command_whose_output_waits_for_hours_goes_on(task: psutil.Process) -> None:
    async with session_beside(task) as session:
        number = await session.start(CommandLine(("seq", "100000")))
        piece = await session.read(number, 0)
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + 36_000.0  # type: ignore[method-assign]
        await asyncio.sleep(0.2)  # the person reads the first page in a pager
        lines = piece.out.count(b"\n")
        while not piece.over:
            piece = await session.read(number, piece.number)
            lines += piece.out.count(b"\n")
    assert (lines, piece.exit_code) == (100_000, 0)


async def test_closed_command_is_over_without_wait_for_task(task: psutil.Process) -> None:
    async with session_beside(task) as session:
        number = await session.start(CommandLine(("sleep", "60")))
        await session.close(number)
        piece = Piece(0)
        async with asyncio.timeout(TOGETHER_S / 2):
            while not piece.over:
                piece = await session.read(number, piece.number)
        assert not piece.task_ended


async def test_calls_for_forgotten_channel_do_no_harm(task: psutil.Process, echo: int) -> None:
    async with session_beside(task) as session:
        number = await session.connect(echo)
        await session.close(number)
        while not session._channels[number].over:
            await asyncio.sleep(0.01)
        await session.connect(echo)
        assert number not in session._channels
        await session.write(number, 1, b"late")
        assert (await session.read(number, 0)).over


async def test_host_that_starts_no_process_says_so(task: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    async with session_beside(task) as session:
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(SessionError, match="can't start the command"):
            await session.start(CommandLine(("true",)))


async def test_session_beside_task_that_is_gone_is_refused(task: psutil.Process) -> None:
    with pytest.raises(TaskNotRunningError, match="attempt 7"):
        await HostSession("127.0.0.1", "ann").enter(TASK._replace(attempt=7))


async def test_host_takes_so_many_sessions_and_no_more(task: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_session, "MOST_SESSIONS", 4)
    async with session_beside(task):
        async with session_beside(task):
            with pytest.raises(TooManySessionsError, match="2 open sessions of at most 4, 2 of them ann's"):
                await HostSession("127.0.0.1", "ann").enter(TASK)
            async with session_beside(task, "annie"), session_beside(task, "bob"):
                with pytest.raises(TooManySessionsError, match="4 open sessions of at most 4, 0 of them carl's"):
                    await HostSession("127.0.0.1", "carl").enter(TASK)
        async with session_beside(task):
            pass


async def test_session_takes_so_many_channels_and_no_more(task: psutil.Process, echo: int) -> None:
    async with session_beside(task) as session:
        opened = await asyncio.gather(
            *(session.connect(echo) for _ in range(MOST_CHANNELS + 9)), return_exceptions=True
        )
        numbers = [one for one in opened if isinstance(one, int)]
        assert len(numbers) == MOST_CHANNELS
        with pytest.raises(SessionError, match=f"{MOST_CHANNELS} open"):
            await session.connect(echo)
        await session.close(last := numbers[-1])
        while not session._channels[last].over:
            await asyncio.sleep(0.01)
        await session.connect(echo)


def test_surroundings_of_process_without_copy_are_refused(nursery: Nursery) -> None:
    with pytest.raises(SessionError, match="keeps no copy"):
        Surroundings.of_process(nursery.sleeper().pid)
