"""Stacks and profiles of a task's process, by py-spy, which comes with Ray.

py-spy runs on the task's host as a plain Ray task. It works even if the task's process hangs.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ray

from iris_ray.actors.calls.ray_internals import on_host
from iris_ray.actors.host.directories import host_directory
from iris_ray.actors.host.output.redirect import started_tasks
from iris_ray.actors.host.session.surroundings import Surroundings
from iris_ray.errors import InspectionFailedError, SessionError

DUMP_S = 20.0
"""py-spy may take so long to read the stacks of a large process."""
WRITING_S = 30.0
"""py-spy may take so long to write a profile."""

NOT_PERMITTED = (
    "py-spy may not look into the process. It needs root, or in a container the capability SYS_PTRACE (docker run"
    " --cap-add SYS_PTRACE; in Kubernetes securityContext.capabilities.add). Without it, stall_timeout= has a task that"
    " hangs print its own stacks"
)


class InspectedTask(NamedTuple):
    """The attempt of a task to look into."""

    job_id: str
    task_index: int
    attempt: int


def stacks_of(task: InspectedTask) -> str:
    """Return the stacks of a task's process on this host, as text.

    Raises:
        InspectionFailedError: the task does not run here, or py-spy fails; the message says why.
    """
    return py_spy(["dump", "--pid", str(_pid_of(task))], DUMP_S)


def profile_of(task: InspectedTask, seconds: int, layout: str, idle: bool) -> bytes:
    """Return a profile of a task's process on this host and of its child processes.

    Args:
        task: the task.
        seconds: how long to sample.
        layout: the file's format: ``flamegraph`` (SVG), ``speedscope`` (JSON) or ``raw`` (text).
        idle: whether to count waiting threads, too.

    Raises:
        InspectionFailedError: the task does not run here, or py-spy fails; the message says why.
    """
    with tempfile.TemporaryDirectory(prefix="iris_ray-profile-") as directory:
        path = Path(directory) / "profile"
        options = ["--duration", str(seconds), "--format", layout, "--output", str(path), "--subprocesses"]
        options += ["--idle"] if idle else []
        py_spy(["record", "--pid", str(_pid_of(task)), *options], seconds + WRITING_S)
        return path.read_bytes()


def variables_of(task: InspectedTask) -> list[str]:
    """Return the names of the environment variables with which a task on this host began, sorted.

    Raises:
        InspectionFailedError: the task does not run here, or has no copy of them.
    """
    try:
        return sorted(Surroundings.of_process(_pid_of(task)).environ)
    except SessionError as error:
        raise InspectionFailedError(str(error)) from None


def ask_host(function: object, node_id: str, address: str, *arguments: object) -> ray.ObjectRef:
    """Call `stacks_of`, `profile_of` or `variables_of` on a host. Return at once."""
    return ray.remote(function).options(**on_host(node_id, address), max_retries=0).remote(*arguments)


def _pid_of(task: InspectedTask) -> int:
    """Return the pid of the process in which a task runs on this host."""
    for pid, found in started_tasks(host_directory()).items():
        if (found.job_id, found.task_index, found.attempt) == task:
            return pid
    raise InspectionFailedError(f"task {task.task_index} of {task.job_id} has no process there: it has just ended")


def py_spy(arguments: Sequence[str], timeout_s: float) -> str:
    """Run py-spy and return its output.

    Raises:
        InspectionFailedError: it is missing, may not look, fails or takes longer; the message says why.
    """
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        raise InspectionFailedError("py-spy is not installed there; it comes with ray[default]: pip install py-spy")
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InspectionFailedError(f"py-spy did not come to an end: {error}") from error
    if done.returncode == 0:
        return done.stdout
    if "ermission" in done.stderr:
        raise InspectionFailedError(NOT_PERMITTED)
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise InspectionFailedError(f"py-spy failed with code {done.returncode}: {last[:300]}")
