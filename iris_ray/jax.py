"""What a JAX program on a gang needs, under its public name."""

from iris_ray.task.jax import agreed_notice, initialize

__all__ = ["agreed_notice", "initialize"]
