"""Calls of capacity."""

from typing import Protocol

from iris_ray.actors.protocol.services import calls_of
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted


@calls_of("capacity")
class CapacityCalls(Protocol):
    """Calls of provisioners."""

    async def demand(self) -> list[WaitingGang]:
        """Return the gangs that wait for slices, in their order; see `waiting_gangs` and `within_limits`."""

    async def leave_chips(self, wanted: ChipsWanted, user: str) -> ChipsLeft:
        """Have jobs of lower bands leave slices of other types, so that a waiting gang can have their chips.

        The slices are reserved for the gang's job (`WaitingGang.removes`) until they are deleted, the job runs or
        ends, or their time is over. A repeated call changes nothing.

        If no jobs can leave enough, slices are held for a job that waits for too long (`WaitingGang.holds`), until
        enough of them are idle. A repeated call renews this.

        Args:
            wanted: the chips, and the slices of the caller's provisioner that may go.
            user: the provisioner's user, who must be an operator.

        Raises:
            NotPermittedError: the user is not an operator.
        """

    async def report_capacity(self, report: CapacityReport) -> None:
        """Keep the report of a provisioner, for `why`, the dashboard and metrics."""

    async def lease_provisioner(self, owner: str, instance: str, seconds: float) -> bool:
        """Give a provisioner's name to one process for some time, before the process requests slices.

        Return whether the process was the last one that had the name. Otherwise another one may have worked meanwhile.
        The answer comes once the Controller's successor would know of it.

        Args:
            owner: the name of the provisioner.
            instance: names the process for people, and is different for each.
            seconds: until it looks again; 0 when it ends in order.

        Raises:
            ProvisionerTakenError: another process has the name.
        """
