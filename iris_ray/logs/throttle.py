"""Decides which lines of a task reach the driver's terminal."""

import re
from dataclasses import dataclass, field

from iris_ray.terminal import printable

FORWARDED_LINES_PER_S = 500.0
"""The rate at which all tasks of a job together may send lines to the driver's terminal, per second."""
BURST_S = 5.0
"""A task may send as many lines at once as its rate allows in this time."""
LEAST_RATE, MOST_RATE, LEAST_BURST = 1.0, 100.0, 20.0
LONGEST_LINE = 4000
NATIVE_STACK = re.compile(
    rb"(\[[^\]]+\] logging\.cc:\d+: )?"  # Ray's repeats
    rb"\s*(@ +0x[0-9a-f]+ |PC: @ |\*\*\* (Check failure stack trace|SIG[A-Z]+ received)|Extension modules: "
    rb"|Additional GRPC error information|:UNKNOWN:Error received from peer)"
)
"""Lines of crash reports that only name addresses and libraries. If a slice is lost, JAX ends all other processes with
such a report."""
FATAL = b"Fatal Python error"
NATIVE_LOG = re.compile(rb"([EWF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.-]+:\d+\] ")
"""Log lines of C++ libraries such as JAX's: errors (E), warnings (W), and fatal errors (F), with which a process ends
itself."""
MOST_HELD = 20
REPORT_S = 2.0
"""Lines that come within this time after a fatal error belong to its report. After that the task goes on: the process
that ended was a child of it."""
REPEAT_COST = 0.02
"""The share of a line's rate that a repeated line costs, since it is only counted."""
COUNTED_S = 5.0
"""Seconds between two lines that say how many lines were repeated or left out."""


@dataclass(slots=True)
class LineThrottle:
    """Decides which lines of one task are shown. The task's log file has all lines.

    It folds repeated lines and native stacks, bounds the rate, cuts long lines, escapes binary data, and shows only the
    last state of a progress bar. If a C++ library ends the process, it shows only the library's fatal error.

    Args:
        rate: lines a second.
        burst: lines that may come at once.
        where: the command that shows all lines, for the line that says how many were left out.
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
    _counts_shown_at: float = 0.0
    _held: list[bytes] = field(default_factory=list)  # errors and warnings: a fatal error may follow
    _last_word: bytes | None = None
    _last_word_at: float = 0.0

    @staticmethod
    def for_task_of(num_tasks: int, where: str) -> "LineThrottle":
        """Return the throttle of one task of a job with this number of tasks."""
        rate = min(MOST_RATE, max(LEAST_RATE, FORWARDED_LINES_PER_S / num_tasks))
        return LineThrottle(rate, max(LEAST_BURST, rate * BURST_S), where)

    @property
    def holds_something(self) -> bool:
        """Whether `flush` would show anything."""
        return bool(self._repeated or self._left_out or self._rest or self._held or self._last_word)

    def feed(self, data: bytes, now: float) -> list[str]:
        """Take output of the task. Return the lines to show now. Lines beyond the rate cost next to no time.

        Args:
            data: the output.
            now: seconds on any clock that never goes back.
        """
        if self._filled_at is None:
            self._tokens, self._counts_shown_at = self.burst, now
        else:
            self._tokens = min(self.burst, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now
        shown: list[str] = []
        if self._last_word is not None and now - self._last_word_at > REPORT_S:
            self._append_counts(shown)
        if now - self._counts_shown_at >= COUNTED_S:
            self._append_counts(shown)
            self._counts_shown_at = now
        if self._dry and self._tokens >= max(self.rate, self.burst / 4):
            self._dry = False  # not at the first token, since single lines out of context are of no use
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

    def leave_out(self, data: bytes) -> None:
        """Count lines that are not shown. `flush` returns a line with their number."""
        self._left_out += data.count(b"\n") + len(self._held)
        self._held.clear()

    def flush(self, now: float) -> list[str]:
        """Return what was held back: lines, counts, and an unfinished line. Call this after a pause in the output."""
        shown: list[str] = []
        if self._rest:
            rest, cut, self._rest, self._rest_cut = self._rest, self._rest_cut, b"", False
            if not self._dry and self._tokens >= 1.0:
                self._take(rest, cut, shown)
            else:
                self._left_out += 1
        self._show_held(shown)
        self._append_counts(shown)
        return shown

    def _take(self, line: bytes, cut: bool, shown: list[str]) -> None:
        line = _last_overwriting(line).rstrip(b"\r")
        is_stack = NATIVE_STACK.match(line) or (not line and (self._left_out or (self._last or b"").startswith(FATAL)))
        if self._last_word is not None or is_stack:
            self._left_out += 1
        elif (log := NATIVE_LOG.match(line)) is None:
            self._show_held(shown)
            self._show(line, cut, shown)
        elif log[1] == b"F":
            self._last_word, self._last_word_at = line, self._filled_at or 0.0
            self._left_out += len(self._held)
            self._held.clear()
        else:
            self._held.append(line)
            if len(self._held) == MOST_HELD:
                self._show_held(shown)

    def _show_held(self, shown: list[str]) -> None:
        held, self._held = self._held, []
        for line in held:
            self._show(line, False, shown)

    def _show(self, line: bytes, cut: bool, shown: list[str]) -> None:
        if line == self._last and not cut:
            self._repeated += 1
            self._tokens -= REPEAT_COST
            return
        self._append_counts(shown)
        self._last = line
        self._tokens -= 1.0
        text = printable(line[:LONGEST_LINE])
        shown.append(text[:LONGEST_LINE] + " … (cut)" if cut or len(text) > LONGEST_LINE else text)

    def _append_counts(self, shown: list[str]) -> None:
        if self._repeated == 1 and self._last is not None:
            shown.append(printable(self._last))
        elif self._repeated:
            shown.append(f"… repeated {self._repeated} times")
        if self._last_word is not None:
            more = f" … ({self._left_out} more lines: {self.where})" if self._left_out else ""
            shown.append(printable(self._last_word) + more)
            self._last = self._last_word = None
        elif self._left_out:
            shown.append(f"… {self._left_out} line{'s' * (self._left_out > 1)} left out here; see {self.where}")
            self._last = None
        self._repeated = self._left_out = 0


def _last_overwriting(line: bytes) -> bytes:
    """Return the part of a line that a terminal shows after its carriage returns."""
    body = line.rstrip(b"\r")
    return line[body.rfind(b"\r") + 1 :]
