"""When output came: beside each log file, a file with some of its offsets and the time at which each was written.

Such a file grows by an entry a second at most, and ever more slowly while its log file lives. A line has the time of
the last entry before its end, so it is early by at most `least_s`: a second in the first eight hours of the log file,
and three seconds after a day.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ENTRY = struct.Struct("<qd")
"""An offset in the attempt's output, and seconds since the epoch."""
LEAST_S = 1.0
"""The least time between two entries of a file, at first."""
FINENESS = 30_000
"""Later, the least time is the age of the file divided by this: two weeks take 2 MB."""

TIMES = ".times"
"""The end of the name of a file of times."""

Times = tuple[tuple[int, float], ...]
"""Offsets in an attempt's output, ascending, and when the output from there to the next one came: in seconds since the
epoch."""


def least_s(age: float) -> float:
    """Return the least time between an entry and the next one, in seconds; ``age`` is that of the file at the entry."""
    return max(LEAST_S, age / FINENESS)


def times_file(log_file: Path) -> Path:
    """Return the path of the times of a log file."""
    return log_file.with_suffix(TIMES)


@dataclass(slots=True)
class TimesWriter:
    """Writes the times of one log file. It never raises: a full disk costs times.

    Attributes:
        path: the file of times.
    """

    path: Path
    _first: float | None = None
    _last: float = 0.0

    def note(self, offset: int, now: float) -> None:
        """Note that output came, if an entry is due.

        Args:
            offset: of its first byte in the attempt's output.
            now: seconds since the epoch.
        """
        first = now if self._first is None else self._first
        if self._first is not None and 0.0 <= now - self._last < least_s(self._last - first):
            return  # a clock that was set back gets an entry
        self._first, self._last = first, now
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, ENTRY.pack(offset, now))
            finally:
                os.close(fd)
        except OSError:  # the log says that the disk is full
            return


def read_times(log_file: Path, start: int = 0, stop: int = 1 << 62) -> Times:
    """Return the times of a log file for the output from ``start`` to ``stop``: also that of the entry before."""
    try:
        data = times_file(log_file).read_bytes()
    except OSError:
        return ()
    entries = range(len(data) // ENTRY.size)

    def offset(entry: int) -> int:
        found: int = ENTRY.unpack_from(data, entry * ENTRY.size)[0]
        return found

    first = max(0, bisect_right(entries, start, key=offset) - 1)
    last = bisect_right(entries, stop - 1, key=offset)
    return tuple(ENTRY.iter_unpack(data[first * ENTRY.size : last * ENTRY.size]))


def offset_since(files: Sequence[tuple[int, Path]], end: int, since: float) -> int:
    """Return the offset after the last output that surely came before a time.

    Output that came after an entry has no entry of its own for a while, so what an entry stands for may be later.

    Args:
        files: the offset and the path of each log file, the oldest first.
        end: the size of the output.
        since: seconds since the epoch.
    """
    after = end
    for start, path in reversed(files):
        if times := read_times(path):
            first = times[0][1]
            if older := [number for number, (_, at) in enumerate(times) if at + least_s(at - first) <= since]:
                return times[older[-1] + 1][0] if older[-1] + 1 < len(times) else after
        elif _written_before(path, since):
            return after
        after = start
    return after


def _written_before(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime < since
    except OSError:
        return True


def timed_parts(offset: int, data: bytes, times: Times) -> Iterator[tuple[float | None, bytes]]:
    """Yield the parts of a piece of output that came at one time, each with its time; None: it is not known."""
    at, known = 0, None
    for start, then in times:
        place = min(max(start - offset, 0), len(data))
        if place > at:
            yield known, data[at:place]
            at = place
        known = then
    if at < len(data):
        yield known, data[at:]


def timed_lines(parts: Iterable[tuple[float | None, bytes]]) -> Iterator[tuple[float | None, bytes]]:
    """Yield the lines of some output, each with the time at which its end came; the last may have no end.

    Args:
        parts: as `timed_parts` yields them, of pieces that follow each other.
    """
    rest, last = bytearray(), None
    for at, data in parts:
        yield from ((at, line) for line in take_lines(rest, data))
        last = at
    if rest:
        yield last, bytes(rest)


def take_lines(rest: bytearray, data: bytes) -> list[bytes]:
    """Return the lines that some output completes. ``rest`` is the beginning of the first, then that of the next one.

    It takes as long as the output is, also if a line without end, such as a progress bar, comes in many pieces.
    """
    first, *others = data.split(b"\n")
    rest += first
    if not others:
        return []
    lines = [bytes(rest), *others[:-1]]
    rest[:] = others[-1]
    return lines
