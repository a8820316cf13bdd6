"""What py-spy, the real one, tells of a task's process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import InspectionFailedError
from iris_ray.inspection import host as inspector
from iris_ray.inspection.host import InspectedTask, Profile, profile_of, stacks_of

TASK = InspectedTask("train", 3, 1)
BUSY = "def spins_here():\n    while True: pass\nprint('', flush=True)\nspins_here()"

AS_PY_SPY_IF_NOTHING_WORKS = """#!/bin/sh
case "$*" in
    *--idle*) while [ "$1" != --output ]; do shift; done; echo waits here > "$2"; echo "Samples: 9 Errors: 0" ;;
    *flamegraph*) printf "Error: Failed to write flamegraph: No stack counts found\\n\\n   0: main\\n" >&2; exit 1 ;;
    *) echo "py-spy> Wrote raw flamegraph data to 'profile'. Samples: 0 Errors: 0" ;;
esac
"""


@pytest.fixture
def task(own_host: Path) -> Iterator[int]:
    """A process that runs the task, and a mark of a process that is gone; returns the pid."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for pid in (gone.pid, process.pid):
            StartedTask(*TASK, num_tasks=8, label="").write(TaskFiles.of_process(own_host, pid))
        yield process.pid
        process.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="py-spy may look into processes of root's children only")
def test_stacks_and_profile_name_the_function_that_runs(task: int) -> None:
    stacks = stacks_of(TASK)
    assert "spins_here" in stacks
    assert f"Process {task}" in stacks
    assert b"spins_here" in profile_of(TASK, 1, "raw", idle=False).data
    assert profile_of(TASK, 1, "flamegraph", idle=True).data.lstrip().startswith(b"<?xml")


@pytest.mark.parametrize("layout", ["flamegraph", "speedscope", "raw"])
def test_profile_of_threads_that_only_wait_shows_where(
    task: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(AS_PY_SPY_IF_NOTHING_WORKS)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert profile_of(TASK, 1, layout, idle=False) == Profile(b"waits here\n", waits=True)
    assert profile_of(TASK, 1, layout, idle=True) == Profile(b"waits here\n")
    program.write_text(AS_PY_SPY_IF_NOTHING_WORKS.replace("--idle", "--never"))
    with pytest.raises(InspectionFailedError, match="took no sample of the process within 1 s"):
        profile_of(TASK, 1, layout, idle=True)


def test_inspecting_task_without_local_process_says_so(task: int) -> None:
    with pytest.raises(InspectionFailedError, match="task 4 of train has no process there"):
        stacks_of(TASK._replace(task_index=4))
    with pytest.raises(InspectionFailedError, match="has no process there"):
        stacks_of(TASK._replace(attempt=2))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'Error: Permission Denied: Try running again with sudo' >&2; exit 1", "SYS_PTRACE"),
        ("echo 'Error: no python here' >&2; exit 3", "failed with code 3: Error: no python here"),
        ("printf 'Error: no stacks\\n\\nStack backtrace:\\n   8: main\\n' >&2; exit 1", "code 1: Error: no stacks$"),
        ("exit 1", "it said nothing"),
        ("sleep 60", "did not finish"),
    ],
    ids=["permission", "error", "backtrace", "silent", "hangs"],
)
def test_py_spy_failure_says_what_to_do(
    task: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec sh -c "{script}"\n' if script == "sleep 60" else f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setattr(inspector, "DUMP_S", 1.0)
    with pytest.raises(InspectionFailedError, match=says):
        stacks_of(TASK)


def test_missing_py_spy_is_named(task: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InspectionFailedError, match="pip install py-spy"):
        stacks_of(TASK)
