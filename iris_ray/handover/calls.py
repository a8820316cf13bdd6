"""Calls of the handover."""

from typing import Any, Protocol

from iris_ray.actors.protocol.services import calls_of
from iris_ray.model.cluster_settings import WasSet


@calls_of("handover")
class HandoverCalls(Protocol):
    """Calls of people."""

    async def restore(self, lines: bytes, user: str) -> dict[str, WasSet]:
        """Import settings, limits, teams, taints and sums of another Controller's export: all or none.

        Args:
            lines: a JSON list of lines; see `iris_ray.handover.file`.
            user: the user who imports it.

        Returns:
            The settings that were set here already and stay.

        Raises:
            InvalidRequestError: a line makes no sense, or this Controller is not empty.
            NotPermittedError: the user is not an operator.
        """


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
