"""Where a task's output goes: into files on its host, in part to the driver's terminal, as last lines to the pool."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from iris_ray.actors.host.output.last_lines_report import LastLinesReport
from iris_ray.actors.host.output.line_throttle import LineThrottle
from iris_ray.actors.host.output.log_files import AttemptLog, logs_directory
from iris_ray.actors.host.output.log_retention import prune
from iris_ray.actors.host.output.log_writer import LogWriter
from iris_ray.actors.host.output.started_task import StartedTask
from iris_ray.actors.wire.ray_internals import label_output
from iris_ray.actors.wire.task_log import LastLines

FLUSH_S = 0.5
"""After so many seconds without output, a line without an end, or a count of repeats, is shown."""


class TaskOutput:
    """The output of one attempt of a task, from its first byte to its last.

    Args:
        task: the task.
        directory: its host's directory.
        node_id: its host's id in Ray.
        report: takes the last lines, every few seconds while there are new ones.
    """

    def __init__(self, task: StartedTask, directory: Path, node_id: str, report: Callable[[LastLines], None]) -> None:
        self._logs = logs_directory(directory)
        self._writer = LogWriter(AttemptLog(self._logs, task.job_id, task.task_index, task.attempt))
        self._throttle = LineThrottle.for_task_of(task.num_tasks, f"iris-ray logs {task.job_id} {task.task_index}")
        self._last_lines = LastLinesReport(task, node_id, report)
        with contextlib.suppress(OSError):  # the disk with Ray's logs is full; the host's directory may be on another
            label_output(task.label, stderr=False)

    def take(self, data: bytes, is_stopped: bool) -> None:
        """Take what the task has printed.

        Args:
            data: the bytes.
            is_stopped: whether iris_ray was ending the task by then. What it still says is not the cause, and a native
                stack of a hundred lines from each task would hide the cause: it goes to the file only.
        """
        problem = self._writer.problem
        if self._writer.write(data):
            prune(self._logs, time.time())
        if self._writer.problem != problem:
            _show([f"iris_ray: this output can't be kept on its host: {self._writer.problem}"])
        self._last_lines.add(data, self._writer.end)
        if is_stopped:
            self._throttle.leave_out(data)
        else:
            _show(self._throttle.feed(data, time.monotonic()))

    def pause(self) -> None:
        """Show what is held back, because the task has printed nothing for a while."""
        _show(self._throttle.flush(time.monotonic()))

    def report_if_due(self) -> None:
        self._last_lines.send_if_due()

    @property
    def patience_s(self) -> float | None:
        """How long to wait for output before `pause` or `report_if_due` has something to do; None: for ever."""
        return FLUSH_S if self._throttle.holds_something else self._last_lines.due_in_s

    def end(self) -> None:
        """Show and report the rest. A task that printed nothing gets an empty file."""
        self._writer.begin()
        self.pause()
        self._last_lines.send()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _show(lines: list[str]) -> None:
    """Print lines on this process's stdout, from where Ray brings them to the driver's terminal."""
    if lines:
        with contextlib.suppress(OSError):  # the disk is full; the task must not stop because of that
            print("\n".join(lines), flush=True)
