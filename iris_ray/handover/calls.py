"""What the service of exports and imports answers."""

from typing import Any, Protocol

from iris_ray.actors.protocol.services import calls_of


@calls_of("handover")
class HandoverCallsOfPool(Protocol):
    """Calls of a pool."""

    async def what_it_runs(self) -> dict[str, Any] | None:
        """Return how the only job of a pool without a caller is started again; None for other pools.

        That is ``run``, see `file.run_line`, and the runtime environment of its Ray job, ``ray_job``. The values of
        environment variables are included.

        Raises:
            TypeError: a runtime environment has a value that is not JSON.
        """
