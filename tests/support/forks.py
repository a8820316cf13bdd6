"""Real zygotes and their forks, as a TPUHostActor starts and asks them, without Ray."""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from ray import cloudpickle

from iris_ray.actors.calls.ray_internals import ClusterToJoin
from iris_ray.actors.host.forked_task import Begin
from iris_ray.actors.host.forks import ForkedProcess, Zygote, ZygoteStart
from iris_ray.actors.protocol.messages import ProcessReady, TaskLaunch
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.outcomes import TaskEnd
from iris_ray.processes.identity import ProcessIdentity

HERE = "127.0.0.1"
INFO = JobInfo("job", "job/task-0", 0, 1, 1, 0, 1, "", 0, f"{HERE}:20002")
NOWHERE = ClusterToJoin(f"{HERE}:1", "namespace", HERE, {})
"""A cluster that no process joins."""


def launch_of(function: Callable[[], Any] | bytes, **env: str) -> TaskLaunch:
    """What a task runs that has no chips."""
    pickled = function if isinstance(function, bytes) else cloudpickle.dumps(function)
    return TaskLaunch(pickled, env, INFO, MultisliceInfo(HERE, 0, 1, 20_000, 20_001), None, "label")


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that no event tells."""
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def a_zygote(
    preload: Sequence[str] = (),
    *,
    path: Sequence[Path] = (),
    variables: Mapping[str, str] = {},
    without: Sequence[str] = (),
) -> AsyncIterator[Zygote]:
    """A zygote of this process, which ends with the block.

    Args:
        preload: modules that it imports.
        path: directories with more modules.
        variables, without: as for `ZygoteStart`.
    """
    zygote = await started_zygote(variables, without)
    try:
        await zygote.prepare([*map(str, path), *sys.path], preload)
        yield zygote
    finally:
        await ended(zygote)


async def started_zygote(
    variables: Mapping[str, str] = {}, without: Sequence[str] = (), kind: type[Zygote] = Zygote
) -> Zygote:
    how = ZygoteStart(variables, without, token_hex(8))
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        await asyncio.to_thread(how.start, theirs)
    return kind(mine, how.token)


async def ended(zygote: Zygote) -> None:
    """End a zygote, and wait until it is gone."""
    zygote.end()
    if zygote.tree is not None:
        tree = zygote.tree
        await until(lambda: not any(process.runs() for process in tree.search()))


@dataclass(frozen=True)
class Ended:
    """A task in a fork that is gone.

    Attributes:
        end: what it said of its end, or None.
        code: the exit code of its process.
    """

    ready: ProcessReady
    end: TaskEnd | None
    code: int | None

    @property
    def result(self) -> Any:
        assert self.end is not None, f"it ended with {self.code}"
        assert self.end.payload is not None, self.end.traceback
        return cloudpickle.loads(self.end.payload)


async def waiting_fork(zygote: Zygote, directory: Path) -> tuple[ForkedProcess, ProcessReady]:
    """A fork that waits for its task."""
    (directory / "tasks").mkdir(exist_ok=True)
    process = await zygote.fork()
    return process, await process.begin(Begin(HERE, frozenset(), directory, {}, NOWHERE))


async def run_in(zygote: Zygote, directory: Path, function: Callable[[], Any] | bytes, **env: str) -> Ended:
    """Run a function in a fork, and wait until the fork is gone."""
    process, ready = await waiting_fork(zygote, directory)
    end = await process.run(launch_of(function, **env))
    process.let_exit()
    identity = ProcessIdentity(ready.pid, ready.started)
    await until(lambda: not identity.exists())  # so the zygote has reaped it
    await until(lambda: zygote.ended or ready.pid not in zygote.forked)
    process.close()
    return Ended(ready, end, process.exit_code())
