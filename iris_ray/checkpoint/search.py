"""Finds the newest step that is whole on the hosts of a gang, and reads boxes of its arrays from there."""

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import numpy as np

from iris_ray.checkpoint.boxes import Box, pieces, shape_of, span, volume, within
from iris_ray.checkpoint.parts import (
    ALIGNMENT,
    CHECKED_BYTES,
    Leaf,
    Part,
    PartName,
    Shard,
    checksum,
    is_whole,
    newest_first,
)
from iris_ray.checkpoint.peer_files import PeerFiles
from iris_ray.checkpoint.store import DirectoryFiles

logger = logging.getLogger(__name__)
Files: TypeAlias = DirectoryFiles | PeerFiles
"""The files on one host: on this machine, or elsewhere."""
AT_ONCE = 8
"""The number of records that a process reads at a time, until they have all wanted boxes."""


class HostFailedError(Exception):
    """The host of this number did not give bytes that its records name."""

    def __init__(self, host: int, why: str) -> None:
        super().__init__(host, why)
        self.host = host
        self.why = why


@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step that is whole.

    Attributes:
        leaves: of its state, with the plain values.
        parts: its parts, the number of the host of each, and the size of its record.
    """

    leaves: tuple[Leaf, ...]
    parts: tuple[tuple[int, PartName, int], ...]

    @property
    def name(self) -> PartName:
        """The name of one of its parts: all have the same attempt, save and step."""
        return self.parts[0][1]

    def to_text(self) -> str:
        parts = [(host, astuple(name), size) for host, name, size in self.parts]
        return json.dumps([Part(self.leaves, ()).to_bytes().hex(), parts])

    @staticmethod
    def from_text(text: str) -> "FoundStep":
        leaves, parts = json.loads(text)
        named = tuple((host, PartName(*name), size) for host, name, size in parts)
        return FoundStep(Part.from_bytes(bytes.fromhex(leaves)).leaves, named)


def newest_whole(hosts: Sequence[Files], folder: str, without: Collection[int], pool: Executor) -> FoundStep | None:
    """Return the newest step that is whole on the hosts; None if none is.

    Args:
        hosts: the files of each host.
        folder: where in them the steps are.
        without: numbers of hosts that are not asked.
        pool: asks several hosts at a time.
    """

    def listed(host: int) -> dict[str, int]:
        if host in without:
            return {}
        try:
            found = hosts[host].list(folder)
        except OSError as error:
            logger.warning("host %d of the gang shows no saved steps: %s", host, error)
            return {}
        return {path.removeprefix(f"{folder}/"): size for path, size in found.items()}

    def read(where: tuple[int, PartName]) -> Part | None:
        host, name = where
        try:
            part = _record(hosts[host], folder, name, files[host][name.record])
        except (OSError, ValueError) as error:
            logger.warning("a part of step %d on host %d can't be read: %s", name.step, host, error)
            return None
        return part if files[host][name.data] >= part.size else None

    files = list(pool.map(listed, range(len(hosts))))
    for where in newest_first(files):
        known = [(place, part) for place, part in zip(where, pool.map(read, where), strict=True) if part is not None]
        if is_whole([part for _, part in known]):
            first = min(known, key=lambda each: each[0][1].task)[1]
            parts = tuple((host, name, files[host][name.record]) for (host, name), _ in known)
            return FoundStep(first.leaves, parts)
        name = where[0][1]
        logger.info("step %d of attempt %d is not whole on the hosts of this gang", name.step, name.attempt)
    return None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a wanted box, and the shard that has this piece."""

    box: Box
    host: int
    data: str
    shard: Shard


Wanted = Mapping[int, Sequence[Box]]
"""The boxes that a process needs, by the number of the leaf."""
Arrays = dict[Box, np.ndarray[Any, np.dtype[np.uint8]]]
"""The bytes of boxes, in C order."""


def read_boxes(
    found: FoundStep, hosts: Sequence[Files], near: Sequence[int], folder: str, wanted: Wanted, pool: Executor
) -> Iterator[tuple[int, Arrays]]:
    """Yield the bytes of all wanted boxes, leaf by leaf.

    Args:
        found: the step.
        hosts, folder, pool: as for `newest_whole`.
        near: numbers of all hosts, the first of which are read from first.
        wanted: what to read.

    Raises:
        HostFailedError: a host did not give bytes that its records name.
    """
    plan = _plan(found, hosts, near, folder, wanted, pool)

    def read(leaf: int) -> tuple[int, Arrays]:
        item = found.leaves[leaf]
        return leaf, {box: _assembled(box, plan[leaf, box], item, hosts) for box in wanted[leaf]}

    yield from pool.map(read, wanted)


def _plan(
    found: FoundStep, hosts: Sequence[Files], near: Sequence[int], folder: str, wanted: Wanted, pool: Executor
) -> dict[tuple[int, Box], list[_Piece]]:
    """Return the pieces of each wanted box."""

    def read(where: tuple[int, PartName, int]) -> Part:
        host, name, size = where
        try:
            return _record(hosts[host], folder, name, size)
        except (OSError, ValueError) as error:
            raise HostFailedError(host, str(error)) from error

    plan: dict[tuple[int, Box], list[_Piece]] = {(leaf, box): [] for leaf, boxes in wanted.items() for box in boxes}
    missing = {key: [key[1]] if volume(key[1]) else [] for key in plan}
    ordered = sorted(found.parts, key=lambda each: near.index(each[0]))
    own = sum(each[0] == near[0] for each in ordered)
    batches = [ordered[:own], *(ordered[start : start + AT_ONCE] for start in range(own, len(ordered), AT_ONCE))]
    for batch in batches:
        for (host, name, _), part in zip(batch, pool.map(read, batch), strict=True):
            shards: dict[int, list[Shard]] = {}
            for shard in part.shards:
                shards.setdefault(shard.leaf, []).append(shard)
            for key, boxes in missing.items():
                still: list[Box] = []
                theirs = shards.get(key[0], []) if boxes else []
                for box in boxes:
                    pairs, left = pieces(box, [shard.box for shard in theirs])
                    plan[key] += [_Piece(each, host, f"{folder}/{name.data}", theirs[n]) for n, each in pairs]
                    still += left
                missing[key] = still
        if not any(missing.values()):
            return plan
    raise HostFailedError(near[0], "the records of the step have changed while it was read")


def _record(files: Files, folder: str, name: PartName, size: int) -> Part:
    content = bytearray(size)
    files.read(f"{folder}/{name.record}", memoryview(content))
    return Part.from_bytes(bytes(content))


def _assembled(
    wanted: Box, parts: Sequence[_Piece], leaf: Leaf, hosts: Sequence[Files]
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    item = parts[0].shard.size // volume(parts[0].shard.box) if parts else 1
    result = aligned(volume(wanted) * item)
    for piece in parts:
        start, end = (number * item for number in span(piece.box, piece.shard.box))
        first = start - start % CHECKED_BYTES  # whole blocks are read, since each has one checksum
        last = min(end + -end % CHECKED_BYTES, piece.shard.size)
        exact = piece.box == wanted and (first, last) == (start, end) and end - start == len(result)
        content = result if exact else aligned(last - first)
        try:
            hosts[piece.host].read(piece.data, content.data, piece.shard.offset + first)
        except OSError as error:
            raise HostFailedError(piece.host, str(error)) from error
        if checksum(content) != piece.shard.checksum[first // CHECKED_BYTES : -(-last // CHECKED_BYTES)]:
            raise HostFailedError(piece.host, f"its bytes of {leaf.name} have changed since they were saved")
        if not exact:
            into = result.reshape(*shape_of(wanted), item)
            into[within(piece.box, wanted)] = _cut(content[start - first : end - first], piece, item)
    return result


def _cut(content: np.ndarray[Any, np.dtype[np.uint8]], piece: _Piece, item: int) -> Any:
    """Return a box of a shard, given the shard's bytes from the first element of the box to the last, in C order."""
    if len(content) == volume(piece.box) * item:
        return content.reshape(*shape_of(piece.box), item)
    strides = [item]
    for length in reversed(shape_of(piece.shard.box)[1:]):
        strides.insert(0, strides[0] * length)
    return np.lib.stride_tricks.as_strided(content, (*shape_of(piece.box), item), (*strides, 1))


def aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return fresh memory of that many bytes, aligned so that JAX on a CPU can take it over without a copy."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
