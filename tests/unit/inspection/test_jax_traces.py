"""How a process is asked for a trace of JAX's profiler: a process of its own, with the real JAX."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.inspection import jax_traces
from iris_ray.inspection.jax_traces import NO_DEVICES, NO_JAX, ask_for_trace
from tests.support.waiting import wait_until

PROGRAM = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
from iris_ray.inspection.jax_traces import answer_trace_requests
answer_trace_requests()
answer_trace_requests()

def wait_after(what):
    print(what, flush=True)
    sys.stdin.readline()

wait_after("no JAX")
import jax
wait_after("imported")
jax.numpy.ones(3).block_until_ready()
wait_after("used")
jax.profiler.start_trace(sys.argv[1])
wait_after("traces itself")
jax.profiler.stop_trace()
wait_after("stopped")
"""


class Process:
    """A process of a task that goes on when it is told to."""

    def __init__(self, process: "subprocess.Popen[str]", directory: Path) -> None:
        self.pid, self.files = process.pid, TaskFiles(str(directory / "task"))
        self._process, self._directory, self._said = process, directory, ""

    def until(self, what: str) -> None:
        """Let it go on until it says so."""
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        while self._said != what:
            if self._said:
                self._process.stdin.write("\n")
                self._process.stdin.flush()
            self._said = self._process.stdout.readline().strip()
            assert self._said, "it has ended"

    def trace(self, seconds: float = 0.2) -> str | None:
        return ask_for_trace(self.files, self.pid, str(self._directory / "trace"), seconds)

    @property
    def traces(self) -> list[Path]:
        return [*(self._directory / "trace").glob("plugins/profile/*/*.xplane.pb")]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    environ = os.environ | {"JAX_PLATFORMS": "cpu", TaskFiles.VARIABLE: str(tmp_path / "task")}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "own")], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as started:  # fmt: skip
        yield Process(started, tmp_path)
        started.kill()


def test_process_takes_trace_only_once_its_jax_has_devices(process: Process) -> None:
    process.until("no JAX")
    assert process.trace() == NO_JAX
    process.until("imported")
    assert process.trace() == NO_DEVICES
    process.until("used")
    assert process.trace() is None
    assert len(process.traces) == 1
    process.until("traces itself")
    assert "already been started" in (process.trace() or "")
    process.until("stopped")
    assert process.trace() is None


def test_trace_ends_early_if_nobody_waits_for_it(process: Process, tmp_path: Path) -> None:
    process.until("used")
    asked = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys; from iris_ray.inspection.jax_traces import *; from iris_ray.actors.protocol.task_files"
            " import TaskFiles; ask_for_trace(TaskFiles(sys.argv[1]), int(sys.argv[2]), sys.argv[3], 600.0)",
            process.files.prefix, str(process.pid), str(tmp_path / "left"),
        ]
    )  # fmt: skip
    with asked:
        wait_until(lambda: "already been started" in (process.trace(0.0) or ""), 60)
        asked.kill()
    wait_until(lambda: process.trace() is None, 60)


def test_process_that_does_not_listen_or_answer_is_told_apart(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.until("no JAX")
    with pytest.raises(ConnectionError, match="does not accept requests for traces"):
        ask_for_trace(process.files, os.getpid(), "/nowhere", 0.1)
    monkeypatch.setattr(jax_traces, "STARTS_S", 0.5)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        process.trace()
