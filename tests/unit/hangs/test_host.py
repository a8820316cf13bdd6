"""What a host says of a task's process while its gang makes no progress."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from iris_ray.hangs.host import frames_of, look_at
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
