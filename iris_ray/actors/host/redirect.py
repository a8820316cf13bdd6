"""Redirects the output of the task's process and its children into the FIFO that its TPUHostActor reads."""

import contextlib
import dataclasses
import fcntl
import json
import os
import struct
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from psutil import pid_exists

from iris_ray.actors.protocol.task_files import TaskFiles

if TYPE_CHECKING:  # it imports Ray, and a pod that ends looks for tasks without
    from iris_ray.actors.protocol.messages import TaskLaunch

DRAINED_S = 2.0
DRAINED_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class StartedTask:
    """The mark that a task process writes when user code begins. It tells the host which task prints.

    Attributes:
        num_tasks: how many tasks its job has.
        label: marks the task's output in the driver's terminal.
    """

    job_id: str
    task_index: int
    attempt: int
    num_tasks: int
    label: str

    def write(self, files: TaskFiles) -> None:
        """Write the mark among the files of the task's process."""
        files.started.parent.mkdir(mode=0o700, exist_ok=True)
        files.started.write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def read(files: TaskFiles) -> "StartedTask | None":
        """Return the task that runs in a process; None if none has started, or the mark is not complete yet."""
        try:
            return StartedTask(**json.loads(files.started.read_text()))
        except (OSError, ValueError):
            return None


def started_tasks(directory: Path) -> dict[int, StartedTask]:
    """Return the tasks that run on a host, by the pid of their process.

    Args:
        directory: iris_ray's directory there.

    Raises:
        PermissionError: it belongs to another user.
    """
    try:
        marks = [name for name in os.listdir(directory / "tasks") if name.endswith(".started")]
    except FileNotFoundError:  # no task has ever run there
        return {}
    pids = [int(pid) for name in marks if (pid := name.removesuffix(".started")).isdecimal() and pid_exists(int(pid))]
    found = {pid: StartedTask.read(TaskFiles.of_process(directory, pid)) for pid in pids}
    return {pid: task for pid, task in found.items() if task is not None}


def redirect_output(directory: Path, launch: "TaskLaunch") -> int | None:
    """Write the mark of the task's start, and redirect stdout and stderr of this process and its children.

    Returns:
        A descriptor of the FIFO; None if no process reads the FIFO. Then nothing is redirected.
    """
    info = launch.info
    task = StartedTask(info.job_id, info.task_index, info.attempt, info.num_tasks, launch.label)
    files = TaskFiles.of_process(directory, os.getpid())
    task.write(files)
    try:
        pipe = os.open(files.output, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    os.set_blocking(pipe, True)
    for stream in (1, 2):
        os.dup2(pipe, stream)
    return pipe


def wait_until_drained(pipe: int, timeout_s: float = DRAINED_S) -> None:
    """Wait until everything in the FIFO has been read, for ``timeout_s`` seconds at most."""
    deadline = time.monotonic() + timeout_s
    while _unread_bytes(pipe) and time.monotonic() < deadline:
        time.sleep(DRAINED_POLL_S)


def _unread_bytes(pipe: int) -> int:
    with contextlib.suppress(OSError):
        size: int = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0]
        return size
    return 0
