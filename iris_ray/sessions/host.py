"""One person's session on the host of a task: an actor in a process of its own, so the task's host is not held up.

The person's process starts it, and Ray ends it with that process, or when it has lost that process's machine. Then the
sockets to the keepers close, and they end the commands. While the person's process lives, a session has no time limit:
output may wait for a pager, and Ctrl-Z may stop the process.
"""

import asyncio
import contextlib
import fcntl
import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from iris_ray.actors.calls.asking_again import ask_again
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.ray_internals import on_host
from iris_ray.actors.host.directories import host_directory
from iris_ray.actors.host.exit_status import WatchedProcess
from iris_ray.actors.host.redirect import started_tasks
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import CommandNotFoundError, IrisError, SessionError, TaskNotRunningError, TooManySessionsError
from iris_ray.fair_limits import leaves_room
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.processes.identity import stat_of
from iris_ray.processes.tree import TOKEN_VARIABLE
from iris_ray.sessions.channels import ByteChannel, PortConnection, RunningCommand, started
from iris_ray.sessions.core import POLL_S, CommandLine, Piece, Size
from iris_ray.sessions.surroundings import Surroundings

MOST_SESSIONS = 32
"""The limit for sessions on a host; one user alone gets half. Each is a process of about 100 MB and its commands."""
MOST_CHANNELS = 64
"""The limit for commands and connections of a session. A browser opens six to each server."""
STARTING_S, STARTING_POLL_S = 2.0, 0.1
"""The time in which the process of a running task must appear, and the interval between two checks; seconds."""
TOGETHER_S = 10.0
"""The time after the end of a command in which the end of the task's attempt is seen, if that is the cause; seconds."""
_AS_HOSTS_END_IT = (None, 143, 137)
"""The exit codes of a command that got SIGTERM or SIGKILL; None: it is not known."""


class HostSession:
    """See `SessionInterface`.

    Args:
        address: the host's IP address.
        user: who opens it.
    """

    def __init__(self, address: str, user: str) -> None:
        self._address = address
        self._user = user
        self._directory = host_directory()
        self._channels: dict[int, ByteChannel] = {}
        self._opening = 0
        self._numbers = itertools.count(1)
        self._task: WatchedProcess | None = None
        self._surroundings: Surroundings | None = None
        self._task_ended = asyncio.Event()
        self._place: int | None = None
        self._background = BackgroundTasks()

    async def enter(self, task: TaskAttemptId) -> None:
        if self._task is not None:
            return
        try:
            if self._place is None:
                self._place = _take_place(self._directory / "sessions", self._user)
            process, self._surroundings = await self._find(task)
        except SessionError:
            raise
        except OSError as error:
            raise SessionError(
                f"the task's host can't open a session: its resources are used up, or its disk fails: {error}"
            ) from None
        except RuntimeError as error:
            raise TaskNotRunningError(
                f"task {task.task_index} of {task.job_id} no longer runs on {self._address} ({error}); see"
                f" iris-ray job events {task.job_id}"
            ) from None
        self._task = process
        self._task.watch(self._on_task_end)

    async def start(self, command: CommandLine) -> int:
        beside = self._surroundings
        if beside is None or self._task_ended.is_set():
            raise TaskNotRunningError("the task's attempt has ended; see iris-ray job events")
        words = (beside.shell(),) if command.words is None else command.words
        if not words or any("\0" in word for word in words):
            raise CommandNotFoundError("give a command with at least a program, and without NUL characters")
        environ, token = beside.for_commands(command.term), beside.environ.get(TOKEN_VARIABLE, "")
        arguments = words, environ, beside.directory, token, command.size, command.takes_input
        try:
            if (prefix := beside.environ.get(TaskFiles.VARIABLE)) is not None:
                TaskFiles(prefix).expect_members()
            return await self._opened(RunningCommand.start, *arguments)
        except (OSError, subprocess.SubprocessError) as error:
            raise SessionError(f"the task's host can't start the command: {error}") from None

    async def connect(self, port: int) -> int:
        return await self._opened(PortConnection.open, port, self._address)

    async def read(self, channel: int, after: int) -> Piece:
        if (found := self._channels.get(channel)) is None:  # it is over, and others have been opened since
            return Piece(after + 1, over=True)
        piece = await found.read(after)
        may_be_tasks_end = piece.exit_code in _AS_HOSTS_END_IT and not (found.is_closed or piece.task_ended)
        if piece.over and may_be_tasks_end and isinstance(found, RunningCommand):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TOGETHER_S):
                    await self._task_ended.wait()
            return piece._replace(task_ended=self._task_ended.is_set())
        return piece

    async def write(self, channel: int, number: int, data: bytes) -> None:
        if (found := self._channels.get(channel)) is not None:  # else it is over
            await found.write(number, data)

    async def resize(self, channel: int, size: Size) -> None:
        if isinstance(found := self._channels.get(channel), RunningCommand):
            found.resize(size)

    async def signal(self, channel: int, number: int) -> None:
        if isinstance(found := self._channels.get(channel), RunningCommand):
            found.signal(number)

    async def close(self, channel: int) -> None:
        found = self._channels.get(channel)
        if found is None or found.over:
            return
        found.is_closed = True
        if isinstance(found, RunningCommand):
            found.end()  # its reader hears how it ended
        else:
            self._background.start(found.drop(), "closing a connection")

    async def task_ended(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._task_ended.wait()
        return self._task_ended.is_set()

    async def _find(self, task: TaskAttemptId) -> tuple[WatchedProcess, Surroundings]:
        """Return the process of a task and its surroundings, which it may be about to keep.

        Raises:
            RuntimeError: it has no process here.
            SessionError: it has kept no surroundings.
            OSError: this process can't look.
        """

        async def find() -> tuple[WatchedProcess, Surroundings]:
            pid = _pid_of(task, self._directory)
            if (stat := stat_of(pid)) is None:
                raise RuntimeError("the task's process has ended")
            surroundings = Surroundings.of_process(pid)
            return WatchedProcess(stat.identity), surroundings

        # a SessionError is a RuntimeError
        return await ask_again(find, RuntimeError, within_s=STARTING_S, pause_s=STARTING_POLL_S)

    async def _opened(self, start: Callable[..., ByteChannel], *arguments: Any) -> int:
        """Start a command or connection in a thread, and return the number of its channel.

        Raises:
            SessionError: the session has `MOST_CHANNELS`, including those that are being opened, or it has no thread.
        """
        self._channels = {number: one for number, one in self._channels.items() if not one.over}
        if len(self._channels) + self._opening >= MOST_CHANNELS:
            raise SessionError(f"this session has {MOST_CHANNELS} open commands and connections; close some first")
        self._opening += 1
        try:
            channel = await started(start, *arguments)
        except RuntimeError as error:
            if isinstance(error, IrisError):
                raise
            raise SessionError(f"the task's host can't start a thread: {error}") from None
        finally:
            self._opening -= 1
        number = next(self._numbers)
        self._channels[number] = channel
        if self._task_ended.is_set():
            self._on_task_end()
        return number

    def _on_task_end(self) -> None:
        self._task_ended.set()
        for channel in self._channels.values():
            channel.task_ended = True
            if not channel.over:
                channel.end()


_HostSession = ray.remote(HostSession)


def start_session(node_id: str, address: str, user: str) -> ActorHandle:
    """Start a user's session on a host, and return at once. It ends with the calling process at the latest."""
    handle: ActorHandle = _HostSession.options(**on_host(node_id, address)).remote(address, user)
    return handle


def _pid_of(task: TaskAttemptId, directory: Path) -> int:
    """Return the pid of a task's process, or raise RuntimeError."""
    for pid, one in started_tasks(directory).items():
        if (one.job_id, one.task_index, one.attempt) == task:
            return pid
    raise RuntimeError(f"attempt {task.attempt} has no process on this host")


def _take_place(directory: Path, user: str) -> int:
    """Take one of the host's places for sessions, and return a descriptor. The place is free again when it closes.

    A place is a file with a lock, in which its user's name stands.

    Raises:
        TooManySessionsError: there is none, or it is for other users.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    name = user.encode()
    with open(directory / "lock", "w") as lock, contextlib.ExitStack() as opened:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sessions look one by one, each for a moment
        free, held = list[int](), 0
        for number in range(MOST_SESSIONS):
            place = os.open(directory / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, place)
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free.append(place)
            except BlockingIOError:
                held += os.pread(place, len(name) + 1, 0) == name
        if leaves_room(held, len(free)):
            os.ftruncate(free[0], 0)
            os.pwrite(free[0], name, 0)
            return os.dup(free[0])  # has the lock, too
    raise TooManySessionsError(
        f"the task's host has {MOST_SESSIONS - len(free)} open sessions of at most {MOST_SESSIONS}, {held} of them"
        f" {user}'s, and keeps the others free for other users: close some of your shells and forwarded ports, or use"
        " another task of the job"
    )
