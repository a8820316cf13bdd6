"""Real processes for tests, which end with the test: children, daemons, sleepers, and some that stand for tasks."""

import asyncio
import os
import resource
import secrets
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from iris_ray.actors.host.exit_status import WatchedProcess
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.output import OutputPump
from iris_ray.actors.host.task_watch import TaskWatch
from iris_ray.actors.protocol.messages import ProcessReady, TaskLaunch
from iris_ray.actors.protocol.version import versions_here
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.outcomes import TaskEnd
from iris_ray.processes.identity import ProcessIdentity, stat_of
from iris_ray.processes.subtree import pids
from iris_ray.processes.tree import ProcessTree

if TYPE_CHECKING:
    import pytest

    from iris_ray.testing import SimulatedCluster

# Starts one child for each argument, prints its pid, and sleeps. It reaps none, so children that end become zombies.
# "fork TOKEN" is a daemon that starts no program, of a parent that has marked its forks.
PARENT = """
import os, subprocess, sys, time

def fork(token):
    global mark
    from iris_ray.processes.tree import mark_forks
    mark = mark_forks(token)
    said, say = os.pipe()
    if between := os.fork():
        os.waitpid(between, 0)
        print(int(os.read(said, 20)), flush=True)
    else:
        os.setsid()
        if daemon := os.fork():
            os.write(say, str(daemon).encode())
            os._exit(0)
        time.sleep(60)
        os._exit(0)

for kind in sys.argv[1:]:
    if kind.startswith("fork "):
        fork(kind.removeprefix("fork "))
        continue
    detached = kind == "daemon"
    print(subprocess.Popen(["sleep", "60"], start_new_session=detached).pid, flush=True)
time.sleep(60)
"""

TOKEN = secrets.token_hex(8)
"""Marks the processes of this run of the tests: another run on the machine has another one."""


class Nursery:
    """Starts processes, and ends all of them with the test."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self._children: list[psutil.Process] = []

    def sleeper(self, **environ: str) -> psutil.Process:
        process = subprocess.Popen(["sleep", "60"], env={**os.environ, **environ}, text=True)
        self._started.append(process)
        return psutil.Process(process.pid)

    def tree(self, *kinds: str, leads: bool = False, **environ: str) -> tuple[psutil.Process, list[psutil.Process]]:
        """Return a parent, which may lead a process group, and its children; a "daemon" has a session of its own."""
        command = [sys.executable, "-c", PARENT, *kinds]
        env, group = {**os.environ, **environ}, 0 if leads else None
        parent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, process_group=group)
        self._started.append(parent)
        assert parent.stdout is not None
        children = [psutil.Process(int(parent.stdout.readline())) for _ in kinds]
        self._children += children
        return psutil.Process(parent.pid), children

    def script(self, script: str, *arguments: str) -> psutil.Process:
        """Return a Python script that has printed its first line."""
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
        self._started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return psutil.Process(process.pid)

    def reap(self, process: psutil.Process) -> None:
        next(started for started in self._started if started.pid == process.pid).wait(10)

    def clear(self) -> None:
        for child in self._children:
            if alive(child):
                child.kill()
        for process in self._started:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


def alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class HasPid(Protocol):
    """A process of psutil's, of subprocess's, or a test's own."""

    @property
    def pid(self) -> int: ...


def identity_of(process: HasPid) -> ProcessIdentity:
    stat = stat_of(process.pid)
    assert stat is not None
    return stat.identity


def earlier_than(process: HasPid) -> ProcessIdentity:
    """Return the identity of an earlier process with the same pid."""
    now = identity_of(process)
    return now._replace(started=now.started - 1)


def tree(process: HasPid, token: str = TOKEN) -> ProcessTree:
    """Return the tree of a process, with no descendant known."""
    return ProcessTree(identity_of(process), token)


def counted_looks(monkeypatch: "pytest.MonkeyPatch") -> list[int]:
    """Return what gets an item for each look at all processes of the machine; a listing has three."""
    looks: list[int] = []

    def look() -> list[int]:
        looks.append(len(found := pids()))
        return found

    monkeypatch.setattr("iris_ray.processes.tree.pids", look)
    return looks


NOTICE = Notice(NoticeKind.MAINTENANCE, "slice-a host 1: it is to be repaired", time.time() + 3600.0)
PATIENCE_S = 300.0
"""More seconds than a child needs, however busy the machine is: ten interpreters at a time may share one core with ten
others. It ends what hangs."""


class Child:
    """A real process that runs a script as a task does: its files are known, and SIGTERM with a notice is swallowed."""

    BEFORE = """
        import os, select, signal, sys, time
        from pathlib import Path
        from iris_ray.actors.host.directories import host_directory
        from iris_ray.actors.protocol.task_files import print_stacks_when_asked, survive_notices
        from iris_ray.actors.protocol.task_files import TaskFiles
        files = TaskFiles.of_process(host_directory(), os.getpid())
        os.environ[TaskFiles.VARIABLE] = files.prefix
        def next_start():
            # Python hears no signal that comes just before a read that blocks. So nothing blocks for long.
            while not select.select([0], [], [], 0.02)[0]:
                pass
            os.read(0, 1)
    """
    START = """
        print("ready", flush=True)
        next_start()
        survive_notices(files)
        print_stacks_when_asked(files)
        TaskFiles.of_process(host_directory(), os.getpid()).started.touch()
    """

    def __init__(self, script: str, before: str = "") -> None:
        parts = (self.BEFORE, before, self.START, script)
        code = "\n".join(map(textwrap.dedent, parts))
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.says("ready")

    def start(self) -> None:
        """Let the script begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def clear(self) -> str:
        """What it said on stderr."""
        self.process.kill()
        return self.process.communicate()[1]


Make = Callable[..., Child]


class NoOutput(OutputPump):
    """Reads nothing."""

    def __init__(self) -> None:
        pass

    def stop_showing(self) -> None:
        pass

    def close(self) -> None:
        pass


class ChildRunner:
    """The way to a child, which runs its exit handlers once it may exit; see `TaskRunner`."""

    is_fork = False
    zygote_ended = False

    def __init__(self, child: Child) -> None:
        self._child = child

    async def run(self, launch: TaskLaunch) -> TaskEnd | None:
        return None

    def let_exit(self) -> None:
        self._child.start()

    def kill(self) -> None:
        self._child.process.kill()

    async def left_nothing(self) -> bool:
        return False

    def exit_code(self) -> int | None:
        return None

    def orphans(self) -> list[ProcessIdentity]:
        return []

    def close(self) -> None:
        pass


def watched(
    child: Child, tmp_path: Path, what: Callable[[TaskWatch], Awaitable[Any]], runner: ChildRunner | None = None
) -> Any:
    """Do something with the watch that TPUHostActor has over a process, from before its start.

    Args:
        child: the process.
        tmp_path: the host's directory.
        what: what to do.
        runner: the way to the process; None: that to a child that has not told how its task ended.
    """

    async def run() -> Any:
        one = tree(psutil.Process(child.process.pid))
        process = WatchedProcess(one.root)
        watch = TaskWatch(runner or ChildRunner(child), process, one, ProcessLedger(tmp_path), None, NoOutput())
        try:
            return await asyncio.wait_for(what(watch), PATIENCE_S)
        finally:
            child.process.kill()
            child.process.wait()
            await watch.how_it_ended()

    return asyncio.run(run())


def started(child: Child, what: Callable[[TaskWatch], Awaitable[Any]]) -> Callable[[TaskWatch], Awaitable[Any]]:
    """The same once the child may begin; the mark of an earlier process would have been removed."""

    def start(watch: TaskWatch) -> Awaitable[Any]:
        child.start()
        return what(watch)

    return start


class WaitingActor:
    """Stands for the handle of a `TaskProcess` actor in a process that waits for a task."""

    def __init__(self, process: HasPid, token: str = TOKEN) -> None:
        self.identity = identity_of(process)
        self._token = token
        self.versions, self.ready = (SimpleNamespace(remote=answer) for answer in (self._versions, self._ready))

    async def _versions(self) -> dict[str, Any]:
        return versions_here()

    async def _ready(self) -> ProcessReady:
        return ProcessReady(*self.identity, self._token, ())


Waiting = Callable[[], WaitingActor]


def host_of(cluster: "SimulatedCluster", pid: int) -> tuple[str, int]:
    """The simulated host on which a process runs."""
    for name in cluster.slice_names:
        for worker in cluster.worker_ids(name):
            if pid in cluster.host_pids(name, worker):
                return name, worker
    raise AssertionError(f"no host has process {pid}")


@contextmanager
def no_file_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
