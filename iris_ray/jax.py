"""JAX on a gang: one call that joins all processes."""

from typing import Any

import jax

from iris_ray.job_info import get_job_info


def initialize(**kwargs: Any) -> None:
    """Join the processes of this gang into one JAX program; call it before anything else touches JAX's devices.

    ``jax.distributed.initialize()`` finds its peers by itself on Cloud TPU, with one fixed port. This one takes the
    address that iris_ray chose for this attempt: no leftover of an earlier attempt and no other gang on the host can
    be in its way, and it works without TPUs too. Outside a task, and in a gang of one, it does nothing, so that a
    script also runs on its own.

    Args:
        kwargs: passed on to ``jax.distributed.initialize``, such as ``initialization_timeout=60`` (seconds).

    Example::

        def train():
            iris_ray.jax.initialize()
            print(jax.process_index(), "of", jax.process_count())
    """
    info = get_job_info()
    if info is None or info.num_tasks == 1:
        return
    jax.distributed.initialize(
        coordinator_address=info.coordinator_address,
        coordinator_bind_address=info.coordinator_address,  # and on no other interface
        num_processes=info.num_tasks,
        process_id=info.task_index,
        **kwargs,
    )
