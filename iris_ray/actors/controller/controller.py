"""The cluster's Controller: one detached actor that sees every TPU host and every job, and decides who runs where.

It holds no user code. The pure core makes all decisions. `pool_calls` and `user_calls` answer questions, and
`controller_process` starts the parts and watches the cluster.
"""

from iris_ray.actors.controller.pool_calls import PoolCalls
from iris_ray.actors.controller.user_calls import UserCalls


class Controller(PoolCalls, UserCalls):
    """The actor."""
