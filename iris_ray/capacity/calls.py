"""Calls of capacity."""

from typing import Protocol

from iris_ray.actors.protocol.services import calls_of
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang


@calls_of("capacity")
class CapacityCalls(Protocol):
    """Calls of provisioners."""

    async def demand(self) -> list[WaitingGang]:
        """Return the gangs that wait for slices, in their order; see `waiting_gangs` and `within_limits`."""

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
