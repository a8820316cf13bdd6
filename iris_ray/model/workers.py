"""One host as the scheduler sees it. Pure data; changed by the `Fleet` alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from iris_ray.model.constraints import Attributes, Scalar
from iris_ray.model.ids import AttemptId
from iris_ray.model.notices import Notice

TPU = "TPU"
"""Ray's resource name for chips."""

TPU_NAME = "tpu-name"
TPU_WORKER_ID = "tpu-worker-id"
TPU_TOPOLOGY = "tpu-topology"
TPU_VM_COUNT = "tpu-vm-count"

Resources = Mapping[str, float]
Occupant = tuple[str, AttemptId]
"""Task id, and the attempt that it is of."""


@dataclass(slots=True, eq=False)
class Worker:
    """One host.

    Attributes:
        node_id: Ray's node id.
        address: the host's IP address.
        attributes: typed facts about the host and its slice, and the taints that were set on it.
        resources: what the host has in all, by Ray's resource names.
        draining: why the host takes nothing new, or None.
        foreign: who outside iris_ray uses the chips, or None.
        notice: what gangs on it are told, if it is to go.
        final: ``draining`` and ``notice`` of a drain or a preemption, if it had such a word; while a maintenance is
            nearer, they are those of the maintenance, which may be called off.
        suspected: why the host may be gone, or None.
        suspected_until: seconds on the caller's clock; later the suspicion counts no more.
        occupants: tasks that hold resources here until their end is confirmed.
        ending: those among them that are over and will be confirmed in a moment.
        reported: the attributes that the host itself reports.
        free: what no occupant holds.
        chips_idle: whether no occupant uses chips.
        slice_name: the slice that it belongs to, or None.
        host_index: its 0-based number within the slice; None if it has none, which is not 0.
        duplicate: whether another live host claims the same number of the same slice.
    """

    node_id: str
    address: str
    attributes: Attributes
    resources: Resources
    draining: str | None = None
    foreign: str | None = None
    notice: Notice | None = None
    final: tuple[str, Notice] | None = None
    suspected: str | None = None
    suspected_until: float = 0.0
    occupants: dict[Occupant, Resources] = field(default_factory=dict)
    ending: set[Occupant] = field(default_factory=set)
    reported: Attributes = field(default_factory=dict)
    free: dict[str, float] = field(init=False)
    chips_idle: bool = field(init=False)
    slice_name: str | None = field(init=False)
    host_index: int | None = field(init=False)
    duplicate: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.slice_name = string_attribute(self.attributes, TPU_NAME)
        number = self.attributes.get(TPU_WORKER_ID)
        self.host_index = number.value if number and _is_host_index(number.value) else None
        self._recount()

    def occupy(self, occupant: Occupant, resources: Resources) -> None:
        self.occupants[occupant] = resources
        self._recount()

    def vacate(self, occupant: Occupant) -> None:
        """The occupant's end is confirmed."""
        self.occupants.pop(occupant, None)
        self.ending.discard(occupant)
        self._recount()

    def free_soon(self) -> Mapping[str, float]:
        """What will be free once all that is over has been confirmed."""
        return self._free_beside(set(self.occupants) - self.ending) if self.ending else self.free

    def _free_beside(self, occupants: Iterable[Occupant]) -> dict[str, float]:
        # Counted anew each time: adding and taking away fractions would drift.
        free = dict(self.resources)
        for occupant in occupants:
            for resource, amount in self.occupants[occupant].items():
                free[resource] = rounded(free.get(resource, 0.0) - amount)
        return free

    def _recount(self) -> None:
        free = self.free = self._free_beside(self.occupants)
        self.chips_idle = free.get(TPU, 0.0) == self.resources.get(TPU, 0.0)

    @property
    def name(self) -> str:
        """What people call it."""
        return f"host {self.node_id}" if self.host_index is None else f"host {self.host_index}"


def rounded(amount: float) -> float:
    """To ten-thousandths, in which Ray counts: 0.3 - 0.1 - 0.1 is to be 0.1."""
    return round(amount, 4)


def string_attribute(attributes: Attributes, key: str) -> str | None:
    """The attribute's value if it is a str."""
    found = attributes.get(key)
    return found.value if found is not None and isinstance(found.value, str) else None


def _is_host_index(value: Scalar) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
