"""The hosts of a simulation: slices and hosts without TPU that are lost and return."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from iris_ray.model.constraints import Attributes, AttributeValue, Scalar
from iris_ray.model.notices import NoticeKind
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import TPU, TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.state.events import Event, WorkerDrainedEvent, WorkerFailedEvent, WorkerRegisteredEvent
from iris_ray.state.fleet import Fleet
from iris_ray.study.agenda import Agenda
from iris_ray.study.history import History
from iris_ray.study.pools import SimulatedPools

CPUS = 120.0
"""The default CPUs of a TPU host."""


class SimulatedHosts:
    """All hosts, absent ones included.

    Args:
        fleet: the live hosts; read only.
        apply: takes events.
        history: records the capacity of the live hosts.
        pools: are told of broken slices.

    Attributes:
        slices: names of all slices → the ids of their hosts.
        single: ids of the hosts without TPU.
    """

    def __init__(
        self,
        agenda: Agenda,
        fleet: Fleet,
        apply: Callable[[Iterable[Event]], None],
        history: History,
        pools: SimulatedPools,
    ) -> None:
        self.slices: dict[str, tuple[str, ...]] = {}
        self.single: list[str] = []
        self._agenda = agenda
        self._fleet = fleet
        self._apply = apply
        self._history = history
        self._pools = pools
        self._registrations: dict[str, WorkerRegisteredEvent] = {}
        self._chips: float | None = None

    def add_slices(
        self, tpu_type: str, count: int = 1, cpus: float = CPUS, attributes: Mapping[str, Scalar] | None = None
    ) -> list[str]:
        """Add slices of a type, and return their names: ``v4-16-0``, ``v4-16-1``, …

        ``cpus`` and ``attributes`` are those of each host.
        """
        config = get_tpu_config(tpu_type)
        first = sum(name.rpartition("-")[0] == config.name for name in self.slices)
        names = [f"{config.name}-{number}" for number in range(first, first + count)]
        for name in names:
            self.add_slice(name, config, cpus, attributes)
        return names

    def add_slice(
        self, name: str, config: TPUConfig, cpus: float = CPUS, attributes: Mapping[str, Scalar] | None = None
    ) -> None:
        """Add a slice of a name that no other slice has."""
        resources = {TPU: float(config.chips_per_vm), "CPU": cpus}
        shared: Attributes = {
            TPU_NAME: AttributeValue(name),
            TPU_TOPOLOGY: AttributeValue(config.name),
            TPU_VM_COUNT: AttributeValue(config.vm_count),
            **{key: AttributeValue(value) for key, value in (attributes or {}).items()},
        }
        hosts = self.slices[name] = tuple(f"{name}-host-{number}" for number in range(config.vm_count))
        for number, node_id in enumerate(hosts):
            facts = {**shared, TPU_WORKER_ID: AttributeValue(number)}
            self._registrations[node_id] = WorkerRegisteredEvent(node_id, "10.0.0.1", facts, resources)
        self._arrive(hosts)

    def remove_slice(self, name: str, reason: str) -> None:
        """Have a slice go for good."""
        hosts = self.slices.pop(name)
        self.lose(hosts, reason, math.inf)
        for node_id in hosts:
            del self._registrations[node_id]

    def reserve(self, chips: float) -> None:
        """Have a number of chips count as the capacity, whatever slices there are."""
        self._chips = chips
        self._note_capacity()

    def add_hosts(self, count: int, cpus: float, attributes: Mapping[str, Scalar] | None = None) -> list[str]:
        """Add hosts without TPU, and return their ids: ``host-0``, ``host-1``, …"""
        facts = {key: AttributeValue(value) for key, value in (attributes or {}).items()}
        names = [f"host-{number}" for number in range(len(self.single), len(self.single) + count)]
        self._registrations |= {name: WorkerRegisteredEvent(name, "10.0.0.1", facts, {"CPU": cpus}) for name in names}
        self.single += names
        self._arrive(names)
        return names

    def preempt(self, name: str, notice_s: float | None = None, away_s: float = 3600.0) -> None:
        """Have the provider take a slice, and bring it back later.

        Args:
            name: the slice.
            notice_s: seconds between the notice and the loss; None: there is no notice.
            away_s: seconds until it is there again.
        """
        if notice_s is None:
            self.lose(self.slices[name], "preempted", away_s)
            return
        deadline = self._agenda.now + notice_s
        self._apply(
            WorkerDrainedEvent(node_id, "preempted", NoticeKind.PREEMPTION, deadline) for node_id in self.slices[name]
        )
        self._agenda.at(deadline, self.lose, self.slices[name], "preempted", away_s)

    def lose(self, hosts: Sequence[str], reason: str, away_s: float = 3600.0) -> None:
        """Have live hosts die now, and bring them back later."""
        lost = [node_id for node_id in hosts if node_id in self._fleet.workers]
        for node_id in lost:
            self._pools.host_is_lost(self._fleet.workers[node_id])
        self._apply(WorkerFailedEvent(node_id, reason) for node_id in lost)
        self._note_capacity()
        self._agenda.after(away_s, self._arrive, lost)

    def _arrive(self, hosts: Iterable[str]) -> None:
        self._apply(self._registrations[node_id] for node_id in hosts)
        self._note_capacity()

    def _note_capacity(self) -> None:
        workers, totals = self._fleet.workers, self._fleet.totals
        cpus = sum(workers[name].resources["CPU"] for name in self.single if name in workers)
        chips = totals.get(TPU, 0.0) if self._chips is None else self._chips
        self._history.capacity_is(self._agenda.now, {TPU: chips, "CPU": cpus})
