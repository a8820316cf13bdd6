"""Finds and removes old files of libtpu, Ray and iris_ray on this machine.

The places are named, and nothing outside of them is touched:

- libtpu's logs: files of its names in ``$TPU_LOG_DIR``, or ``/tmp/tpu_logs``.
- Dead sessions of Ray: directories of their names in Ray's own directory. A session is dead if nobody listens on any of
  its sockets, which holds across containers that share the directory, and no process has a file in it open, runs in it,
  or has it in its command line.
- Logs of workers that have ended, in the living session.
- Core dumps of tasks, which the service `evidence` remembers. The limits count them apart from all else, and the newest
  one stays until it is too old, while a tenth of the disk is free.
- iris_ray's own directory: logs of tasks, local directories of jobs that no process has locked, and output directories
  of tasks that do not run. These have limits of their own.

Only what belongs to this process's user goes, and no link is followed.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from iris_ray.actors.host.directories import LocalDirectories, host_directory
from iris_ray.actors.host.redirect import started_tasks
from iris_ray.actors.protocol.services import module_of
from iris_ray.actors.protocol.task_files import write_whole
from iris_ray.cleaning.core import DAY_S, LEAST_AGE_S, ClockReading, Item, Limits, to_remove
from iris_ray.errors import ServiceUnavailableError
from iris_ray.model.lifecycle import TaskAttemptId

TPU_LOGS: Final = "libtpu's logs"
SESSIONS: Final = "dead sessions of Ray"
WORKER_LOGS: Final = "logs of Ray's dead workers"
CORE_DUMPS: Final = "core dumps of tasks"
OURS: Final = "iris_ray's own files"
OUTPUTS: Final = "output directories of tasks"

TPU_LOG_DIR: Final = "TPU_LOG_DIR"
"""libtpu's variable for the directory of its logs; ``disabled``: it writes none."""
_TPU_LOG_DEFAULT: Final = "/tmp/tpu_logs"
_TPU_LOG: Final = re.compile(r"tpu_driver\..+\.log\.[A-Z]+\.\d{8}-\d{6}\.\d+")
_SESSION: Final = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+")
_WORKER_LOG: Final = re.compile(
    r"(worker-[0-9a-f]+-.+-\d+\.(out|err)|python-core-(worker|driver)-[0-9a-f]+_\d+\.log)(\.\d+)?"
)
_CLOCK: Final = "clock.json"
_CONNECT_S: Final = 1.0
_FLAGS: Final = re.compile(r"^flags:\s+([0-7]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Places:
    """Where to look on this machine.

    Attributes:
        tpu_logs: where libtpu keeps its logs; None: nowhere, or not on this machine.
        sessions: Ray's own directory.
        session: the session of this process.
        own: iris_ray's own directory.
    """

    tpu_logs: Path | None
    sessions: Path
    session: Path
    own: Path

    @staticmethod
    def of_this_machine(environ: Mapping[str, str] = os.environ, *, has_chips: bool) -> "Places":
        """Return the places on this machine, in a process of Ray's.

        Raises:
            OSError: iris_ray's directory here is not safe.
        """
        from iris_ray.actors.calls.ray_internals import logs_directory, temp_dir

        named = environ.get(TPU_LOG_DIR) or _TPU_LOG_DEFAULT
        tpu_logs = Path(named) if has_chips and os.path.isabs(named) else None
        return Places(tpu_logs, Path(temp_dir()), logs_directory().parent, host_directory(environ))


@dataclass(frozen=True, slots=True)
class Target:
    """A file or a directory in one of the places."""

    place: str
    directory: Path
    name: str

    @property
    def path(self) -> Path:
        return self.directory / self.name


@dataclass
class Cleaned:
    """What was done on a machine.

    Attributes:
        files: how many files and directories went, by place.
        bytes: what they took, by place.
        problems: what could not be removed, and why; a few of them.
    """

    files: dict[str, int]
    bytes: dict[str, int]
    problems: list[str]

    def add(self, place: str, files: int, size: int) -> None:
        if files:
            self.files[place] = self.files.get(place, 0) + files
            self.bytes[place] = self.bytes.get(place, 0) + size

    def remove(self, by: Callable[[], object], path: Path, place: str, size: int) -> None:
        """Remove a file or directory by that function, and note that, or why it can't be removed."""
        with self.noting(path):
            by()
            self.add(place, 1, size)

    @contextlib.contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """Note why something at a path can't be read or removed, and let all else be cleaned."""
        try:
            yield
        except OSError as error:
            if len(self.problems) < MOST_PROBLEMS:
                self.problems.append(f"{path}: {error.strerror or error}")


MOST_PROBLEMS: Final = 5
FREE: Final = 10
"""The divisor for the part of a disk that must stay free: a tenth. Core dumps older than an hour go until it is."""


KEEP_ALL: Final = Limits(None, None)


def clean(
    places: Places, limits: Limits, clock: ClockReading | None = None, *, of_outputs: Limits = KEEP_ALL
) -> Cleaned:
    """Remove what is too old or too much.

    Args:
        places: where to look.
        limits: what may stay of everything else.
        clock: this machine's clocks; None: read them.
        of_outputs: what may stay of the output directories of tasks.
    """
    cleaned = Cleaned({}, {}, [])
    if limits.keep_all and of_outputs.keep_all:
        return cleaned
    clock = _remember(places.own, clock or read_clock())
    if not limits.keep_all:
        _clean_others(places, limits, clock, cleaned)
        with contextlib.suppress(ServiceUnavailableError), cleaned.noting(places.own):
            _clean_core_dumps(places.own, limits, clock, cleaned)
        with cleaned.noting(places.own):
            _clean_own(places.own, limits, clock, cleaned)
    if not of_outputs.keep_all:
        with contextlib.suppress(ServiceUnavailableError), cleaned.noting(places.own):
            _clean_outputs(places.own, of_outputs, clock, cleaned)
    return cleaned


def _clean_others(places: Places, limits: Limits, clock: ClockReading, cleaned: Cleaned) -> None:
    used = used_paths([root for root in (places.tpu_logs, places.sessions) if root is not None])
    items = list[Item[Target]]()
    for path, find in (
        (places.tpu_logs or places.own, _tpu_logs),
        (places.sessions, _sessions),
        (places.session, _worker_logs),
    ):
        with cleaned.noting(path):
            items += find(places, used)
    for item in to_remove(items, clock, limits):
        cleaned.remove(partial(_remove, item.key), item.key.path, item.key.place, item.bytes)


def clean_this_machine(limits: Limits, of_outputs: Limits, has_chips: bool) -> dict[str, Any]:
    """Clean this machine, in a process of Ray's; return a `Cleaned` as plain values."""
    try:
        places = Places.of_this_machine(has_chips=has_chips)
    except OSError as error:
        return asdict(Cleaned({}, {}, [str(error)]))
    return asdict(clean(places, limits, of_outputs=of_outputs))


# -- what there is -----------------------------------------------------------------------------------------------------


def _tpu_logs(places: Places, used: "Used") -> Iterator[Item[Target]]:
    if places.tpu_logs is not None:
        yield from _files(TPU_LOGS, places.tpu_logs, _TPU_LOG, used)


def _worker_logs(places: Places, used: "Used") -> Iterator[Item[Target]]:
    for directory in (places.session / "logs", places.session / "logs" / "old"):
        yield from _files(WORKER_LOGS, directory, _WORKER_LOG, used)


def _files(place: str, directory: Path, names: re.Pattern[str], used: "Used") -> Iterator[Item[Target]]:
    """Yield the regular files of this user in a directory, whose names match."""
    with _opened(directory) as fd:
        for name in os.listdir(fd) if fd is not None else ():
            with contextlib.suppress(OSError):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if names.fullmatch(name) and stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
                    target = Target(place, directory, name)
                    yield Item(target, found.st_mtime, found.st_blocks * 512, str(target.path) in used.written)


def _sessions(places: Places, used: "Used") -> Iterator[Item[Target]]:
    with _opened(places.sessions) as fd:
        for name in os.listdir(fd) if fd is not None else ():
            path = places.sessions / name
            if _SESSION.fullmatch(name) is None or path == places.session:
                continue
            with contextlib.suppress(OSError):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                    changed_at, size, sockets = _tree(path, found)
                    inside = f"{path}/"
                    lives = any(one == str(path) or one.startswith(inside) for one in used.any)
                    lives = lives or any(map(_may_be_listened_on, sockets))
                    yield Item(Target(SESSIONS, places.sessions, name), changed_at, size, lives)


def _tree(path: Path, found: os.stat_result) -> tuple[float, int, list[Path]]:
    """Return when a file of a directory was changed last, what all of them take, and the sockets.

    Directories do not count: what an interrupted removal has left would look new.
    """
    changed_at, size = 0.0, 0
    sockets = []
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                one = os.lstat(os.path.join(parent, name))
                size += one.st_blocks * 512
                if stat.S_ISSOCK(one.st_mode):
                    sockets.append(Path(parent, name))
                changed_at = max(changed_at, one.st_mtime)
    return changed_at or found.st_mtime, size, sockets


def _may_be_listened_on(path: Path) -> bool:
    """Return whether a process listens on a socket, or whether that can't be known."""
    with _opened(path.parent) as fd, socket.socket(socket.AF_UNIX) as probe:
        if fd is None:
            return True
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(f"/proc/self/fd/{fd}/{path.name}")  # the path itself may be too long for a socket
        except ConnectionRefusedError:
            return False
        except OSError as error:
            return error.errno != errno.ENOENT
        return True


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int | None]:
    """Open a directory; None if there is none, if it is a link, or if it can't be read."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


# -- what is used ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Used:
    """The paths that processes of this machine use.

    Attributes:
        written: files that are open for writing. Ray's log monitor has logs open, too, and reads them only.
        any: all that are open, mapped, run in, or in a command line.
    """

    written: Collection[str]
    any: Collection[str]


def used_paths(roots: Collection[Path]) -> Used:
    """Return which paths below these directories processes use."""
    given = {os.path.realpath(root): str(root) for root in roots}
    names = {*given, *given.values()}
    if not names:
        return Used(set(), set())
    pattern = re.compile("(?:" + "|".join(map(re.escape, names)) + r")/[^\s\0:,;'\"=]+")
    written: set[str] = set()
    found: set[str] = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        for path, fd in _open_files(process):
            if pattern.match(path):
                found.add(path)
                if _writes(process, fd):
                    written.add(path)
        found.update(pattern.findall("\n".join(_texts(process))))

    def both_ways(paths: set[str]) -> set[str]:
        """Return the paths as they are, and as they are by way of a link to a directory."""
        links = given.items()
        return paths | {path.replace(real, name, 1) for path in paths for real, name in links if path.startswith(real)}

    return Used(both_ways(written), both_ways(found))


def _open_files(pid: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each open file of a process, and its descriptor."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{fd}"), fd


def _writes(pid: str, fd: str) -> bool:
    """Return whether a process has opened a file for writing, or whether that can't be known."""
    try:
        flags = _FLAGS.search(Path(f"/proc/{pid}/fdinfo/{fd}").read_text())
    except OSError:
        return True
    return flags is None or int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY


def _texts(pid: str) -> Iterator[str]:
    """Yield the paths of a process: its working directory, its program, its arguments and its mapped files."""
    for name in ("cwd", "exe"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/{name}")
    for name in ("cmdline", "maps"):
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")


# -- what goes ---------------------------------------------------------------------------------------------------------


def _remove(target: Target) -> None:
    """Remove a file, or a directory with all that is in it. Nothing is followed that has become a link meanwhile."""
    with _opened(target.directory) as fd:
        if fd is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target.directory)
        if target.place != SESSIONS:
            os.unlink(target.name, dir_fd=fd)
        else:
            shutil.rmtree(target.name, dir_fd=fd)  # safe against links: shutil.rmtree.avoids_symlink_attacks


def _clean_core_dumps(own: Path, limits: Limits, clock: ClockReading, cleaned: Cleaned) -> None:
    """Remove core dumps of tasks. The newest stays until it is too old, even if it alone is too large, unless the disk
    is nearly full.

    Raises:
        ServiceUnavailableError: there is no service that knows them.
        OSError: it can't read what it knows.
    """
    dumps = module_of("evidence", "dumps").remembered(own)
    items = [Item(dump, dump.changed_ns / 1e9, dump.bytes) for dump in dumps]
    if not items:
        return
    newest = max(items, key=lambda item: item.changed_at)
    directory = Path(newest.key.path).parent
    going = to_remove(items, clock, Limits(limits.days, _room(directory, items, limits.bytes, FREE)))
    is_full = limits.bytes is not None and _lacking(directory, FREE) > 0
    if not is_full and newest not in to_remove(items, clock, Limits(limits.days, None)):
        going = [item for item in going if item is not newest]
    for item in going:
        cleaned.remove(item.key.remove, Path(item.key.path), CORE_DUMPS, item.bytes)


def _clean_own(own: Path, limits: Limits, clock: ClockReading, cleaned: Cleaned) -> None:
    """Remove logs of tasks and directories of jobs that are too old. Their modules know what a living task uses."""
    if limits.days is None:
        return
    oldest = clock.wall - limits.days * DAY_S
    if clock.set_at > oldest:
        return  # no file is known to be old
    before = _own_files(own)
    with contextlib.suppress(ServiceUnavailableError):
        files = module_of("logs", "files")
        files.prune(files.logs_directory(own), clock.wall, kept_s=limits.days * DAY_S)
    local = LocalDirectories.of_host(own)
    old = {path: at for path, at in local.left().items() if at < oldest * 1e9}
    local.remove(not_taken_since=old)
    after = _own_files(own)
    cleaned.add(OURS, max(0, before[0] - after[0]), max(0, before[1] - after[1]))


def _clean_outputs(own: Path, limits: Limits, clock: ClockReading, cleaned: Cleaned) -> None:
    """Remove output directories of tasks that do not run here any more.

    Raises:
        ServiceUnavailableError: there is no service that knows them.
    """
    outputs = module_of("outputs", "directory")
    root = outputs.outputs_directory(own)
    living = {
        outputs.OutputDirectory.of(root, TaskAttemptId(task.job_id, task.task_index, task.attempt))
        for task in started_tasks(own).values()
    }
    kept = [one for one in outputs.kept_outputs(root) if one.of not in living]
    items = [Item(one.of, one.changed_at, one.bytes) for one in kept]
    for item in to_remove(items, clock, Limits(limits.days, _room(own, items, limits.bytes, outputs.FREE))):
        cleaned.remove(item.key.remove, item.key.path, OUTPUTS, item.bytes)
    for one in kept:
        if clock.wall - one.changed_at >= LEAST_AGE_S:
            one.of.remove_if_unused()


def _room(directory: Path, items: Collection[Item[Any]], most_bytes: int | None, free: int) -> int | None:
    """Return what these may take on the disk of a directory: this, or less if one of so many parts is not free."""
    if most_bytes is None:
        return None
    return min(most_bytes, max(0, sum(item.bytes for item in items) - _lacking(directory, free)))


def _lacking(directory: Path, free: int) -> int:
    """Return how many bytes are lacking on a directory's disk until one of so many parts of it is free."""
    disk = os.statvfs(directory)
    return max(0, disk.f_blocks // free - disk.f_bavail) * disk.f_frsize


def _own_files(own: Path) -> tuple[int, int]:
    number = size = 0
    for parent, folders, names in os.walk(own):
        if parent == str(own) and "outputs" in folders:  # tasks write there meanwhile
            folders.remove("outputs")
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_blocks * 512
                number += 1
    return number, size


# -- clocks ------------------------------------------------------------------------------------------------------------


def read_clock() -> ClockReading:
    """Return what this machine's clocks show."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return ClockReading(boot, time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))


def _remember(own: Path, clock: ClockReading) -> ClockReading:
    """Return a reading with what the last one tells, and keep it for the next time, if the disk takes it."""
    path = own / _CLOCK
    try:
        found = json.loads(path.read_text())
        earlier = ClockReading(str(found["boot"]), *(float(found[name]) for name in ("wall", "uptime", "set_at")))
    except (OSError, ValueError, KeyError, TypeError):
        earlier = None
    clock = clock.after(earlier)
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(asdict(clock)).encode())
    return clock
