"""Checkpoints of a Levanter run in a gang: as its config says, at a notice, and at the end of all other work.

Saves and restores are marked, so that `iris-ray job goodput` counts them by their kinds.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from iris_ray.task.jax import agreed_notice
from iris_ray.task.progress import heartbeat, unproductive


class GangCheckpointer:
    """Levanter's Checkpointer, with a heartbeat for each step, and a save at a notice.

    The checkpoint of the last step marks a run as complete. So `save_last_step` saves it, after the last evaluations
    and exports, which Levanter would not repeat.

    Args:
        checkpointer: Levanter's.
        num_train_steps: the number of steps of the run.
        before_leaving: called when the checkpoint of a notice is saved.
    """

    def __init__(self, checkpointer: Any, num_train_steps: int, before_leaving: Callable[[], object]) -> None:
        self._checkpointer = checkpointer
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
        if notice := agreed_notice(step):
            self._checkpointer.save_interval = timedelta.resolution  # makes a temporary checkpoint due
        with unproductive("checkpoint_save"):
            save(force=bool(notice) and step == 0)  # Levanter saves its first step only if it must
            if notice:
                self._checkpointer.wait_until_finished()
        if notice:
            print(f"Step {step} is saved, because the gang moves: {notice.reason}", flush=True)
            self._before_leaving()
            notice.saved()

    def save_last_step(self) -> None:
        """Save the last step, if there was one, and wait until it is saved."""
        with unproductive("checkpoint_save"):
            if self._save_last_step is not None:
                self._save_last_step(force=True)
            self._checkpointer.wait_until_finished()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)


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


def is_complete(path: str, num_train_steps: int) -> bool:
    """Return whether the last step of a run is among its checkpoints.

    Args:
        path: the directory of the run's checkpoints, in any file system that fsspec knows.
        num_train_steps: the number of steps of the run.
    """
    import fsspec

    files, _, (directory,) = fsspec.get_fs_token_paths(path)
    saved = [found.split("/")[-2].removeprefix("step-") for found in files.glob(f"{directory}/step-*/metadata.json")]
    return any(step.isdecimal() and int(step) >= num_train_steps - 1 for step in saved)  # step-500-best is a user's
