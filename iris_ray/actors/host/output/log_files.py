"""What tasks have printed, in files on their host: ``task-logs/<job id>/task-<i>.attempt-<n>.<offset>.log``.

An attempt's output is one stream of bytes, cut into files of bounded size. Each file is named after the offset of its
first byte. The oldest files are deleted while the newest grow. Offsets keep counting, so a reader can always continue
where it stopped. TPUHostActors write these files; any process of the host may read them, also long afterwards.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from iris_ray.actors.host.directories.job_name import directory_name

_FAR = 1 << 62
"""An offset beyond the end of any log."""


def logs_directory(host_directory: Path) -> Path:
    """Return the directory with the logs of all jobs."""
    return host_directory / "task-logs"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an attempt's output.

    Attributes:
        offset: where it begins, in bytes from the attempt's first one.
        data: its bytes.
        end: how many bytes the attempt had printed in all when it was read.
    """

    offset: int
    data: bytes
    end: int


@dataclass(frozen=True, slots=True)
class AttemptLog:
    """The files of one attempt of one task.

    Args:
        root: the host's directory of logs.
        job_id, task_index, attempt: which attempt of which task.
    """

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

    def read(self, offset: int, limit: int) -> Piece | None:
        """Return up to ``limit`` bytes from ``offset`` on, or from the first byte behind it that is still there.

        Returns None if the attempt has no files. The attempt may still be writing.
        """
        files = self.files()
        if not files:
            return None
        last_start, last = files[-1]
        end = last_start + _size(last)
        offset = min(max(offset, files[0][0]), end)
        data = bytearray()
        for (start, path), (stop, _) in zip(files, [*files[1:], (end, last)], strict=True):
            if start > offset + len(data):  # the bytes before could not be kept, or were deleted just now
                if data:
                    break
                offset = start
            if offset + len(data) < stop and len(data) < limit:
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    file.seek(offset + len(data) - start)
                    data += file.read(min(limit - len(data), stop - offset - len(data)))
        return Piece(offset, bytes(data), end)

    def tail(self, lines: int, limit: int) -> Piece | None:
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
        return Piece(piece.offset + start, data[start:], piece.end)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
