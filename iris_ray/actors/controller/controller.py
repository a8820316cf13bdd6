"""The cluster's Controller: one detached actor that sees every TPU host and every job, and decides who runs where.

It holds no user code and nothing of its callers. All decisions are made by the pure core. `pool_calls` and `user_calls`
are what may be asked of it, `controller_process` is its start and its watching. The other modules of this room do the
work: `event_processor`, `dispatcher`, `node_diff`, `recovery`, `journal`, `pool_registry`, `log_service`,
`maintenance_service`.
"""

from iris_ray.actors.controller.pool_calls import PoolCalls
from iris_ray.actors.controller.user_calls import UserCalls


class Controller(PoolCalls, UserCalls):
    """The actor."""
