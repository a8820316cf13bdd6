"""Keeps the state of a JAX program in the memory of its hosts, so that a lost slice costs steps, not hours."""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import jax

from iris_ray.checkpoint.gang import JaxGang, this_gang
from iris_ray.checkpoint.leaves import state_leaves
from iris_ray.checkpoint.steps import GangSteps
from iris_ray.model.checks import Holds, OneOf, Whole, is_whole, require
from iris_ray.model.notices import NoticeKind
from iris_ray.task.preemption import PreemptionNotice
from iris_ray.task.progress import count_unproductive, unproductive


class MemoryCheckpointer:
    """Checkpoints of a JAX program in the memory of its hosts.

    The shards are kept in ``local_dir``, which outlives the attempt; of the processes of a slice that have the same
    shard, one keeps it. After a loss, each process of the next attempt reads the shards on its own host, and fetches
    the others; the number and order of slices may change. A shard that only one slice has is copied to a host of
    another slice. All processes must call each method at the same steps. Whatever isn't a JAX array that spans all
    processes must be equal in all of them: numbers, bools, str, NumPy arrays, and JAX arrays of one process.

    It does not replace checkpoints in a bucket: if a job has a single slice and loses it, or is evicted, the memory of
    its hosts is lost as well.

    Args:
        every: `save` keeps the steps that are multiples of it.
        keep: the number of files for steps of each process, at least 2. Each has the size of the process's share: one
            holds the newest whole step while the next step is written into another.
        copies: ``"auto"`` copies shards to another slice if no other slice has them; ``"none"`` never does.
        name: of the state, if a program keeps several.
        limit: bytes of each host's memory that the steps may take; by default, all that is free except a tenth of the
            memory.
        directory: one that all processes share, such as ``/dev/shm/run-7`` on a single machine, in place of the hosts'
            own. A program that isn't a task of a job finds its earlier steps there.

    Example::

        with MemoryCheckpointer(every=10) as memory:
            start, state = memory.restore(state, newest_in_bucket()) or restore_from_bucket()
            for step in range(start, steps):
                state = train_step(state)
                notice = iris_ray.jax.agreed_notice(step)
                memory.save(step + 1, state, now=notice is not None)
                if notice:
                    if not memory.outlives(notice):
                        save_to_bucket(step + 1, state)
                    notice.saved()
    """

    def __init__(
        self,
        every: int = 1,
        keep: int = 2,
        copies: Literal["auto", "none"] = "auto",
        *,
        name: str = "state",
        limit: int | None = None,
        directory: str | Path | None = None,
    ) -> None:
        require("every", every, Whole(1))
        require("keep", keep, Whole(2))  # one step stays whole while the next is written
        require("copies", copies, OneOf(("auto", "none")))
        require("name", name, Holds(str.isidentifier, "a name of letters, digits and _"))
        self.every = every
        self._keep = keep
        self._copies = copies == "auto"
        self._name = name
        self._limit = limit
        self._directory = None if directory is None else Path(directory).absolute()
        self._known: tuple[JaxGang, GangSteps] | None = None
        self._untold_s = 0.0
        """How long the latest save held the program up. The next save's thread counts it: that takes milliseconds."""

    def save(self, step: int, state: Any, now: bool = False) -> bool:
        """Keep a state. Return whether this step is due; with ``now``, whether it is whole on the hosts.

        The call first waits for the end of the save before. It returns once the state is on this host, so that the
        program may go on and donate its arrays; NumPy arrays are copied. The rest goes on in a thread: the files,
        checksums, the copy for another slice, and the agreement that the step is whole. Only then is the previous step
        given up. If a part can't be written or a host refuses a copy, a warning says so, and the previous step stays.
        The latest save counts, whatever its number, so a program may go back and save a step again. The time of the
        call counts as ``checkpoint_save`` for `iris-ray job goodput`, once the next step is saved or `wait` is called.

        Args:
            step: how many steps are done; `restore` returns it.
            state: a pytree of arrays of JAX and NumPy, random keys, int, float, bool and str.
            now: keep a step that isn't a multiple of ``every`` as well, and return once it is known whether all hosts
                have their parts and copies: for a notice.

        Raises:
            CheckpointTooLargeError: some host has no room for steps of this size: then all processes raise this, at the
                first save of a state of these shapes. Or this host's memory has become full since. Earlier steps are
                still there.
            InvalidRequestError: a leaf of the state is of another type, or processes can't read each other's files.
        """
        require("step", step, Holds(lambda step: is_whole(step) and step >= 0, Whole().wanted))
        step = int(step)
        if step % self.every and not now:
            return False
        jax.block_until_ready(state)  # type: ignore[no-untyped-call]
        began, untold_s = time.monotonic(), self._untold_s
        gang, steps = self._here()
        steps.save(step, state_leaves(state, gang.count)[0], lambda: count_unproductive("checkpoint_save", untold_s))
        self._untold_s = time.monotonic() - began
        if not now:
            return True
        self.wait()
        return steps.is_whole

    def restore(self, target: Any, at_least: int = 0) -> tuple[int, Any] | None:
        """Return the newest step that is whole in the hosts' memory, and its state; None if there is none.

        All processes return the same step. The steps of the newest attempt that has a whole one come first.

        Args:
            target: a state with the structure, shapes and types of the saved one, and with the wanted shardings; its
                elements don't matter. Arrays may be ``jax.ShapeDtypeStruct`` with a sharding, which take no memory.
            at_least: the newest step in the bucket; the value of process 0 counts. An older step in memory is left
                alone: the gang may have been elsewhere meanwhile, and have saved later steps there.

        Raises:
            CheckpointMismatchError: the saved state is another one; the message names the first difference.
            InvalidRequestError: as `save`.
        """
        with unproductive("checkpoint_restore"):
            gang, steps = self._here()
            leaves, structure = state_leaves(target, gang.count)
            found = steps.restore(leaves, at_least)
            if found is None:
                return None
            step, restored = found
            return step, jax.block_until_ready(jax.tree_util.tree_unflatten(structure, restored))  # type: ignore[no-untyped-call]

    def newest(self, at_least: int = 0) -> int | None:
        """Return the step that `restore` would return now in all processes; None if there is none."""
        return self._here()[1].newest(at_least)

    def wait(self) -> None:
        """Wait until the latest step is whole, with its copies, or is known not to become so."""
        if self._known is not None:
            with unproductive("checkpoint_save", outlives_hosts=False):
                self._known[1].finish()
            count_unproductive("checkpoint_save", self._untold_s)
            self._untold_s = 0.0

    def outlives(self, notice: PreemptionNotice) -> bool:
        """Return whether the latest step survives what a notice announces, so that it need not go into a bucket.

        It does if it is whole and the gang grows, or loses one of several slices whose shards the others have. It does
        not if a host has refused its part or a copy, if the gang loses its only slice, if another job takes its hosts,
        or if the job ends. Whether a notice is about several slices is not checked. All processes get one answer.
        """
        self.wait()
        steps = self._here()[1]
        if notice.kind is NoticeKind.GROWTH:
            return steps.is_whole
        return notice.kind not in (NoticeKind.EVICTION, NoticeKind.TIME_LIMIT) and steps.outlives_a_slice

    def __enter__(self) -> "MemoryCheckpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until the latest step is whole. After an error, the other processes may never come to agree on it."""
        if error is None:
            self.wait()

    def _here(self) -> tuple[JaxGang, GangSteps]:
        """Return the gang and its steps, which are known once JAX's processes have joined."""
        if self._known is None:
            gang = this_gang(self._name, self._directory)
            self._known = gang, GangSteps(gang, self._keep, self._copies, self._limit)
        return self._known
