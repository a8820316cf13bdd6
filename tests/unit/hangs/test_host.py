"""What a host says of a task's process while its gang makes no progress."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from iris_ray.actors.host.task_watch import TaskWatch
from iris_ray.errors import InspectionFailedError
from iris_ray.hangs import host
from iris_ray.hangs.calls import TaskLook
from iris_ray.hangs.host import HangsOnHost, _told, frames_of, look_at
from tests.support.processes import Make, watched
from tests.support.waiting import wait_until

DUMP = """Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 8 (idle): "Thread-1 (pump)"
    wait (threading.py:331)
Thread 7 (active): "MainThread"
    spins (train.py:3)
    <module> (train.py:9)
"""
SPINS = "def spins_here():\n    while True: pass\nprint('', flush=True)\nspins_here()"
CHILD = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.fixture(params=["itself", "child"])
def task(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A process whose user code spins in it, or in a process that it has started; the pids of both."""
    command = [SPINS] if request.param == "itself" else [CHILD, SPINS]
    with subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = psutil.Process(process.pid).children()
        yield process.pid, children[0].pid if children else process.pid
        for child in children:
            child.kill()
        process.kill()


def test_frames_are_those_of_main_thread_innermost_first() -> None:
    assert frames_of(DUMP) == ("spins (train.py:3)", "<module> (train.py:9)")
    assert frames_of(DUMP.replace("MainThread", "Dummy-1")) == ("wait (threading.py:331)",)
    assert frames_of("") == ()


@pytest.mark.skipif(os.getuid() != 0, reason="py-spy may look into processes of root's children only")
def test_look_shows_spinning_then_stopped_process(task: tuple[int, int]) -> None:
    pid, spinning = task
    look = look_at(pid)
    assert look.state == ""
    assert look.cpu > 0.1
    assert any("spins_here" in frame for frame in look.stack) == (pid == spinning)
    os.kill(spinning, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(spinning).status() == psutil.STATUS_STOPPED)
    look = look_at(pid)
    assert (look.state, look.cpu) == ("T", 0.0)
    assert look.took_s < 10.0


def test_look_at_ended_process_shows_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    look = look_at(process.pid)
    assert (look.state, look.cpu, look.stack) == ("", 0.0, ())


HANGS = """
import threading
def hangs_here():
    print("hangs", flush=True)
    time.sleep(1000)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
hangs_here()
"""


async def looked_at(watch: TaskWatch) -> TaskLook:
    """Return what the service says of the task on its host."""

    async def in_thread(function: Any, *args: Any) -> Any:
        return await asyncio.to_thread(function, *args)

    pid = int(watch.files.pid)
    part = HangsOnHost(
        cast(Any, SimpleNamespace(watches={pid: watch})), cast(Any, SimpleNamespace(in_thread=in_thread))
    )
    return await part.look(pid)


@pytest.mark.parametrize("may_look", [True, False], ids=["by py-spy", "by itself"])
def test_host_sees_where_task_hangs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_look: bool
) -> None:
    """py-spy may not look into a process in most containers."""

    def is_refused(arguments: object, timeout_s: float) -> str:
        raise InspectionFailedError("not permitted")

    if not may_look:
        monkeypatch.setattr(host, "_py_spy", is_refused)
    child = make(HANGS)

    async def look(watch: TaskWatch) -> TaskLook:
        child.start()
        await asyncio.to_thread(child.says, "hangs")
        return await looked_at(watch)

    found = watched(child, tmp_path, look)
    assert found.state == ""
    assert found.stack[0].startswith("hangs_here (")


def test_end_of_endless_stacks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOST_TOLD_BYTES", 1000)
    (stacks := tmp_path / "stacks").write_text("old\n")
    told = "Current thread 0x1 (most recent call first):\n" + '  File "train.py", line 3 in step\n'
    assert _told(stacks, lambda: _append(stacks, "Thread 0x2:\n" * 100_000 + told)) == ("step (train.py:3)",)


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_task_that_has_not_begun_is_not_asked(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would die of the signal."""
    monkeypatch.setattr(host, "_main_thread", lambda pid: ())
    child = make(HANGS)

    async def look(watch: TaskWatch) -> tuple[str, ...]:
        found = await looked_at(watch)
        assert not watch.ended
        return found.stack

    assert watched(child, tmp_path, look) == ()
