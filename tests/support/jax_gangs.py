"""What the processes of a gang find out when they join it by JAX."""

import os
from typing import Any

from iris_ray import get_job_info


def joined() -> dict[str, Any]:
    """Join the gang, and return what this process finds out about it, by JAX and by iris_ray."""
    import jax
    import jax.numpy as jnp

    import iris_ray.jax

    iris_ray.jax.initialize()
    me = get_job_info()
    assert me is not None
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    ranks = jax.make_array_from_callback(
        (jax.device_count(),),
        jax.NamedSharding(mesh, jax.P("all")),
        lambda _: jnp.array([jax.process_index()]),
    )
    return {
        "rank": (jax.process_index(), jax.process_count()),
        "devices": jax.device_count(),
        "sum": int(jax.jit(jnp.sum)(ranks)),
        "info": me,
        "pid": os.getpid(),
        "environ": dict(os.environ),
    }
