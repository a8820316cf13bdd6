"""How tasks ask a host's file service over HTTP, and how much room a job's directory has."""

import contextlib
import os
from pathlib import Path
from urllib.parse import quote, unquote

import psutil

from iris_ray.actors.protocol.task_files import MEMORY

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


# -- room --------------------------------------------------------------------------------------------------------------

CGROUP = Path("/sys/fs/cgroup")
KEPT_FREE = 10
"""The part of a file system, and of the host's memory, that the file service leaves free: a tenth."""


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
