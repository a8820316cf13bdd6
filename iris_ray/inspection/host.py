"""Looks into a task's process from a plain Ray task on its host: stacks, profiles, traces, chips.

Stacks and profiles are py-spy's, which comes with Ray. It works even if the task's process hangs. Traces are those of
JAX's profiler in the task's process, and libtpu tells of the chips.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ray

from iris_ray.actors.calls.ray_internals import on_host
from iris_ray.actors.host.directories import host_directory
from iris_ray.actors.host.redirect import started_tasks
from iris_ray.actors.protocol.services import module_of
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import InspectionFailedError, SessionError
from iris_ray.inspection.chip_metrics import ChipUse, chip_use
from iris_ray.inspection.jax_traces import NO_DEVICES, NO_JAX, ask_for_trace
from iris_ray.processes.subtree import descendants

DUMP_S = 20.0
"""The limit for py-spy to read the stacks of a large process; seconds."""
WRITING_S = 30.0
"""The limit for py-spy to write a profile; seconds."""

TRACE_SUFFIX = ".xplane.pb"
"""How JAX's profiler and XProf call the file of one host in a trace."""
LONGEST_WAIT_S = 10.0
"""The limit for the wait for the beginning of a trace, whatever the clocks say; seconds."""

NOT_PERMITTED = (
    "py-spy may not look into the process. Run Ray as root, in a container with the capability SYS_PTRACE (docker run"
    " --cap-add SYS_PTRACE; in Kubernetes securityContext.capabilities.add), or set kernel.yama.ptrace_scope=0 on the"
    " host. Without it, a task that hangs prints its own stacks"
)


_NO_SAMPLES = "No stack counts found", "Samples: 0 "
"""The output of py-spy if no thread did anything: its error for a flame graph, and its text for other formats."""


class Profile(NamedTuple):
    """A profile of a task.

    Attributes:
        data: of the file.
        waits: whether no thread worked, so that the profile shows where the threads wait.
    """

    data: bytes
    waits: bool = False


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


def profile_of(task: InspectedTask, seconds: int, layout: str, idle: bool) -> Profile:
    """Return a profile of a task's process on this host and of its child processes.

    If all threads wait all the time, as a host does for its chips, watch again, and show where they wait.

    Args:
        task: the task.
        seconds: how long to sample.
        layout: the file's format: ``flamegraph`` (SVG), ``speedscope`` (JSON) or ``raw`` (text).
        idle: whether to count waiting threads as well.

    Raises:
        InspectionFailedError: the task does not run here, or py-spy fails; the message says why.
    """
    if not idle and (found := _recorded(task, seconds, layout)) is not None:
        return Profile(found)
    if (found := _recorded(task, seconds, layout, "--idle")) is not None:
        return Profile(found, waits=not idle)
    raise InspectionFailedError(f"py-spy took no sample of the process within {seconds} s; try a longer --duration")


def _recorded(task: InspectedTask, seconds: int, layout: str, *options: str) -> bytes | None:
    """Return a profile; None if there is nothing in it."""
    with tempfile.TemporaryDirectory(prefix="iris_ray-profile-") as directory:
        path = Path(directory) / "profile"
        words = ["--duration", str(seconds), "--format", layout, "--output", str(path), "--subprocesses", *options]
        try:
            said = py_spy(["record", "--pid", str(_pid_of(task)), *words], seconds + WRITING_S)
        except InspectionFailedError as error:
            if _NO_SAMPLES[0] in str(error):
                return None
            raise
        return None if _NO_SAMPLES[1] in said else path.read_bytes()


def trace_of(task: InspectedTask, seconds: float, begin_at: float) -> bytes:
    """Return a trace of JAX's profiler in a task's process on this host, or in one that it has started.

    Args:
        task: the task.
        seconds: how long to watch.
        begin_at: when to begin, as ``time.time()``; at once if that is over.

    Raises:
        InspectionFailedError: the task does not run here, does not use JAX, or JAX refuses; the message says why.
    """
    pid = _pid_of(task)
    files = TaskFiles.of_process(host_directory(), pid)
    time.sleep(min(max(0.0, begin_at - time.time()), LONGEST_WAIT_S))
    with tempfile.TemporaryDirectory(prefix="iris_ray-trace-") as directory:
        _take_trace(files, [pid, *descendants(pid)], directory, seconds)
        written = [*Path(directory).rglob(f"*{TRACE_SUFFIX}")]
        if not written:
            raise InspectionFailedError("JAX's profiler has written no trace")
        return written[0].read_bytes()


def _take_trace(files: TaskFiles, pids: Sequence[int], directory: str, seconds: float) -> None:
    """Have the first of a task's processes that uses JAX take a trace."""
    said: set[str] = set()
    for pid in pids:
        try:
            why = ask_for_trace(files, pid, directory, seconds)
        except TimeoutError:
            why = "its process does not answer: something holds its interpreter, or its JAX; see iris-ray job stacks"
        except ConnectionError:
            continue
        if why is None:
            return
        said.add(why)
    if others := sorted(said - {NO_JAX}, key=lambda why: why == NO_DEVICES):
        raise InspectionFailedError(others[0])
    raise InspectionFailedError(
        "none of the task's processes was found to use JAX. A program that the task starts itself can be found once it"
        " has called iris_ray.jax.initialize(); one in a container never can"
    )


def chips_of(task: InspectedTask) -> list[ChipUse]:
    """Return the use of the chips of this host, as libtpu reports it in the task that has them.

    Raises:
        InspectionFailedError: the task does not run here, or libtpu does not answer; the message says why.
    """
    return chip_use(_environ_of(task))


def variables_of(task: InspectedTask) -> list[str]:
    """Return the names of the environment variables with which a task on this host began, sorted.

    Raises:
        InspectionFailedError: the task does not run here, or has no copy of them.
    """
    return sorted(_environ_of(task))


def ask_host(function: object, node_id: str, address: str, *arguments: object) -> ray.ObjectRef:
    """Call `stacks_of` or another function of this module on a host. Return at once."""
    return ray.remote(function).options(**on_host(node_id, address), max_retries=0).remote(*arguments)


def _environ_of(task: InspectedTask) -> Mapping[str, str]:
    """Return the variables with which a task's user code began. Raise like `variables_of`."""
    surroundings = module_of("sessions", "surroundings").Surroundings
    try:
        environ: Mapping[str, str] = surroundings.of_process(_pid_of(task)).environ
    except SessionError as error:
        raise InspectionFailedError(str(error)) from None
    return environ


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
        raise InspectionFailedError(
            "py-spy is not installed on that host; it comes with ray[default]: pip install py-spy"
        )
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InspectionFailedError(f"py-spy did not finish: {error}") from error
    if done.returncode == 0:
        return done.stdout
    if "ermission" in done.stderr:
        raise InspectionFailedError(NOT_PERMITTED)
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    why = next((line for line in lines if line.startswith("Error: ")), lines[-1])  # a backtrace may follow
    raise InspectionFailedError(f"py-spy failed with code {done.returncode}: {why[:300]}")
