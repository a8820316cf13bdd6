"""Calls of the handover."""

from typing import Protocol

from iris_ray.actors.protocol.services import calls_of
from iris_ray.model.cluster_settings import WasSet


@calls_of("handover")
class HandoverCalls(Protocol):
    """Calls of people."""

    async def restore(self, lines: bytes, user: str) -> dict[str, WasSet]:
        """Take over the settings, limits, taints and sums of another Controller's export: all or none.

        Args:
            lines: a JSON list of lines; see `iris_ray.handover.file`.
            user: who imports it.

        Returns:
            The settings that were set here already and stay.

        Raises:
            InvalidRequestError: a line makes no sense, or this Controller is not empty.
            NotPermittedError: the user is not an operator.
        """
