"""A run of Levanter as the task of a gang: joined with its peers, resumed, and saved at a notice and at its end."""

import contextlib
import copy
import dataclasses
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from iris_ray.errors import InvalidRequestError
from iris_ray.model.job_info import JobInfo
from iris_ray.task.job_info import get_job_info

if TYPE_CHECKING:
    from iris_ray.checkpoint import MemoryCheckpointer
    from iris_ray.levanter.checkpointing import GangCheckpointer

PRELOAD: Final = ["levanter.main.train_lm", "iris_ray.levanter", "iris_ray.jax", "iris_ray.checkpoint"]
"""Modules for the option ``preload``: each host imports them once, before tasks start, if a fork can inherit them."""

MEMORY_EVERY: Final = 10
"""A run is kept in the memory of its hosts at the multiples of this number of steps."""

Config = TypeVar("Config")
Result = TypeVar("Result")


def run(main: Callable[[Config], Result], config: Config, memory_every: int | None = MEMORY_EVERY) -> Result | None:
    """Call a ``main`` function of Levanter in a task of a gang; it continues from the last attempt's checkpoint.

    - The gang's processes are joined before Levanter touches JAX. Levanter does not join them again, and starts no Ray.
    - The run's id is the config's, else ``$RUN_ID``, else the job's id: each attempt finds the checkpoints of the run.
    - In tasks with chips, every tenth step is kept in the memory of the hosts. After the loss of one of several slices,
      the gang goes on from there, unless a checkpoint is newer. A state that doesn't fit isn't kept there.
    - Every step is a heartbeat; saves and restores are marked for ``iris-ray job goodput``. At a notice the gang saves
      its step, in memory or as a checkpoint, and moves without losing it.
    - When ``main`` has returned, `run` saves the last step and waits for it. Then the run is complete: another attempt,
      or another job with the same run id, does not call ``main``, unless the config has ``load_checkpoint=False``.

    Outside a task it only calls ``main``.

    Args:
        main: such as ``levanter.main.train_lm.main``.
        config: the argument of ``main``: a ``TrainerConfig``, or a dataclass that has one as ``trainer``. It stays
            unchanged.
        memory_every: keeps the steps that are multiples of it in the hosts' memory; None for none.

    Returns:
        The result of ``main``; None if the run was complete.

    Raises:
        InvalidRequestError: the config is not Levanter's; or, in a task, its checkpoints have a relative path, which is
            another directory on each host, or it would shut the host down.

    Example::

        def train():
            iris_ray.levanter.run(levanter.main.train_lm.main, config)


        iris_ray.levanter.run_on_pod_resumable(train, "v4-32", preload=iris_ray.levanter.PRELOAD)
    """
    given = _trainer_of(config)
    me = get_job_info()
    if me is None:
        return main(config)
    _require_good_for_a_gang(given)
    _join()
    from iris_ray.checkpoint import MemoryCheckpointer
    from iris_ray.levanter.checkpointing import begun_from_memory, marked_restores, steps_saved

    trainer = _in_a_gang(given, me)
    own, saved = [trainer.checkpointer.expanded_path(trainer.id)], 0
    if trainer.load_checkpoint is not False:
        saved = steps_saved(paths := _checkpoint_paths(trainer))
        # Levanter does not load the run's own checkpoints if load_checkpoint_path is set
        if saved >= trainer.num_train_steps or steps_saved(own) >= trainer.num_train_steps:
            print(
                f"Run {trainer.id} is complete: its last step is in {' or '.join(dict.fromkeys([*own, *paths]))}.",
                flush=True,
            )
            return None
    memory = None if memory_every is None or not me.local_dir else MemoryCheckpointer(memory_every, name="levanter")
    checkpointers = _with_gang_checkpointers(trainer, memory)
    with marked_restores(), contextlib.nullcontext() if memory is None else begun_from_memory(memory, saved):
        result = main(trainer if given is config else dataclasses.replace(config, trainer=trainer))  # type: ignore[type-var]
    for checkpointer in checkpointers:
        checkpointer.save_last_step()
    return result


def _trainer_of(config: Any) -> Any:
    trainer = getattr(config, "trainer", config)
    if not (
        dataclasses.is_dataclass(trainer) and dataclasses.is_dataclass(config) and hasattr(trainer, "checkpointer")
    ):
        raise InvalidRequestError(
            f"the config is a {type(config).__name__}; give Levanter's TrainerConfig, or a dataclass that has one as"
            " trainer"
        )
    return trainer


def _require_good_for_a_gang(trainer: Any) -> None:
    base_path = trainer.checkpointer.base_path
    if "://" not in base_path and not os.path.isabs(base_path):
        raise InvalidRequestError(
            f"checkpointer.base_path is {base_path!r}, a directory of each host's own, where another attempt would find"
            " nothing; give one that all hosts share, such as gs://bucket/checkpoints"
        )
    if trainer.shutdown_at_exit is not False:
        raise InvalidRequestError(
            f"shutdown_at_exit is {trainer.shutdown_at_exit}, but the host belongs to the cluster; leave it out"
        )


def _join() -> None:
    import jax

    import iris_ray.jax

    if not jax.distributed.is_initialized():
        iris_ray.jax.initialize()


def _in_a_gang(given: Any, me: JobInfo) -> Any:
    """Return Levanter's config for a gang, with a run id, and without Levanter's own start of Ray and JAX."""
    changes = {
        "id": given.id or os.environ.get("RUN_ID") or re.sub(r"[^\w.-]", "-", me.job_id),
        "distributed": dataclasses.replace(given.distributed, initialize_jax_distributed=False),
        "checkpointer": copy.copy(given.checkpointer),
    }
    if hasattr(given, "ray"):  # no longer in Marin's Levanter
        changes["ray"] = dataclasses.replace(given.ray, auto_start_cluster=False)
    if given.require_accelerator is None and os.environ.get("JAX_PLATFORMS") == "cpu":
        changes["require_accelerator"] = False  # JAX was told to use the CPU, as on simulated slices
    return dataclasses.replace(given, **changes)


def _checkpoint_paths(trainer: Any) -> list[str]:
    """Return the directories from which Levanter loads a checkpoint."""
    if hasattr(trainer, "checkpoint_search_paths"):  # versions with a directory for temporary checkpoints
        return list(map(str, trainer.checkpoint_search_paths(trainer.id)))
    return [trainer.checkpointer.expanded_path(trainer.id)]


def _with_gang_checkpointers(trainer: Any, memory: "MemoryCheckpointer | None") -> "list[GangCheckpointer]":
    """Have a config make checkpointers for a gang, and return a list that will hold them."""
    from iris_ray.levanter.checkpointing import GangCheckpointer

    made: list[GangCheckpointer] = []
    create = trainer.checkpointer.create

    def create_for_gang(run_id: str) -> GangCheckpointer:
        made.append(GangCheckpointer(create(run_id), trainer.num_train_steps, _finish_trackers, memory))
        return made[-1]

    trainer.checkpointer.create = create_for_gang
    return made


def _finish_trackers() -> None:
    """Have W&B and other trackers upload their data, because the process is about to end."""
    import levanter.tracker

    levanter.tracker.current_tracker().finish()
