"""What tasks print, on its way to a reader: pieces of logs, and positions in them."""

from codecs import getincrementaldecoder
from dataclasses import dataclass, replace
from typing import NamedTuple


class LogId(NamedTuple):
    """Which attempt of which task a log is of. An `AttemptId` names an attempt of a whole gang.

    Attributes:
        job_id: the job.
        task_index: which of its tasks.
        attempt: the number of the attempt.
    """

    job_id: str
    task_index: int
    attempt: int


def printable(data: bytes) -> str:
    """Return any bytes as text for a terminal: tabs and colours stay, other control characters are escaped."""
    text = data.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\t\x1b" else repr(c)[1:-1] for c in text)


@dataclass(frozen=True, slots=True)
class TaskLog:
    """A piece of what one attempt of a task has printed: stdout and stderr, in the order in which they were written.

    Attributes:
        job_id, task_index, attempt: which attempt of which task; attempt 0 if the task has had none yet.
        offset: where the piece begins, in bytes from the attempt's first one.
        data: its bytes, as they were printed.
        end: how many bytes the attempt had printed in all when this was read.
        finished: whether the attempt will print nothing more.
        latest_attempt: the number of the task's latest attempt.
        job_finished: whether there will be no further attempt.
        from_host: whether it was read on the host; otherwise it is what reached the Controller last, or nothing.
        note: what a reader has to know about the piece, or None.
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

    @property
    def log_id(self) -> LogId:
        """What it is the log of."""
        return LogId(self.job_id, self.task_index, self.attempt)

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
        """The same without the first bytes of a character at its end, if the next piece can have all of them."""
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(self.data)
        half = len(decoder.getstate()[0])
        return replace(self, data=self.data[:-half]) if half and self.more and half < len(self.data) else self

    @property
    def text(self) -> str:
        """The bytes as text; bytes that are not UTF-8 are escaped."""
        return self.data.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where to read.

    Attributes:
        attempt: which attempt; None: the latest.
        offset: the first byte to read.
        tail_lines: read so many of the last lines instead; None: read from the offset on.
    """

    attempt: int | None = None
    offset: int = 0
    tail_lines: int | None = None


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where a log is to be read.

    Attributes:
        log: the log without content: how its attempt stands. What is read after its end is all of it.
        host: node id and address of the host that its attempt runs or ran on; None if that is gone or not known.
    """

    log: TaskLog
    host: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class LastLines:
    """The end of what an attempt of a task has printed so far.

    Attributes:
        job_id, task_index, attempt: which attempt of which task.
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
    def log_id(self) -> LogId:
        """What log they are of."""
        return LogId(self.job_id, self.task_index, self.attempt)


MOST_LOGS = 100
"""Tasks whose logs the Controller reads in one answer."""
