"""A handle of a job of Fray's, by the job's id. It works in every process of the cluster."""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from iris_ray.actors.protocol.status import JobStatus, TaskStatus
from iris_ray.client.client import IrisClient
from iris_ray.errors import IrisError
from iris_ray.model.lifecycle import JobState, TaskState

if TYPE_CHECKING:
    from fray.types import JobStatus as FrayStatus

FIRST_POLL_S, LAST_POLL_S = 0.05, 1.0
MOST_LOG_BYTES = 1 << 20
"""Bytes of one task's log that `JobHandle.logs` reads."""
TRACEBACK_LINES = 200
"""Lines at the end of a failed task's log among which its traceback is looked for."""
_TRACEBACK, _CHAINED = "Traceback (most recent call last):", (" exception occurred:", " of the following exception:")


def fray_status(state: JobState) -> "FrayStatus":
    """Return Fray's name of a state. Fray has one name for all failures."""
    from fray.types import JobStatus as FrayStatus

    if state in (JobState.PENDING, JobState.RUNNING, JobState.SUCCEEDED):
        return FrayStatus[state.name]
    return FrayStatus.STOPPED if state is JobState.KILLED else FrayStatus.FAILED


def last_traceback(lines: Sequence[str]) -> list[str]:
    """Return the lines from the last traceback on, its causes included; none if there is no traceback."""
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    while len(starts) > 1 and any(line.endswith(_CHAINED) for line in lines[starts[-1] - 2 : starts[-1]]):
        starts.pop()
    return list(lines[starts[-1] :]) if starts else []


class JobHandle:
    """A job that was submitted, or found by its name. It can be pickled."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._end: JobStatus | None = None

    @property
    def job_id(self) -> str:
        """The job's name in the cluster, also for `iris-ray` and `IrisClient`."""
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
            fray.client.JobFailed: the job has failed, or was stopped; a note says why, with the traceback of the task
                that failed first if its log can be read.
            TimeoutError: the job goes on; the message says what it does or waits for.
        """
        status = self._wait(math.inf if timeout is None else timeout)
        if raise_on_failure and not status.state.finished:
            raise TimeoutError(f"job {self._job_id} has not ended within {timeout:g} s: {status.explanation}")
        if raise_on_failure and status.state is not JobState.SUCCEEDED:
            self._raise(status)
        return fray_status(status.state)

    def logs(self, max_lines: int = 0) -> tuple[str, ...]:
        """Return the output of the tasks' latest attempts, task by task.

        Args:
            max_lines: the number of lines in all, the last ones of each task; 0: the first 1 MiB of each task.
        """
        tasks = self.tasks()
        each = max(1, max_lines // len(tasks)) if max_lines else None
        lines = [line for task in tasks for line in self._log(task.task_index, None, each)]
        return tuple(lines[-max_lines:])

    def terminate(self) -> None:
        """End the job, whatever its state."""
        IrisClient().cancel(self._job_id)

    def tasks(self) -> list[TaskStatus]:
        """Return the full status of all tasks."""
        return IrisClient().list_tasks(self._job_id)

    def look(self) -> JobStatus:
        """Return the job's full status."""
        if self._end is not None:
            return self._end
        status = IrisClient().job_status(self._job_id)
        if status.state.finished:
            self._end = status  # the Controller may forget it
        return status

    def _log(self, task_index: int, attempt: int | None, tail_lines: int | None) -> list[str]:
        log = IrisClient().fetch_task_logs(
            self._job_id, task_index, attempt, max_bytes=MOST_LOG_BYTES, tail_lines=tail_lines
        )
        return log.text.splitlines()

    def _wait(self, timeout: float) -> JobStatus:
        deadline, pause = time.monotonic() + timeout, FIRST_POLL_S
        while not (status := self.look()).state.finished and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, LAST_POLL_S)
        return status

    def _raise(self, status: JobStatus) -> None:
        from fray.client import JobFailed

        failed = JobFailed(self._job_id, fray_status(status.state))
        failed.add_note("\n".join((status.error or status.state.value, *self._traceback())))
        raise failed

    def _traceback(self) -> list[str]:
        """Return the traceback of the task that failed first, from its log; nothing without one."""
        try:
            failed = [task for task in self.tasks() if task.state is TaskState.FAILED]
            first = min(failed, key=lambda task: task.ended_at or math.inf)
            return last_traceback(self._log(first.task_index, first.attempt, TRACEBACK_LINES))
        except (IrisError, ValueError):
            return []  # the job is forgotten, or no task of it has failed

    def __repr__(self) -> str:
        return f"<JobHandle {self._job_id}>"
