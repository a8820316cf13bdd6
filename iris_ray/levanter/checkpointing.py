"""Checkpoints of a Levanter run in a gang: in the hosts' memory, as its config says, and at the end of all other work.

Saves and restores are marked, so that `iris-ray job goodput` counts them by their kinds.
"""

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from iris_ray.errors import CheckpointTooLargeError
from iris_ray.task.jax import agreed_notice
from iris_ray.task.preemption import PreemptionNotice
from iris_ray.task.progress import heartbeat, note_save, unproductive

if TYPE_CHECKING:
    from iris_ray.checkpoint import MemoryCheckpointer

logger = logging.getLogger(__name__)


class GangCheckpointer:
    """Levanter's Checkpointer, with a heartbeat for each step, steps in the hosts' memory, and a save at a notice.

    The checkpoint of the last step marks a run as complete. So `save_last_step` saves it, after the last evaluations
    and exports, which Levanter would not repeat.

    Args:
        checkpointer: Levanter's.
        num_train_steps: the number of steps of the run.
        before_leaving: called when the checkpoint of a notice is saved.
        memory: keeps steps in the hosts' memory; or None.
    """

    def __init__(
        self,
        checkpointer: Any,
        num_train_steps: int,
        before_leaving: Callable[[], object],
        memory: "MemoryCheckpointer | None" = None,
    ) -> None:
        self._checkpointer = _telling_of_saves(checkpointer)
        self._memory = memory
        self._last_step = num_train_steps - 1
        self._before_leaving = before_leaving
        self._latest_step = -1
        self._save_last_step: Callable[..., object] | None = None

    def on_step(self, *info: Any, force: bool = False, **state: Any) -> None:
        """Levanter calls it after each step, with a ``StepInfo`` or, in other versions, with ``tree`` and ``step``.

        After the last step it calls it once more, in some versions with ``force``.
        """
        step = int(info[0].step if info else state["step"])
        heartbeat(step)
        save = functools.partial(self._checkpointer.on_step, *info, **state)
        if step in (self._last_step, self._latest_step):
            self._save_last_step = save
            return
        self._latest_step = step
        notice = agreed_notice(step)
        safe = self._keep_in_memory(step, notice, info, state)
        must_save = notice is not None and not safe
        if must_save:
            self._checkpointer.save_interval = timedelta.resolution  # makes a temporary checkpoint due
        with unproductive("checkpoint_save", outlives_hosts=False):  # each step; only some save
            save(force=must_save and step == 0)  # Levanter saves its first step only if it must
            if must_save:
                self._checkpointer.wait_until_finished()
        if notice:
            print(f"Step {step} is saved, because the gang moves: {notice.reason}", flush=True)
            self._before_leaving()
            notice.saved()

    def _keep_in_memory(
        self, step: int, notice: PreemptionNotice | None, info: Sequence[Any], state: Mapping[str, Any]
    ) -> bool:
        """Keep a step in the hosts' memory if it is due. Return whether it survives the announced loss."""
        if self._memory is None or (notice is None and (step + 1) % self._memory.every):
            return False
        tree = info[0].state.saveable_state if info else state["tree"]
        try:
            self._memory.save(step + 1, arrays_of(tree), now=notice is not None)
        except CheckpointTooLargeError as error:
            logger.warning("%s", error)
            return False
        return notice is not None and self._memory.outlives(notice)

    def save_last_step(self) -> None:
        """Save the last step, if there was one, and wait until it is saved."""
        with unproductive("checkpoint_save", outlives_hosts=False):
            if self._save_last_step is not None:
                self._save_last_step(force=True)
            self._checkpointer.wait_until_finished()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)


def _telling_of_saves(checkpointer: Any) -> Any:
    """Have Levanter's Checkpointer tell when it saves, which it does by a method of its own."""
    if (save := getattr(checkpointer, "save_checkpoint", None)) is not None:

        @functools.wraps(save)
        def save_and_tell(*args: Any, **kwargs: Any) -> Any:
            result = save(*args, **kwargs)
            note_save()
            return result

        checkpointer.save_checkpoint = save_and_tell
    return checkpointer


@contextlib.contextmanager
def marked_restores() -> Iterator[None]:
    """Mark the time in which Levanter loads checkpoints within the block."""
    levanter = sys.modules.get("levanter.checkpoint")
    if levanter is None:  # the module that loads checkpoints is not imported
        yield
        return
    load = levanter.load_checkpoint
    loading = False

    @functools.wraps(load)
    def marked(*args: Any, **kwargs: Any) -> Any:
        nonlocal loading
        if loading:  # some versions call themselves for another path
            return load(*args, **kwargs)
        loading = True
        try:
            with unproductive("checkpoint_restore"):
                return load(*args, **kwargs)
        finally:
            loading = False

    levanter.load_checkpoint = marked  # type: ignore[attr-defined]
    try:
        yield
    finally:
        levanter.load_checkpoint = load  # type: ignore[attr-defined]


@contextlib.contextmanager
def begun_from_memory(memory: "MemoryCheckpointer", saved: int) -> Iterator[None]:
    """Have Levanter's trainers begin within the block with the newest step in the hosts' memory, if there is one.

    Args:
        memory: the memory.
        saved: how many steps are done in the newest checkpoint. Memory that is older is left alone.
    """
    trainers = sys.modules.get("levanter.trainer")
    if trainers is None:
        yield
        return
    initial_state = trainers.Trainer.initial_state

    @functools.wraps(initial_state)
    def from_memory(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        config = trainer.config
        if config.load_checkpoint is False or memory.newest(saved) is None:
            return initial_state(trainer, *args, **kwargs)
        trainer.config = dataclasses.replace(config, load_checkpoint=False, initialize_from=None)
        try:
            fresh = initial_state(trainer, *args, **kwargs)
        finally:
            trainer.config = config
        found = memory.restore(arrays_of(fresh.saveable_state), saved)
        if found is None:
            return initial_state(trainer, *args, **kwargs)
        print(f"Step {found[0] - 1} of this run was in the hosts' memory", flush=True)
        return _with_arrays(fresh, found[1])

    trainers.Trainer.initial_state = from_memory
    try:
        yield
    finally:
        trainers.Trainer.initial_state = initial_state


def arrays_of(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by their paths. Levanter's states also have functions and other objects."""
    import jax
    import numpy as np

    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in found if isinstance(leaf, (jax.Array, np.ndarray))}


def _with_arrays(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a tree with these arrays at their paths."""
    import jax

    return jax.tree_util.tree_map_with_path(lambda path, leaf: arrays.get(jax.tree_util.keystr(path), leaf), tree)


def steps_saved(paths: Iterable[str]) -> int:
    """Return how many steps are done in the newest whole checkpoint of a run; 0 without one.

    Args:
        paths: directories of the run's checkpoints, in any file system that fsspec knows.
    """
    import fsspec

    newest = 0
    for path in paths:
        files, directory = fsspec.core.url_to_fs(path)  # no pattern: a name may have brackets
        for found in files.ls(directory, detail=False) if files.isdir(directory) else ():
            step = found.rstrip("/").rpartition("/step-")[2]
            if step.isdecimal() and files.exists(f"{found}/metadata.json"):  # step-500-best is a user's
                newest = max(newest, int(step) + 1)
    return newest
