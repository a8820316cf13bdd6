"""For JAX programs: join the processes of a gang, hear a preemption notice at the same step, find chips that flip bits.

The first lines of a JAX task are ``import iris_ray.jax`` and ``iris_ray.jax.initialize()``.
"""

from typing import TYPE_CHECKING, Any

from iris_ray.actors.protocol.services import module_of
from iris_ray.task.jax import agreed_notice, initialize

if TYPE_CHECKING:
    from iris_ray.checkpoint.replay_check import ReplayReport, ReplaySuspect, replay_check

__all__ = ["ReplayReport", "ReplaySuspect", "agreed_notice", "initialize", "replay_check"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(module_of("checkpoint", "replay_check"), name)
