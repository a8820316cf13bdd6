"""Gangs whose processes are threads and keep a state in directories: hosts are lost, processes die at any write."""

import contextlib
import errno
import itertools
import math
import mmap
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from iris_ray.checkpoint import store
from iris_ray.checkpoint.boxes import Box, shape_of, whole, within
from iris_ray.checkpoint.gang import JaxGang, Talk
from iris_ray.checkpoint.leaves import StateLeaf
from iris_ray.checkpoint.parts import Leaf, Part, PartName
from iris_ray.checkpoint.shares import HeldArray
from iris_ray.checkpoint.steps import GangSteps
from iris_ray.checkpoint.store import DirectoryFiles

FOLDER = "memory/state"


class Killed(BaseException):
    """Stands for the death of a process: nothing catches it."""


class Service:
    """JAX's coordination service: it fails for all as soon as one process is dead. It keeps names of barriers.

    Attributes:
        values: the keys that are set, with their values.
        arrived: how often a process has come to each barrier.
    """

    def __init__(self, count: int) -> None:
        self.values: dict[str, str] = {}
        self.arrived: dict[str, int] = {}
        self._count = count
        self._changed = threading.Condition()
        self._broken = False

    def end(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self.values, "as JAX does"
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self._await(lambda: key in self.values)
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            del self.values[key]

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        with self._changed:
            came = self.arrived.get(barrier_id, 0)
            self.arrived[barrier_id] = came + 1
            self._changed.notify_all()
        self._await(lambda: self.arrived[barrier_id] >= (came // self._count + 1) * self._count)

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(each, value) for each, value in self.values.items() if each.startswith(f"{key}/")]

    def _await(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._broken or condition())
            if not condition():
                raise Killed


class Fuse:
    """Ends a process at one of its writes, and all writes after it."""

    def __init__(self, left: int | None) -> None:
        self._left = left

    def blow(self) -> None:
        self._left = 0

    def burn(self) -> None:
        if self._left is not None:
            if not self._left:
                raise Killed
            self._left -= 1


class FilesUntilDeath(DirectoryFiles):
    """Files that a process changes until it dies, even in the middle of a call."""

    def __init__(self, root: Path, fuse: Fuse, refused: Collection[int] = ()) -> None:
        super().__init__(root)
        self._fuse = fuse
        self._refused = refused

    def write(self, path: str, source: Path | memoryview) -> None:
        self._fuse.burn()
        if path.endswith(".copy") and int(path.split("-")[-2]) in self._refused:
            raise OSError(errno.ENOSPC, "no room for the copy", path)
        super().write(path, source)

    def delete(self, path: str) -> None:
        self._fuse.burn()
        super().delete(path)

    def rename(self, path: str, to: str) -> None:
        self._fuse.burn()
        super().rename(path, to)

    def grow(self, path: str, size: int) -> mmap.mmap:
        self._fuse.burn()
        return super().grow(path, size)


# -- states ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How an array lies on the processes of a gang: cut along an axis over slices, over the hosts of each, or both."""

    shape: tuple[int, ...]
    over_slices: int | None
    over_hosts: int | None

    def held(self, slices: int, hosts: int) -> HeldArray:
        holders: dict[Box, list[int]] = {}
        for process in range(slices * hosts):
            box = whole(self.shape)
            for axis, number, count in (
                (self.over_slices, process // hosts, slices),
                (self.over_hosts, process % hosts, hosts),
            ):
                if axis is not None and axis < len(self.shape):
                    box = _cut(box, axis, number, count)
            holders.setdefault(box, []).append(process)
        return HeldArray(8, {box: tuple(each) for box, each in holders.items()})


def _cut(box: Box, axis: int, number: int, count: int) -> Box:
    start, end = box[axis]
    length = math.ceil((end - start) / count)
    cut = (min(end, start + number * length), min(end, start + (number + 1) * length))
    return (*box[:axis], cut, *box[axis + 1 :])


def content(layouts: Sequence[Layout], attempt: int, step: int) -> list[np.ndarray]:
    """The arrays of a step, which no other step of any attempt has."""
    random = np.random.default_rng([attempt, step])
    return [random.integers(2**63, size=layout.shape, dtype=np.int64) for layout in layouts]


def leaves_of(
    layouts: Sequence[Layout], arrays: Sequence[np.ndarray], process: int, slices: int, hosts: int
) -> list[StateLeaf]:
    leaves = [StateLeaf(Leaf("step", value=0), None, (), dict, lambda value, _: value)]
    for number, (layout, array) in enumerate(zip(layouts, arrays, strict=True)):
        held = layout.held(slices, hosts)
        boxes = tuple(box for box, holders in held.holders.items() if process in holders)
        leaves.append(_leaf(f"array {number}", array, held, boxes))
    return leaves


def _leaf(name: str, array: np.ndarray, held: HeldArray, boxes: tuple[Box, ...]) -> StateLeaf:
    def build(_: Any, found: Mapping[Box, Any]) -> Any:
        return {box: content.view(np.int64).reshape(shape_of(box)) for box, content in found.items()}

    def shards() -> Mapping[Box, Any]:
        return {box: array[within(box, whole(array.shape))] for box in boxes}

    return StateLeaf(Leaf(name, "int64", array.shape), held, boxes, shards, build)


# -- attempts ----------------------------------------------------------------------------------------------------------


class Attempt:
    """The processes of an attempt, each on a host of its own.

    Args:
        layouts: of the arrays of their state.
        hosts: the directory of each process's host.
        slices: of how many slices they are.
        attempt: its number.
        files: returns the files of a host as a process sees them; takes the numbers of both.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        hosts: Sequence[Path],
        slices: int,
        attempt: int = 1,
        files: Callable[[int, int], DirectoryFiles] | None = None,
    ) -> None:
        store._known.clear()  # as in a new process
        count, self._a_slice = len(hosts), len(hosts) // slices
        self.layouts, self.slices, self.number = layouts, slices, attempt
        self.service = Service(count)
        self.gangs = []
        domains = [each // self._a_slice if slices > 1 else each for each in range(count)]
        for index in range(count):
            seen = [files(index, host) if files else DirectoryFiles(hosts[host]) for host in range(count)]
            talk = Talk(self.service, index, "state")
            self.gangs.append(
                JaxGang(index, count, attempt, seen, range(count), seen[index], FOLDER, domains, slices > 1, talk)
            )
        self.again()

    def again(self) -> None:
        """Have each process make another checkpointer of the same name."""
        self.steps = [GangSteps(gang, keep=2, copies=True, limit=None) for gang in self.gangs]

    def leaves(self, index: int, arrays: Sequence[np.ndarray]) -> list[StateLeaf]:
        return leaves_of(self.layouts, arrays, index, self.slices, self._a_slice)

    def save(self, step: int, seed: int | None = None) -> list[bool]:
        """Save a step in all processes, with a content that depends on the seed; return whether it is whole."""

        def save(index: int) -> bool:
            arrays = content(self.layouts, self.number if seed is None else seed, step)
            self.steps[index].save(step, self.leaves(index, arrays))
            self.steps[index].finish()
            return self.steps[index].is_whole

        return self.on_all(save)

    def restore(self) -> list[tuple[int, list[Any]] | None]:
        blank = [np.zeros(layout.shape, np.int64) for layout in self.layouts]
        return self.on_all(lambda index: self.steps[index].restore(self.leaves(index, blank)))

    def on_all(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what a function returns for each process; it is called in a thread for each."""
        with ThreadPoolExecutor(len(self.gangs)) as pool:
            return list(pool.map(work, range(len(self.gangs))))


class Program:
    """A program that keeps steps of its state, attempt by attempt.

    Args:
        layouts: of its arrays.
        root: a directory for the hosts' directories.
    """

    def __init__(self, layouts: Sequence[Layout], root: Path) -> None:
        self.layouts = layouts
        self.settled: tuple[int, int] | None = None
        """The newest attempt and step of which every process knows that it is whole."""
        self._root = root
        self._attempt = 0
        self._hosts = itertools.count()

    def new_host(self) -> Path:
        path = self._root / f"host-{next(self._hosts)}"
        path.mkdir()
        return path

    def run(
        self,
        hosts: Sequence[Path],
        slices: int,
        steps: int,
        dies: int | None = None,
        at_write: int = 0,
        refused: Collection[int] = (),
    ) -> list[tuple[int, list[Any]] | None]:
        """Restore in a new attempt, and keep some steps; return what each process has restored.

        Args:
            hosts: the directory of each process's host.
            slices: of how many slices they are.
            steps: how many to keep.
            dies: the process that dies at one of its writes.
            at_write: at which one.
            refused: steps of which no host takes a copy, as if it had no room.
        """
        self._attempt += 1
        count = len(hosts)
        fuses = [Fuse(at_write if index == dies else None) for index in range(count)]

        def files(index: int, host: int) -> DirectoryFiles:
            return FilesUntilDeath(hosts[host], fuses[index], refused)

        attempt = Attempt(self.layouts, hosts, slices, self._attempt, files)
        restored: dict[int, tuple[int, list[Any]] | None] = {}
        errors: list[BaseException] = []
        kept: list[int] = [0] * count

        def process(index: int) -> None:
            states = attempt.steps[index]
            try:
                blank = [np.zeros(layout.shape, np.int64) for layout in self.layouts]
                restored[index] = states.restore(attempt.leaves(index, blank))
                for step in range(1, steps + 1):
                    states.save(step, attempt.leaves(index, content(self.layouts, self._attempt, step)))
                    states.finish()
                    if states.is_whole:
                        kept[index] = step
                states.finish()  # what a restore has begun
            except Killed:
                pass
            except BaseException as error:
                errors.append(error)
            else:
                return
            fuses[index].blow()
            attempt.service.end()
            with contextlib.suppress(Killed):
                states.finish()

        attempt.on_all(process)
        if errors:
            raise errors[0]
        if min(kept):
            self.settled = self._attempt, min(kept)
        return [restored[index] for index in range(count)] if len(restored) == count else []

    def expected(self, hosts: Sequence[Path]) -> tuple[int, int] | None:
        """The newest attempt and step of which the hosts have every element, found element by element."""
        masks: dict[tuple[int, int, int], list[np.ndarray]] = {}
        for host in hosts:
            for path in (host / FOLDER).glob("*.json"):
                name = PartName.of(path.name)
                assert name is not None
                shapes = [layout.shape for layout in self.layouts]
                key = name.attempt, name.save, name.step
                mask = masks.setdefault(key, [np.zeros(shape, bool) for shape in shapes])
                for shard in Part.from_bytes(path.read_bytes()).shards:
                    mask[shard.leaf - 1][within(shard.box, whole(mask[shard.leaf - 1].shape))] = True
        whole_ones = [key for key, found in masks.items() if all(mask.all() for mask in found)]
        return (max(whole_ones)[0], max(whole_ones)[2]) if whole_ones else None

    def check(self, restored: Sequence[tuple[int, list[Any]] | None], expected: tuple[int, int] | None) -> None:
        """Every process has the same step, the newest that was whole, bit by bit; None exactly if none was."""
        for each in restored:
            assert (each is None) == (expected is None)
            if each is None or expected is None:
                continue
            step, leaves = each
            assert step == expected[1]
            for array, boxes in zip(content(self.layouts, *expected), leaves[1:], strict=True):
                for box, found in boxes.items():
                    np.testing.assert_array_equal(found, array[within(box, whole(array.shape))])
