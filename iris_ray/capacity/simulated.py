"""A reservation in a simulation, shared by all slice sizes: the real provisioner decides, and the provider is on paper.

The simulation is one of `iris_ray.study`, which imports this module when a study has such a reservation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang, demand_of, slices_to_remove
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted, left_for, promise_for
from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Market, NewSlice, QueuedSlice, QueuedState, Source
from iris_ray.capacity.provisioner import CLOSED_S, GIVEN_BACK, Jobs, Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import TPU_NAME
from iris_ray.scheduler.eviction_costs import EvictionRules
from iris_ray.state.events import SliceReleasedEvent, TaintedEvent, TaintLiftedEvent

if TYPE_CHECKING:
    from iris_ray.study import Simulation
    from iris_ray.study.agenda import Timings

EVERY_S, IDLE_S = 60.0, 600.0
RELEASE_S = 15.0
"""Seconds between two looks for warm slices that are to be removed; the Controller looks twice a second."""
EPOCH: Final = 1.7e9
"""The wall clock at the beginning of a simulation."""
PLACE: Final = "projects/p/locations/simulated"
OWNER: Final = "study"


def reaches() -> tuple[str, ...]:
    """Return how far chips can be taken back."""
    return tuple(reach.value for reach in Reach)


@dataclass
class PaperSlice:
    """A slice that was requested: how it is listed, its type, and whether it is being deleted."""

    listed: QueuedSlice
    config: TPUConfig
    leaves: bool = False


class SimulatedReservation(Jobs):
    """The zone of a reservation, and the cluster as its provisioner sees it. There are no slices at the beginning.

    Args:
        simulation: the cluster.
        cpus: the types of the slices, with the CPUs of each host.
        chips: the number of chips of the reservation.
        take_back: how far the provisioner goes to free chips for a waiting job.
        evictions: when jobs may take hosts from lower bands; None: never.
        timings: how long it takes to make and to delete slices.

    Attributes:
        made: the number of slices that were requested.
    """

    location = PLACE

    def __init__(
        self,
        simulation: "Simulation",
        cpus: Mapping[str, float],
        chips: int,
        take_back: str,
        evictions: EvictionRules | None,
        timings: "Timings",
    ) -> None:
        self._simulation, self._state = simulation, simulation.state
        self._evictions, self._timings = evictions, timings
        self._slices: dict[str, PaperSlice] = {}
        self.made, self._chips = 0, chips
        configs = tuple(map(get_tpu_config, cpus))
        self._cpus = {config.name: one for config, one in zip(configs, cpus.values(), strict=True)}
        self._source = Source.reserved(f"{PLACE}/reservations/shared:{chips}")
        reach = Reach(take_back)
        settings = Settings(OWNER, configs, (self._source,), least=0, most=chips, idle_s=IDLE_S, take_back=reach)
        hosts = HostSettings("image", {OWNER_LABEL: OWNER}, "")
        self._provisioner = Provisioner(
            settings, [self], self, hosts, every_s=EVERY_S, print_line=lambda *_: None, clocks=self._clocks
        )
        simulation.hosts.reserve(chips)
        simulation.agenda.after(EVERY_S, self._turn)

    def _clocks(self) -> tuple[float, float]:
        now = self._simulation.now
        return now, EPOCH + now

    def _turn(self) -> None:
        """Take a turn of the provisioner, and plan the next one."""
        self._provisioner.turn()
        self._release_warm(until=self._simulation.now + EVERY_S)
        self._simulation.agenda.after(EVERY_S, self._turn)

    def _release_warm(self, until: float) -> None:
        """Have pools release warm slices that are to be removed, as the Controller does; look again until a time."""
        state, simulation = self._state, self._simulation
        waiting = [job for job in state.pending().others.values() if job.promise is not None]
        names = [name for job in waiting for name in slices_to_remove(job, state.fleet)]
        for name in names:
            holder = state.holders.get(name)
            if holder is not None and not any(host.occupants for host in state.fleet.slice_workers(name)):
                simulation.apply([SliceReleasedEvent(name, holder)])
        if names and simulation.now + RELEASE_S < until:
            simulation.agenda.after(RELEASE_S, self._release_warm, until)

    # -- the provider ----------------------------------------------------------------------------------------------

    def require_type(self, config: TPUConfig) -> None:
        """Take every type: this provider has all of them."""

    def queued_slices(self) -> list[QueuedSlice]:
        return [
            replace(one.listed, state=QueuedState.DELETING) if one.leaves else one.listed
            for one in self._slices.values()
        ]

    def create(self, wanted: NewSlice) -> str | None:
        listed = QueuedSlice(
            wanted.name, wanted.config.accelerator_type, QueuedState.PROVISIONING, {OWNER_LABEL: OWNER},
            location=PLACE, market=Market.RESERVED, reservation=self._source.reservation,
        )  # fmt: skip
        self._slices[wanted.name] = PaperSlice(listed, wanted.config)
        if sum(one.config.chip_count for one in self._slices.values()) > self._chips:
            raise RuntimeError("a chip has two owners")
        self.made += 1
        self._simulation.agenda.after(self._timings.make_slice, self._is_made, wanted.name)
        return None

    def _is_made(self, name: str) -> None:
        if (one := self._slices.get(name)) is not None and not one.leaves:
            one.listed = replace(one.listed, state=QueuedState.ACTIVE)
            self._simulation.hosts.add_slice(name, one.config, self._cpus[one.config.name])

    def delete(self, name: str) -> str | None:
        if (one := self._slices.get(name)) is not None and not one.leaves:
            one.leaves = True
            self._simulation.agenda.after(self._timings.delete_slice, self._is_gone, name)
        return None

    def _is_gone(self, name: str) -> None:
        if name in self._simulation.hosts.slices:
            self._simulation.hosts.remove_slice(name, "its slice is deleted")
        del self._slices[name]

    # -- the cluster -----------------------------------------------------------------------------------------------

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        fleet, joined = self._state.fleet, {}
        for name in fleet.grouping(TPU_NAME):
            hosts = fleet.slice_workers(name)
            in_use = any(host.occupants or fleet.holder_of(host) for host in hosts)
            joined[name] = Joined(True, in_use, any(TAINT_PREFIX + GIVEN_BACK in host.attributes for host in hosts))
        return demand_of(self._state, self._simulation.waits, self._simulation.now), joined

    def leave_chips(self, wanted: ChipsWanted) -> ChipsLeft:
        now = self._simulation.now
        event = promise_for(wanted, self._state, self._evictions, self._simulation.waits, now)
        if isinstance(event, str):
            return ChipsLeft(why_not=event)
        if event is not None:
            self._simulation.apply([event])
        return left_for(wanted.job_id, self._state, now)

    def lease(self, owner: str, instance: str, seconds: float) -> bool | None:
        return True

    def report(self, report: CapacityReport) -> None:
        """Tell nobody."""

    def close(self, name: str) -> None:
        self._simulation.apply([TaintedEvent(name, GIVEN_BACK, "it goes", self._simulation.now + CLOSED_S)])

    def reopen(self, name: str) -> None:
        self._simulation.apply([TaintLiftedEvent(name, GIVEN_BACK)])
