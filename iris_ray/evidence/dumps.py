"""The core dumps of tasks that have crashed on a host: which files these are, for as long as nobody changes them."""

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from iris_ray.actors.protocol.task_files import write_whole

_FOLDER: Final = "core-dumps"


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A core dump, as it was when its task had crashed.

    Attributes:
        path: where it is, without links.
        device, inode: which file it is.
        changed_ns: when it was modified last, in nanoseconds since the epoch.
        bytes: what it takes on the disk.
    """

    path: str
    device: int
    inode: int
    changed_ns: int
    bytes: int

    @staticmethod
    def at(path: str) -> "DumpFile":
        """Return what is at a path now.

        Raises:
            OSError: no regular file of this user is there.
        """
        path = os.path.realpath(path)
        found = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise FileNotFoundError(path)
        return DumpFile(path, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_blocks * 512)


def remember(host_directory: Path, paths: Iterable[str]) -> None:
    """Remember which files are core dumps of tasks; one that can't be read is left out.

    Args:
        host_directory: iris_ray's directory on the host.
        paths: of the dumps.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            dump = DumpFile.at(path)
            folder = host_directory / _FOLDER
            folder.mkdir(mode=0o700, exist_ok=True)
            write_whole(folder / f"{dump.device}-{dump.inode}", json.dumps(astuple(dump)).encode())


def remembered(host_directory: Path) -> Iterator[DumpFile]:
    """Yield the core dumps that are still as they were; forget those that are gone, or have become something else."""
    with contextlib.suppress(FileNotFoundError):
        for note in list((host_directory / _FOLDER).iterdir()):
            if note.suffix:  # it is being written
                continue
            with contextlib.suppress(OSError):
                if (dump := _read(note)) is not None:
                    yield dump
                else:
                    note.unlink()


def _read(note: Path) -> DumpFile | None:
    try:
        path, *_ = noted = tuple(json.loads(note.read_bytes()))
        dump = DumpFile.at(path)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    return dump if astuple(dump) == noted else None
