"""Real processes that stand for tasks, and what their host does with them."""

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from iris_ray.actors.host.exit_status import WatchedProcess
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.output.pump import OutputPump
from iris_ray.actors.host.task_watch import TaskWatch
from iris_ray.model.notices import Notice, NoticeKind
from tests.support.processes import tree

NOTICE = Notice(NoticeKind.MAINTENANCE, "slice-a host 1: it is to be repaired", time.time() + 3600.0)
PATIENCE_S = 300.0
"""More seconds than a child needs, however busy the machine is: ten interpreters at a time may share one core with ten
others. It ends what hangs."""


class Child:
    """A real process that runs a script as a task does: its files are known, and SIGTERM with a notice is swallowed."""

    BEFORE = """
        import faulthandler, os, select, signal, sys, time
        from pathlib import Path
        from iris_ray.actors.host.directories import host_directory
        from iris_ray.actors.protocol.task_files import STACKS_SIGNAL, survive_notices
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
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
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


def watched(child: Child, tmp_path: Path, what: Callable[[TaskWatch], Awaitable[Any]], standby: Any = None) -> Any:
    """Do something with the watch that TPUHostActor has over a process, from before its start.

    Args:
        child: the process.
        tmp_path: the host's directory.
        what: what to do.
        standby: stands for the actor in the process.
    """

    async def run() -> Any:
        one = tree(psutil.Process(child.process.pid))
        process = WatchedProcess(one.pid, one.started)
        watch = TaskWatch(standby, process, one, ProcessLedger(tmp_path), None, NoOutput())
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
