"""`Client`: Fray's interface to jobs, on a Ray cluster."""

import threading
from typing import TYPE_CHECKING

from iris_ray.actors.wire.controller_connection import RESTART_S, ControllerConnection, find_controller
from iris_ray.client.client import IrisClient, launch, require_may_detach
from iris_ray.client.identity import current_user
from iris_ray.fray.current import require_fray
from iris_ray.fray.job_handle import JobHandle
from iris_ray.fray.job_request import fray_request
from iris_ray.task.job_info import get_job_info

if TYPE_CHECKING:
    from fray.types import JobRequest

_submitting = threading.Lock()
"""Two threads that submit the same job would not see each other's."""


class Client:
    """Fray's client, for ``fray.current_client.set_current_client``. Tasks of its jobs have it as the current one, too.

    Args:
        iris: the way to the cluster; ``IrisClient.remote(address)`` from outside of it. None: the cluster that this
            process runs in.
        detached: its jobs go on when this process ends. Not for what a task submits, which ends with that task.

    Raises:
        FrayMissingError: Fray is not installed here.
        NoClusterError: there is no cluster to connect to.
        InvalidRequestError: ``detached`` in a task.
    """

    def __init__(self, iris: IrisClient | None = None, *, detached: bool = False) -> None:
        require_fray()
        if detached:
            require_may_detach()
        self._iris = IrisClient() if iris is None else iris
        self._detached = detached
        self._jobs: list[JobHandle] = []

    def submit(self, request: "JobRequest", adopt_existing: bool = True) -> JobHandle:
        """Put a job into the cluster's queue; returns as soon as it is there.

        A name counts for one user, and in one job: what a task submits has names of its own. A name is free again when
        its job has ended.

        Args:
            request: the job.
            adopt_existing: if such a job has not ended, return that, whichever process submitted it.

        Raises:
            fray.client.JobAlreadyExists: there is one, and ``adopt_existing`` is False; the error has its handle.
            InvalidRequestError: something can't work as written; nothing was acquired.
            UnsupportedOptionError: something that iris_ray does not do; an InvalidRequestError, too.
        """
        made = fray_request(request)
        with _submitting:
            if (job_id := unfinished_job(request.name)) is None:
                self._jobs.append(JobHandle(launch(made, self._detached).job_id))
                return self._jobs[-1]
        if adopt_existing:
            return JobHandle(job_id)
        from fray.client import JobAlreadyExists

        raise JobAlreadyExists(request.name, JobHandle(job_id))

    def shutdown(self, wait: bool = True) -> None:
        """Leave it at that. Jobs that are not detached end with this process.

        Args:
            wait: for the ends of the jobs that this client has submitted.
        """
        for job in self._jobs if wait else ():
            job.wait(raise_on_failure=False)
        self._jobs.clear()


def unfinished_job(name: str) -> str | None:
    """Return the id of the newest job of that name that has not ended, of this user, and of this job if in a task."""
    if find_controller() is None:
        return None  # no job has needed one yet
    user, me = current_user(), get_job_info()
    parent = me.job_id if me else ""
    for job in reversed(ControllerConnection(patience_s=RESTART_S).list_jobs()):
        known = (job.name, job.user, job.job_id.rpartition("/")[0])
        if known == (name, user, parent) and not job.state.finished:
            return job.job_id
    return None
