"""The log files of tasks on their host: ``task-logs/<job id>/task-<i>.attempt-<n>.<offset>.log``.

An attempt's output is one stream of bytes, cut into files of bounded size. A file's name has the offset of its first
byte. The oldest files are deleted while the newest grow. Offsets keep counting, so a reader can always continue where
it stopped. TPUHostActors write these files; any process of the host may read them, even long afterwards. Each has a
file with the times of its output, which lives as long as it does: see `times.py`.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from iris_ray.actors.host.directories import directory_name
from iris_ray.logs.times import TIMES, Times, TimesWriter, offset_since, read_times, times_file

_FAR = 1 << 62
"""An offset beyond the end of any log."""


def logs_directory(host_directory: Path) -> Path:
    """Return the directory with the logs of all jobs."""
    return host_directory / "task-logs"


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A piece of an attempt's output.

    Attributes:
        offset: of its first byte in the attempt's output.
        data: its bytes.
        end: how many bytes the attempt had printed in all when the piece was read.
        times: when its bytes came, if that was asked for.
    """

    offset: int
    data: bytes
    end: int
    times: Times = ()


@dataclass(frozen=True, slots=True)
class AttemptLog:
    """The log files of one attempt of one task. ``root`` is the host's directory of logs."""

    root: Path
    job_id: str
    task_index: int
    attempt: int

    @property
    def directory(self) -> Path:
        """The directory with the logs of the job."""
        return self.root / directory_name(self.job_id)

    def file(self, offset: int) -> Path:
        """Return the path of the file that begins at this offset."""
        return self.directory / f"task-{self.task_index}.attempt-{self.attempt}.{offset:015d}.log"

    def files(self) -> list[tuple[int, Path]]:
        """Return the offset and the path of each file, the oldest first."""
        paths = self.directory.glob(f"task-{self.task_index}.attempt-{self.attempt}.*.log")
        return sorted((int(path.name.split(".")[-2]), path) for path in paths)

    def all_files(self) -> list[Path]:
        """Return the paths of the log files and of the times of each."""
        return [path for _, log in self.files() for path in (log, times_file(log))]

    def offset_since(self, since: float) -> int:
        """Return the offset of the first byte that came at a time, in seconds since the epoch, or later."""
        files = self.files()
        return offset_since(files, files[-1][0] + _size(files[-1][1]), since) if files else 0

    def times(self, piece: LogPiece) -> Times:
        """Return when the bytes of a piece came."""
        stop, files = piece.offset + len(piece.data), self.files()
        ends = [*(start for start, _ in files[1:]), piece.end]
        return tuple(
            one
            for (start, path), end in zip(files, ends, strict=True)
            if start < stop and piece.offset < end
            for one in read_times(path, piece.offset, stop)
        )

    def read(self, offset: int, limit: int) -> LogPiece | None:
        """Return up to ``limit`` bytes from ``offset`` on, or from the first later byte that is still kept.

        Return None if the attempt has no files. The attempt may still be writing.
        """
        files = self.files()
        if not files:
            return None
        last_start, last = files[-1]
        end = last_start + _size(last)
        offset = min(max(offset, files[0][0]), end)
        data = bytearray()
        for (start, path), (stop, _) in zip(files, [*files[1:], (end, last)], strict=True):
            if start > offset + len(data):  # the bytes before were not kept, or were just deleted
                if data:
                    break
                offset = start
            if offset + len(data) < stop and len(data) < limit:
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    file.seek(offset + len(data) - start)
                    data += file.read(min(limit - len(data), stop - offset - len(data)))
        return LogPiece(offset, bytes(data), end)

    def tail(self, lines: int, limit: int) -> LogPiece | None:
        """Return the last lines, at most ``limit`` bytes of them; None if the attempt has no files."""
        found = self.read(_FAR, 0)
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
        return LogPiece(piece.offset + start, data[start:], piece.end)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# -- writing -----------------------------------------------------------------------------------------------------------

FILE_BYTES = 64 << 20
FILES_KEPT = 5
"""A file grows to `FILE_BYTES`. Of each attempt of a task the newest `FILES_KEPT` are kept, with the one that grows."""
RETRY_BYTES = 1 << 20
"""The bytes that are skipped after a failed write, before the next try."""


class LogWriter:
    """Appends to the files of one attempt. It never raises: a full disk must not harm the task.

    Attributes:
        end: how many bytes it was given.
        problem: why some of them could not be written, or None.
    """

    def __init__(self, log: AttemptLog, file_bytes: int = FILE_BYTES, files_kept: int = FILES_KEPT) -> None:
        self._log = log
        self._file_bytes = file_bytes
        self._files_kept = files_kept
        self._starts: list[int] = []
        self._fd: int | None = None
        self._next_file = 0  # the offset at which the next file begins
        self._times: TimesWriter | None = None  # those of the current file
        self.end = 0
        self.problem: str | None = None

    def write(self, data: bytes, now: float | None = None) -> bool:
        """Write some bytes.

        Args:
            data: the bytes.
            now: when they came, in seconds since the epoch; None: it is not noted.

        Returns:
            Whether this began a new file.
        """
        view, turned = memoryview(data), False
        while view:
            if self.end >= self._next_file or self._is_deleted():
                turned = True
                self._begin_file()
            size = min(len(view), self._next_file - self.end)
            self._append(view[:size])
            if self._times is not None and now is not None:
                self._times.note(self.end, now)
            self.end += size
            view = view[size:]
        return turned

    def begin(self) -> None:
        """Create the first file if there is none yet. An empty file says that the attempt has printed nothing."""
        if self.end >= self._next_file:
            self._begin_file()

    def close(self) -> None:
        fd, self._fd, self._times = self._fd, None, None
        if fd is not None:
            try:
                os.close(fd)
            except OSError as error:  # a network file system may report a failed write only here
                self.problem = str(error)

    def _is_deleted(self) -> bool:
        """Return whether somebody, such as `prune`, has deleted the current file."""
        try:
            return self._fd is not None and os.fstat(self._fd).st_nlink == 0
        except OSError:  # the disk is faulty
            return False

    def _append(self, view: memoryview) -> None:
        try:
            while view and self._fd is not None:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._give_up(error)

    def _begin_file(self) -> None:
        """Begin a file at this offset, and delete files that are too old.

        Age is an offset, not a count of files: on a full disk many empty files may begin, and would push out full ones.
        """
        self.close()
        self._next_file = self.end + self._file_bytes
        try:
            try:
                self._fd = self._open()
            except FileNotFoundError:  # a concurrent `prune` removed the directory while it was empty
                self._fd = self._open()
        except OSError as error:
            self._give_up(error)
            return
        self._starts.append(self.end)
        self._times = TimesWriter(times_file(self._log.file(self.end)))
        while self._starts[0] < self._next_file - self._files_kept * self._file_bytes:
            with contextlib.suppress(OSError):
                _delete(self._log.file(self._starts.pop(0)))

    def _open(self) -> int:
        self._log.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._log.file(self.end), flags, 0o600)

    def _give_up(self, error: OSError) -> None:
        """Drop the next bytes, and try again later with a new file."""
        self.problem = str(error)
        self.close()
        self._next_file = self.end + RETRY_BYTES


# -- retention ---------------------------------------------------------------------------------------------------------

HOST_BYTES = 2 << 30
HOST_FILES = 20_000
KEPT_S = 14 * 24 * 3600.0
"""The limits for all logs of a host, in bytes and files, and for the age of a log, in seconds."""


def prune(
    root: Path, now: float, most_bytes: int = HOST_BYTES, kept_s: float = KEPT_S, most_files: int = HOST_FILES
) -> None:
    """Delete logs that are too old, then the oldest until the limits are met. The newest file always stays.

    Args:
        root: the host's directory of logs.
        now: seconds since the epoch.
        most_bytes, most_files: the limits for all logs together.
        kept_s: the seconds after its last line at which a log is too old.
    """
    files = sorted(_logs(root))
    total, count = sum(size for _, size, _ in files), len(files)
    for written_at, size, path in files[:-1]:
        if total > most_bytes or count > most_files or written_at < now - kept_s:
            with contextlib.suppress(OSError):
                _delete(path)
                total, count = total - size, count - 1
    for directory in _within(root):
        with contextlib.suppress(OSError):
            directory.rmdir()  # refused unless it is empty


def _delete(log_file: Path) -> None:
    """Delete a log file and its times.

    Raises:
        OSError: the log file can't be deleted.
    """
    log_file.unlink()
    times_file(log_file).unlink(missing_ok=True)


def _logs(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield each log file's time of the last write, in seconds since the epoch, its size in bytes, and its path.

    The size is that with its times. Times without a log count as logs.
    """
    for paths in map(_within, _within(root)):
        there = set(paths)
        for path in paths:
            if path.suffix == TIMES and path.with_suffix(".log") in there:
                continue
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield stat.st_mtime, stat.st_size + _size(times_file(path)), path


def _within(directory: Path) -> list[Path]:
    """Return the entries of a directory; none if it is no directory, or a concurrent `prune` has removed it."""
    try:
        return list(directory.iterdir())
    except OSError:
        return []
