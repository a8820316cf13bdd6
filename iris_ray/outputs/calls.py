"""What the service of output directories answers."""

from typing import Protocol

from iris_ray.actors.protocol.services import calls_of


@calls_of("outputs")
class OutputCalls(Protocol):
    """Calls of the Controller, and of a pool, which passes them on to it."""

    async def most_bytes(self) -> int | None:
        """Return how many bytes the output directory of an attempt may take; None: there is no limit."""
