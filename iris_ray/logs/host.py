"""Passes a task's output on: all of it to files on the host, some to the driver's terminal, last lines to the pool."""

import time
from collections.abc import Callable
from pathlib import Path

from iris_ray.actors.host.output import TellPool, terminal
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.host.services import HostPart
from iris_ray.logs.archive import LogCopier, copy_left
from iris_ray.logs.calls import LogCallsOfPool
from iris_ray.logs.core import LAST_BYTES, LastLines
from iris_ray.logs.files import AttemptLog, LogWriter, logs_directory, prune
from iris_ray.logs.throttle import LineThrottle
from iris_ray.settings import LOG_ARCHIVE

FLUSH_S = 0.5
"""The seconds without output after which an unfinished line or a count of repeats is shown."""


class LogsOnHost(HostPart):
    """Deletes old logs when a host's actor starts, and copies to the archive what actors before it have not."""

    async def started(self) -> None:
        logs, archive = logs_directory(self.host.directory()), LOG_ARCHIVE.read()
        await self.in_thread(prune, logs, time.time())
        if archive is not None:
            await self.in_thread(copy_left, logs, archive)


class TaskOutput:
    """The output of one attempt of a task, from its first byte to its last.

    Args:
        task: the task.
        directory: its host's directory.
        node_id: its host's id in Ray.
        tell_pool: calls the pool; the last lines of the task go there every few seconds while there are new ones.
    """

    def __init__(self, task: StartedTask, directory: Path, node_id: str, tell_pool: TellPool) -> None:
        self._logs = logs_directory(directory)
        log, archive = AttemptLog(self._logs, task.job_id, task.task_index, task.attempt), LOG_ARCHIVE.read()
        self._writer = LogWriter(log)
        self._copier = None if archive is None else LogCopier(log, archive)
        self._throttle = LineThrottle.for_task_of(task.num_tasks, f"iris-ray logs {task.job_id} {task.task_index}")
        self._last_lines = LastLinesReport(task, node_id, lambda last: tell_pool(LogCallsOfPool.take_last_lines, last))
        self._label = task.label
        terminal.begin(self._label)

    def take(self, data: bytes, is_stopped: bool) -> None:
        """Take output of the task.

        Args:
            data: the output.
            is_stopped: whether iris_ray is ending the task. Then the output goes to the file only: it is not the cause
                of the end, and a native stack of a hundred lines from each task would hide the cause.
        """
        problem = self._writer.problem
        now = time.time()
        if self._writer.write(data, now):
            prune(self._logs, now)
        if self._writer.problem != problem:
            self._show([f"iris_ray: this output can't be kept on its host: {self._writer.problem}"])
        self._last_lines.add(data, self._writer.end)
        if is_stopped:
            self._throttle.leave_out(data)
        else:
            self._show(self._throttle.feed(data, time.monotonic()))

    def pause(self) -> None:
        """Show the lines that were held back, because the task has printed nothing for a while."""
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
        self._writer.close()
        if self._copier is not None:
            self._copier.close()

    def _show(self, lines: list[str]) -> None:
        if lines:
            terminal.show(self._label, lines)


FIRST_REPORT_S, REPORT_S = 1.0, 5.0
"""Seconds from a task's start to its first report of last lines, and between two reports."""


class LastLinesReport:
    """Reports the last lines of one attempt of a task every few seconds, so that they outlive the task's host."""

    def __init__(self, task: StartedTask, node_id: str, report: Callable[[LastLines], None]) -> None:
        self._task = task
        self._node_id = node_id
        self._report = report
        self._last = b""
        self._end = self._reported_end = 0
        self._due_at = time.monotonic() + FIRST_REPORT_S

    def add(self, data: bytes, end: int) -> None:
        """Take output; ``end`` is how many bytes the task has printed in all."""
        self._last = (self._last + data[-LAST_BYTES:])[-LAST_BYTES:]
        self._end = end

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the next report; None if there is nothing new to report."""
        return None if self._end == self._reported_end else max(0.0, self._due_at - time.monotonic())

    def send_if_due(self) -> None:
        if self.due_in_s == 0.0:
            self.send()

    def send(self) -> None:
        """Report new output now, if there is any."""
        if self._end == self._reported_end:
            return
        task, self._reported_end = self._task, self._end
        self._report(LastLines(task.job_id, task.task_index, task.attempt, self._node_id, self._end, self._last))
        self._due_at = time.monotonic() + REPORT_S
