"""The directory in which iris_ray keeps its files on a host, and where a task process's own files are in it."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the host's directory: ``$IRIS_RAY_HOST_DIR``, or a directory per user under /tmp. Create it if needed.

    Raises:
        RuntimeError: the directory belongs to another user.
    """
    configured = environ.get("IRIS_RAY_HOST_DIR")
    path = Path(configured) if configured else Path(tempfile.gettempdir()) / f"iris_ray-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(
            f"{path} belongs to another user; remove it, or set IRIS_RAY_HOST_DIR to a directory of yours"
        )
    return path


def started_mark(directory: Path, pid: int) -> Path:
    """Return the path of the file that a task process writes when user code begins; it names the task."""
    return directory / "tasks" / f"{pid}.started"


def output_pipe(directory: Path, pid: int) -> Path:
    """Return the path of the FIFO that a task process prints into."""
    return directory / "tasks" / f"{pid}.output"
