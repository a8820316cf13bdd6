"""Commands under which a host is not as one expects; for ``SimulatedCluster.add_slice(under=...)``."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import iris_ray
from iris_ray.actors.host.ledger import EXCLUSIVE
from iris_ray.actors.protocol.version import PROTOCOL_VERSION, package_directory

CONTAINER = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc"]
"""Sees no process but its own, with pids of its own."""
NON_ROOT = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
"""A user without any privilege, in a namespace of its own: the files are still its own."""
READ_ONLY_ROOT = [
    *("unshare", "--mount", "sh", "-c"),
    'mount --bind /tmp /tmp && mount -o remount,ro,bind / && exec "$0" "$@"',
]
"""Only /tmp and what else is mounted there can be written to, such as /dev/shm."""
SMALL_DISK = [
    *("sh", "-c"),
    f'disk="$IRIS_RAY_HOST_DIR/{EXCLUSIVE}" && mkdir -p "$disk" && mount -t tmpfs -o size=4m small-disk "$disk"'
    ' && exec "$0" "$@"',
]
"""Records its task processes on a file system of four megabytes. The caller unmounts that: it outlives the host."""

_OTHER_CLOCK = """\
import time
_true = time.time
time.time = lambda: _true() + {seconds}
time.time_ns = lambda: int(time.time() * 1e9)
"""


def clock_off_by(seconds: float, directory: Path) -> list[str]:
    """Return a command under which every Python process has another wall clock.

    Ray's C++ code has the machine's. libfaketime 0.9 would shift that too, but breaks ``time.sleep``.

    Args:
        seconds: how far ahead the clock is.
        directory: for a module that Python imports at its start.
    """
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(_OTHER_CLOCK.format(seconds=seconds))
    return _with_on_path(directory)


def with_installed(package: Path) -> list[str]:
    """Return a command under which every Python process finds a package's directory before what is installed."""
    return _with_on_path(package.parent)


def other_iris_ray(directory: Path, version: str, protocol: int = PROTOCOL_VERSION) -> Path:
    """Write an iris_ray of another version, as if it were installed there. Return the directory of the package."""
    copy = directory / "iris_ray"
    ours = Path(package_directory())
    shutil.copytree(ours, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in (
        ("__init__.py", f'__version__ = "{iris_ray.__version__}"', f'__version__ = "{version}"'),
        ("actors/protocol/version.py", f"PROTOCOL_VERSION = {PROTOCOL_VERSION}", f"PROTOCOL_VERSION = {protocol}"),
    ):
        text = (copy / name).read_text()
        assert before in text
        (copy / name).write_text(text.replace(before, after, 1))
    return copy


def _with_on_path(directory: Path) -> list[str]:
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    return ["env", f"PYTHONPATH={path}"]


def fill(directory: Path) -> Path:
    """Fill a directory's file system to the last byte; use a small one. Return the file that takes the room."""
    ballast = directory / "ballast"
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    return ballast


def unmount(directory: Path) -> None:
    """Unmount a file system, also while processes use it."""
    subprocess.run(["umount", "--lazy", str(directory)], check=True)
