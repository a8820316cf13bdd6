"""`JobHandle`: one job that was submitted, as a future of its results."""

import concurrent.futures
import math
import time
from typing import Any

from ray.exceptions import RayTaskError

from iris_ray.actors.calls.controller_connection import RESTART_S
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.client.connection import current_user, this_connection
from iris_ray.client.job_progress import wait_visibly
from iris_ray.client.transport import Transport
from iris_ray.client.user_function import callers_error
from iris_ray.errors import InvalidRequestError, JobCancelledError, NoClusterError, UnknownNameError
from iris_ray.model.checks import Whole, require

SETTLED_S = 20.0
"""Seconds that the Controller may take to hear of a job's end after its results have come."""
_SETTLE_POLL_S = 0.1
_LOOK_S = 0.5
"""Seconds between checks that this process is in the cluster: Ray does not end a wait for results when it leaves."""


class JobHandle(concurrent.futures.Future[list[Any]]):
    """A job that was submitted: a `concurrent.futures.Future` of its tasks' results, by task index.

    Attributes:
        job_id: the job's name in the cluster.
    """

    def __init__(self, job_id: str, results: "concurrent.futures.Future[list[Any]]", transport: Transport) -> None:
        super().__init__()
        self.job_id = job_id
        self._transport = transport
        self._connection = this_connection()
        self.set_running_or_notify_cancel()
        results.add_done_callback(self._take)

    def _take(self, done: "concurrent.futures.Future[list[Any]]") -> None:
        if (error := done.exception()) is not None:
            self.set_exception(callers_error(error))
        else:
            self.set_result([_as_the_users(result) for result in done.result()])

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for the job's end, and return one result per task, by index.

        If the job succeeds though tasks failed, which ``max_task_failures`` allows, each missing result is an error.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: the job has not ended in time, and goes on.
            NoClusterError: this process has left the cluster meanwhile, so it can't get the results.
            ray.exceptions.RayTaskError: a task's own error, also an instance of the exception that it raised.
            JobCancelledError, JobUnschedulableError, PreemptedTooManyTimesError, TaskCrashedError, TaskSetupError:
                as for `run_on_pod`.
        """
        return self.result(timeout)

    def wait(
        self, timeout: float | None = None, *, stream_logs: bool = False, stream_task_index: int | None = None
    ) -> JobStatus:
        """Wait for the job's end, and return its status. A failure of the job is not raised.

        Meanwhile a terminal shows the job's status; elsewhere stderr says why it waits; with the URL of a dashboard,
        nothing is shown. If the Controller is stopped or replaced, this waits for the next one.

        Args:
            timeout: seconds after which to return anyway; None waits for ever.
            stream_logs: print what the tasks print, each line after its task (``task-3| …``), until the job ends.
            stream_task_index: print the whole output of this task alone.

        Raises:
            InvalidRequestError: the index is not a number, or there is a timeout for logs, which end with the job.
            ControllerUnavailableError: no Controller came back within 20 s after the end.
            NoClusterError: as for `results`.
            UnknownNameError: there is no such task.
        """
        if stream_logs or stream_task_index is not None:
            if timeout is not None:
                raise InvalidRequestError("logs are streamed until the job ends; leave timeout out, or the logs")
            if stream_task_index is not None:
                require("stream_task_index", stream_task_index, Whole())
            self._transport.show(module_of("logs", "client").print_logs_of, self.job_id, stream_task_index)
        self._wait_for_results(timeout, says_why=True)
        return self._settled_status()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return the results; like `results`."""
        self._wait_for_results(timeout, says_why=False)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the job's own error, or None. Raises like `results` if the results don't come, or not in time."""
        self._wait_for_results(timeout, says_why=False)
        return super().exception(0)

    def _wait_for_results(self, timeout: float | None, says_why: bool) -> None:
        """Wait for the results, at most for the timeout. A terminal shows the job's status if asking is quick."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout

        def over(seconds: float | None) -> bool:
            until = min(deadline, math.inf if seconds is None else time.monotonic() + seconds)
            while not self.done():
                self._require_connection()
                if (left := until - time.monotonic()) <= 0.0:
                    break
                concurrent.futures.wait([self], min(left, _LOOK_S))
            return self.done() or time.monotonic() >= deadline

        if self._transport.is_direct:
            wait_visibly(self.job_id, over, says_why)
        else:
            over(None)

    def _require_connection(self) -> None:
        """Raise NoClusterError if this process has left the cluster, even if it has joined it again."""
        if self._transport.is_direct and this_connection() != self._connection:
            raise NoClusterError(
                "this process has left the cluster (ray.shutdown, or the end of IrisClient.remote), so it can't get the"
                f" results of {self.job_id}. The job has ended with the connection, unless it is detached: iris-ray job"
                f" status {self.job_id}"
            )

    def _settled_status(self) -> JobStatus:
        """Return the job's status. If its results are here, give the Controller time to hear of its end."""
        status, settled_by = self.status(), time.monotonic() + SETTLED_S
        while self.done() and not status.state.finished and time.monotonic() < settled_by:
            time.sleep(_SETTLE_POLL_S)
            status = self.status()
        return status

    def status(self) -> JobStatus:
        """Return the job's status."""
        return self._transport.ask(RESTART_S, ControllerInterface.job_status, self.job_id)

    def cancelled(self) -> bool:
        """Return whether `result` raises JobCancelledError.

        The job was cancelled, ended with its group, or reached its ``max_runtime``.
        """
        return self.done() and isinstance(self.exception(), JobCancelledError)

    def cancel(self) -> bool:
        """End the job, whether it waits or runs; return whether it had not ended. Raises like `IrisClient.cancel`."""
        user = current_user()
        before = self._transport.ask(RESTART_S, ControllerInterface.cancel, self.job_id, f"cancelled by {user}", user)
        return not before.state.finished

    def __repr__(self) -> str:
        return f"<JobHandle {self.job_id}>"


def job_id_of(job: JobHandle | str) -> str:
    """Return the id of a job that is named by its handle or its id; any other value raises UnknownNameError."""
    if not isinstance(job, (JobHandle, str)):
        raise UnknownNameError(f"a job is named by its id or its handle, not by a {type(job).__name__}")
    return job if isinstance(job, str) else job.job_id


def _as_the_users(result: Any) -> Any:
    """Return a task's result. An error in its place becomes an instance of the user's exception as well."""
    return result.as_instanceof_cause() if isinstance(result, RayTaskError) else result
