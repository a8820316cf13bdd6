"""Keeps steps of a state on the hosts of a gang, and restores the newest whole one: the work of each process.

A save is *begun* in a file of the host that holds no whole step. It is *here* once its record is written, and *at the
partner* once a host of another slice has a copy of the shards that no other slice has. It is *whole* once all processes
have said that they came so far: then older ones are given up, and callers are told. A save that fails on the way leaves
the newest whole one as it is.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from iris_ray.checkpoint.boxes import Box
from iris_ray.checkpoint.gang import JaxGang
from iris_ray.checkpoint.leaves import StateLeaf
from iris_ray.checkpoint.local_files import room_in
from iris_ray.checkpoint.parts import ALIGNMENT, Part, PartName, Shard, checksum, difference
from iris_ray.checkpoint.search import FoundStep, HostFailedError, newest_whole, read_boxes
from iris_ray.checkpoint.shares import HeldArray, Kept, partner, share_out
from iris_ray.checkpoint.store import Bytes, StepFiles, bytes_of
from iris_ray.errors import CheckpointMismatchError, CheckpointTooLargeError

logger = logging.getLogger(__name__)

READERS: Final = 8
"""Threads that read during a restore."""
TRIES: Final = 5
"""How often the processes look for a step, each time without the hosts that have failed."""


class GangSteps:
    """The steps of a state that a gang keeps, as one of its processes sees them. All processes call the same methods.

    Args:
        gang: the processes.
        keep: files for steps on each host.
        copies: whether shards that only one slice has are copied to another one.
        limit: bytes of each host's memory; None for what `room_in` gives.

    Attributes:
        is_whole: whether the latest save is whole, which all processes learn alike.
    """

    def __init__(self, gang: JaxGang, keep: int, copies: bool, limit: int | None) -> None:
        self._gang = gang
        self._copies = copies
        self._limit = limit
        self._files = StepFiles.of(gang.own, gang.folder, gang.attempt, gang.index, keep)
        self._plan: _Plan | None = None
        self.is_whole = False
        self._counter = itertools.count()
        to = partner(gang.index, gang.domains) if copies and gang.sliced else None
        self._partner = None if to is None else gang.hosts[gang.host_of[to]]

    @property
    def outlives_a_slice(self) -> bool:
        """Whether each shard of the latest save is in two slices."""
        plan = self._plan
        return self.is_whole and self._gang.sliced and plan is not None and (self._copies or not plan.alone_anywhere)

    def finish(self) -> None:
        """Wait for what goes on in the background, and raise its error."""
        going_on, self._files.going_on = self._files.going_on, None
        if going_on is not None:
            going_on.result()

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, step: int, leaves: Sequence[StateLeaf], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Keep a step. Return once its bytes are on this host; `finish` waits until it is whole, or known not to be.

        Args:
            step: the step.
            leaves: of its state.
            meanwhile: called in the background.

        Raises:
            CheckpointTooLargeError: it does not fit into the memory of this host.
        """
        key = f"saved/{next(self._counter)}/{step}"
        try:
            self.finish()
            self.is_whole = False
            plan = self._planned(leaves)
            slot, memory = self._files.begin(plan.size)
            arrays = {leaf: leaves[leaf].shards() for leaf in {each.leaf for each in plan.kept}}
            for each in plan.kept:
                if leaves[each.leaf].lasting:
                    arrays[each.leaf][each.box].copy_to_host_async()
            later: list[tuple[int, Bytes]] = []
            for each, offset in zip(plan.kept, plan.offsets, strict=True):
                content = bytes_of(arrays[each.leaf][each.box])
                if leaves[each.leaf].lasting:
                    later.append((offset, content))
                else:
                    np.copyto(memory[offset : offset + each.size], content)
        except Exception as error:
            self._tell(key, error)  # the others wait for it, and take part in nothing else before
            raise
        about = tuple(leaf.leaf for leaf in leaves)

        def write() -> None:
            for offset, content in later:
                np.copyto(memory[offset : offset + len(content)], content)
            later.clear()  # the others may take long
            shards = [
                Shard(each.leaf, each.box, offset, each.size, checksum(memory[offset : offset + each.size]))
                for each, offset in zip(plan.kept, plan.offsets, strict=True)
            ]
            name = self._files.commit(step, slot, Part(about, tuple(shards)))
            self._copy(name, memory, Part(about, tuple(shards[: plan.alone])))

        def complete() -> None:
            self._complete(step, key, write)
            meanwhile()

        self._files.going_on = _in_background(complete)

    def _complete(self, step: int, key: str, write: Callable[[], None]) -> None:
        """Write the files of a save, and agree on whether it is whole. The training need not wait for this."""
        error: Exception | None = None
        try:
            write()
        except Exception as caught:  # the others must hear of it
            error = caught
        if failures := self._tell(key, error):
            logger.warning("Step %d is not whole in memory, the step before stays: %s", step, failures[0])
        else:
            self.is_whole = True
            try:
                self._files.settle(self._files.saves)
                self._drop_copies()
            except (OSError, CheckpointTooLargeError) as caught:  # the next save tries again
                logger.warning("Files older than step %d stay in memory for now: %s", step, caught)
        if error is not None and not isinstance(error, OSError):
            raise error

    def _tell(self, key: str, error: Exception | None) -> list[str]:
        """Tell the other processes how this one fared; return all failures."""
        return self._gang.talk.agree(key, None if error is None else f"process {self._gang.index}: {error}")

    def _copy(self, name: PartName, memory: Bytes, part: Part) -> None:
        """Give the shards that no other slice has to a host of another slice. It keeps at most two copies at a time."""
        self._drop_copies()
        if self._partner is not None and part.shards:
            copy = dataclasses.replace(name, slot=None)
            self._files.copies.add(copy)
            self._partner.write(f"{self._gang.folder}/{copy.data}", memory.data[: part.size])
            self._partner.write(f"{self._gang.folder}/{copy.record}", memoryview(part.to_bytes()))

    def _drop_copies(self) -> None:
        """Delete the copies of all saves but the newest whole one.

        Raises:
            OSError: the partner's host can't do it now.
        """
        settled = self._files.settled
        for copy in sorted(self._files.copies):
            if self._partner is not None and (settled is None or copy.save != settled.save):
                for each in (copy.record, copy.data):
                    self._partner.delete(f"{self._gang.folder}/{each}")
                self._files.copies.remove(copy)

    def _planned(self, leaves: Sequence[StateLeaf]) -> "_Plan":
        """Return which shards this process keeps, and where. It is planned anew when the state looks different."""
        gang = self._gang
        held = [leaf.held for leaf in leaves]
        if self._plan is None or self._plan.held != held:
            plan = _Plan.of(held, gang, self._copies)
            try:
                refusal = self._why_too_large(plan)
            except OSError as error:  # the others wait for this process
                refusal = f"the room on process {gang.index}'s host is not known: {error}"
            if refusals := gang.talk.agree(f"room/{next(self._counter)}", refusal):
                raise CheckpointTooLargeError(refusals[0])
            self._plan = plan
        return self._plan

    def _prepare(self, leaves: Sequence[StateLeaf]) -> None:
        """Have the first file made while the program compiles. If it does not fit, `save` raises the error."""

        def prepare() -> None:
            with contextlib.suppress(CheckpointTooLargeError):
                self._files.prepare(size)

        with contextlib.suppress(CheckpointTooLargeError):
            size = self._planned(leaves).size
            self._files.going_on = _in_background(prepare)

    def _why_too_large(self, plan: "_Plan") -> str | None:
        """Return why the steps don't fit into the memory of this host; None if they do."""
        gang = self._gang
        here = [process for process, host in enumerate(gang.host_of) if host == gang.host_of[gang.index]]
        need = sum(self._files.keep * plan.sizes[process] for process in here)
        need += sum(2 * size for giver, size in plan.copies.items() if partner(giver, gang.domains) in here)
        used = sum(gang.own.list(gang.folder).values())
        room = room_in(gang.own.root) + used
        if need <= (most := room if self._limit is None else self._limit):
            return None
        return (
            f"steps of this state take {need:,} bytes of the memory of process {gang.index}'s host, as"
            f" {self._files.keep} files{' and the copies of other slices' * bool(plan.copies)}, and"
            f" {'there is room for' if self._limit is None else 'limit is'} {most:,}; shard the state over more hosts,"
            " or keep it in a bucket only"
        )

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(self, leaves: Sequence[StateLeaf], at_least: int = 0) -> tuple[int, list[Any]] | None:
        """Return the newest step that is whole, and its leaves; None if there is none, or only an older one.

        Raises:
            CheckpointMismatchError: it is of another state.
        """
        self.finish()
        with ThreadPoolExecutor(READERS, "iris_ray.checkpoint") as pool:
            found, built = self._agreed(leaves, at_least, pool)
        if found is not None and found.name.attempt == self._gang.attempt:
            self._files.settle(found.name.save)
        self._prepare(leaves)
        return None if found is None else (found.name.step, built)

    def newest(self, at_least: int = 0) -> int | None:
        """Return the newest step that is whole; None if there is none, or only an older one."""
        self.finish()
        with ThreadPoolExecutor(READERS, "iris_ray.checkpoint") as pool:
            found = self._found(f"newest/{next(self._counter)}", at_least, (), pool)
        return None if found is None else found.name.step

    def _agreed(
        self, leaves: Sequence[StateLeaf], at_least: int, pool: ThreadPoolExecutor
    ) -> tuple[FoundStep | None, list[Any]]:
        """Restore the step that process 0 has found; without the hosts that fail, until all processes succeed."""
        gang, failed = self._gang, set[int]()
        for _ in range(TRIES):
            key = f"restore/{next(self._counter)}"
            found = self._found(key, at_least, failed, pool)
            if found is None:
                return None, []
            built: list[Any] = []
            failure = None
            try:
                built = self._built(leaves, found, pool)
            except HostFailedError as error:
                failure = [error.host, error.why]
            except CheckpointMismatchError as error:
                failure = [-1, str(error)]
            said = None if failure is None else json.dumps(failure)
            failures = [json.loads(each) for each in gang.talk.agree(f"{key}/done", said)]
            for host, why in failures:
                if host == -1:
                    raise CheckpointMismatchError(why)
                logger.warning("host %d of the gang can't give its part of step %d: %s", host, found.name.step, why)
                failed.add(host)
            if not failures:
                return found, built
        return None, []

    def _found(self, key: str, at_least: int, without: Collection[int], pool: ThreadPoolExecutor) -> FoundStep | None:
        """Return the newest whole step if it is at least this one, as process 0 sees it."""

        def decision() -> str:
            found = newest_whole(self._gang.hosts, self._gang.folder, without, pool)
            if found is not None and (step := found.name.step) < at_least:
                logger.info("step %d in memory is older than %d, which the program has elsewhere", step, at_least)
                found = None
            return "" if found is None else found.to_text()

        text = self._gang.talk.decide(key, decision)
        return FoundStep.from_text(text) if text else None

    def _built(self, leaves: Sequence[StateLeaf], found: FoundStep, pool: ThreadPoolExecutor) -> list[Any]:
        if why := difference(found.leaves, [leaf.leaf for leaf in leaves]):
            raise CheckpointMismatchError(
                f"step {found.name.step} of attempt {found.name.attempt} in memory holds a different state: {why}; give"
                " restore() a target like the state that was saved, or a new state another name="
            )
        gang = self._gang
        number = {leaf.name: each for each, leaf in enumerate(found.leaves)}
        target = {number[leaf.leaf.name]: leaf for leaf in leaves}
        wanted: dict[int, Sequence[Box]] = {each: leaf.wanted for each, leaf in target.items()}
        built = {}
        for each, boxes in read_boxes(found, gang.hosts, gang.near, gang.folder, wanted, pool):
            built[each] = target[each].build(found.leaves[each].value, boxes)
        return [built[number[leaf.leaf.name]] for leaf in leaves]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The shards that this process keeps of each step.

    Attributes:
        held: the state for which this is the plan.
        kept: the shards, those first that no other slice keeps.
        offsets: the byte of the file at which each begins.
        size: bytes of the file.
        alone: how many shards no other slice keeps.
        alone_anywhere: whether any process keeps such shards.
        sizes: bytes that each process keeps.
        copies: bytes that processes give away, by process.
    """

    held: list[HeldArray | None]
    kept: list[Kept]
    offsets: list[int]
    size: int
    alone: int
    alone_anywhere: bool
    sizes: list[int]
    copies: dict[int, int]

    @staticmethod
    def of(held: list[HeldArray | None], gang: JaxGang, copies: bool) -> "_Plan":
        shares = share_out(
            [each or HeldArray(0, {}) for each in held], gang.domains, len(gang.domains) if gang.sliced else 2
        )
        offsets, sizes, given = [], [], {}
        for process, share in enumerate(shares):
            ends = list(itertools.accumulate((-(-each.size // ALIGNMENT) * ALIGNMENT for each in share), initial=0))
            sizes.append(ends[-1])
            if copies and gang.sliced and (alone := sum(each.alone for each in share)):
                given[process] = ends[alone]
            if process == gang.index:
                offsets = ends[:-1]
        kept = shares[gang.index]
        alone = sum(each.alone for each in kept)
        lonely = any(each.alone for share in shares for each in share)
        return _Plan(held, kept, offsets, sizes[gang.index], alone, lonely, sizes, given)


def _in_background(function: Callable[[], None]) -> Future[None]:
    """Run a function in a thread that doesn't keep the process from ending, or now if there is none. Return its end."""
    end: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            end.set_exception(error)
        else:
            end.set_result(None)

    try:
        threading.Thread(target=run, name="iris_ray.checkpoint", daemon=True).start()
    except RuntimeError as error:  # the other processes wait for what it does
        logger.warning("a save blocks the program, because it can't run in the background: %s", error)
        run()
    return end
