"""Commands in a task's host: with pipes, on a terminal, one that is signalled, and one that the person leaves."""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import SessionError
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.processes.tree import TOKEN_VARIABLE
from iris_ray.sessions import host
from iris_ray.sessions.channels import RunningCommand
from iris_ray.sessions.core import CommandLine, Piece, Size
from iris_ray.sessions.host import HostSession
from iris_ray.sessions.surroundings import NAME
from iris_ray.settings import HOST_DIR
from tests.proofs.every_operation.runs import Said, Scenario

TASK = TaskAttemptId("train", 0, 1)
GONE_S = 10.0
"""The time after which nothing of a command may run any more; seconds."""
DAEMON = "env -i setsid sh -c 'echo $$ > daemon; exec sleep 60' & while ! [ -s daemon ]; do sleep 0.01; done"
COMMANDS: dict[str, tuple[str, Size | None, bytes, int]] = {
    "pipes": ("cat; head -c 100000 /dev/zero >&2; exit 3", None, b"one two\n", 3),
    "terminal": (f"stty size; {DAEMON}; exit 4", Size(30, 90), b"30 90\r\n", 4),
    "signalled": ("echo ready; exec sleep 60", None, b"ready\n", 143),
    "left": ("echo ready; exec sleep 60", None, b"ready\n", 137),
}
"""By name: a shell's line, the size of its terminal, what it prints, and its exit code."""
listdir = os.listdir


def exec_() -> Scenario:
    return Scenario(
        "exec",
        lambda place: (place / "tasks").mkdir(),
        lambda place, said, operations: asyncio.run(_act(place, said)),
        _judge,
        (SessionError,),
        {"a lost keeper keeps its socket": _keep_socket, "an unknown end counts as success": _succeed},
    )


@contextlib.contextmanager
def _own_process_as_task(place: Path) -> Any:
    """This process is the task: the mark of its start is written, and it keeps its surroundings."""
    os.environ[HOST_DIR.name] = str(place)
    os.chdir(place)
    files = TaskFiles.of_process(place, os.getpid())
    mark = StartedTask(*TASK, 1, "")
    with io.FileIO(str(files.started), "w") as file:
        file.write(json.dumps(asdict(mark)).encode())
    with io.FileIO(os.memfd_create(NAME), "w") as kept:
        environ = {**os.environ, TOKEN_VARIABLE: _token(place)}
        kept.write(json.dumps({"environ": environ, "python": "/usr/bin/python3"}).encode())
        yield


def _token(place: Path) -> str:
    return f"every-operation-{place.parent.name}"


async def _act(place: Path, said: Said) -> None:
    host.TOGETHER_S = 0.1
    with _own_process_as_task(place):
        try:
            session = HostSession("127.0.0.1", "ann")
        except OSError as error:  # the person's process hears that the actor has died
            raise SessionError(str(error)) from None
        try:
            await session.enter(TASK)
            for name in COMMANDS:
                await _one(session, name, said)
        finally:
            for channel in session._channels.values():
                await asyncio.wait_for(channel.drop(), GONE_S)
            if session._task is not None:
                asyncio.get_running_loop().remove_reader(session._task._pidfd)
                session._task.close()
            if session._place is not None:
                os.close(session._place)
            _require_nothing_runs(place)


async def _one(session: HostSession, name: str, said: Said) -> None:
    """Run a command as a person's process does, and report its output and its exit code."""
    line, size, _, _ = COMMANDS[name]
    channel = await session.start(CommandLine(("sh", "-c", line), size, takes_input=name == "pipes"))
    if name == "pipes":
        await session.write(channel, 1, b"one two\n")
        await session.write(channel, 2, b"")
    out = err = b""
    piece = Piece(0)
    while not piece.over:
        piece = await session.read(channel, piece.number)
        out, err = out + piece.out, err + piece.err
        if piece.out == b"ready\n":
            if name == "signalled":
                await session.signal(channel, signal.SIGTERM)
            else:
                await session.close(channel)
    if piece.exit_code is not None:
        assert err == bytes(100_000 if name == "pipes" else 0), len(err)
        said(name, out.decode(), piece.exit_code)


def _judge(place: Path, said: list[list[Any]]) -> None:
    for name, out, code in said:
        _, _, true_out, true_code = COMMANDS[name]
        assert (out.encode(), code) == (true_out, true_code), (name, out, code)
    _require_nothing_runs(place)


def _require_nothing_runs(place: Path) -> None:
    """Raise AssertionError if a process of a command, or its keeper, still runs."""
    deadline = time.monotonic() + GONE_S
    while left := _running(place):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.01)


def _running(place: Path) -> list[str]:
    token, daemon = _token(place).encode(), _content(place / "daemon").strip()
    found = []
    for pid in filter(str.isdecimal, listdir("/proc")):
        command = _content(Path("/proc", pid, "cmdline"))
        if command and (token in _content(Path("/proc", pid, "environ")) or pid.encode() == daemon):
            found.append(f"{pid} {command.decode()}")
    return found


def _content(path: Path) -> bytes:
    with contextlib.suppress(OSError), io.FileIO(str(path)) as file:  # no operation of the scenario
        return file.readall()
    return b""


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _keep_socket() -> None:
    close, kept = RunningCommand._close, list[socket.socket]()

    def closed(command: RunningCommand) -> None:
        if command._exit_code is None:
            kept.append(command._control.dup())
        close(command)

    RunningCommand._close = closed  # type: ignore[method-assign, assignment]


def _succeed() -> None:
    last = RunningCommand._last_piece

    def succeeded(command: RunningCommand) -> Piece:
        piece = last(command)
        return piece if piece.exit_code is not None else piece._replace(exit_code=0)

    RunningCommand._last_piece = succeeded  # type: ignore[method-assign, assignment]
