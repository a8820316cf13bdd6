"""Lists the files of an output directory, and sends them as a tar stream, for a client of the host."""

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from typing import Final

from iris_ray.errors import InvalidRequestError
from iris_ray.outputs.core import Entry, Kind, Removed
from iris_ray.outputs.directory import FILE_FLAGS, LOOK_AT, OutputDirectory, below, entries, entry_of, opened

PIECE_BYTES: Final = 4 << 20
MOSTLY_HOLES: Final = 1 << 30, 16
"""A file of more bytes than this, and of more than this many times what it takes on the disk, is not sent."""
COPIED: Final = "copied"
"""The name of what is sent within the tar stream."""
MOST_LISTED: Final = 10_000
"""The limit for the files of an attempt that are listed."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file in an output directory.

    Attributes:
        path: relative to the output directory.
        bytes: its size.
        changed_at: when it was changed last, in seconds since the epoch.
    """

    path: str
    bytes: int
    changed_at: float


@dataclass(frozen=True, slots=True)
class Listing:
    """What an output directory has.

    Attributes:
        files: its files, at most `MOST_LISTED`, by path.
        count: how many files it has; of more than `LOOK_AT` entries, those that were looked at.
        removed: what was removed of it to stay within the limits.
    """

    files: tuple[ListedFile, ...]
    count: int
    removed: Removed


@dataclass
class LeftOut:
    """What is there and is not sent.

    Attributes:
        count: how many files and the like.
        first: the first of them, and why.
    """

    count: int = 0
    first: str = ""

    def add(self, path: str, why: str) -> None:
        self.count += 1
        self.first = self.first or f"{path!r}: {why}"


def listing(of: OutputDirectory, within: str = "") -> Listing | None:
    """Return what an output directory has; None if there is none.

    Args:
        of: the directory.
        within: only this file, or only what is in this directory of it.
    """
    within = checked(within)
    parent, name = os.path.split(within)
    with opened(of.path / within, of.root) as top, opened(of.path / parent, of.root) as above:
        found = []
        if top is not None:
            found = [one for one in islice(entries(top), LOOK_AT) if one.kind is Kind.FILE]
        elif above is None:
            return None
        else:
            with contextlib.suppress(OSError):  # there is none
                one = entry_of("", os.stat(name, dir_fd=above, follow_symlinks=False))
                found = [one] if one.kind is Kind.FILE else []
            if not found:
                return None
    found.sort(key=lambda one: one.path)
    files = tuple(
        ListedFile(f"{within}/{one.path}".strip("/"), one.size, one.changed_at) for one in found[:MOST_LISTED]
    )
    return Listing(files, len(found), of.removed())


def checked(path: str) -> str:
    """Return a path below an output directory without needless parts; "" is the directory itself.

    Raises:
        InvalidRequestError: it leads out of the directory.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise InvalidRequestError(f"{path!r} is not a path within the task's output directory; leave out / and ..")
    return "/".join(parts)


def packed(of: OutputDirectory, path: str = "", left_out: LeftOut | None = None) -> Iterator[bytes]:
    """Yield a file or a directory of an output directory as a tar stream, in pieces of about `PIECE_BYTES`.

    Its name in the stream is `COPIED`. Links in a directory are sent as links: their receiver judges them. FIFOs and
    the like are left out, and so are files that can't be opened or are mostly holes: nobody wants a terabyte of zeros.

    Args:
        of: the directory.
        path: what of it is sent.
        left_out: hears what is left out.

    Raises:
        FileNotFoundError: there is no such file or directory.
        InvalidRequestError: this one file is of a kind that is left out, or a file can't be read to its end.
    """
    pieces = _tar(of, checked(path), LeftOut() if left_out is None else left_out)
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        if len(waiting) >= PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    waiting += b"\0" * (2 * tarfile.BLOCKSIZE)
    yield bytes(waiting)


def _tar(of: OutputDirectory, path: str, left_out: LeftOut) -> Iterator[bytes]:
    parent, name = os.path.split(path)
    with opened(of.path / parent, of.root) as above:
        if above is None:
            raise FileNotFoundError(f"there is no {parent or of.name}")
        seen: dict[tuple[int, int], tuple[str, float]] = {}
        if name:
            one = entry_of(path, os.stat(name, dir_fd=above, follow_symlinks=False))
            if one.kind is Kind.LINK:
                target = os.readlink(name, dir_fd=above)
                raise InvalidRequestError(f"{path!r} is a link to {target!r}; name what it leads to")
            if one.kind is not Kind.DIRECTORY:
                yield from _member(above, name, one, COPIED, seen, left_out)
                if left_out.count:
                    raise InvalidRequestError(left_out.first)
                return
        with below(above, name) as top:
            yield _header(COPIED, tarfile.DIRTYPE, 0o755, at=os.fstat(top).st_mtime)
            for one in entries(top):
                folder, own = os.path.split(one.path)
                with contextlib.suppress(OSError), below(top, folder) as fd:  # else it has just gone
                    yield from _member(fd, own, one, f"{COPIED}/{one.path}", seen, left_out)


def _member(
    fd: int, name: str, entry: Entry, path: str, seen: dict[tuple[int, int], tuple[str, float]], left_out: LeftOut
) -> Iterator[bytes]:
    """Yield one member of a tar stream; nothing of what is not sent.

    Raises:
        InvalidRequestError: a file can't be read to its end, so that the stream is of no use.
    """
    if entry.kind is Kind.DIRECTORY:
        yield _header(path, tarfile.DIRTYPE, 0o755, at=entry.changed_at)
    elif entry.kind is Kind.LINK:
        yield _header(path, tarfile.SYMTYPE, 0o777, at=entry.changed_at, target=os.readlink(name, dir_fd=fd))
    elif entry.kind is Kind.FILE and entry.inode in seen:
        first, at = seen[entry.inode]
        yield _header(path, tarfile.LNKTYPE, 0o644, at=at, target=first)
    elif entry.kind is Kind.FILE:
        try:
            file = FileIO(os.open(name, os.O_RDONLY | FILE_FLAGS, dir_fd=fd))
        except FileNotFoundError:  # it has just gone
            return
        except OSError as error:
            left_out.add(entry.path, f"it can't be opened: {error.strerror}")
            return
        with file:
            found = os.fstat(file.fileno())
            most, times = MOSTLY_HOLES
            if not stat.S_ISREG(found.st_mode) or found.st_size > max(most, times * found.st_blocks * 512):
                left_out.add(entry.path, f"it is mostly holes: {found.st_blocks * 512:,} of {found.st_size:,} bytes")
                return
            if found.st_nlink > 1:
                seen[entry.inode] = path, found.st_mtime
            yield _header(path, tarfile.REGTYPE, found.st_mode & 0o777, found.st_size, found.st_mtime)
            yield from _content(file, found.st_size, entry.path)
    else:
        left_out.add(entry.path, "it is neither a file nor a directory nor a link, or too deep")


def _content(file: FileIO, size: int, path: str) -> Iterator[bytes]:
    """Yield so many bytes of a file, which may grow or shrink meanwhile, and the padding of a tar stream."""
    left = size
    try:
        while left and (data := file.read(min(left, PIECE_BYTES))):
            yield data
            left -= len(data)
    except OSError as error:  # its header is sent, and what follows would be taken for its content
        raise InvalidRequestError(f"{path!r} can't be read to its end: {error.strerror or error}") from None
    while left:  # it has become shorter meanwhile
        yield b"\0" * min(left, PIECE_BYTES)
        left -= min(left, PIECE_BYTES)
    yield b"\0" * (-size % tarfile.BLOCKSIZE)


def _header(path: str, kind: bytes, mode: int, size: int = 0, at: float = 0.0, target: str = "") -> bytes:
    member = tarfile.TarInfo(path)
    member.type, member.mode, member.size, member.mtime, member.linkname = kind, mode, size, int(at), target
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
