"""Where a task's output goes: into files on its host, in part to the driver's terminal, as last lines to the pool."""

import contextlib
import threading
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
        self._label = task.label
        _terminal.begin(self._label)

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
            self._show([f"iris_ray: this output can't be kept on its host: {self._writer.problem}"])
        self._last_lines.add(data, self._writer.end)
        if is_stopped:
            self._throttle.leave_out(data)
        else:
            self._show(self._throttle.feed(data, time.monotonic()))

    def pause(self) -> None:
        """Show what is held back, because the task has printed nothing for a while."""
        self._show(self._throttle.flush(time.monotonic()))

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

    def _show(self, lines: list[str]) -> None:
        if lines:
            _terminal.show(self._label, lines)


class _Terminal:
    """The driver's terminal: Ray brings there what this process prints. Tasks without chips share it on their host.

    A full disk with Ray's logs stops no task; the host's directory may be on another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._label: str | None = None  # of what is printed now

    def begin(self, label: str) -> None:
        """Mark what is printed from now on as one task's."""
        with self._lock, contextlib.suppress(OSError):
            self._mark(label)

    def show(self, label: str, lines: list[str]) -> None:
        """Print lines of a task under its label."""
        with self._lock, contextlib.suppress(OSError):
            if label != self._label:
                self._mark(label)
            print("\n".join(lines), flush=True)

    def _mark(self, label: str) -> None:
        self._label = None
        label_output(label, stderr=False)
        self._label = label


_terminal = _Terminal()
