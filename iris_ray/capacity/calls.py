"""Calls of capacity."""

from typing import Protocol

from iris_ray.actors.protocol.services import calls_of
from iris_ray.capacity.core import CapacityReport


@calls_of("capacity")
class CapacityCalls(Protocol):
    """Calls of provisioners."""

    async def demand(self) -> dict[str, list[int]]:
        """Return how many more slices of each type each waiting gang needs to run; see `missing_slices`."""

    async def report_capacity(self, report: CapacityReport) -> None:
        """Keep the report of a provisioner, for `why`, the dashboard and metrics."""

    async def lease_provisioner(self, owner: str, instance: str, seconds: float) -> None:
        """Give a provisioner's name to one process for some time, before the process requests slices.

        Args:
            owner: the name of the provisioner.
            instance: names the process for people, and is different for each.
            seconds: until it looks again; 0 when it ends in order.

        Raises:
            ProvisionerTakenError: another process has the name.
        """
