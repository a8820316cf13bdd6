"""Streams the output of a job's tasks line by line, while it runs or afterwards."""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from iris_ray.actors.protocol.status import JobStatus
from iris_ray.client.job_progress import job_in_words
from iris_ray.logs.core import MOST_LOGS, LogPosition, TaskLog
from iris_ray.logs.throttle import LineThrottle
from iris_ray.logs.times import take_lines
from iris_ray.terminal import LiveLine, print_line

PIECE_BYTES = 1 << 20
BACKLOG_BYTES = 4 << 20
"""With several tasks, a reader that is further behind than this skips to near the end of its task's output."""
TAKEN_UP_BYTES = 64 << 10
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
FIRST_WORD_S, REPEAT_S = 2.0, 30.0
"""Seconds until people are first told why a job waits, and between repetitions."""


FROM_THE_BEGINNING: Final = LogPosition()


class LogSource(Protocol):
    """The questions that following logs asks, as `HostLogs` answers them."""

    def job_status(self, job_id: str) -> JobStatus: ...

    def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog: ...

    def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]: ...


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one task.

    Attributes:
        task_index, attempt: the task and its attempt; a note about the whole job has no task.
        data: the line as it was printed, without its end.
        note: whether iris_ray says it, about the log or why the job waits.
        time: when its end came, in seconds since the epoch; None: it is not known, or was not asked for.
    """

    task_index: int | None
    attempt: int
    data: bytes
    note: bool = False
    time: float | None = None


def stream_logs(
    controller: LogSource,
    job_id: str,
    task_index: int | None = None,
    first: LogPosition = FROM_THE_BEGINNING,
    *,
    follow: bool = True,
    every_attempt: bool = False,
    live: LiveLine | None = None,
) -> Iterator[LogLine]:
    """Yield the lines of one task, or of all tasks of a job, from the beginning; if followed, also why the job waits.

    All lines of a single task are given. The rate of several tasks is limited, as on a driver's terminal.

    Args:
        controller: the source of the output.
        job_id: the job.
        task_index: one task; None for all.
        first: where each task's output begins. If it names an attempt, that attempt alone is read; otherwise the latest
            and all later ones. Of a task that has not been placed yet, all attempts are later ones.
        follow: go on until the job is over; otherwise end with the output that there is now.
        every_attempt: begin with the first attempt instead of the latest; for a follower from the job's submission.
        live: shows the job's status, if it is a line of a terminal.

    Raises:
        UnknownNameError: there is no such job, task or attempt.
    """
    attempt = first.attempt
    reader = _JobReader(controller, job_id, task_index, first, follow, every_attempt)
    word = _WaitingWord()
    pause_s = SHORTEST_PAUSE_S
    if task_index is not None:
        controller.fetch_task_logs(job_id, task_index, LogPosition(attempt), 1)  # raises if there is no such task
    while True:
        status = controller.job_status(job_id)
        if live is not None:
            live.show(job_in_words(status))
        waits_unseen = status.waiting is not None and not (live is not None and live.live)
        if follow and word.is_due(waits_unseen):
            yield LogLine(None, status.attempt, str(status.waiting).encode(), True)
        came = False
        for line in reader.read(sum(status.tasks.values()) * status.processes_per_host):
            came = True
            yield line
        if not reader.left and (status.state.finished or not follow or attempt is not None):
            return
        if not reader.is_behind:
            pause_s = SHORTEST_PAUSE_S if came else min(2 * pause_s, LONGEST_PAUSE_S)
            time.sleep(pause_s)


def print_logs(controller: LogSource, job_id: str, task_index: int | None, live: LiveLine) -> None:
    """Print the output of one task of a job, or with None of all its tasks, from its beginning to the job's end."""
    for line in stream_logs(controller, job_id, task_index, every_attempt=True, live=live):
        if line.note:
            whose = job_id if line.task_index is None else f"{job_id} task {line.task_index}"
            print_line(f"{whose}: ".encode() + line.data, sys.stderr)
        else:
            print_line((b"" if task_index is not None else f"task-{line.task_index}| ".encode()) + line.data)


@dataclass(slots=True)
class _WaitingWord:
    """Decides when people are told why a job waits: after a moment, and then repeatedly."""

    _next_at: float = field(default_factory=lambda: time.monotonic() + FIRST_WORD_S)

    def is_due(self, waits_unseen: bool) -> bool:
        """Return whether people are told now.

        Args:
            waits_unseen: whether the job waits and no terminal shows it; if not, the moment begins anew.
        """
        now = time.monotonic()
        if not waits_unseen:
            self._next_at = now + FIRST_WORD_S
            return False
        if now < self._next_at:
            return False
        self._next_at = now + REPEAT_S
        return True


@dataclass(slots=True)
class _JobReader:
    """Reads the tasks of a job that are shown.

    Attributes:
        task_index: one task; None for all.
        first: where the reading of each task begins.
        left: readers of the tasks that were read last and may print more.
    """

    controller: LogSource
    job_id: str
    task_index: int | None
    first: LogPosition
    follow: bool
    every_attempt: bool
    left: list["_TaskReader"] = field(default_factory=list)
    _readers: dict[int, "_TaskReader"] = field(default_factory=dict)

    @property
    def is_behind(self) -> bool:
        return any(reader.behind for reader in self.left)

    def read(self, count: int) -> Iterator[LogLine]:
        """Yield the unread lines of a job with this number of tasks."""
        self._begin(count)
        self.left = []
        wanted = [reader for index, reader in self._readers.items() if not reader.done and index < count]
        for start in range(0, len(wanted), MOST_LOGS):
            some = {reader.index: reader.position for reader in wanted[start : start + MOST_LOGS]}
            for index, log in self.controller.fetch_logs(self.job_id, some, PIECE_BYTES // len(some)).items():
                yield from self._readers[index].take(log, time.monotonic())
                if not self._readers[index].done:
                    self.left.append(self._readers[index])

    def _begin(self, count: int) -> None:
        shared_by = count if self.task_index is None else None
        for index in range(count) if self.task_index is None else (self.task_index,):
            if index not in self._readers:
                self._readers[index] = _TaskReader(
                    self.job_id, index, self.first, self.follow, shared_by, self.every_attempt
                )


@dataclass(slots=True)
class _TaskReader:
    """Reads one task.

    Attributes:
        position: what it reads next.
        shared_by: how many tasks are shown; None if only this one is.
        every_attempt: whether to begin with the first attempt, though a later one may be the latest by now.
    """

    job_id: str
    index: int
    position: LogPosition
    follow: bool
    shared_by: int | None
    every_attempt: bool
    done: bool = False
    behind: bool = False
    _only: bool = False
    _rest: bytearray = field(default_factory=bytearray)  # of a line that has no end yet
    _throttle: LineThrottle | None = None
    _said: str | None = None
    _time: float | None = None  # of the latest output

    def __post_init__(self) -> None:
        self._only = self.position.attempt is not None

    def take(self, log: TaskLog, now: float) -> Iterator[LogLine]:
        """Yield the lines that a piece of output completes."""
        self.behind = False
        if log.attempt == 0:
            self.done = log.job_finished or not self.follow
            if self.done:
                yield from self._note(log, log.note)
            self.every_attempt |= self.follow  # attempts may begin and end until the next look
            return
        if self.position.attempt is None and self.every_attempt and log.attempt > 1:
            self.position, self.behind = replace(self.position, attempt=1, tail_lines=None), True
            return
        self.position = replace(self.position, attempt=log.attempt)
        if log.note and not log.from_host and self.follow and not log.finished:
            yield from self._note(log, f"{log.note.partition(';')[0]}; trying again")
            return
        yield from self._note(log, log.note)
        self.position = replace(self.position, tail_lines=None, since=None, offset=log.next_offset)
        for at, data in log.timed_parts or [(self._time, b"")]:
            yield from self._lines(log, data, now, at)
        self.behind = log.more
        if self.shared_by is not None and self.follow and log.end - log.next_offset > BACKLOG_BYTES:
            left_out = log.end - TAKEN_UP_BYTES - log.next_offset
            self.position = replace(self.position, offset=log.next_offset + left_out)
            self._rest.clear()
            yield self._ours(log, f"{left_out} bytes left out here; see iris-ray logs {self.job_id} {self.index}")
        elif not log.more and (log.finished or not self.follow):
            yield from self._end_of_attempt(log, now)

    def _end_of_attempt(self, log: TaskLog, now: float) -> Iterator[LogLine]:
        if self._rest:
            yield from self._lines(log, b"\n", now, self._time)
        if self._throttle is not None:
            yield from (self._line(log, text.encode()) for text in self._throttle.flush(now))
        if log.attempt < log.latest_attempt and self.follow and not self._only:
            self.position = replace(self.position, attempt=log.attempt + 1, offset=0)
            self.behind, self._said, self._time = True, None, None
            yield self._ours(replace(log, attempt=log.attempt + 1), f"attempt {log.attempt + 1} of task {self.index}")
        else:
            self.done = log.job_finished or not self.follow or self._only

    def _lines(self, log: TaskLog, data: bytes, now: float, at: float | None) -> Iterator[LogLine]:
        """Yield the lines that some output completes, which came at one time."""
        self._time = at
        if self.shared_by is None:
            yield from (self._line(log, line) for line in take_lines(self._rest, data))
            return
        if self._throttle is None:
            self._throttle = LineThrottle.for_task_of(self.shared_by, f"iris-ray logs {self.job_id} {self.index}")
        shown = self._throttle.feed(data, now) if data else self._throttle.flush(now)
        yield from (self._line(log, text.encode()) for text in shown)

    def _line(self, log: TaskLog, data: bytes) -> LogLine:
        return LogLine(self.index, log.attempt, data, time=self._time)

    def _note(self, log: TaskLog, note: str | None) -> Iterator[LogLine]:
        """Yield the note, unless it repeats the previous one."""
        if note and note != self._said:
            yield self._ours(log, note)
        self._said = note

    def _ours(self, log: TaskLog, text: str) -> LogLine:
        return LogLine(self.index, log.attempt, text.encode(), True)
