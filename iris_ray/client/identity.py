"""Who submits a job, and what the job is called."""

import getpass
import os
import secrets

from iris_ray import settings
from iris_ray.task.job_info import get_job_info


def current_user() -> str:
    """Return who this process works for: ``$IRIS_USER``, or the name of the operating system's account."""
    try:
        return settings.USER.read() or getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as containers have them
        return str(os.getuid())


def new_job_id(name: str) -> str:
    """Return an id that no job had before. The id of a job that a task submits begins with its own job's id and "/"."""
    parent = get_job_info()
    own = f"{name.replace('/', '-')}-{secrets.token_hex(4)}"
    return f"{parent.job_id}/{own}" if parent else own
