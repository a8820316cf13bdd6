"""The parts of a saved step: the shards that one process keeps, in a file of data with a record of its content.

The record marks a part as complete: it is written last and removed first. A step is whole if its records cover every
array.
"""

import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from iris_ray.checkpoint.boxes import Box, covers

ALIGNMENT = 64
"""Shards begin at multiples of this many bytes."""
CHECKED_BYTES = 1 << 22
"""The size of the blocks of a shard that have checksums of their own, so that a piece of it can be checked."""
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a state, without its elements.

    Attributes:
        name: its path in the tree.
        dtype, shape: of the stored array; empty for a plain value.
        key: the implementation of random keys, whose data is the array.
        value: the plain value: a number, a bool or a str.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    key: str = ""
    value: Any = None

    def __str__(self) -> str:
        if not self.dtype:
            return f"a {type(self.value).__name__}"
        return f"{self.key and f'random keys ({self.key}) as '}{self.dtype}{list(self.shape)}"

    def fits(self, other: "Leaf") -> bool:
        """Whether the content of one can be restored as the other."""
        mine, theirs = ((leaf.name, leaf.dtype, leaf.shape, leaf.key) for leaf in (self, other))
        return mine == theirs


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard in a file of data.

    Attributes:
        leaf: number of the leaf in the state.
        box: which part of the leaf's array.
        offset, size: where it is in the file, in bytes.
        checksum: of each block of `CHECKED_BYTES`; see `checksum`.
    """

    leaf: int
    box: Box
    offset: int
    size: int
    checksum: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """The name of a part. Parts of one saved step have the same ``attempt``, ``save`` and ``step``.

    Attributes:
        save: the number of the save in the attempt. A program that rolls back saves a step number again.
        task: the process that has saved it.
        slot: number of the file of data; None for a copy on the host of another slice.
    """

    attempt: int
    save: int
    step: int
    task: int
    slot: int | None = None

    @property
    def record(self) -> str:
        """Name of the file with the record."""
        slot = "copy" if self.slot is None else self.slot
        return f"{self.attempt}-{self.save}-{self.step}-{self.task}-{slot}.json"

    @property
    def data(self) -> str:
        """Name of the file with the data. A slot is used again by later steps."""
        if self.slot is None:
            return f"{self.attempt}-{self.save}-{self.task}.copy"
        return f"{self.attempt}-{self.task}-{self.slot}.data"

    @staticmethod
    def of(record: str) -> "PartName | None":
        """Return the name of the part whose record has that file name; None for any other file."""
        found = re.fullmatch(r"(\d+)-(\d+)-(\d+)-(\d+)-(\d+|copy)\.json", record)
        if found is None:
            return None
        attempt, save, step, task = map(int, found.groups()[:-1])
        return PartName(attempt, save, step, task, None if found[5] == "copy" else int(found[5]))


@dataclass(frozen=True, slots=True)
class Part:
    """The record of a part."""

    leaves: tuple[Leaf, ...]
    shards: tuple[Shard, ...]

    @property
    def size(self) -> int:
        """Size of the file of data in bytes, without padding."""
        return max((shard.offset + shard.size for shard in self.shards), default=0)

    def to_bytes(self) -> bytes:
        text = json.dumps([[asdict(leaf) for leaf in self.leaves], [astuple(shard) for shard in self.shards]])
        return zlib.compress(text.encode(), 1)

    @staticmethod
    def from_bytes(content: bytes) -> "Part":
        """Read a record.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        try:
            leaves, shards = json.loads(zlib.decompress(content))
            return Part(
                tuple(Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in leaves),
                tuple(
                    Shard(leaf, tuple((a, b) for a, b in box), offset, size, tuple(sums))
                    for leaf, box, offset, size, sums in shards
                ),
            )
        except (zlib.error, TypeError, KeyError) as error:
            raise ValueError(f"not the record of a saved step: {error}") from error


def is_whole(parts: Sequence[Part]) -> bool:
    """Return whether parts of one step have every element of every array, and are of one state."""
    if not parts or any(difference(part.leaves, parts[0].leaves) for part in parts[1:]):
        return False
    boxes: list[set[Box]] = [set() for _ in parts[0].leaves]
    for part in parts:
        for shard in part.shards:
            boxes[shard.leaf].add(shard.box)
    kinds = {(leaf.shape, frozenset(having)) for leaf, having in zip(parts[0].leaves, boxes, strict=True) if leaf.dtype}
    return all(covers(having, shape) for shape, having in kinds)


def newest_first(files: Iterable[Mapping[str, int]]) -> list[list[tuple[int, PartName]]]:
    """Return the parts of each saved step, the newest step first.

    Args:
        files: for each host the names and sizes of its files. Parts without their data are left out.

    Returns:
        For each step its parts, each with the number of the host.
    """
    steps: dict[tuple[int, int, int], list[tuple[int, PartName]]] = {}
    for host, names in enumerate(files):
        for each in sorted(names):
            if (name := PartName.of(each)) is not None and name.data in names:
                steps.setdefault((name.attempt, name.save, name.step), []).append((host, name))
    return [steps[key] for key in sorted(steps, reverse=True)]


def difference(saved: Collection[Leaf], wanted: Collection[Leaf]) -> str | None:
    """Return in words why a saved state can't be restored as the one that is wanted; None if it can."""
    have, want = ({leaf.name: leaf for leaf in leaves} for leaves in (saved, wanted))
    for name, leaf in want.items():
        if name not in have:
            return f"it has no {name or 'single leaf'}, which the target has as {leaf}"
        if not have[name].fits(leaf):
            return f"its {name or 'only leaf'} is {have[name]}, and the target wants {leaf}"
    extra = next((leaf for name, leaf in have.items() if name not in want), None)
    return None if extra is None else f"it has {extra.name or 'a single leaf'} ({extra}), which the target has not"


def checksum(data: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, ...]:
    """Return the checksum of each block of bytes, as fast as memory is read. It shows torn and zeroed memory."""
    return tuple(_checksum(data[start : start + CHECKED_BYTES]) for start in range(0, len(data), CHECKED_BYTES))


def _checksum(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    blocks = len(data) // _BLOCK
    sums = data[: blocks * _BLOCK].view(np.uint64).reshape(blocks, _BLOCK // 8).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[blocks * _BLOCK :].tobytes(), zlib.crc32(sums.tobytes()))
