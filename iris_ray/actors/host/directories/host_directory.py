"""The directory in which iris_ray keeps its files on a host."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from iris_ray.actors.wire.ray_internals import temp_dir
from iris_ray.settings import HOST_DIR


def host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the host's directory: ``$IRIS_RAY_HOST_DIR``, or one per user in Ray's own directory. Create it if needed.

    Ray gives all processes of a node the same directory, ``/tmp/ray`` by default, whatever ``TMPDIR`` a job sets. It
    is there in containers that Ray starts, too.

    Raises:
        OSError: another user owns the directory, or may write to it; or it can't be created.
    """
    configured = HOST_DIR.read(environ)
    path = configured or _in_rays_directory()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat() if configured else path.lstat()  # an operator's path may be a link, one in /tmp must not
    if reason := _why_unsafe(found):
        raise PermissionError(
            f"{path} {reason}; remove it, or set {HOST_DIR.name} to a directory of yours before `ray start`"
        )
    return path


def can_not_start(error: OSError) -> str:
    """Return that no task can start on a host because of this error, as part of a sentence about the host."""
    return f"no task can start there: {error}"


def _in_rays_directory() -> Path:
    return Path(temp_dir()) / f"iris_ray-{os.getuid()}"


def _why_unsafe(found: os.stat_result) -> str | None:
    """Return why a process of another user might change what we keep in a directory; None if none can."""
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    if found.st_uid != os.getuid():
        return "belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by other users"
    return None
