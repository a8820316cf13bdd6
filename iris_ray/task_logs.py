"""What tasks print: how it is shown without drowning anybody, what is remembered of it, and how it is answered for."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

FORWARDED_LINES_PER_S = 500.0
"""What all tasks of a job together may send to its driver's terminal."""
BURST_S = 5.0
LEAST_RATE, MOST_RATE, LEAST_BURST = 1.0, 100.0, 20.0
LONGEST_LINE = 4000
REPEAT_COST = 0.02
"""A line that is like the one before it is only counted, which is cheap, but not for nothing."""
COUNTED_S = 5.0
"""After so long it is said how many lines were counted so far."""


def printable(data: bytes) -> str:
    """Any bytes as text for a terminal: tabs and colours stay, other control characters are spelled out."""
    text = data.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\t\x1b" else repr(c)[1:-1] for c in text)


@dataclass(slots=True)
class LineThrottle:
    """Decides which lines of one task are shown. Nothing that it leaves out is lost: the file has everything.

    Lines that are alike and follow each other are folded, the rate is bounded, long lines are cut, binary is spelled
    out, and of what a progress bar wrote over and over the last is shown.

    Args:
        rate: lines a second.
        burst: lines that may come at once.
        where: how to see all of it, for the line that says how many were left out.
    """

    rate: float
    burst: float
    where: str
    _tokens: float = 0.0
    _dry: bool = False
    _filled_at: float | None = None
    _rest: bytes = b""
    _rest_cut: bool = False
    _last: bytes | None = None
    _repeated: int = 0
    _left_out: int = 0
    _said_at: float = 0.0

    @staticmethod
    def for_task_of(num_tasks: int, where: str) -> "LineThrottle":
        """One task's share of what a job may show."""
        rate = min(MOST_RATE, max(LEAST_RATE, FORWARDED_LINES_PER_S / num_tasks))
        return LineThrottle(rate, max(LEAST_BURST, rate * BURST_S), where)

    @property
    def holds_something(self) -> bool:
        """Whether `flush` would give anything out."""
        return bool(self._repeated or self._left_out or self._rest)

    def feed(self, data: bytes, now: float) -> list[str]:
        """What to show now, after the task wrote these bytes. Bytes beyond the rate cost next to nothing."""
        if self._filled_at is None:
            self._tokens, self._said_at = self.burst, now
        else:
            self._tokens = min(self.burst, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now
        shown: list[str] = []
        if now - self._said_at >= COUNTED_S:
            self._say_counts(shown)
            self._said_at = now
        if self._dry and self._tokens >= max(self.rate, self.burst / 4):
            self._dry = False  # not at the first token: lines without their neighbours tell nobody anything
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            if self._dry or self._tokens < 1.0:
                self._dry = True
                last_end = data.rfind(b"\n")
                self._left_out += data.count(b"\n", start)
                self._rest, self._rest_cut, start = b"", False, last_end + 1
                break
            line = self._rest + data[start : min(end, start + LONGEST_LINE)]
            cut = self._rest_cut or end - start > LONGEST_LINE
            self._rest, self._rest_cut, start = b"", False, end + 1
            self._take(line, cut, shown)
        rest = _last_overwriting(self._rest + data[start:])
        self._rest_cut |= len(rest) > LONGEST_LINE
        self._rest = rest[:LONGEST_LINE]
        return shown

    def flush(self, now: float) -> list[str]:
        """What is held back: counts, and a line without an end. To be asked when nothing has come for a while."""
        shown: list[str] = []
        if self._rest:
            rest, cut, self._rest, self._rest_cut = self._rest, self._rest_cut, b"", False
            if not self._dry and self._tokens >= 1.0:
                self._take(rest, cut, shown)
            else:
                self._left_out += 1
        self._say_counts(shown)
        return shown

    def _take(self, line: bytes, cut: bool, shown: list[str]) -> None:
        line = _last_overwriting(line).rstrip(b"\r")
        if line == self._last and not cut:
            self._repeated += 1
            self._tokens -= REPEAT_COST
            return
        self._say_counts(shown)
        self._last = line
        self._tokens -= 1.0
        text = printable(line[:LONGEST_LINE])
        shown.append(text[:LONGEST_LINE] + " … (cut)" if cut or len(text) > LONGEST_LINE else text)

    def _say_counts(self, shown: list[str]) -> None:
        if self._repeated == 1 and self._last is not None:
            shown.append(printable(self._last))
        elif self._repeated:
            shown.append(f"… repeated {self._repeated} times")
        if self._left_out:
            shown.append(f"… {self._left_out} line{'s' * (self._left_out > 1)} left out here; see {self.where}")
            self._last = None
        self._repeated = self._left_out = 0


def _last_overwriting(line: bytes) -> bytes:
    """What a terminal shows in the end of a line in which carriage returns went back to its beginning."""
    body = line.rstrip(b"\r")
    return line[body.rfind(b"\r") + 1 :]


@dataclass(slots=True)
class LineSplitter:
    """Puts lines together from bytes that come in pieces."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that are complete now, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return iter(lines)

    def rest(self) -> Iterator[bytes]:
        """What never got an end."""
        rest, self._rest = self._rest, b""
        return iter([rest] if rest else [])


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


@dataclass(slots=True)
class LogMemory:
    """Where attempts of tasks ran, and the last lines of each: what is left when a host is gone. Bounded.

    Args:
        most_places: attempts of tasks whose host is remembered; the oldest are forgotten first.
        most_bytes: of last lines in all.
    """

    most_places: int = 200_000
    most_bytes: int = 64 << 20
    _places: OrderedDict[AttemptOfTask, str] = field(default_factory=OrderedDict)
    _last: OrderedDict[AttemptOfTask, LastLines] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def placed(self, job_id: str, task_index: int, attempt: int, node_id: str) -> None:
        """That attempt of that task runs there."""
        self._places[job_id, task_index, attempt] = node_id
        while len(self._places) > self.most_places:
            self._places.popitem(last=False)

    def remember(self, last: LastLines) -> None:
        """Take the last lines of an attempt, in place of earlier ones of the same."""
        key = last.job_id, last.task_index, last.attempt
        old = self._last.pop(key, None)
        if old is not None and old.end > last.end:
            last = old  # messages overtake each other
        self._bytes += len(last.data) - (len(old.data) if old else 0)
        self._last[key] = last
        self.placed(*key, last.node_id)
        while self._bytes > self.most_bytes:
            self._bytes -= len(self._last.popitem(last=False)[1].data)

    def node_of(self, key: AttemptOfTask) -> str | None:
        return self._places.get(key)

    def last_lines(self, key: AttemptOfTask) -> LastLines | None:
        return self._last.get(key)
