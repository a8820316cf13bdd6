"""What hosts are asked to keep of a task."""

from typing import Protocol

from iris_ray.actors.protocol.services import calls_of


@calls_of("evidence")
class EvidenceCalls(Protocol):
    """Calls of a host, about the process of a task that runs there."""

    async def keep_evidence(self, pid: int) -> None:
        """Keep the stacks, the last output and the use of the chips of a task that hangs. This takes seconds."""
