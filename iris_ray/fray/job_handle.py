"""A job of Fray's, by its id: from any process of the cluster, also one that did not submit it."""

import math
import time
from typing import TYPE_CHECKING

from iris_ray.actors.calls.controller_connection import RESTART_S, ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.actors.protocol.task_log import LogPosition
from iris_ray.client.connection import current_user
from iris_ray.model.lifecycle import JobState

if TYPE_CHECKING:
    from fray.types import JobStatus as FrayStatus

FIRST_POLL_S, LAST_POLL_S = 0.05, 1.0
MOST_LOG_BYTES = 1 << 20
"""Of one task."""

_NAMES = {
    JobState.PENDING: "PENDING",
    JobState.RUNNING: "RUNNING",
    JobState.SUCCEEDED: "SUCCEEDED",
    JobState.KILLED: "STOPPED",
    JobState.FAILED: "FAILED",
    JobState.WORKER_FAILED: "FAILED",
    JobState.UNSCHEDULABLE: "FAILED",
}
"""Fray knows fewer states."""


def fray_status(state: JobState) -> "FrayStatus":
    """Return a state as Fray calls it."""
    from fray.types import JobStatus as FrayStatus

    return FrayStatus[_NAMES[state]]


class JobHandle:
    """A job that was submitted, or found by its name. It can be pickled."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._end: JobStatus | None = None

    @property
    def job_id(self) -> str:
        """The job's name in the cluster; `iris-ray` and `IrisClient` take it, too."""
        return self._job_id

    def status(self) -> "FrayStatus":
        """Return how the job stands: pending, running, succeeded, failed or stopped."""
        return fray_status(self.look().state)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> "FrayStatus":
        """Wait for the job's end, and return how it stands then.

        Args:
            timeout: seconds; None waits for ever.
            raise_on_failure: whether anything but a success in time is an error. If not, the status says what it is.

        Raises:
            fray.client.JobFailed: it has failed, or was stopped; a note says why.
            TimeoutError: it goes on; the message says what it does or waits for.
        """
        status = self._wait(math.inf if timeout is None else timeout)
        if raise_on_failure and not status.state.finished:
            raise TimeoutError(f"job {self._job_id} has not ended within {timeout:g} s: {status.explanation}")
        if raise_on_failure and status.state is not JobState.SUCCEEDED:
            self._raise(status)
        return fray_status(status.state)

    def logs(self, max_lines: int = 0) -> tuple[str, ...]:
        """Return what the tasks have printed in their latest attempts, task by task, at most 1 MiB of each.

        Args:
            max_lines: the last lines of each task, so many in all; 0: all.
        """
        controller = ControllerConnection(patience_s=RESTART_S)
        tasks = [task.task_index for task in controller.ask_all(ControllerInterface.list_tasks, self._job_id)]
        each = max(1, max_lines // len(tasks)) if max_lines else None
        lines: list[str] = []
        for index in tasks:
            at = LogPosition(None, 0, each)
            log = controller.ask(ControllerInterface.fetch_task_logs, self._job_id, index, at, MOST_LOG_BYTES)
            lines += log.text.splitlines()
        return tuple(lines[-max_lines:])

    def terminate(self) -> None:
        """End the job, wherever it stands."""
        user = current_user()
        controller = ControllerConnection(patience_s=RESTART_S)
        controller.ask(ControllerInterface.cancel, self._job_id, f"terminated by {user}", user)

    def look(self) -> JobStatus:
        """Return how the job stands, in full."""
        if self._end is not None:
            return self._end
        status = ControllerConnection(patience_s=RESTART_S).ask(ControllerInterface.job_status, self._job_id)
        if status.state.finished:
            self._end = status  # the Controller may forget it
        return status

    def _wait(self, timeout: float) -> JobStatus:
        deadline, pause = time.monotonic() + timeout, FIRST_POLL_S
        while not (status := self.look()).state.finished and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, LAST_POLL_S)
        return status

    def _raise(self, status: JobStatus) -> None:
        from fray.client import JobFailed

        failed = JobFailed(self._job_id, fray_status(status.state))
        failed.add_note(status.error or status.state.value)
        raise failed

    def __repr__(self) -> str:
        return f"<JobHandle {self._job_id}>"
