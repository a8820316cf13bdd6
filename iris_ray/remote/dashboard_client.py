"""An `IrisClient` for machines that reach nothing of a cluster but its dashboard: it has the head make its calls."""

import atexit
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.client.client import IrisClient, launch
from iris_ray.client.connection import require_workspace
from iris_ray.client.job_handle import JobHandle, job_id_of
from iris_ray.client.job_progress import say_if_it_runs_once
from iris_ray.errors import InvalidRequestError, IrisError
from iris_ray.logs.client import print_logs_of
from iris_ray.remote.cluster_call import ClusterCall, send_call
from iris_ray.remote.ray_jobs import RayJobs

LONG_PATIENCE_S = 3600.0
"""Seconds for which the dashboard may be silent while this process waits for results: a laptop sleeps for a while."""


def _on_the_head(name: str) -> Any:
    """Return a method that has the head call this method of its own `IrisClient`."""

    @functools.wraps(getattr(IrisClient, name))
    def method(self: "DashboardClient", *args: Any, **kwargs: Any) -> Any:
        named = {key: _as_id(value) for key, value in kwargs.items()}
        return self.call(name.replace("_", "-"), _ask, name, tuple(map(_as_id, args)), named).answer()

    return method


class DashboardClient(IrisClient):
    """The client that ``IrisClient.remote("http://10.0.0.2:8265")`` returns.

    Each method takes some seconds, as a process starts on the head for it.

    Args:
        address: of the dashboard.
        workspace: a directory that travels with each job, or None.

    Raises:
        NoClusterError, TokenRefusedError, VersionMismatchError: as for `RayJobs`.
        InvalidRequestError: the address or the workspace makes no sense.
    """

    def __init__(self, address: str, workspace: Path | str | None = None) -> None:
        if workspace is not None:
            require_workspace(workspace)
        self._workspace = workspace
        self._jobs = RayJobs(address)
        self._at_the_end = contextlib.ExitStack()
        atexit.register(self.close)

    def call(self, name: str, function: Any, *arguments: Any, workspace: Path | str | None = None) -> ClusterCall:
        """Have the head call a function; see `send_call`."""
        return send_call(self._jobs, name, function, *arguments, workspace=workspace)

    def _launch(self, request: RunRequest, detached: bool) -> JobHandle:
        if given := [name for name, one in request.secrets.items() if one.value]:
            raise InvalidRequestError(
                f"the value of {given[0]} would go through Ray's job API, which keeps what it is given; have an"
                f" operator set it in the cluster's store (iris-ray cluster secrets set {given[0]}), and give"
                f' Secret.from_store("{given[0]}")'
            )
        say_if_it_runs_once(request.spec)
        call = self.call(request.spec.name, _launch, request, detached, workspace=self._workspace)
        handle = DashboardJobHandle(request.spec.job_id, self, call)
        try:
            call.answer()
        except BaseException as error:
            handle.end()
            if detached and isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(IrisError):  # most often it is not in the queue yet
                    self.cancel(request.spec.job_id)
            raise
        if not detached:
            self._at_the_end.callback(handle.end)
        handle.begin()
        return handle


HERE = {"submit", "submit_group", "run", "explain", "close", "remote", "local"}
"""The methods of `IrisClient` that use the others, or that need no cluster. Every other one is called on the head."""

for _name in vars(IrisClient):
    if not _name.startswith("_") and _name not in HERE:
        setattr(DashboardClient, _name, _on_the_head(_name))


class DashboardJobHandle(JobHandle):
    """A job that a process on the head has submitted for this one, and whose results it sends.

    Args:
        job_id: the job's name in the cluster.
        client: asks about the job.
        call: the call whose second answer are the results.
    """

    def __init__(self, job_id: str, client: DashboardClient, call: ClusterCall) -> None:
        concurrent.futures.Future.__init__(self)
        self.job_id = job_id
        self._client, self._call = client, call
        self.set_running_or_notify_cancel()

    def begin(self) -> None:
        """Begin to wait for the results, in a thread."""
        threading.Thread(target=self._receive, name=self.job_id, daemon=True).start()

    def end(self) -> None:
        """End the process on the head unless the results are here. A job that is not detached ends with it."""
        if not self.done():
            with contextlib.suppress(IrisError):  # there is nobody to tell
                self._client._jobs.stop(self._call.run_id)

    def _receive(self) -> None:
        try:
            self.set_result(self._call.answer(1, LONG_PATIENCE_S))
        except BaseException as error:
            self.set_exception(error)

    def _print_logs(self, task_index: int | None) -> None:
        call = self._client.call("logs", print_logs_of, self.job_id, task_index)
        call.print_output()
        call.answer()

    def _wait_for_results(self, timeout: float | None, says_why: bool) -> None:
        concurrent.futures.wait([self], timeout)

    def status(self) -> JobStatus:
        return self._client.job_status(self.job_id)

    def cancel(self) -> bool:
        before: JobStatus = self._client.cancel(self.job_id)
        return not before.state.finished


def _as_id(value: Any) -> Any:
    return job_id_of(value) if isinstance(value, JobHandle) else value


# -- on the head -------------------------------------------------------------------------------------------------------


def _ask(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(IrisClient(), name)(*args, **kwargs)


def _launch(request: RunRequest, detached: bool) -> Iterator[Any]:
    """Submit a job; yield None when the Controller has it, and then its results."""
    job = launch(request, detached)
    yield None
    yield job.results()
