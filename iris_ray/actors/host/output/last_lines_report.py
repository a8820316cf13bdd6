"""Reports the last lines of a task's output every few seconds, so that they outlive the task's host."""

import time
from collections import deque
from collections.abc import Callable

from iris_ray.actors.host.output.started_task import StartedTask
from iris_ray.actors.wire.task_log import LastLines

LAST_BYTES = 4096
FIRST_REPORT_S, REPORT_S = 1.0, 5.0
"""Seconds from a task's start to its first report, and between two reports; there is none without new output."""


class LastBytes:
    """The last bytes of a stream, `LAST_BYTES` at most. Holds less than twice as much in memory."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        self._pieces.append(data[-LAST_BYTES:])
        self._size += len(self._pieces[-1])
        while self._size - len(self._pieces[0]) >= LAST_BYTES:
            self._size -= len(self._pieces.popleft())

    @property
    def held(self) -> int:
        """How many bytes are in memory."""
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)[-LAST_BYTES:]


class LastLinesReport:
    """Reports the last lines of one attempt of a task.

    Args:
        task: the task.
        node_id: its host's id in Ray.
        report: takes each report.
    """

    def __init__(self, task: StartedTask, node_id: str, report: Callable[[LastLines], None]) -> None:
        self._task = task
        self._node_id = node_id
        self._report = report
        self._last = LastBytes()
        self._end = self._reported_end = 0
        self._due_at = time.monotonic() + FIRST_REPORT_S

    def add(self, data: bytes, end: int) -> None:
        """Take what was printed last.

        Args:
            data: the bytes.
            end: how many bytes the task has printed in all.
        """
        self._last.add(data)
        self._end = end

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the next report; None if there is nothing new to report."""
        return None if self._end == self._reported_end else max(0.0, self._due_at - time.monotonic())

    def send_if_due(self) -> None:
        """Report new output, if it is time for that."""
        if self.due_in_s == 0.0:
            self.send()

    def send(self) -> None:
        """Report new output now, if there is any."""
        if self._end == self._reported_end:
            return
        task, self._reported_end = self._task, self._end
        self._report(LastLines(task.job_id, task.task_index, task.attempt, self._node_id, self._end, bytes(self._last)))
        self._due_at = time.monotonic() + REPORT_S
