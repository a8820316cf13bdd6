"""The files of saved steps in a host's memory: a ring of files that one process writes again and again.

Touching fresh memory costs more than the copy itself. So files are made ahead, mapped once and used again, including
those that an earlier attempt on the host has left.
"""

import contextlib
import errno
import mmap
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

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
            OSError: the file is too short, or can't be read.
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
        try:
            unfinished.write_bytes(source.read_bytes() if isinstance(source, Path) else source)
        except OSError:  # a full disk keeps nothing of it
            unfinished.unlink(missing_ok=True)
            raise
        self.rename(str(unfinished.relative_to(self.root)), path)

    def delete(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def rename(self, path: str, to: str) -> None:
        (self.root / path).rename(self.root / to)

    def grow(self, path: str, size: int) -> mmap.mmap:
        """Give a file that size, and the memory for it; return it mapped, with its pages touched."""
        self._make_folder(path)
        with (self.root / path).open("ab") as file:
            before = file.tell()
        with (self.root / path).open("r+b") as file:
            os.ftruncate(file.fileno(), size)
            try:  # without its memory, a write to the mapped file would kill the process
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError:  # some file systems keep the part that they have allocated, and stay full
                os.ftruncate(file.fileno(), before)
                raise
            return mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def _make_folder(self, path: str) -> None:
        """Make the folders of a file, but not the root: when that is removed, a thread may still be writing."""
        for parent in reversed(Path(path).parents):
            (self.root / parent).mkdir(exist_ok=True)


class StepFiles:
    """The steps that one process of an attempt keeps on its host.

    The newest save that is whole in the gang stays as it is until `settle` names a newer one. So does what earlier
    attempts have left, until a save of this attempt is whole.

    Args:
        files: the host's.
        folder: where in it.
        attempt: the attempt's number.
        task: index of the process.
        keep: the number of files of data; at least 2.

    Attributes:
        keep: as above.
        saves: how many saves have begun: the number of the latest one. All processes count alike.
        copies: the parts that may lie on the partner's host, whole or not.
        going_on: the end of what goes on in the background; None if nothing does.
    """

    def __init__(self, files: DirectoryFiles, folder: str, attempt: int, task: int, keep: int) -> None:
        self._files = files
        self._folder = folder
        self._attempt = attempt
        self._task = task
        self.keep = keep
        self.saves = 0
        self.copies: set[PartName] = set()
        self.going_on: Future[None] | None = None
        self._maps: dict[int, mmap.mmap] = {}
        self._records: dict[int, PartName] = {}  # of the slots that hold a part
        self._settled: int | None = None  # the slot that holds this process's part of the newest whole save

    @staticmethod
    def of(files: DirectoryFiles, folder: str, attempt: int, task: int, keep: int) -> "StepFiles":
        """Return the files that this process has used before in this place, or new ones."""
        found = _known.setdefault((files.root, folder, attempt, task), StepFiles(files, folder, attempt, task, keep))
        found.keep = keep
        return found

    @property
    def settled(self) -> PartName | None:
        """This process's part of the newest save of this attempt that is whole in the gang; None before."""
        return None if self._settled is None else self._records[self._settled]

    def prepare(self, size: int) -> None:
        """Make the first file ahead, so that the first step of that size need not wait for its memory.

        Raises:
            CheckpointTooLargeError: the host's memory is full.
        """
        if not self._maps:
            self._make(self._free_slot(), size)

    def begin(self, size: int) -> tuple[int, Bytes]:
        """Begin a save. Return a file of data to write into, with its number. It belongs to no other save any more.

        Raises:
            CheckpointTooLargeError: the host's memory is full.
        """
        self.saves += 1
        slot = self._free_slot()
        self._forget(slot)
        self._make(slot, size)
        return slot, np.frombuffer(self._maps[slot], np.uint8, count=size)

    def commit(self, step: int, slot: int, part: Part) -> PartName:
        """Write the record that makes the content of a slot this process's part of the latest save. Return its name."""
        name = self._records[slot] = PartName(self._attempt, self.saves, step, self._task, slot)
        self._files.write(self._path(name.record), memoryview(part.to_bytes()))
        return name

    def settle(self, save: int) -> None:
        """Forget all other saves, now that this one is whole in the gang, and make all files for those to come."""
        self._settled = next((slot for slot, name in self._records.items() if name.save == save), None)
        for slot in self._records.keys() - {self._settled}:
            self._forget(slot)
        for path, name in self._old().items():
            if name is not None:
                self._files.delete(path)
        size = max(map(len, self._maps.values()), default=0)
        for slot in range(self.keep):
            if slot not in self._maps:
                self._make(slot, size)
        for path in self._old():
            self._files.delete(path)

    def _free_slot(self) -> int:
        """Return a slot without a part, best one that has a file, or the slot with the oldest part."""

        def order(slot: int) -> tuple[int, bool, int]:
            return self._records[slot].save if slot in self._records else 0, slot not in self._maps, slot

        return min((slot for slot in range(self.keep) if slot != self._settled), key=order)

    def _forget(self, slot: int) -> None:
        if slot in self._records:
            self._files.delete(self._path(self._records[slot].record))
            del self._records[slot]

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
        path = self._path(PartName(self._attempt, 0, 0, self._task, slot).data)
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

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


_known: Final[dict[tuple[Path, str, int, int], StepFiles]] = {}
"""The files of this process, by place: a second MemoryCheckpointer of a name goes on with those of the first."""
