"""The service of output directories in a pool: it tells its hosts the limit."""

from iris_ray.actors.pool.services import PoolPart
from iris_ray.outputs.calls import OutputCalls


class OutputsInPool(PoolPart):
    """See `OutputCalls`."""

    calls = (OutputCalls,)

    async def most_bytes(self) -> int | None:
        return await self.pool.controller.ask(OutputCalls.most_bytes)
