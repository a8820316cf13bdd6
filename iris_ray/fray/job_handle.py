"""A handle of a job of Fray's, by the job's id. It works in every process of the cluster."""

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
"""Bytes of one task's log that `JobHandle.logs` reads."""

_NAMES = {
    JobState.PENDING: "PENDING",
    JobState.RUNNING: "RUNNING",
    JobState.SUCCEEDED: "SUCCEEDED",
    JobState.KILLED: "STOPPED",
    JobState.FAILED: "FAILED",
    JobState.WORKER_FAILED: "FAILED",
    JobState.UNSCHEDULABLE: "FAILED",
}
"""Our states as Fray's, which are fewer."""


def fray_status(state: JobState) -> "FrayStatus":
    """Return Fray's name of a state."""
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
        """Return the job's state: pending, running, succeeded, failed or stopped."""
        return fray_status(self.look().state)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> "FrayStatus":
        """Wait for the job's end, and return its state.

        Args:
            timeout: seconds; None waits for ever.
            raise_on_failure: whether to raise the errors below; if not, the returned state tells.

        Raises:
            fray.client.JobFailed: the job has failed, or was stopped; a note says why.
            TimeoutError: the job goes on; the message says what it does or waits for.
        """
        status = self._wait(math.inf if timeout is None else timeout)
        if raise_on_failure and not status.state.finished:
            raise TimeoutError(f"job {self._job_id} has not ended within {timeout:g} s: {status.explanation}")
        if raise_on_failure and status.state is not JobState.SUCCEEDED:
            self._raise(status)
        return fray_status(status.state)

    def logs(self, max_lines: int = 0) -> tuple[str, ...]:
        """Return the output of the tasks' latest attempts, task by task, at most 1 MiB of each.

        Args:
            max_lines: the number of lines in all, the last ones of each task; 0: all lines.
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
        """End the job, whatever its state."""
        user = current_user()
        controller = ControllerConnection(patience_s=RESTART_S)
        controller.ask(ControllerInterface.cancel, self._job_id, f"terminated by {user}", user)

    def look(self) -> JobStatus:
        """Return the job's full status."""
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
