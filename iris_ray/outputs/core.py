"""What goes from an output directory that has too much: a pure function of what is there and of the limits."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

MOST_ENTRIES: Final = 100_000
"""The limit for the files and directories of one attempt."""
FREE: Final = 10
"""Output directories leave one of this many parts of their disk free."""
ON_FULL_DISK: Final = 1 << 28
"""What an attempt may have even if its disk is fuller than that, perhaps with files of others; bytes."""


class Kind(Enum):
    """What a name in a directory stands for."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    OTHER = "other"
    """A FIFO, a socket or a device."""
    TOO_DEEP = "too deep"
    """A directory so deep that nobody looks into it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in an output directory.

    Attributes:
        path: relative to the output directory.
        kind: what it is.
        size: of a file: what its reader gets; bytes.
        allocated: what it takes on the disk; bytes.
        changed_at: when it was changed last, in seconds since the epoch. A program can't set this time (``ctime``).
        inode: device and inode; two hard links have the same.
        links: how many hard links there are of it.
    """

    path: str
    kind: Kind
    size: int
    allocated: int
    changed_at: float
    inode: tuple[int, int]
    links: int


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed of an attempt to stay within the limits.

    Attributes:
        files: how many files, links and directories.
        bytes: what they took on the disk.
    """

    files: int = 0
    bytes: int = 0

    def __add__(self, other: "Removed") -> "Removed":
        return Removed(self.files + other.files, self.bytes + other.bytes)


def taken(entries: Iterable[Entry]) -> int:
    """Return what entries take on the disk, in bytes. Hard links of one file take its space once."""
    return sum({entry.inode: entry.allocated for entry in entries}.values())


def limit_on_disk(most_bytes: int | None, has: int, lacking: int) -> int | None:
    """Return what an attempt may take on its disk now, so that a part of the disk stays free.

    Args:
        most_bytes: what it may take if the disk has room; None: there is no limit.
        has: what it takes.
        lacking: how much less is free than that part; bytes.
    """
    if lacking <= 0:
        return most_bytes
    limit = max(ON_FULL_DISK, has - lacking)
    return limit if most_bytes is None else min(most_bytes, limit)


def to_remove(entries: Sequence[Entry], most_bytes: int | None, most_entries: int = MOST_ENTRIES) -> list[Entry]:
    """Return what goes, in this order: what is too deep to be measured, then the oldest until the rest fits.

    A directory goes only if there are too many entries, and after all that is in it.

    Args:
        entries: all that is there; what is in a directory before the directory.
        most_bytes: what may stay on the disk; None: there is no limit.
        most_entries: how many entries may stay.
    """
    gone = [entry for entry in entries if entry.kind is Kind.TOO_DEEP]
    left = _oldest_first([entry for entry in entries if entry.kind is not Kind.TOO_DEEP])
    allocated, count, links = taken(left), len(left), Counter(entry.inode for entry in left)
    for entry in left:
        too_much, too_many = most_bytes is not None and allocated > most_bytes, count > most_entries
        if not (too_much or too_many):
            break
        if entry.kind is Kind.DIRECTORY and not too_many:
            continue
        gone.append(entry)
        links[entry.inode] -= 1
        allocated, count = allocated - (0 if links[entry.inode] else entry.allocated), count - 1
    return gone


def _oldest_first(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries by age. A directory is as old as the newest entry in it, and comes after that."""
    newest: dict[str, float] = {}
    ages = []
    for entry in entries:
        at = max(entry.changed_at, newest.pop(entry.path, 0.0))
        ages.append(at)
        parent = entry.path.rpartition("/")[0]
        newest[parent] = max(newest.get(parent, 0.0), at)
    order = sorted(range(len(entries)), key=lambda i: ages[i])  # stable, so a directory stays behind what is in it
    return [entries[i] for i in order]
