"""What tasks print, as it travels: pieces of it, and where to read on."""

from dataclasses import dataclass


def printable(data: bytes) -> str:
    """Any bytes as text for a terminal: tabs and colours stay, other control characters are spelled out."""
    text = data.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\t\x1b" else repr(c)[1:-1] for c in text)


@dataclass(frozen=True, slots=True)
class TaskLog:
    """A piece of what one attempt of a task has printed, stdout and stderr in the order in which they were written.

    Attributes:
        job_id, task_index, attempt: whose; attempt 0 if the task has not had any yet.
        offset: where the piece begins, counted in bytes from the attempt's first one.
        data: the bytes as they were printed.
        end: how much had been printed when this was read.
        finished: nothing more will come of this attempt.
        latest_attempt: the number of the task's latest attempt.
        job_finished: there will be no further attempt.
        from_host: it was read on the host; otherwise it is the last that reached the Controller, or nothing.
        note: what the reader has to know about it, or None.
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
    def next_offset(self) -> int:
        """Where to go on."""
        return self.offset + len(self.data)

    @property
    def more(self) -> bool:
        """Whether there was more to read already."""
        return self.next_offset < self.end

    @property
    def text(self) -> str:
        return self.data.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where to read: an attempt (None: the latest) and an offset in bytes, or the last lines of it."""

    attempt: int | None = None
    offset: int = 0
    tail_lines: int | None = None


@dataclass(frozen=True, slots=True)
class LastLines:
    """The end of what an attempt of a task has printed so far.

    Attributes:
        job_id, task_index, attempt: whose.
        node_id: the host.
        end: how much it has printed in all, in bytes.
        data: the last of it.
    """

    job_id: str
    task_index: int
    attempt: int
    node_id: str
    end: int
    data: bytes


AttemptOfTask = tuple[str, int, int]
"""Job id, task index, attempt."""
