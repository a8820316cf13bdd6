"""What tasks have printed, in files on their host: ``task-logs/<job id>/task-<i>.attempt-<n>.<offset>.log``.

An attempt's output is one stream of bytes, cut into files of bounded size, each named after the offset at which it
begins. The oldest are deleted while the newest grow; offsets keep counting, so a reader can always go on where it was.
Written by TPUHostActors, read by whoever is asked, also long after.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

FILE_BYTES = 64 << 20
FILES_KEPT = 5
"""Of one attempt of one task."""
RETRY_BYTES = 1 << 20
"""How much is passed over after a file could not be written."""
HOST_BYTES = 2 << 30
HOST_FILES = 20_000
KEPT_S = 14 * 24 * 3600.0
"""What all logs of a host may take together, and how long they are kept."""


def logs_directory(host_directory: Path) -> Path:
    return host_directory / "task-logs"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of an attempt's output: the bytes from ``offset`` on, and how much there is in all."""

    offset: int
    data: bytes
    end: int


@dataclass(frozen=True, slots=True)
class AttemptLog:
    """The files of one attempt of one task.

    Args:
        root: the host's directory of logs.
        job_id, task_index, attempt: whose.
    """

    root: Path
    job_id: str
    task_index: int
    attempt: int

    @property
    def directory(self) -> Path:
        name = quote(self.job_id, safe="")[:200]
        return self.root / (name if name.strip(".") else name.replace(".", "%2E"))

    def file(self, offset: int) -> Path:
        return self.directory / f"task-{self.task_index}.attempt-{self.attempt}.{offset:015d}.log"

    def files(self) -> list[tuple[int, Path]]:
        """With the offsets at which they begin, the oldest first."""
        paths = self.directory.glob(f"task-{self.task_index}.attempt-{self.attempt}.*.log")
        return sorted((int(path.name.split(".")[-2]), path) for path in paths)

    def read(self, offset: int, limit: int) -> Piece | None:
        """Up to ``limit`` bytes from ``offset`` on, or from the first byte after it that is still there.

        None if there are no files of that attempt. What it still writes may be read at any moment.
        """
        files = self.files()
        if not files:
            return None
        last_start, last = files[-1]
        end = last_start + _size(last)
        offset = min(max(offset, files[0][0]), end)
        data = bytearray()
        for (start, path), (stop, _) in zip(files, [*files[1:], (end, last)], strict=True):
            if start > offset + len(data):  # what was before could not be kept, or was deleted just now
                if data:
                    break
                offset = start
            if offset + len(data) < stop and len(data) < limit:
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    file.seek(offset + len(data) - start)
                    data += file.read(min(limit - len(data), stop - offset - len(data)))
        return Piece(offset, bytes(data), end)

    def tail(self, lines: int, limit: int) -> Piece | None:
        """The last lines, at most ``limit`` bytes of them."""
        found = self.read(1 << 62, 0)
        if found is None:
            return None
        piece = self.read(found.end - limit, limit)
        assert piece is not None
        data, at = piece.data, len(piece.data) - piece.data.endswith(b"\n")
        for _ in range(lines):
            at = data.rfind(b"\n", 0, max(at, 0))
            if at < 0:
                return piece
        start = at + 1 if lines > 0 else len(data)
        return Piece(piece.offset + start, data[start:], piece.end)


class LogWriter:
    """Appends to the files of one attempt. It never raises: a full disk must not harm who prints.

    Attributes:
        end: how many bytes were given to it.
        problem: why some of them could not be kept, or None.
    """

    def __init__(self, log: AttemptLog, file_bytes: int = FILE_BYTES, files_kept: int = FILES_KEPT) -> None:
        self._log = log
        self._file_bytes = file_bytes
        self._files_kept = files_kept
        self._starts: list[int] = []
        self._fd: int | None = None
        self._next_file = 0  # the offset at which a file is begun
        self.end = 0
        self.problem: str | None = None

    def write(self, data: bytes) -> bool:
        """Take some bytes; whether a new file was begun."""
        view, turned = memoryview(data), False
        while view:
            if self.end >= self._next_file:
                turned = True
                self._begin_file()
            size = min(len(view), self._next_file - self.end)
            self._append(view[:size])
            self.end += size
            view = view[size:]
        return turned

    def begin(self) -> None:
        """Make its first file, should it not be there: the sign that the attempt has printed nothing."""
        if self.end >= self._next_file:
            self._begin_file()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, view: memoryview) -> None:
        try:
            while view and self._fd is not None:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._give_up(error)

    def _begin_file(self) -> None:
        """Begin a file at this offset, and delete the oldest."""
        self.close()
        self._next_file = self.end + self._file_bytes
        try:
            try:
                self._fd = self._open()
            except FileNotFoundError:  # somebody who tidied up took the directory for one that is left over
                self._fd = self._open()
        except OSError as error:
            self._give_up(error)
            return
        self._starts.append(self.end)
        while len(self._starts) > self._files_kept:
            with contextlib.suppress(OSError):
                self._log.file(self._starts.pop(0)).unlink()

    def _open(self) -> int:
        self._log.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._log.file(self.end), flags, 0o600)

    def _give_up(self, error: OSError) -> None:
        """Keep nothing for a while, then try again with a new file."""
        self.problem = str(error)
        self.close()
        self._next_file = self.end + RETRY_BYTES


def prune(
    root: Path, now: float, most_bytes: int = HOST_BYTES, kept_s: float = KEPT_S, most_files: int = HOST_FILES
) -> None:
    """Delete what was not written to for too long, and then the oldest, until all that is left is small enough."""
    files = sorted(_with_times(root))
    total, count = sum(size for _, size, _ in files), len(files)
    for written_at, size, path in files[:-1]:
        if total > most_bytes or count > most_files or written_at < now - kept_s:
            with contextlib.suppress(OSError):
                path.unlink()
                total, count = total - size, count - 1
    for directory in root.glob("*"):
        with contextlib.suppress(OSError):
            directory.rmdir()  # refused unless it is empty


def _with_times(root: Path) -> Iterator[tuple[float, int, Path]]:
    for path in root.glob("*/*.log"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            yield facts.st_mtime, facts.st_size, path


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
