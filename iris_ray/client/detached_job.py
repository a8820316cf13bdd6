"""A job that goes on when its caller ends."""

from typing import Any

import ray
from ray import cloudpickle

from iris_ray.actors.calls.actor import Actor
from iris_ray.actors.protocol.pool_interface import PoolInterface
from iris_ray.actors.wire.messages import RunRequest
from iris_ray.actors.wire.payloads import INLINE_BYTES
from iris_ray.actors.wire.shared_names import NAMESPACE
from iris_ray.client.pool_actor import REPEATED, PoolActor


def submit_detached(request: RunRequest) -> tuple["ray.ObjectRef[list[Any]]", Actor[PoolInterface]]:
    """Start a job that does not end with this process, in a pool of its own, which ends with the job.

    Returns:
        The reference to its results, and the pool that runs it.
    """
    spec = request.spec
    head = {"node:__internal_head__": 0.001}  # the calling process's own node may be a host that is taken away
    # The cluster keeps what a pool is made with, for the pool's restarts; but of a larger request Ray keeps a reference
    # only, to an object that goes with this process.
    large = len(cloudpickle.dumps(request)) > INLINE_BYTES
    actor = PoolActor.options(
        max_restarts=0 if large else -1,
        resources=head,
        lifetime="detached",
        name=f"pool/{spec.job_id}",
        namespace=NAMESPACE,
    ).remote(None if large else request)
    pool = Actor[PoolInterface](actor)
    if large:
        try:
            ray.get(pool.call(PoolInterface.begin, request))
        except BaseException:  # such as Ctrl-C: the caller gets no handle with which to cancel the job
            ray.kill(pool.handle)
            raise
    return pool.with_options(name=f"submit({spec.name})", **REPEATED).call(PoolInterface.results), pool
