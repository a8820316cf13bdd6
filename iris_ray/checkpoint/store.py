"""The files of saved steps in a host's memory: a ring of files that one process writes again and again.

First touches of fresh memory cost more than the copy itself, so files are made ahead, mapped once and used again, also
those that an earlier attempt on the host has left.
"""

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from iris_ray.checkpoint.parts import Part, PartName
from iris_ray.errors import CheckpointTooLargeError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_UNFINISHED = ".new"


def bytes_of(array: Any) -> Bytes:
    """Return the bytes of an array of NumPy, or of JAX on this host, in C order; without a copy if they lie so."""
    content: Bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return content


class DirectoryFiles:
    """The files in a directory that this process can see, with the methods of `PeerFiles`, and `rename`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self, directory: str = "") -> dict[str, int]:
        found = {}
        for path in (self.root / directory).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.suffix != _UNFINISHED and path.is_file():
                    found[str(path.relative_to(self.root))] = path.stat().st_size
        return found

    def read(self, path: str, into: memoryview, offset: int = 0) -> None:
        """Fill a buffer with the bytes of a file from an offset on.

        Raises:
            OSError: the file does not have so many bytes, or can't be read.
        """
        left = into.cast("B")
        with (self.root / path).open("rb", buffering=0) as file:
            while left:
                if not (count := os.preadv(file.fileno(), [left], offset)):
                    raise OSError(errno.EIO, "the file is shorter than expected", str(self.root / path))
                left, offset = left[count:], offset + count

    def write(self, path: str, source: Path | memoryview) -> None:
        final = self.root / path
        self._make_folder(path)
        unfinished = final.with_name(final.name + _UNFINISHED)
        unfinished.write_bytes(source.read_bytes() if isinstance(source, Path) else source)
        self.rename(str(unfinished.relative_to(self.root)), path)

    def delete(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def rename(self, path: str, to: str) -> None:
        (self.root / path).rename(self.root / to)

    def grow(self, path: str, size: int) -> mmap.mmap:
        """Give a file that size, and the memory for it; return it mapped, with its pages touched."""
        self._make_folder(path)
        with (self.root / path).open("ab") as file:
            pass
        with (self.root / path).open("r+b") as file:
            os.ftruncate(file.fileno(), size)
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a mapped file that is too large kills the process
            return mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def _make_folder(self, path: str) -> None:
        """Make the folders of a file, but not the root: when that is removed, a thread may still be writing."""
        for parent in reversed(Path(path).parents):
            (self.root / parent).mkdir(exist_ok=True)


class StepFiles:
    """The steps that one process of an attempt keeps on its host.

    At every moment the newest step that is whole in the gang stays as it is; `settled` says which one that is. What
    earlier attempts have left stays until a step of this one has settled.

    Args:
        files: the host's.
        folder: where in it.
        attempt: the attempt's number.
        task: index of the process.
        keep: how many files of data; at least 2.
    """

    def __init__(self, files: DirectoryFiles, folder: str, attempt: int, task: int, keep: int) -> None:
        self._files = files
        self._folder = folder
        self._attempt = attempt
        self._task = task
        self._keep = keep
        self._maps: dict[int, mmap.mmap] = {}
        names = [PartName.of(path.rpartition("/")[2]) for path in files.list(folder)]
        mine = [name for name in names if name is not None and (name.attempt, name.task) == (attempt, task)]
        self._steps = {name.slot: name.step for name in mine if name.slot is not None}
        """The steps in the slots that have a record."""
        self._settled = min(self._steps.values(), default=None)

    def prepare(self, size: int) -> None:
        """Make the first file ahead, so that the first step of that size need not wait for its memory.

        Raises:
            CheckpointTooLargeError: the host's memory is full.
        """
        if not self._maps:
            self._make(self._free_slot(), size)

    def begin(self, size: int) -> tuple[int, Bytes]:
        """Return a file of data to write into, with its number. It belongs to no step any more.

        Raises:
            CheckpointTooLargeError: the host's memory is full.
        """
        slot = self._free_slot()
        self._forget(slot)
        self._make(slot, size)
        return slot, np.frombuffer(self._maps[slot], np.uint8, count=size)

    def commit(self, step: int, slot: int, part: Part) -> None:
        """Write the record that makes the content of a slot count as this process's part of a step."""
        self._files.write(self._path(self._name(step, slot).record), memoryview(part.to_bytes()))
        self._steps[slot] = step

    def settled(self, step: int) -> None:
        """Forget what is older than a step that is now whole in the gang, and make all files for the steps to come."""
        self._settled = step
        for slot in [slot for slot, saved in self._steps.items() if saved != step]:
            self._forget(slot)
        for path, name in self._old().items():
            if name is not None:
                self._files.delete(path)
        size = max(map(len, self._maps.values()), default=0)
        for slot in range(self._keep):
            if slot not in self._maps:
                self._make(slot, size)
        for path in self._old():
            self._files.delete(path)

    def _free_slot(self) -> int:
        free = [slot for slot in range(self._keep) if slot not in self._steps]
        if free:
            return min(free, key=lambda slot: (slot not in self._maps, slot))
        return min((step, slot) for slot, step in self._steps.items() if step != self._settled)[1]

    def _forget(self, slot: int) -> None:
        if slot in self._steps:
            self._files.delete(self._path(self._name(self._steps[slot], slot).record))
            del self._steps[slot]

    def _old(self) -> dict[str, PartName | None]:
        """Return the files of earlier attempts, with the names of the parts whose records they are."""
        found = {}
        for path in sorted(self._files.list(self._folder)):
            name = path.rpartition("/")[2]
            attempt = name.partition("-")[0]
            if attempt.isdecimal() and int(attempt) < self._attempt:
                found[path] = PartName.of(name)
        return found

    def _make(self, slot: int, size: int) -> None:
        """Give a slot a file of that size, if it has none. Take over one that an earlier attempt has left."""
        if slot in self._maps and len(self._maps[slot]) >= size:
            return
        path = self._path(self._name(0, slot).data)
        old = self._old()
        needed = {self._path(name.data) for name in old.values() if name is not None}
        for left in old if slot not in self._maps else ():
            if left.endswith(".data") and left not in needed:
                with contextlib.suppress(FileNotFoundError):  # another process of this host was faster
                    self._files.rename(left, path)
                    break
        try:
            self._maps[slot] = self._files.grow(path, max(size, 1))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise CheckpointTooLargeError(
                f"this host has no room for {size:,} bytes more of a saved step in {self._files.root}:"
                f" {error.strerror}; free memory there, or shard the state over more hosts"
            ) from error

    def _name(self, step: int, slot: int) -> PartName:
        return PartName(self._attempt, step, self._task, slot)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"
