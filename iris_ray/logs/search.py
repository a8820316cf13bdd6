"""Searches the log files of an attempt for lines that match, where they lie.

Python's regular expressions run over the mapped files, so that only what is found is copied.
"""

import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from iris_ray.logs.files import AttemptLog

LINE_BYTES = 10_000
"""Longer lines are cut in an answer."""
MOST_FOUND_BYTES = 4 << 20
"""The limit for the lines in the answer of one host. Further matches are left out."""

Buffer = bytes | mmap.mmap


@dataclass(frozen=True, slots=True)
class LogSearch:
    """What lines are searched for.

    Attributes:
        pattern: a regular expression of Python's, for one line.
        context: the number of lines before and after each that are found with it.
        since: output that came before this time is left out; seconds since the epoch; None: none is.
        most_bytes: as `MOST_FOUND_BYTES`.
    """

    pattern: str
    context: int = 0
    since: float | None = None
    most_bytes: int = MOST_FOUND_BYTES


@dataclass(slots=True)
class FoundLines:
    """What was found in one attempt's output.

    Attributes:
        groups: lines in their order, those together that follow each other.
        matches: how many lines match, without those around them.
        size: the bytes of all these lines.
        cut: whether more would match.
    """

    groups: list[list[bytes]]
    matches: int = 0
    size: int = 0
    cut: bool = False


def search(log: AttemptLog, wanted: LogSearch, most_bytes: int) -> FoundLines | None:
    """Return the lines of an attempt's output that match; None if it has no files here."""
    files = log.files()
    if not files:
        return None
    found, pattern = FoundLines([]), _compiled(wanted)
    for buffer, start, stop in _parts(files, 0 if wanted.since is None else log.offset_since(wanted.since)):
        _search_part(buffer, start, stop, pattern, wanted.context, found, most_bytes)
        if found.cut:
            break
    return found


def search_text(text: bytes, wanted: LogSearch) -> FoundLines:
    """Return the lines of a text that match."""
    found = FoundLines([])
    _search_part(text, 0, len(text), _compiled(wanted), wanted.context, found, wanted.most_bytes)
    return found


def _compiled(wanted: LogSearch) -> "re.Pattern[bytes]":
    return re.compile(wanted.pattern.encode(), re.MULTILINE)


def _parts(files: Sequence[tuple[int, Path]], first_offset: int) -> Iterator[tuple[Buffer, int, int]]:
    """Yield whole lines from an offset in the output on: a buffer, where they begin, and where the last one ends.

    A line that two files share comes by itself.
    """
    begun = b""
    for (offset, path), next_offset in zip(files, [*(offset for offset, _ in files[1:]), None], strict=True):
        if next_offset is not None and next_offset <= first_offset:
            continue
        start = max(0, first_offset - offset)
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                first, last = data.find(b"\n", start), data.rfind(b"\n", start)
                if first < 0:
                    begun += data[start:]
                    continue
                if begun:
                    yield begun + data[:first], 0, len(begun) + first
                is_latest = next_offset is None
                yield data, first + 1 if begun else start, len(data) if is_latest else last
                begun = b"" if is_latest else data[last + 1 :]
        except (FileNotFoundError, ValueError):  # it was just deleted, or is empty
            continue
    if begun:
        yield begun, 0, len(begun)


def _search_part(
    buffer: Buffer,
    start: int,
    stop: int,
    pattern: "re.Pattern[bytes]",
    context: int,
    found: FoundLines,
    most_bytes: int,
) -> None:
    at, shown = start, -1  # shown: where the lines end that are found already
    while at < stop and (match := pattern.search(buffer, at, stop)) is not None:
        first = max(at, buffer.rfind(b"\n", at, match.start()) + 1)
        last = _line_end(buffer, match.start(), stop)
        at = last + 1
        if match.end() > last and pattern.search(buffer, first, last) is None:
            continue  # it goes over the end of its line
        if found.size >= most_bytes:
            found.cut = True
            return
        found.matches += 1
        for _ in range(context):
            if first > start:
                first = max(start, buffer.rfind(b"\n", start, first - 1) + 1)
            if last < stop:
                last = _line_end(buffer, last + 1, stop)
        goes_on = first <= shown
        lines = [line[:LINE_BYTES] for line in buffer[max(first, shown) : last].split(b"\n")]
        if goes_on:
            if last >= shown:
                found.groups[-1] += lines
        else:
            found.groups.append(lines)
        found.size += sum(map(len, lines))
        shown = max(shown, last + 1)


def _line_end(buffer: Buffer, at: int, stop: int) -> int:
    end = buffer.find(b"\n", at, stop)
    return stop if end < 0 else end
