"""The core dumps of tasks that have crashed on a host: which files these are, for as long as nobody changes them.

Each is remembered by an empty file whose name says which file it is. So no note is ever half written, and a disk that
the dump has filled still takes it.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MOUNTS = Path("/proc/self/mountinfo")
MOST_REMEMBERED: Final = 10_000
"""The limit for the dumps of a crash that are remembered; the newest are."""
_FOLDER: Final = "core-dumps"
_LOCAL: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""The file systems of disks that only this machine has. On others, the process in a dump's name may be another
machine's, and a look may take for ever."""
_ELF, _ELF_CORE = b"\x7fELF", 4
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A core dump, as it was when its task had crashed.

    Attributes:
        path: where it is, without links.
        device, inode: which file it is.
        changed_ns: when it was modified last, in nanoseconds since the epoch.
        size: its length in bytes.
        bytes: what it takes on the disk. The kernel may say so only later.
    """

    path: str
    device: int
    inode: int
    changed_ns: int
    size: int
    bytes: int = field(default=0, compare=False)

    @staticmethod
    def at(path: str, found: os.stat_result) -> "DumpFile":
        """Return what is at a path without links.

        Raises:
            FileNotFoundError: it is no regular file of this user.
        """
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise FileNotFoundError(errno.ENOENT, "it has been replaced", path)
        return DumpFile(path, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_blocks * 512)

    @staticmethod
    def of_note(name: str) -> "DumpFile":
        """Return what a note is about.

        Raises:
            ValueError: it is not a note.
        """
        *numbers, path = name.split("-", 4)
        device, inode, changed_ns, size = (int(number, 16) for number in numbers)
        return DumpFile(path.replace("%2F", "/").replace("%25", "%"), device, inode, changed_ns, size)

    @property
    def note(self) -> str:
        """The name of its note."""
        path = self.path.replace("%", "%25").replace("/", "%2F")
        return f"{self.device:x}-{self.inode:x}-{self.changed_ns:x}-{self.size:x}-{path}"

    def remove(self) -> None:
        """Remove it.

        Raises:
            OSError: it can't be removed, or something else is there now.
        """
        directory, name = os.path.split(self.path)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if DumpFile.at(self.path, os.stat(name, dir_fd=fd, follow_symlinks=False)) != self:
                raise FileNotFoundError(errno.ENOENT, "it has been replaced", self.path)
            os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)


def prepare(host_directory: Path) -> None:
    """Create the folder of the notes. A full disk may take no folder, though it takes files without content.

    Args:
        host_directory: iris_ray's directory on the host.
    """
    with contextlib.suppress(OSError):
        (host_directory / _FOLDER).mkdir(mode=0o700, exist_ok=True)


def remember(host_directory: Path, paths: Iterable[str]) -> None:
    """Remember those of these files that are core dumps on a disk of this machine, unless their paths are too long.

    Args:
        host_directory: iris_ray's directory on the host.
        paths: of files whose names say that they are core dumps of a task.
    """
    prepare(host_directory)
    mounts = _mounts()
    for given in paths:
        with contextlib.suppress(OSError):
            path = os.path.realpath(given)
            if _kind_of_disk(path, mounts) in _LOCAL and (dump := _core_dump_at(path)) is not None:
                (host_directory / _FOLDER / dump.note).touch(mode=0o600)


def remembered(host_directory: Path) -> Iterator[DumpFile]:
    """Yield the core dumps that are still as they were; forget those that are gone, or have become something else.

    Raises:
        OSError: the notes can't be read.
    """
    folder = host_directory / _FOLDER
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # what can't be looked at now stays remembered
            if (dump := _still_there(name)) is not None:
                yield dump
            else:
                (folder / name).unlink()


def _still_there(note: str) -> DumpFile | None:
    try:
        noted = DumpFile.of_note(note)
        found = DumpFile.at(noted.path, os.stat(os.path.realpath(noted.path), follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if found == noted and os.path.realpath(noted.path) == noted.path else None


def _core_dump_at(path: str) -> DumpFile | None:
    """Return the core dump at a path; None if the file there is something else. A task may give any file its name.

    Raises:
        OSError: there is no file, or it can't be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        dump = DumpFile.at(path, os.fstat(fd))
        head = os.read(fd, 18)
    finally:
        os.close(fd)
    kind = int.from_bytes(head[16:18], "big" if head[5:6] == b"\2" else "little")
    return dump if head.startswith(_ELF) and kind == _ELF_CORE else None


def _mounts() -> list[tuple[str, str]]:
    """Return where file systems are mounted, and their kinds; none if the kernel does not tell."""
    mounts = []
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text(errors="surrogateescape").splitlines():
            mount, _, system = line.partition(" - ")
            where = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), mount.split(" ")[4])
            mounts.append((where.rstrip("/") + "/", system.split(" ")[0]))
    return mounts


def _kind_of_disk(path: str, mounts: Iterable[tuple[str, str]]) -> str:
    """Return the kind of the file system that a path is on; "" if it is not known."""
    found = "", ""
    for mount in mounts:
        if path.startswith(mount[0]) and len(mount[0]) >= len(found[0]):
            found = mount
    return found[1]
