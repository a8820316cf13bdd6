"""What hosts answer before a gang returns to them."""

from typing import NamedTuple, Protocol

from ray.actor import ActorHandle

from iris_ray.actors.protocol.services import calls_of


class Link(NamedTuple):
    """How fast one host reaches another: seconds for a call and its answer, and bytes per second."""

    latency_s: float
    bytes_per_s: float


@calls_of("preflight")
class PreflightCalls(Protocol):
    """Calls of a host."""

    async def preflight(self) -> str | None:
        """Test this host's chips, memory and disk. Return why it must not take a task, or None."""

    async def measure_link(self, peer: ActorHandle, name: str) -> Link:
        """Measure the link from this host to another one, given by its actor and that actor's name."""

    async def take_bytes(self, data: bytes) -> None:
        """Take bytes and drop them: the caller measures the link."""
