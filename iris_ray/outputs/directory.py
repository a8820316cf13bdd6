"""The output directories of tasks on their host: ``outputs/<job id>/task-<i>.attempt-<n>/``.

A task's program writes what it likes there: links to other places, FIFOs, trees of any depth, a million files. So every
path is opened name by name below the host's directory, no link is followed, only regular files are read, and each look
at a directory has a limit. The directory is a place for files, and no cage: other accounts can't enter it, and programs
of the same account could always read each other's files.
"""

import contextlib
import ctypes
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from iris_ray.actors.host.directories import directory_name
from iris_ray.actors.protocol.task_files import write_whole
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.core import MOST_ENTRIES, Entry, Kind, Removed, to_remove

DEEPEST: Final = 64
"""Directories below this depth are not looked into. Each level takes two open files."""
LOOK_AT: Final = 2 * MOST_ENTRIES
"""The limit for the entries of one look. Of more, a look removes some, and the next one some more."""
MOST_NOTE_BYTES: Final = 1000
REMOVAL_S: Final = 300.0
"""The time in which a whole directory has to be removed."""

_NAME = re.compile(r"task-\d+\.attempt-\d+")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def outputs_directory(host_directory: Path) -> Path:
    """Return the directory with the output directories of all jobs."""
    return host_directory / "outputs"


@dataclass(frozen=True, slots=True)
class OutputDirectory:
    """The output directory of one attempt of a task.

    Attributes:
        root: the host's directory of them.
        job: the name of its job's directory.
        name: its own name.
    """

    root: Path
    job: str
    name: str

    @staticmethod
    def of(root: Path, attempt: TaskAttemptId) -> "OutputDirectory":
        name = f"task-{attempt.task_index}.attempt-{attempt.attempt}"
        return OutputDirectory(root, directory_name(attempt.job_id), name)

    @property
    def path(self) -> Path:
        return self.root / self.job / self.name

    def create(self) -> None:
        """Create the directory; no other account can enter it.

        Raises:
            OSError: the disk is full, or something else has this name.
        """
        for path in (self.root, self.root / self.job, self.path):
            path.mkdir(mode=0o700, exist_ok=True)

    def removed(self) -> Removed:
        """Return what was removed to stay within the limits."""
        with (
            opened(self.path.parent, self.root) as parent,
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
        ):
            if parent is not None:
                with open(os.open(self._note.name, os.O_RDONLY | FILE_FLAGS, dir_fd=parent), "rb") as file:
                    found = json.loads(file.read(MOST_NOTE_BYTES))
                return Removed(int(found["files"]), int(found["bytes"]))
        return Removed()

    def trim(self, most_bytes: int | None, most_entries: int = MOST_ENTRIES) -> Removed:
        """Remove the oldest files until the limits are met. Return what was removed now.

        A file that a program has open for writing is emptied, and stays: without a name it would grow unseen. Its size
        stays as well, so that a program that has mapped it is not killed.
        """
        done = Removed()
        with opened(self.path, self.root) as top:
            if top is None:
                return done
            gone = to_remove(list(islice(entries(top), LOOK_AT)), most_bytes, most_entries)
            written = files_being_written(self.path) if gone else set()
            for entry in gone:
                with contextlib.suppress(OSError):
                    done += _remove(top, entry, entry.inode in written)
        if done.files:
            with contextlib.suppress(OSError):  # a full disk
                write_whole(self._note, json.dumps(asdict(self.removed() + done)).encode())
        return done

    def remove_if_unused(self) -> None:
        """Remove the directory if nothing was ever in it."""
        if not self.removed().files:
            with contextlib.suppress(OSError):
                self.path.rmdir()
                self.path.parent.rmdir()

    def remove(self) -> None:
        """Remove the directory with all that is in it.

        Raises:
            OSError: not all of it can be removed.
        """
        with opened(self.path.parent, self.root) as parent:
            if parent is None:
                return
            _remove_tree(parent, self.name)
            with contextlib.suppress(OSError):
                os.unlink(self._note.name, dir_fd=parent)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    @property
    def _note(self) -> Path:
        """The file with what was removed, beside the directory."""
        return Path(f"{self.path}.removed")


# -- what there is -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path, root: Path) -> Iterator[int | None]:
    """Open a directory below a root, name by name. None if there is none, or if a name on the way is a link."""
    fd = None
    try:
        fd = os.open(root, _DIRECTORY)
        for name in path.relative_to(root).parts:
            above, fd = fd, os.open(name, _DIRECTORY, dir_fd=fd)
            os.close(above)
    except OSError:
        if fd is not None:
            os.close(fd)
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def entries(top: int) -> Iterator[Entry]:
    """Yield what is in an open directory and below it, what is in a directory before the directory itself."""
    level = [_Level(os.dup(top), "", None)]
    try:
        while level:
            now = level[-1]
            one = next(now.names, None)
            if one is None:
                level.pop().close()
                if now.entry is not None:
                    yield now.entry
                continue
            with contextlib.suppress(OSError):  # it has just gone
                entry = entry_of(os.path.join(now.path, one.name), one.stat(follow_symlinks=False))
                if entry.kind is not Kind.DIRECTORY:
                    yield entry
                elif len(level) == DEEPEST:
                    yield Entry(entry.path, Kind.TOO_DEEP, 0, 0, entry.changed_at, entry.inode, 1)
                else:
                    level.append(_Level(os.open(one.name, _DIRECTORY, dir_fd=now.fd), entry.path, entry))
    finally:
        for each in level:
            each.close()


class _Level:
    """A directory whose names are being read."""

    def __init__(self, fd: int, path: str, entry: Entry | None) -> None:
        self.fd, self.path, self.entry = fd, path, entry
        try:
            self.names = os.scandir(fd)
        except OSError:
            os.close(fd)
            raise

    def close(self) -> None:
        self.names.close()
        os.close(self.fd)


_KINDS: Final = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIRECTORY, stat.S_IFLNK: Kind.LINK}


def entry_of(path: str, found: os.stat_result) -> Entry:
    inode = found.st_dev, found.st_ino
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), Kind.OTHER)
    return Entry(path, kind, found.st_size, found.st_blocks * 512, found.st_ctime, inode, found.st_nlink)


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """An output directory on this host.

    Attributes:
        of: which one.
        changed_at: when something in it was changed last, in seconds since the epoch.
        bytes: what it takes on the disk.
    """

    of: OutputDirectory
    changed_at: float
    bytes: int


def kept_outputs(root: Path) -> Iterator[KeptOutput]:
    """Yield the output directories of a host. Whatever else is there is left alone."""
    for job in _names(root, root):
        for name in _names(root / job, root):
            directory = OutputDirectory(root, job, name)
            if _NAME.fullmatch(name) is None:
                continue
            with opened(directory.path, root) as fd:
                if fd is not None:
                    found = [entry_of("", os.fstat(fd)), *islice(entries(fd), LOOK_AT)]
                    allocated = sum(entry.allocated for entry in found)
                    yield KeptOutput(directory, max(entry.changed_at for entry in found), allocated)


def _names(path: Path, root: Path) -> list[str]:
    with opened(path, root) as fd:
        return [] if fd is None else os.listdir(fd)


# -- what goes ---------------------------------------------------------------------------------------------------------


def _remove(top: int, entry: Entry, is_written: bool) -> Removed:
    """Remove an entry, or empty it if it is a file that is being written. Return what that has freed."""
    parent, name = os.path.split(entry.path)
    with below(top, parent) as fd:
        if entry.kind is Kind.TOO_DEEP:
            _remove_tree(fd, name)
        elif entry.kind is Kind.DIRECTORY:
            os.rmdir(name, dir_fd=fd)
        elif not (is_written and entry.links == 1 and _emptied(fd, name, entry.size)):
            _unlink(fd, name)
    return Removed(1, entry.allocated)


@contextlib.contextmanager
def below(top: int, path: str) -> Iterator[int]:
    """Open a directory below an open one, name by name.

    Raises:
        OSError: there is none, or a name on the way is a link.
    """
    fd = os.dup(top)
    try:
        for name in filter(None, path.split("/")):
            above, fd = fd, os.open(name, _DIRECTORY, dir_fd=fd)
            os.close(above)
        yield fd
    finally:
        os.close(fd)


def _unlink(fd: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except PermissionError:  # the program has made the directory read-only
        os.fchmod(fd, 0o700)
        os.unlink(name, dir_fd=fd)


_PUNCH_HOLE = 0x01 | 0x02
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`` of Linux."""


def _emptied(fd: int, name: str, size: int) -> bool:
    """Give the disk back what a file takes, and keep its size. Return whether the file system can do that."""
    file = os.open(name, os.O_WRONLY | FILE_FLAGS, dir_fd=fd)
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        return size > 0 and fallocate(file, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(size)) == 0
    finally:
        os.close(file)


def _remove_tree(fd: int, name: str) -> None:
    """Remove a directory with all that is in it, of any depth, even if the program has made it read-only.

    Raises:
        OSError: not all of it can be removed.
    """
    path = f"/proc/self/fd/{fd}/{name}"
    for command in (["rm", "-rf", "--", path], ["chmod", "-R", "u+rwX", "--", path], ["rm", "-rf", "--", path]):
        try:
            done = subprocess.run(
                command, pass_fds=[fd], stdin=subprocess.DEVNULL, capture_output=True, timeout=REMOVAL_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{name} is not removed after {REMOVAL_S:g} s") from error
        if command[0] == "rm" and done.returncode == 0:
            return
    raise OSError(done.stderr.decode(errors="replace").strip()[:300])


def files_being_written(directory: Path) -> set[tuple[int, int]]:
    """Return device and inode of the files below a directory that a process of this machine has open for writing."""
    found = set()
    inside = f"{os.path.realpath(directory)}/"
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = f"/proc/{pid}/fd/{fd}"
                    if os.readlink(link).startswith(inside) and os.lstat(link).st_mode & stat.S_IWUSR:
                        file = os.stat(link)
                        found.add((file.st_dev, file.st_ino))
    return found
