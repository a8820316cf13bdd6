"""``iris-ray exec``, ``shell`` and ``port-forward``: the Controller and the sessions are real, with real commands."""

import asyncio
import contextlib
import itertools
import logging
import os
import pty
import signal
import socket
import sys
import termios
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, Popen

import psutil
import pytest

from iris_ray import IrisClient
from iris_ray.cli import streams
from iris_ray.cli.conventions import FAILED, INTERRUPTED, OK, USAGE
from iris_ray.errors import CommandNotFoundError, InvalidRequestError, TooManySessionsError
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.sessions import cli as beside
from iris_ray.sessions import host as host_session
from iris_ray.sessions import port_forward
from iris_ray.sessions.cli import NOT_FOUND
from iris_ray.sessions.host import HostSession
from tests.support.controller_in_process import ControllerInProcess
from tests.support.gangs import alive
from tests.support.processes import Nursery
from tests.support.sessions import DAEMON, task_process
from tests.support.waiting import wait_until

JOB = "train-1a2b3c4d"


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.clear()


Begin = Callable[[int], list[psutil.Process]]


@pytest.fixture
def begin(world: ControllerInProcess, nursery: Nursery, tmp_path: Path) -> Begin:
    """Gives the tasks of an attempt of `JOB` real processes."""

    def begin(attempt: int) -> list[psutil.Process]:
        return [
            task_process(nursery, task.host.directory, tmp_path, TaskAttemptId(JOB, task.info.task_index, attempt))
            for task in world.tasks_of(JOB, attempt)
        ]

    return begin


@pytest.fixture
def tasks(world: ControllerInProcess, begin: Begin) -> list[psutil.Process]:
    """The processes of a job's two tasks, which run."""
    world.start(JOB, max_retries_failure=1)
    return begin(1)


@pytest.mark.usefixtures("tasks")
def test_exec_prints_output_and_ends_with_code(world: ControllerInProcess) -> None:
    done = world.iris("exec", JOB, "--", "sh", "-c", "echo $WHO; echo trouble >&2; exit 5", code=5, quotes=True)
    assert (done.stdout, done.stderr) == ("task 0\n", "trouble\n")
    for name in ((f"{JOB}/1",), (f"{JOB}/task-1",), (JOB, "1")):
        assert world.iris("exec", *name, "--", "sh", "-c", "echo $WHO").stdout == "task 1\n"
    assert world.iris("exec", JOB, "1", "sh").stdout == ""
    assert "'1' can't be started" in world.iris("exec", JOB, "--", "1", code=NOT_FOUND, quotes=True).stderr


@pytest.mark.usefixtures("tasks")
def test_exec_everywhere_labels_lines_and_takes_first_code(world: ControllerInProcess) -> None:
    script = 'printf "$WHO\\nends"; [ "$WHO" = "task 0" ] || exit 4'
    done = world.iris("exec", JOB, "--all-tasks", "--", "sh", "-c", script, code=4, quotes=True)
    hosts = [f"{task.group} {task.host}" for task in world._ask("list_tasks", JOB)]
    expected = [f"{host}| {line}" for index, host in enumerate(hosts) for line in (f"task {index}", "ends")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize("everywhere", [(), ("--all-tasks",)])
def test_exec_of_unknown_program_ends_like_a_shell(world: ControllerInProcess, everywhere: tuple[str, ...]) -> None:
    done = world.iris("exec", JOB, *everywhere, "--", "no-such-program", code=NOT_FOUND, quotes=True)
    assert "'no-such-program' can't be started" in done.stderr


@pytest.mark.usefixtures("tasks")
def test_only_jobs_user_and_operators_may_exec(world: ControllerInProcess) -> None:
    world.iris("cluster", "settings", "set", "operators=root,ann", user="root")
    world.iris("cluster", "settings", "set", "operators=root", user="root")
    refused = world.iris("exec", JOB, "--", "true", user="bob", code=FAILED)
    assert "only ann and operators may run commands on the hosts of its tasks" in refused.stderr
    assert "only ann and operators" in world.iris("port-forward", JOB, "6006", user="bob", code=FAILED).stderr
    for user in ("ann", "root"):
        world.iris("exec", JOB, "--", "true", user=user)


def test_exec_says_why_task_does_not_run(world: ControllerInProcess) -> None:
    world.start("first", slices=(3,))
    world.submit(JOB)
    waits = world.iris("exec", JOB, "--", "true", code=FAILED)
    assert f"task 0 of {JOB} does not run: " in waits.stderr
    assert "in use by first" in waits.stderr
    assert "in use by first" in world.iris("exec", JOB, "--all-tasks", "--", "true", code=FAILED).stderr
    world.succeed("first")
    world.wait_for_attempt(JOB, 1)
    world.succeed(JOB)
    assert "it has ended: succeeded" in world.iris("exec", JOB, "--", "true", code=FAILED).stderr
    assert "there is no task" in world.iris("exec", f"{JOB}/7", "--", "true", code=USAGE).stderr
    assert "did you mean" in world.iris("exec", JOB[:-1], "--", "true", code=USAGE).stderr


def test_exec_beside_moved_task_ends_with_its_attempt(
    world: ControllerInProcess, tasks: list[psutil.Process], tmp_path: Path
) -> None:
    def moves() -> None:
        wait_until(lambda: (tmp_path / "daemon").exists())
        world.fail(JOB, 0)
        tasks[0].kill()

    with world.meanwhile(moves):
        done = world.iris("exec", JOB, "--", "sh", "-c", f"{DAEMON} sleep 60", code=FAILED, quotes=True)
    assert f"attempt 1 of task 0 of {JOB}" in done.stderr
    assert "has ended, and this session with it" in done.stderr
    assert not alive(int((tmp_path / "daemon").read_text()))


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize(("ignores", "code"), [("", 130), ("trap '' INT;", INTERRUPTED)])
def test_ctrl_c_ends_command_with_all_it_started(
    world: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: str, code: int
) -> None:
    monkeypatch.setattr(streams, "INTERRUPT_S", 0.3)

    def press() -> None:
        wait_until(lambda: (tmp_path / "daemon").exists())
        os.kill(os.getpid(), signal.SIGINT)

    with world.meanwhile(press):
        world.iris("exec", JOB, "--", "sh", "-c", f"{DAEMON} {ignores} sleep 60", code=code, quotes=True)
    wait_until(lambda: not alive(int((tmp_path / "daemon").read_text())))


@pytest.mark.usefixtures("tasks")
def test_third_ctrl_c_ends_wait_for_silent_host(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    enter, runs, heard, ended = HostSession.enter, threading.Event(), threading.Semaphore(0), threading.Event()

    async def enter_or_hang(self: HostSession, task: TaskAttemptId) -> None:
        await (asyncio.sleep(60) if task.task_index == 1 else enter(self, task))

    class CtrlC(streams.CtrlC):
        def goes_to(self, channel: streams.Remote) -> None:
            super().goes_to(channel)
            runs.set()

        def _press(self) -> None:
            super()._press()
            heard.release()

    monkeypatch.setattr(HostSession, "enter", enter_or_hang)
    monkeypatch.setattr(beside, "CtrlC", CtrlC)

    def press() -> None:
        assert runs.wait(30)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            assert heard.acquire(timeout=30)
        assert ended.wait(20), "it still waits for the silent host"

    with world.meanwhile(press):
        world.iris("exec", JOB, "--all-tasks", "--", "sleep", "60", code=INTERRUPTED)
        ended.set()


@pytest.mark.usefixtures("tasks")
def test_broken_pipe_ends_exec_everywhere_without_traceback(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(data: bytes, is_err: bool) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(streams, "pass_on", broken)
    caplog.set_level(logging.ERROR, "asyncio")
    script = '[ "$WHO" = "task 1" ] && printf rest && sleep 60; sleep 0.5; echo line'
    world.iris("exec", JOB, "--all-tasks", "--", "sh", "-c", script, code=FAILED, quotes=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("exec", f"{JOB}/1", "--all-tasks", "--", "true"), "--all-tasks is for all tasks"),
        (("exec", "--all-tasks", JOB, "ls"), "write -- before the command"),
        (("exec", JOB, "ls", "-l"), "after --"),
        (("exec", JOB, "3"), "give the command to run"),
        (("port-forward", JOB, "x", "6006"), "a task's number and a port"),
        (("port-forward", JOB, "1", "2", "6006"), "a task's number and a port"),
        (("shell", JOB), "a shell needs a terminal"),
        (("port-forward", JOB, "70000"), "not a port"),
        (("port-forward", JOB, "tensorboard"), "not a port"),
    ],
)
def test_what_can_not_work_is_refused_with_advice(
    world: ControllerInProcess, words: tuple[str, ...], said: str
) -> None:
    assert said in world.iris(*words, code=USAGE).stderr


# -- port-forward ------------------------------------------------------------------------------------------------------


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(one,)).start()

        def answer(one: socket.socket) -> None:
            with one, contextlib.suppress(ConnectionResetError):
                while data := one.recv(65536):
                    one.sendall(data)

        serving = threading.Thread(target=serve)
        serving.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        serving.join(10)


def then_ctrl_c(story: Callable[[], None]) -> Callable[[], None]:
    """A story that presses Ctrl-C if it goes wrong, so that the command ends."""

    def told() -> None:
        try:
            story()
        except BaseException:
            traceback.print_exc()
            os.kill(os.getpid(), signal.SIGINT)
            raise

    return told


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def connect(port: int) -> socket.socket:
    def try_it() -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", port), 20)
        except ConnectionRefusedError:
            return None

    return wait_until(try_it)


def comes_back(connection: socket.socket, data: bytes) -> bool:
    def send() -> None:
        with contextlib.suppress(OSError):  # the connection may be closed meanwhile
            connection.sendall(data)

    threading.Thread(target=send).start()
    found = b""
    while len(found) < len(data) and (some := connection.recv(65536)):
        found += some
    return found == data


def test_port_forward_carries_connections_to_where_task_runs(
    world: ControllerInProcess, tasks: list[psutil.Process], begin: Begin, echo: int
) -> None:
    port = free_port()

    def story() -> None:
        with connect(port) as first, connect(port) as second:
            assert comes_back(first, b"first")
            assert comes_back(second, os.urandom(1_000_000))
            world.fail(JOB, 0)
            tasks[0].kill()
            with pytest.raises(ConnectionResetError):  # the task has moved, and bytes may be missing
                first.recv(1)
        world.wait_for_attempt(JOB, 2)
        again = begin(2)

        def works_again() -> bool:
            with connect(port) as third:
                try:
                    return comes_back(third, b"third")
                except ConnectionError:
                    return False

        wait_until(works_again)
        world.succeed(JOB)
        again[0].kill()

    with world.meanwhile(then_ctrl_c(story)):
        done = world.iris("port-forward", JOB, f"{port}:{echo}", code=OK)
    said = done.stderr
    assert said.count(f"http://localhost:{port} is port {echo} on the host of task 0 of {JOB}") == 2
    assert "connections are closed" in said
    assert f"{JOB} has ended: succeeded" in said


@pytest.mark.usefixtures("tasks")
def test_port_forward_says_that_nothing_listens(world: ControllerInProcess) -> None:
    port, unused = free_port(), free_port()

    def story() -> None:
        with connect(port) as one:
            assert one.recv(1) == b""
        os.kill(os.getpid(), signal.SIGINT)

    with world.meanwhile(story):
        done = world.iris("port-forward", JOB, f"{port}:{unused}", code=INTERRUPTED, quotes=True)
    assert f"nothing listens on port {unused}" in done.stderr


@pytest.mark.usefixtures("tasks")
def test_taken_local_port_is_refused(world: ControllerInProcess, echo: int) -> None:
    assert "can't be used" in world.iris("port-forward", JOB, str(echo), code=USAGE).stderr


def test_full_host_is_asked_again_and_said_once(
    world: ControllerInProcess, tasks: list[psutil.Process], begin: Begin, echo: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, tries = free_port(), []
    take_place = host_session._take_place

    def taken(directory: Path, user: str) -> int:
        tries.append(time.monotonic())
        if 1 < len(tries) < 4:
            raise TooManySessionsError("the task's host has 32 open sessions")
        return take_place(directory, user)

    monkeypatch.setattr(host_session, "_take_place", taken)
    monkeypatch.setattr(port_forward, "LOOK_S", 0.3)

    def story() -> None:
        connect(port).close()
        world.fail(JOB, 0)
        tasks[0].kill()
        world.wait_for_attempt(JOB, 2)
        begin(2)
        wait_until(lambda: len(tries) >= 4)
        os.kill(os.getpid(), signal.SIGINT)

    with world.meanwhile(then_ctrl_c(story)):
        done = world.iris("port-forward", JOB, f"{port}:{echo}", code=INTERRUPTED, quotes=True)
    assert done.stderr.count("32 open sessions") == 1
    assert min(later - earlier for earlier, later in itertools.pairwise(tries)) > 0.25


# -- stdin -------------------------------------------------------------------------------------------------------------


def test_unreadable_stdin_ends_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def read() -> list[bytes]:
        return [data async for data in streams.stdin_bytes()]

    before, directory = os.dup(0), os.open(tmp_path, os.O_RDONLY)
    os.dup2(directory, 0)
    try:
        assert asyncio.run(read()) == []
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(directory)
    assert "stdin can't be read: Is a directory" in capsys.readouterr().err


# -- the terminal of a person ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "restores"),
    [
        ("return", False),
        ("raise SystemExit(3)", True),
        ("show(b'\\x1b[?1049hfull', False); raise SystemExit(3)", True),
    ],
)
def test_terminal_is_as_before_however_session_ends(ends: str, restores: bool) -> None:
    script = f"""
        import sys, termios
        from iris_ray.cli.streams import raw_terminal
        def session():
            with raw_terminal() as show:
                assert not termios.tcgetattr(0)[3] & termios.ICANON
                show(b"raw", False)
                {ends}
        session()
    """
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with Popen(command, stdin=its, stdout=its, stderr=DEVNULL, start_new_session=True) as process:
        code = process.wait(60)
    shown = os.read(ours, 1000)
    after = termios.tcgetattr(its)
    os.close(ours)
    os.close(its)
    assert (code, after) == (3 if restores else 0, before)
    assert (b"\x1b[?25h" in shown, b"\x1b[?1049l" in shown) == (restores, "full" in ends), shown


# -- from Python -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tasks")
def test_client_runs_command_beside_task(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_USER", "ann")
    client = IrisClient()
    done = client.exec(JOB, ["sh", "-c", "cat; echo $WHO >&2; exit 3"], task_index=1, input=b"given")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"given", b"task 1\n")
    with pytest.raises(CommandNotFoundError):
        client.exec(JOB, ["no-such-program"])
    for wrong in ("ls -l", [], ["ls", 3]):
        with pytest.raises(InvalidRequestError, match="command"):
            client.exec(JOB, wrong)  # type: ignore[arg-type]
