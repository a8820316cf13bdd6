"""What goes from an output directory that has too much: a pure function of what is there and of the limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

MOST_ENTRIES: Final = 100_000
"""The limit for the files and directories of one attempt."""


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


def to_remove(entries: Sequence[Entry], most_bytes: int | None, most_entries: int = MOST_ENTRIES) -> list[Entry]:
    """Return what goes, in this order: what is too deep to be measured, then the oldest until the rest fits.

    A directory goes only if there are too many entries; it can be removed only once it is empty.

    Args:
        entries: all that is there.
        most_bytes: what may stay on the disk; None: there is no limit.
        most_entries: how many entries may stay.
    """
    gone = [entry for entry in entries if entry.kind is Kind.TOO_DEEP]
    left = sorted((entry for entry in entries if entry.kind is not Kind.TOO_DEEP), key=lambda entry: entry.changed_at)
    allocated, count = sum(entry.allocated for entry in left), len(left)
    for entry in left:
        too_much, too_many = most_bytes is not None and allocated > most_bytes, count > most_entries
        if not (too_much or too_many):
            break
        if entry.kind is Kind.DIRECTORY and not too_many:
            continue
        gone.append(entry)
        allocated, count = allocated - entry.allocated, count - 1
    return gone
