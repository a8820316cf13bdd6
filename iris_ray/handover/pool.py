"""The service of exports and imports in a pool: how its job is started again elsewhere."""

from typing import Any

import ray

from iris_ray.actors.pool.services import PoolPart
from iris_ray.actors.protocol.payloads import fetched
from iris_ray.handover.calls import HandoverCallsOfPool
from iris_ray.handover.file import environment_line, run_line


class HandoverInPool(PoolPart):
    """See `HandoverCallsOfPool`."""

    calls = (HandoverCallsOfPool,)

    async def what_it_runs(self) -> dict[str, Any] | None:
        request = self.pool.only_request()
        if request is None:
            return None
        function = request.pickled_function
        return {
            "run": run_line(request, await fetched(function)),
            "ray_job": environment_line(ray.get_runtime_context().runtime_env or {}),
        }
