"""The output directories of tasks on their host: ``outputs/<job id>/task-<i>.attempt-<n>/``.

A task's program writes what it likes there: links to other places, FIFOs, trees of any depth, a million files. It may
mount a bucket there. So every path is opened name by name below the host's directory, no link is followed, what is
mounted there is left alone, only regular files are read, and each look at a directory has a limit. The directory is a
place for files, and no cage: other accounts can't enter it, and programs of the same account could always read each
other's files.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from iris_ray.actors.host.directories import directory_name
from iris_ray.actors.protocol.task_files import write_whole
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.core import FREE, MOST_ENTRIES, Entry, Kind, Removed, limit_on_disk, taken, to_remove

DEEPEST: Final = 64
"""Directories below this depth are not looked into. Each level takes two open files."""
LOOK_AT: Final = 2 * MOST_ENTRIES
"""The limit for the entries of one look. Of more, a look removes some, and the next one some more."""
MOST_NOTE_BYTES: Final = 1000
REMOVAL_S: Final = 300.0
"""The time in which a whole directory has to be removed."""
CREATION_TRIES: Final = 100
"""Another attempt of the job may end meanwhile, and remove the job's directory while it is empty."""

_NAME = re.compile(r"task-\d+\.attempt-\d+")
_ESCAPED = re.compile(rb"\\([0-3][0-7]{2})")  # as the kernel writes spaces and the like in a path
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def outputs_directory(host_directory: Path) -> Path:
    """Return the directory with the output directories of all jobs."""
    return host_directory / "outputs"


_MEANWHILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENOTEMPTY)
"""The errors of a removal that say that the program has changed the directory since the look."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What was done to keep a directory within its limits.

    Attributes:
        removed: what was removed now.
        problem: what can't be removed, and why; None if all could be.
    """

    removed: Removed
    problem: str | None = None


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
            OSError: the disk is full, or something else, such as a link, has this name.
        """
        for left in reversed(range(CREATION_TRIES)):
            try:
                return self._create()
            except FileNotFoundError:
                if not left:
                    raise

    def _create(self) -> None:
        self.root.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self.root, _DIRECTORY)
        try:
            for name in (self.job, self.name):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=fd)
                above, fd = fd, os.open(name, _DIRECTORY, dir_fd=fd)
                os.close(above)
        finally:
            os.close(fd)

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Write a file of iris_ray's own in a folder, in place of an earlier one. No link is followed.

        Raises:
            OSError: the disk is full, or something else has one of these names.
        """
        with opened(self.path, self.root) as top:
            if top is None:
                raise FileNotFoundError(errno.ENOENT, "there is no output directory", str(self.path))
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=top)
            with below(top, folder) as fd:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS
                with open(os.open(name, flags, 0o600, dir_fd=fd), "wb") as file:
                    file.write(content)

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

    def trim(self, most_bytes: int | None, most_entries: int = MOST_ENTRIES) -> Trimmed:
        """Remove the oldest files until the limits are met, and a part of the disk is free; see `limit_on_disk`.

        A file that a program has open for writing is emptied, and stays: without a name it would grow unseen. Its size
        stays as well, so that a program that has mapped it is not killed. What the program has changed since the look
        is left alone.
        """
        done, problem = Removed(), None
        with opened(self.path, self.root) as top:
            if top is None:
                return Trimmed(done)
            found = list(islice(entries(top), LOOK_AT))
            limit = limit_on_disk(most_bytes, taken(found), _lacking(top))
            gone = to_remove(found, limit, most_entries)
            written = files_being_written(self.path) if gone else set()
            for entry in gone:
                try:
                    done += _remove(top, entry, entry.inode in written)
                except OSError as error:
                    if error.errno not in _MEANWHILE:
                        problem = problem or f"{entry.path!r}: {error.strerror or error}"
        if done.files:
            with contextlib.suppress(OSError):  # a full disk
                write_whole(self._note, json.dumps(asdict(self.removed() + done)).encode())
        return Trimmed(done, problem)

    def remove_if_unused(self) -> bool:
        """Remove the directory if nothing was ever in it. Return whether there is none now."""
        if self.removed().files:
            return False
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
        return True

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
    """Open a directory below a root, name by name. None if there is none, or a name on the way is a link or a mount."""
    try:
        fd = _descended(os.open(root, _DIRECTORY), path.relative_to(root).parts)
    except OSError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _descended(fd: int, names: Sequence[str]) -> int:
    """Close an open directory, and open the one that these names lead to from it.

    Raises:
        OSError: there is none, or a name on the way is a link or a mount.
    """
    try:
        mount = _mount_of(fd) if names else ""
        for name in names:
            child = _child(fd, name, mount)
            os.close(fd)
            fd = child
    except BaseException:
        os.close(fd)
        raise
    return fd


def _child(fd: int, name: str, mount: str) -> int:
    """Open a directory in an open one, even if the program has made it unreadable.

    Raises:
        OSError: there is none, it is a link or another account's, or something is mounted there.
    """
    try:
        child = os.open(name, _DIRECTORY, dir_fd=fd)
    except PermissionError:  # what is not read would not be counted
        _make_readable(fd, name)
        child = os.open(name, _DIRECTORY, dir_fd=fd)
    if _mount_of(child) != mount:
        os.close(child)
        raise OSError(errno.EXDEV, "something is mounted there")
    return child


def _make_readable(fd: int, name: str) -> None:
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
    finally:
        os.close(found)


def _mount_of(fd: int) -> str:
    """Return the kernel's number of the mount that an open file is in; it differs for bind mounts as well."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        return next((line for line in file if line.startswith("mnt_id:")), "")


def _lacking(fd: int) -> int:
    """Return how many bytes less are free on the disk of an open file than output directories leave there."""
    disk = os.fstatvfs(fd)
    return (disk.f_blocks // FREE - disk.f_bavail) * disk.f_frsize


def entries(top: int) -> Iterator[Entry]:
    """Yield what is in an open directory and below it, what is in a directory before the directory itself.

    What is mounted there is left out.
    """
    mount, level = _mount_of(top), [_Level(os.dup(top), "", None)]
    try:
        while level:
            now, one = level[-1], None
            with contextlib.suppress(OSError):  # a faulty disk
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
                    level.append(_Level(_child(now.fd, one.name, mount), entry.path, entry))
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
                    yield KeptOutput(directory, max(entry.changed_at for entry in found), taken(found))


def _names(path: Path, root: Path) -> list[str]:
    with opened(path, root) as fd:
        return [] if fd is None else os.listdir(fd)


# -- what goes ---------------------------------------------------------------------------------------------------------


def _remove(top: int, entry: Entry, is_written: bool) -> Removed:
    """Remove an entry, or empty it if it is a file that is being written. Return what that has freed.

    Raises:
        OSError: it can't be removed, or is no longer there.
    """
    parent, name = os.path.split(entry.path)
    with below(top, parent) as fd:
        if entry.kind is Kind.TOO_DEEP:
            _remove_tree(fd, name)
            return Removed(1)
        now = entry_of(entry.path, os.stat(name, dir_fd=fd, follow_symlinks=False))
        is_same = now.inode == entry.inode and now.kind is entry.kind
        if entry.kind is Kind.FILE and entry.links == 1 and not is_written:  # removing a link changes the others
            is_same = is_same and now.changed_at == entry.changed_at
        if not is_same:  # the program has put something newer in its place
            return Removed()
        if entry.kind is Kind.DIRECTORY:
            os.rmdir(name, dir_fd=fd)
        elif not (is_written and now.kind is Kind.FILE and now.links == 1 and _emptied(fd, name)):
            _unlink(fd, name)
            if now.links > 1 and now.kind is Kind.FILE:
                return Removed(1)
        return Removed(1, now.allocated)


@contextlib.contextmanager
def below(top: int, path: str) -> Iterator[int]:
    """Open a directory below an open one, name by name.

    Raises:
        OSError: there is none, or a name on the way is a link or a mount.
    """
    fd = _descended(os.dup(top), [name for name in path.split("/") if name])
    try:
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


def _emptied(fd: int, name: str) -> bool:
    """Give the disk back what a file takes, and keep its size. Return whether the file system lets us."""
    try:
        file = os.open(name, os.O_WRONLY | FILE_FLAGS, dir_fd=fd)
    except OSError:  # the program has made it read-only, or it is another account's
        return False
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or not found.st_size or _mount_of(file) != _mount_of(fd):
            return False
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        done: int = fallocate(file, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(found.st_size))
        return done == 0
    finally:
        os.close(file)


def _remove_tree(fd: int, name: str) -> None:
    """Remove a directory with all that is in it, of any depth, even if the program has made it read-only.

    Raises:
        OSError: not all of it can be removed.
    """
    path, remove = f"/proc/self/fd/{fd}/{name}", ["rm", "-rf", "--one-file-system", "--"]
    inside = f"{os.readlink(f'/proc/self/fd/{fd}')}/{name}"
    if mounted := [one for one in _mount_points() if f"{one}/".startswith(f"{inside}/")]:
        raise OSError(errno.EBUSY, f"something is mounted at {mounted[0]}; unmount it")
    for command in ([*remove, path], ["chmod", "-R", "u+rwX", "--", path], [*remove, path]):
        try:
            done = subprocess.run(
                command, pass_fds=[fd], stdin=subprocess.DEVNULL, capture_output=True, timeout=REMOVAL_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{name} is not removed after {REMOVAL_S:g} s") from error
        if command[0] == "rm" and done.returncode == 0:
            return
    raise OSError(done.stderr.decode(errors="replace").strip()[:300])


def _mount_points() -> list[str]:
    """Return the paths of all mounts that this process sees."""
    with open("/proc/self/mountinfo", "rb") as file:
        paths = [line.split()[4] for line in file]
    return [os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), path)) for path in paths]


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
