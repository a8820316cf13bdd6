"""What a JAX program on a gang needs, under its public name."""

from iris_ray.task.jax import agreed_notice, initialize
from iris_ray.task.replay_check import ReplayReport, ReplaySuspect, replay_check

__all__ = ["ReplayReport", "ReplaySuspect", "agreed_notice", "initialize", "replay_check"]
