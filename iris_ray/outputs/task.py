"""Gives each task its output directory, just before user code."""

import logging

from iris_ray.actors.protocol.task_files import OUTPUT_DIR, TaskFiles
from iris_ray.model.job_info import JobInfo
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.directory import OutputDirectory, outputs_directory

logger = logging.getLogger(__name__)


def output_variable(files: TaskFiles, info: JobInfo) -> dict[str, str]:
    """Create a task's output directory, and return the variable that names it.

    If it can't be created, as on a full disk, user code learns that when it writes there.
    """
    attempt = TaskAttemptId(info.job_id, info.task_index, info.attempt)
    directory = OutputDirectory.of(outputs_directory(files.host_directory), attempt)
    try:
        directory.create()
    except OSError as error:
        logger.warning("the output directory of this task can't be created: %s", error)
    return {OUTPUT_DIR: str(directory.path)}
