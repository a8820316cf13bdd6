"""Writes the log files of one attempt of a task."""

import contextlib
import os

from iris_ray.actors.host.output.log_files import AttemptLog

FILE_BYTES = 64 << 20
FILES_KEPT = 5
"""How large a file becomes, and of how many such files the newest bytes of one attempt of one task are kept."""
RETRY_BYTES = 1 << 20
"""How many bytes are skipped after a file could not be written, before the next try."""


class LogWriter:
    """Appends to the files of one attempt. It never raises: a full disk must not harm the task.

    Args:
        log: the attempt's files.
        file_bytes: how large a file becomes.
        files_kept: the newest bytes are kept, as many as are in so many full files.

    Attributes:
        end: how many bytes it was given.
        problem: why some of them could not be kept, or None.
    """

    def __init__(self, log: AttemptLog, file_bytes: int = FILE_BYTES, files_kept: int = FILES_KEPT) -> None:
        self._log = log
        self._file_bytes = file_bytes
        self._files_kept = files_kept
        self._starts: list[int] = []
        self._fd: int | None = None
        self._next_file = 0  # the offset at which the next file begins
        self.end = 0
        self.problem: str | None = None

    def write(self, data: bytes) -> bool:
        """Write some bytes, and return whether a new file was begun."""
        view, turned = memoryview(data), False
        while view:
            if self.end >= self._next_file or self._is_deleted():
                turned = True
                self._begin_file()
            size = min(len(view), self._next_file - self.end)
            self._append(view[:size])
            self.end += size
            view = view[size:]
        return turned

    def begin(self) -> None:
        """Create the first file, unless there is one: an empty file says that the attempt has printed nothing."""
        if self.end >= self._next_file:
            self._begin_file()

    def close(self) -> None:
        """Close the current file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                os.close(fd)
            except OSError as error:  # a network's file system may say only here that it could not write
                self.problem = str(error)

    def _is_deleted(self) -> bool:
        """Return whether `prune` or a person has deleted the current file, so that nothing in it can be read."""
        try:
            return self._fd is not None and os.fstat(self._fd).st_nlink == 0
        except OSError:  # a faulty disk can't tell
            return False

    def _append(self, view: memoryview) -> None:
        try:
            while view and self._fd is not None:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._give_up(error)

    def _begin_file(self) -> None:
        """Begin a file at this offset, and delete those that are too old.

        Files are not counted: a full disk lets new ones begin, and these would push out what was kept before.
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
        while self._starts[0] < self._next_file - self._files_kept * self._file_bytes:
            with contextlib.suppress(OSError):
                self._log.file(self._starts.pop(0)).unlink()

    def _open(self) -> int:
        self._log.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._log.file(self.end), flags, 0o600)

    def _give_up(self, error: OSError) -> None:
        """Drop the next bytes, and try again later with a new file."""
        self.problem = str(error)
        self.close()
        self._next_file = self.end + RETRY_BYTES
