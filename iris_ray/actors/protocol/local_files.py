"""A job's directory on a host, as the host and the job's tasks see it, and how tasks ask a host's file service."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import psutil

from iris_ray.actors.protocol.task_files import write_whole

# -- on disk -----------------------------------------------------------------------------------------------------------

MEMORY = Path("/dev/shm")
"""The file system in memory that job directories use, if it has room."""
CGROUP = Path("/sys/fs/cgroup")
KEPT_FREE = 10
"""The part of a file system, and of the host's memory, that the file service leaves free: a tenth."""


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """The files of a job on one host. They are locked, kept and removed as a whole.

    Attributes:
        path: the directory; no other user can read it.
    """

    path: Path

    @staticmethod
    def of_local_dir(local_dir: str) -> "JobDirectory":
        """Return the directory that has a task's ``local_dir``."""
        return JobDirectory(Path(local_dir).parent)

    @property
    def files(self) -> Path:
        """The tasks' ``local_dir``, with nothing of iris_ray in it."""
        return self.path / "files"

    @property
    def incoming(self) -> Path:
        """Files that the file service is receiving or removing."""
        return self.path / "incoming"

    @property
    def token(self) -> Path:
        """The file with the job's token. The file service answers only who knows the token."""
        return self.path / "token"

    def write_token(self, token: str) -> None:
        """Let the file service serve this directory to who has the token."""
        write_whole(self.token, token.encode())

    def read_token(self) -> str:
        """Return the job's token; "" if the file service does not serve this directory."""
        with contextlib.suppress(OSError):
            return self.token.read_text()
        return ""


def room_in(directory: Path) -> int:
    """Return how many bytes of further files a directory may take; negative if it has too many already.

    A tenth of its file system stays free and, if that is in memory, a tenth of the memory of the host or, if that is
    less, of the container.
    """
    disk = os.statvfs(directory)
    rooms = [disk.f_bavail * disk.f_frsize - disk.f_blocks * disk.f_frsize // KEPT_FREE]
    with contextlib.suppress(OSError):
        if directory.stat().st_dev == MEMORY.stat().st_dev:
            memory = psutil.virtual_memory()
            rooms.append(memory.available - memory.total // KEPT_FREE)
            rooms.append(_room_of_container(CGROUP))
    return min(rooms)


def _room_of_container(cgroup: Path) -> int:
    """Return what a container's memory limit leaves (cgroup v2). The kernel takes the page cache back if it must.

    Raises:
        OSError: there is no limit.
    """
    try:
        most, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = next(int(value) for name, value in lines if name == "inactive_file")
    except (ValueError, StopIteration) as error:  # "max"
        raise FileNotFoundError(cgroup) from error
    return most - used + cached - most // KEPT_FREE


# -- over HTTP ---------------------------------------------------------------------------------------------------------

LIST, FILES = "/list/", "/files/"
"""``GET /list/<directory>`` answers a JSON object of paths and sizes. ``GET``, ``PUT`` and ``DELETE /files/<path>``
read, write and delete. Paths are relative to the job's ``local_dir``."""
TOKEN_HEADER, TOKEN_PREFIX = "Authorization", "Bearer "


def to_target(prefix: str, path: str) -> str:
    """Return a path in the form of a request's target."""
    return prefix + quote(path, errors="surrogateescape")


def of_target(prefix: str, target: str) -> str:
    """Return the path in a request's target."""
    return unquote(target.removeprefix(prefix), errors="surrogateescape")
