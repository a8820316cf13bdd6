"""What a machine tells ``iris-ray doctor``: which processes hold its chips, its disks, the metadata server, versions.

On the hosts of a cluster this runs as a plain Ray task. It travels by value with the other modules of `TRAVELS`, so
that a host with another iris_ray, or without one, can answer. These modules therefore use the standard library and
psutil only, which Ray brings along. Answers are of built-in types.
"""

import contextlib
import http.client
import os
import platform
import queue
import resource
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from iris_ray.actors.host.chips import blocks, find_holders, host_devices, owner_of
from iris_ray.settings import HOST_DIR, TEST_METADATA_HOST

TRAVELS = __name__, "iris_ray.actors.host.chips", "iris_ray.settings"
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
    devices = host_devices(os.environ)
    holders = find_holders(devices)
    return {
        "holders": [str(holder) for holder in holders.seen],
        "hidden": holders.hidden,
        "foreign_lock": owner_of(devices.lock) if blocks(devices.lock) else None,
        "disks": [trouble for path in kept_in(os.environ) if (trouble := disk_trouble(path))],
        "metadata": metadata_tells(os.environ),
        "lockable": lockable_bytes(),
        "versions": versions(),
    }


def gcs_variables(names: Sequence[str], session: str) -> dict[str, str | None] | None:
    """Return variables in the environment of the GCS of a session of Ray's on this machine.

    Returns:
        The values by name, None for a variable that is not set; None if the GCS's environment can't be read.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(words[0]).name == "gcs_server" and any(session in Path(word).parts for word in words):
                lines = (process / "environ").read_bytes().decode(errors="replace").split("\0")
                given = dict(line.split("=", 1) for line in lines if "=" in line)
                return {name: given.get(name) for name in names}
    return None


def lockable_bytes() -> int | None:
    """Return how much memory a process here may lock, in bytes; None: as much as it likes."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def kept_in(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories in which Ray, in a process of Ray's, and iris_ray keep their files on this machine."""
    import ray

    # Ray before 2.55 does not tell.
    tell = getattr(ray.get_runtime_context(), "get_temp_dir", None) if ray.is_initialized() else None
    rays = [tell()] if tell else []
    return [Path(path) for path in (*rays, HOST_DIR.read(environ)) if path]


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


def metadata_variable(environ: Mapping[str, str]) -> str | None:
    """Return the variable that names this machine's metadata server; None if none does."""
    return next((name for name in METADATA_VARIABLES if environ.get(name)), None)


def metadata_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses at which this machine's metadata server may be, as `MetadataWatch` tries them."""
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
