"""What the tasks of a job print, line by line, while it runs or afterwards."""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from iris_ray.actors.host.output.line_throttle import LineThrottle
from iris_ray.actors.wire.status import JobStatus
from iris_ray.actors.wire.task_log import MOST_LOGS, LogPosition, TaskLog, printable
from iris_ray.client.job_words import job_in_words
from iris_ray.terminal import LiveLine

PIECE_BYTES = 1 << 20
BACKLOG_BYTES = 4 << 20
"""When several tasks are shown, one whose reader is further behind than this goes on near the end of its output."""
TAKEN_UP_BYTES = 64 << 10
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
FIRST_WORD_S, REPEAT_S = 2.0, 30.0
"""After how many seconds people are told for the first time why a job waits, and how often that is repeated."""


class LogSource(Protocol):
    """Those methods of `ControllerConnection` that following logs needs."""

    def job_status(self, job_id: str) -> JobStatus: ...

    def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog: ...

    def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]: ...


@dataclass(slots=True)
class LineSplitter:
    """Puts lines together from bytes that come in pieces."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Return the lines that are complete now, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return iter(lines)

    def rest(self) -> Iterator[bytes]:
        """Return what never got an end."""
        rest, self._rest = self._rest, b""
        return iter([rest] if rest else [])


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one task.

    Attributes:
        task_index, attempt: whose; a note about the whole job has no task.
        data: the line without its end, as it was printed.
        note: whether it is ours, about the log or why the job waits.
    """

    task_index: int | None
    attempt: int
    data: bytes
    note: bool = False


def stream_logs(
    controller: LogSource,
    job_id: str,
    task_index: int | None = None,
    *,
    attempt: int | None = None,
    tail_lines: int | None = None,
    follow: bool = True,
    live: LiveLine | None = None,
) -> Iterator[LogLine]:
    """Yield the lines of one task, or of all tasks of a job, from the beginning; and why it waits, if it is followed.

    One task's lines are all given. Those of several tasks are bounded in their rate, as on a driver's terminal.

    Args:
        controller: where to read them.
        job_id: the job.
        task_index: one task; None for all.
        attempt: this attempt alone; None for the latest and all that come after it.
        tail_lines: begin with the last lines, so many of each task.
        follow: go on until the job is over; otherwise until all that is there now has been given.
        live: shows how the job stands, and why it waits, if a terminal has it.

    Raises:
        UnknownNameError: there is no such job, task or attempt.
    """
    readers: dict[int, _TaskReader] = {}
    pause_s = SHORTEST_PAUSE_S
    next_word = time.monotonic() + FIRST_WORD_S
    if task_index is not None:
        controller.fetch_task_logs(job_id, task_index, LogPosition(attempt), 1)  # raises if there is no such task
    while True:
        status = controller.job_status(job_id)
        if live is not None:
            live.show(job_in_words(status))
        if status.waiting is None or (live is not None and live.live):
            next_word = time.monotonic() + FIRST_WORD_S
        elif follow and time.monotonic() >= next_word:
            next_word = time.monotonic() + REPEAT_S
            yield LogLine(None, status.attempt, str(status.waiting).encode(), True)
        count = sum(status.tasks.values())
        for index in range(count) if task_index is None else (task_index,):
            if index not in readers:
                shared_by = count if task_index is None else None
                readers[index] = _TaskReader(job_id, index, attempt, tail_lines, follow, shared_by)
        wanted = [reader for index, reader in readers.items() if not reader.done and index < count]
        came, left = False, []
        for start in range(0, len(wanted), MOST_LOGS):
            some = {reader.index: reader.position for reader in wanted[start : start + MOST_LOGS]}
            for index, log in controller.fetch_logs(job_id, some, PIECE_BYTES // len(some)).items():
                for line in readers[index].take(log, time.monotonic()):
                    came = True
                    yield line
                if not readers[index].done:
                    left.append(readers[index])
        if not left and (status.state.finished or not follow or attempt is not None):
            return
        if not any(reader.behind for reader in left):
            pause_s = SHORTEST_PAUSE_S if came else min(2 * pause_s, LONGEST_PAUSE_S)
            time.sleep(pause_s)


def print_logs(controller: LogSource, job_id: str, task_index: int | None, live: LiveLine) -> None:
    """Print what one task of a job prints, or with None what all its tasks print, until the job ends."""
    for line in stream_logs(controller, job_id, task_index, live=live):
        text = printable(line.data)
        if line.note:
            whose = job_id if line.task_index is None else f"{job_id} task {line.task_index}"
            print(f"{whose}: {text}", file=sys.stderr, flush=True)
        else:
            print(text if task_index is not None else f"task-{line.task_index}| {text}", flush=True)


@dataclass(slots=True)
class _TaskReader:
    """How far one task has been read.

    Attributes:
        shared_by: how many tasks' lines are shown; None if only this one's.
    """

    job_id: str
    index: int
    attempt: int | None
    tail_lines: int | None
    follow: bool
    shared_by: int | None
    done: bool = False
    behind: bool = False
    _offset: int = 0
    _only: bool = False
    _splitter: LineSplitter = field(default_factory=LineSplitter)
    _throttle: LineThrottle | None = None
    _said: str | None = None

    def __post_init__(self) -> None:
        self._only = self.attempt is not None

    @property
    def position(self) -> LogPosition:
        return LogPosition(self.attempt, self._offset, self.tail_lines)

    def take(self, log: TaskLog, now: float) -> Iterator[LogLine]:
        """Yield the lines that a piece completes."""
        self.behind = False
        if log.attempt == 0:
            self.done = log.job_finished or not self.follow
            if self.done:
                yield from self._note(log, log.note)
            return
        self.attempt = log.attempt
        if log.note and not log.from_host and self.follow and not log.finished:
            yield from self._note(log, f"{log.note.partition(';')[0]}; trying again")
            return
        yield from self._note(log, log.note)
        self.tail_lines, self._offset = None, log.next_offset
        yield from self._lines(log, log.data, now)
        self.behind = log.more
        if self.shared_by is not None and self.follow and log.end - self._offset > BACKLOG_BYTES:
            left_out = log.end - TAKEN_UP_BYTES - self._offset
            self._offset += left_out
            self._splitter = LineSplitter()
            yield self._ours(log, f"{left_out} bytes left out here; see iris-ray logs {self.job_id} {self.index}")
        elif not log.more and (log.finished or not self.follow):
            yield from self._end_of_attempt(log, now)

    def _end_of_attempt(self, log: TaskLog, now: float) -> Iterator[LogLine]:
        for rest in self._splitter.rest():
            yield from self._lines(log, rest + b"\n", now)
        if self._throttle is not None:
            yield from (LogLine(self.index, log.attempt, text.encode()) for text in self._throttle.flush(now))
        if log.attempt < log.latest_attempt and self.follow and not self._only:
            self.attempt, self._offset, self._said = log.attempt + 1, 0, None
            self._splitter, self.behind = LineSplitter(), True
            yield LogLine(self.index, self.attempt, f"attempt {self.attempt} of task {self.index}".encode(), True)
        else:
            self.done = log.job_finished or not self.follow or self._only

    def _lines(self, log: TaskLog, data: bytes, now: float) -> Iterator[LogLine]:
        if self.shared_by is None:
            yield from (LogLine(self.index, log.attempt, line) for line in self._splitter.feed(data))
            return
        if self._throttle is None:
            self._throttle = LineThrottle.for_task_of(self.shared_by, f"iris-ray logs {self.job_id} {self.index}")
        shown = self._throttle.feed(data, now) if data else self._throttle.flush(now)
        yield from (LogLine(self.index, log.attempt, text.encode()) for text in shown)

    def _note(self, log: TaskLog, note: str | None) -> Iterator[LogLine]:
        """Yield the note, unless it was the previous one, too."""
        if note and note != self._said:
            yield self._ours(log, note)
        self._said = note

    def _ours(self, log: TaskLog, text: str) -> LogLine:
        return LogLine(self.index, log.attempt, text.encode(), True)
