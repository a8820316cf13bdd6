"""The directory that a job has on each host of its slices, for caches and checkpoints that only this host needs.

It outlives the attempts of the job on the host and goes when the job ends, when another job takes the host, or some
minutes after the last process of iris_ray there: nobody is left then who would hear of the job's end.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from iris_ray.actors.host.host_directory import VARIABLE

MEMORY = Path("/dev/shm")
LEAST_MEMORY_BYTES = 1 << 30
"""A file system in memory with less free space is not used, nor one that is more than half full."""


class LocalDirectories:
    """The directories of jobs on one host.

    Args:
        directory: iris_ray's directory on the host. They are there if there is no room in memory.
        memory: a file system in memory; None to use none.
    """

    def __init__(self, directory: Path, memory: Path | None) -> None:
        key = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
        self._on_disk = directory / "jobs"
        self._memory = memory
        self._in_memory = None if memory is None else memory / f"iris_ray-{os.getuid()}-{key}"

    @staticmethod
    def of_host(directory: Path, environ: Mapping[str, str] = os.environ) -> "LocalDirectories":
        """Return those of this host. An operator who has chosen where iris_ray keeps its files finds them there."""
        return LocalDirectories(directory, None if environ.get(VARIABLE) else MEMORY)

    def take(self, job_id: str) -> Path:
        """Return the directory of a job that has the host to itself. Create it if needed; remove those of other jobs.

        Raises:
            OSError: it can't be created.
        """
        self.remove(but=job_id)
        path = next((own for own in self._all() if own.name == job_id), None)
        if path is None:
            path = self._root() / job_id
            path.mkdir(mode=0o700)
        os.utime(path)
        return path

    def remove(self, job_id: str | None = None, but: str | None = None, before: float | None = None) -> None:
        """Remove directories, as far as that is possible.

        Args:
            job_id: of this job only.
            but: not that of this job.
            before: only those that no task has taken since, in Unix time.
        """
        for path in self._all():
            with contextlib.suppress(FileNotFoundError):
                is_old = before is None or path.stat().st_mtime < before
                if is_old and path.name != but and job_id in (None, path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def hold_anything(self) -> bool:
        """Return whether any job has left files. Directories without files are removed."""
        for path in self._all():
            with contextlib.suppress(OSError):
                path.rmdir()
        return any(True for _ in self._all())

    def _all(self) -> Iterator[Path]:
        for root in (self._in_memory, self._on_disk):
            if root is not None and _is_ours(root):
                yield from list(root.iterdir())

    def _root(self) -> Path:
        for root in (self._in_memory, self._on_disk):
            if root is not None and (root is self._on_disk or self._has_room()):
                with contextlib.suppress(FileExistsError):
                    root.mkdir(mode=0o700)
                if _is_ours(root):
                    return root
        raise PermissionError(f"{self._on_disk} is not this user's own directory; remove it")

    def _has_room(self) -> bool:
        assert self._memory is not None
        try:
            disk = os.statvfs(self._memory)
        except OSError:
            return False
        free = disk.f_bavail * disk.f_frsize
        return free >= LEAST_MEMORY_BYTES and 2 * disk.f_bavail >= disk.f_blocks


def _is_ours(root: Path) -> bool:
    """Return whether this is a directory into which nobody else can write; a link is none."""
    try:
        found = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
