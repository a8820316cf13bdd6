"""Gives each task its output directory, just before user code."""

import atexit
import os

from iris_ray.actors.protocol.task_files import OUTPUT_DIR, TaskFiles
from iris_ray.model.job_info import job_info_of
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.directory import OutputDirectory, outputs_directory


def give_output_directory(files: TaskFiles) -> None:
    """Create this task's output directory, and name it in its variable.

    Raises:
        OSError: it can't be created. User code learns it when it writes there.
    """
    info = job_info_of(os.environ)
    assert info is not None, "called in a task"
    attempt = TaskAttemptId(info.job_id, info.task_index, info.attempt)
    directory = OutputDirectory.of(outputs_directory(files.host_directory), attempt)
    os.environ[OUTPUT_DIR] = str(directory.path)
    directory.create()
    atexit.register(_remove_if_unused, directory, os.getpid())


def _remove_if_unused(directory: OutputDirectory, task: int) -> None:
    """Leave no directory behind that was never used; a process that the task has forked has no say in that."""
    if os.getpid() == task:
        directory.remove_if_unused()
