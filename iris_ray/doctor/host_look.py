"""What a machine tells ``iris-ray doctor``: which processes hold its chips, its disks, the metadata server, versions.

On the hosts of a cluster this module runs as a plain Ray task and travels by value, so that a host with another
iris_ray, or without one, answers as well. So its functions use the standard library only, and answer in built-in types.
"""

import contextlib
import http.client
import os
import platform
import pwd
import queue
import resource
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from iris_ray.settings import HOST_DIR, TEST_METADATA_HOST

HOST_DIR_VARIABLE = HOST_DIR.name
METADATA_TIMEOUT_S = 1.0
METADATA_VARIABLES = (TEST_METADATA_HOST, "GCE_METADATA_HOST")
METADATA_HOSTS = ("metadata.google.internal", "169.254.169.254")
PREEMPTED = "instance/preempted"
MetadataTells = Literal["nothing", "no preemptions", "preemptions"]
NO_NOTICES = "as in GKE: let each pod announce its end with a preStop hook (iris-ray host give-notice --help)"
_FLAVOR = {"Metadata-Flavor": "Google"}
LITTLE_BYTES = 200 << 20
"""A disk on which less is free is as good as full: Ray's logs alone take that in a day."""
PACKAGES = ("ray", "iris_ray", "jax")


def look_around() -> dict[str, Any]:
    """Return everything about this machine. It takes about a second and changes nothing."""
    dev, lock = device_places(os.environ)
    devices = chip_devices(dev)
    holders, hidden = find_holders([*devices, lock])
    return {
        "holders": holders,
        "hidden": hidden,
        "foreign_lock": foreign_lock(lock),
        "disks": [trouble for path in kept_in(os.environ) if (trouble := disk_trouble(path))],
        "metadata": metadata_tells(os.environ),
        "lockable": lockable_bytes(),
        "versions": versions(),
    }


def lockable_bytes() -> int | None:
    """Return how much memory a process here may lock, in bytes; None: as much as it likes."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def kept_in(environ: Mapping[str, str]) -> list[Path]:
    """Return where Ray, if this is a process of its, and iris_ray keep their files on this machine."""
    import ray

    # Ray before 2.55 does not tell.
    tell = getattr(ray.get_runtime_context(), "get_temp_dir", None) if ray.is_initialized() else None
    rays = [tell()] if tell else []
    own = environ.get(HOST_DIR_VARIABLE)
    return [Path(path) for path in (*rays, own) if path]


def disk_trouble(path: Path) -> str | None:
    """Return why hardly anything can be written in a directory, or None."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return str(error)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_flag & os.ST_RDONLY:
        return f"{path} is read-only"
    if disk.f_files and not disk.f_favail:
        return f"no further file can be created in {path}"
    return f"{free >> 20} MB are left in {path}" if free < LITTLE_BYTES else None


def device_places(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the directory of device files, and the file that libtpu locks. Simulated hosts have their own."""
    own = environ.get(HOST_DIR_VARIABLE)  # on a real host it holds logs and no devices
    if own and Path(own, "dev").is_dir():
        return Path(own, "dev"), Path(own, "lock", "libtpu_lockfile")
    return Path("/dev"), Path("/tmp/libtpu_lockfile")


def chip_devices(dev: Path) -> list[Path]:
    """Return the device files of this machine's TPU chips."""
    return sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])


def find_holders(files: Iterable[Path]) -> tuple[list[str], int]:
    """Return the processes that have one of the files open, and how many could not be inspected."""
    paths = set(map(str, files))
    holders, hidden = [], 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(path in paths for path in _open_files(process)):
                holders.append(f"pid {process.name} ({(process / 'comm').read_text(errors='replace').strip()})")
        except PermissionError:
            hidden += 1
        except OSError:
            continue  # it has ended
    return holders, hidden


def _open_files(process: Path) -> Iterator[str]:
    for descriptor in os.listdir(process / "fd"):
        try:
            yield os.readlink(process / "fd" / descriptor)
        except FileNotFoundError:
            continue  # closed meanwhile


def foreign_lock(lock: Path) -> str | None:
    """Return the owner of the lock file if libtpu could not open it from here even when unlocked, or None."""
    try:
        owner = lock.stat().st_uid
    except OSError:
        return None
    if os.access(lock, os.R_OK | os.W_OK):
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"uid {owner}"


def metadata_variable(environ: Mapping[str, str]) -> str | None:
    """Return the variable that names this machine's metadata server; None if none does."""
    return next((name for name in METADATA_VARIABLES if environ.get(name)), None)


def metadata_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return where this machine's metadata server may be; the same places as `MetadataWatch` asks."""
    named = metadata_variable(environ)
    return (environ[named],) if named else METADATA_HOSTS


def metadata_tells(environ: Mapping[str, str]) -> MetadataTells:
    """Return what Google's metadata server tells within `METADATA_TIMEOUT_S`. That of GKE has no `PREEMPTED`."""
    statuses: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    hosts = metadata_hosts(environ)
    for host in hosts:  # in threads, as name resolution has no timeout of its own
        url = f"http://{host}/computeMetadata/v1/{PREEMPTED}"
        threading.Thread(target=lambda url: statuses.put(_status(url)), args=(url,), daemon=True).start()
    give_up_at = time.monotonic() + METADATA_TIMEOUT_S
    status = None
    with contextlib.suppress(queue.Empty):
        for _ in hosts:
            if status is None:
                status = statuses.get(timeout=max(0.0, give_up_at - time.monotonic()))
    return "nothing" if status is None else "no preemptions" if status == HTTPStatus.NOT_FOUND else "preemptions"


def _status(url: str) -> int | None:
    """Return the status of the metadata server's answer; None without one."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy reaches it
    request = urllib.request.Request(url, headers=_FLAVOR)
    try:
        with direct.open(request, timeout=METADATA_TIMEOUT_S) as reply:
            answer = reply
    except urllib.error.HTTPError as error:
        answer = error
        error.close()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    is_googles = answer.headers.get("Metadata-Flavor") == "Google"
    return int(answer.status) if is_googles else None


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of `PACKAGES`; None for a missing package."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    if package == "iris_ray":  # may come with a working directory instead of being installed
        try:
            import iris_ray
        except ImportError:
            return None
        return iris_ray.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None
