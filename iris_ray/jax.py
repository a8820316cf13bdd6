"""What a JAX program on a gang needs, under its public name."""

from iris_ray.checkpoint.replay_check import ReplayReport, ReplaySuspect, replay_check
from iris_ray.task.jax import agreed_notice, initialize

__all__ = ["ReplayReport", "ReplaySuspect", "agreed_notice", "initialize", "replay_check"]
