"""Processes that stand for running tasks, for people to look inside."""

import asyncio
import itertools
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.sessions.channels import ByteChannel
from iris_ray.sessions.core import Piece, Size
from iris_ray.sessions.host import HostSession
from tests.support.processes import TOKEN, Nursery

DAEMON = "env -i setsid sh -c 'echo $$ > daemon; exec sleep 60' &"
"""Starts a program that leaves its parent, its session and its variables, and tells its pid in a file."""

_TASK = """
    import os, sys, time
    from pathlib import Path
    from iris_ray.actors.host.redirect import StartedTask
    from iris_ray.sessions.surroundings import keep_surroundings
    from iris_ray.actors.protocol.task_files import TaskFiles
    from iris_ray.processes.tree import TOKEN_VARIABLE
    directory, work, token, job, index, attempt = sys.argv[1:]
    (Path(directory) / "tasks").mkdir(exist_ok=True)
    os.environ |= {"WHO": f"task {index}", "MEGASCALE_NUM_SLICES": "2", "JAX_PLATFORMS": "tpu,cpu"}
    os.environ |= {TOKEN_VARIABLE: token, "IRIS_COORDINATOR_ADDRESS": "10.0.0.1:1234", "PATH": "/usr/bin:/bin"}
    files = TaskFiles.of_process(Path(directory), os.getpid())
    os.environ[TaskFiles.VARIABLE] = files.prefix
    os.chdir(work)
    keep_surroundings()
    StartedTask(job, int(index), int(attempt), 4, "").write(files)
    print("ready", flush=True)
    time.sleep(600)
"""


def task_process(nursery: Nursery, directory: Path, work: Path, task: TaskAttemptId) -> psutil.Process:
    """Return the process of a task.

    Args:
        nursery: ends it.
        directory: of its host.
        work: where it works.
        task: what it is taken for.
    """
    return nursery.script(textwrap.dedent(_TASK), str(directory), str(work), TOKEN, *map(str, task))


class Direct:
    """The way to a command or connection of this process: a channel without a session."""

    def __init__(self, channel: ByteChannel) -> None:
        self._channel = channel
        self._writes = itertools.count(1)

    async def pieces(self) -> AsyncIterator[Piece]:
        piece = Piece(0)
        while not piece.over:
            piece = await self._channel.read(piece.number)
            yield piece

    async def write(self, data: bytes) -> None:
        await self._channel.write(next(self._writes), data)

    def resize(self, size: Size) -> None: ...

    def signal(self, number: int) -> None: ...

    def close(self) -> None:
        if not self._channel.over:
            self._channel.end()


class SessionInProcess(HostSession):
    """A session in this process. What it has started ends as if its process had ended."""

    def on_death(self) -> None:
        """Tell the keepers, as the kernel would, and close the descriptors once no task waits for them any more."""
        loop = asyncio.get_running_loop()
        for channel in self._channels.values():
            if not channel.over:
                channel.end()
                loop.call_soon(loop.call_soon, channel._close)
