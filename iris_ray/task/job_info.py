"""The calling task's place in its gang."""

import os
from collections.abc import Mapping

from iris_ray.model.job_info import JobInfo, job_info_of


def get_job_info(environ: Mapping[str, str] = os.environ) -> JobInfo | None:
    """Return the calling task's place in its gang, or None outside a task.

    Raises:
        InvalidRequestError: ``IRIS_TASK_ID`` is set, but not all other ``IRIS_…`` variables of the task, as in a child
            process that got a part of the environment.

    Example::

        info = get_job_info()
        shard = shards[info.task_index :: info.num_tasks]
    """
    return job_info_of(environ)
