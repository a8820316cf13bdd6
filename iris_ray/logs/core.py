"""Pieces of task logs on their way to a reader, and positions in a log."""

from codecs import getincrementaldecoder
from dataclasses import dataclass, replace

from iris_ray.logs.times import Times, timed_lines, timed_parts
from iris_ray.model.lifecycle import TaskAttemptId


@dataclass(frozen=True, slots=True)
class TaskLog:
    """A piece of the output of one attempt of a task: stdout and stderr, in the order in which they were written.

    Attributes:
        job_id, task_index, attempt: the task and its attempt; attempt 0 if the task has had none yet.
        offset: of the piece's first byte in the attempt's output.
        data: the bytes, as they were printed.
        end: how many bytes the attempt had printed in all when the piece was read.
        finished: whether the attempt will print nothing more.
        latest_attempt: the number of the task's latest attempt.
        job_finished: whether there will be no further attempt.
        from_host: whether it was read on the host; else it is from the archive of logs, or consists of the last lines
            that reached the Controller, or is empty.
        note: a remark about the piece for readers, or None.
        times: if they were asked for and are known: offsets in the attempt's output, ascending, and when the output
            from each to the next came, in seconds since the epoch.
    """

    job_id: str
    task_index: int
    attempt: int
    offset: int = 0
    data: bytes = b""
    end: int = 0
    finished: bool = False
    latest_attempt: int = 0
    job_finished: bool = False
    from_host: bool = False
    note: str | None = None
    times: Times = ()

    @property
    def log_id(self) -> TaskAttemptId:
        """The attempt whose output it is."""
        return TaskAttemptId(self.job_id, self.task_index, self.attempt)

    @property
    def next_offset(self) -> int:
        """The offset of the next byte to read."""
        return self.offset + len(self.data)

    @property
    def more(self) -> bool:
        """Whether the attempt had printed more than this when it was read."""
        return self.next_offset < self.end

    @property
    def without_half_character(self) -> "TaskLog":
        """The piece without an incomplete character at its end, if the next piece can have the whole character."""
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(self.data)
        half = len(decoder.getstate()[0])
        return replace(self, data=self.data[:-half]) if half and self.more and half < len(self.data) else self

    @property
    def timed_parts(self) -> list[tuple[float | None, bytes]]:
        """The parts of the data that came at one time, each with it, in seconds since the epoch; None: unknown."""
        return list(timed_parts(self.offset, self.data, self.times))

    @property
    def timed_lines(self) -> list[tuple[float | None, bytes]]:
        """The lines of the data, each with the time at which its end came, as ``timed_parts``."""
        return list(timed_lines(self.timed_parts))

    @property
    def text(self) -> str:
        """The bytes as text; bytes that are not UTF-8 are escaped."""
        return self.data.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in a task's log.

    Attributes:
        attempt: the number of the attempt; None: the latest.
        offset: the first byte to read.
        tail_lines: the number of last lines to read instead; None: read from the offset on.
        since: read only what came at this time or later, in seconds since the epoch; None: read all.
        with_times: whether to read the times, too.
    """

    attempt: int | None = None
    offset: int = 0
    tail_lines: int | None = None
    since: float | None = None
    with_times: bool = False


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The host on which a log can be read.

    Attributes:
        log: the log without content, with the standing of its attempt. A log read after the end is complete.
        host: node id and address of the attempt's host; None if the host is gone or not known.
    """

    log: TaskLog
    host: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class LastLines:
    """The end of the output of a task's attempt so far.

    Attributes:
        node_id: its host's id in Ray.
        end: how many bytes it has printed in all.
        data: the last of these bytes.
    """

    job_id: str
    task_index: int
    attempt: int
    node_id: str
    end: int
    data: bytes

    @property
    def log_id(self) -> TaskAttemptId:
        return TaskAttemptId(self.job_id, self.task_index, self.attempt)


LAST_BYTES = 4096
"""The limit for the `LastLines` of a task."""
MOST_LOGS = 100
"""The limit for the tasks whose logs the Controller reads in one answer."""
