"""Workers: hosts as the scheduler sees them. Pure data that only the `Fleet` changes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from iris_ray.model.checks import is_int
from iris_ray.model.constraints import TAINT_PREFIX, Attributes
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice

TPU = "TPU"
"""Ray's resource name for chips."""
GPU = "GPU"
"""Ray's resource name for GPUs."""

TPU_NAME = "tpu-name"
TPU_WORKER_ID = "tpu-worker-id"
TPU_TOPOLOGY = "tpu-topology"
TPU_VM_COUNT = "tpu-vm-count"
TOPOLOGY_LABEL = "ray.io/tpu-topology"
"""Ray's label with the slice's shape in chips, such as ``4x4``."""
TPU_PER_CHIP = "tpu-per-chip"
"""The attribute with Ray's count for each chip, if it isn't 1: on TPU7x, Ray may count the two devices of a chip."""

SUB_SLICE = "ray.io/tpu-subslice-"
"""Prefix of the labels by which Ray 2.60 numbers a slice's parts: the part's shape follows; the value is its number."""

UNITS = 10_000
"""Units in one of any resource: Ray counts ten-thousandths."""

Resources = Mapping[str, float]
Occupant = tuple[str, AttemptId]
"""A task id and its attempt."""

UNCONFIRMED_S = 30.0
"""Seconds after an attempt's end for which its resources count as about to be free. Then jobs stop waiting for them."""


@dataclass(slots=True, eq=False)
class Worker:
    """A host.

    Attributes:
        node_id: Ray's node id.
        address: the host's IP address.
        attributes: typed facts about the host and its slice, and the taints that were set on it.
        resources: the host's total resources, by Ray's names; each chip counts once.
        draining: why the host takes no new tasks, or None.
        foreign: the process outside iris_ray that uses the chips, or None.
        notice: the notice for gangs on the host if it is about to be lost, or None.
        final: the ``draining`` and ``notice`` of a drain or a preemption, which can't be called off, or None. Kept
            during an earlier maintenance, whose values ``draining`` and ``notice`` then have.
        suspected: why the host may be lost, or None.
        suspected_until: when the suspicion ends; seconds on the caller's clock.
        elsewhere: the resources used by work outside iris_ray, without chips (see ``foreign``).
        occupants: tasks' attempts that hold resources here until their end is confirmed.
        ending: the occupants that have ended, with the time, but whose end is not confirmed yet; seconds.
        reported: the attributes that the host itself reports.
        free: the resources that are used neither by occupants nor by work outside iris_ray.
        chips_idle: whether no occupant uses chips.
        slice_name: the slice that it belongs to, or None.
        host_index: its 0-based number within the slice, or None.
        taints: the keys of its taints.
        tasks_of: the number of occupants of each job, by job id.
        duplicate: whether another live host claims its number in its slice.
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
    ending: dict[Occupant, float] = field(default_factory=dict)
    reported: Attributes = field(default_factory=dict)
    elsewhere: Resources = field(default_factory=dict)
    free: dict[str, float] = field(init=False)
    chips_idle: bool = field(init=False)
    slice_name: str | None = field(init=False)
    host_index: int | None = field(init=False)
    taints: tuple[str, ...] = field(init=False)
    duplicate: bool = field(init=False, default=False)
    tasks_of: Counter[str] = field(init=False, repr=False)
    _used: dict[str, int] = field(init=False, repr=False)  # in whole units, because sums of fractions drift

    def __post_init__(self) -> None:
        self.slice_name = string_attribute(self.attributes, TPU_NAME)
        number = self.attributes.get(TPU_WORKER_ID)
        self.host_index = number.value if number and is_int(number.value, 0) else None
        self.taints = tuple([key for key in self.attributes if key.startswith(TAINT_PREFIX)])
        self._used = {}
        self.tasks_of = Counter(attempt.job_id for _, attempt in self.occupants)
        for resources in self.occupants.values():
            self._count(resources, 1)
        self._recount()

    def occupy(self, occupants: Mapping[Occupant, Resources]) -> None:
        """Add occupants with the resources that they take."""
        for occupant, resources in occupants.items():
            self.tasks_of[occupant[1].job_id] += occupant not in self.occupants
            self._count(self.occupants.pop(occupant, {}), -1)
            self.occupants[occupant] = resources
            self._count(resources, 1)
        self._recount()

    def vacate(self, occupant: Occupant) -> None:
        """Remove an occupant whose end is confirmed, and free its resources."""
        if occupant in self.occupants:
            self._has_left(occupant[1].job_id)
        self._count(self.occupants.pop(occupant, {}), -1)
        self._recount()
        self.ending.pop(occupant, None)

    def _has_left(self, job_id: str) -> None:
        self.tasks_of[job_id] -= 1
        if not self.tasks_of[job_id]:
            del self.tasks_of[job_id]

    def free_soon(self, now: float) -> Mapping[str, float]:
        """Return the free resources, including those of occupants that ended within the last `UNCONFIRMED_S`."""
        used = dict(self._used)
        for occupant, since in self.ending.items():
            if now >= since + UNCONFIRMED_S:
                continue
            for resource, amount in self.occupants.get(occupant, {}).items():
                used[resource] -= units(amount)
        return self._free_beside(used) if self.ending else self.free

    def stuck(self, now: float) -> Resources:
        """Return the resources held by occupants that ended longer than `UNCONFIRMED_S` ago."""
        held: dict[str, float] = {}
        for occupant, since in self.ending.items():
            if now >= since + UNCONFIRMED_S:
                for resource, amount in self.occupants.get(occupant, {}).items():
                    held[resource] = rounded(held.get(resource, 0.0) + amount)
        return held

    def _count(self, resources: Resources, sign: int) -> None:
        """Add to the used resources, or subtract from them, independently of the number of occupants."""
        for resource, amount in resources.items():
            self._used[resource] = self._used.get(resource, 0) + sign * units(amount)

    def _recount(self) -> None:
        free = self.free = self._free_beside(self._used)
        self.chips_idle = free.get(TPU, 0.0) == self.resources.get(TPU, 0.0)

    def _free_beside(self, used: Mapping[str, int]) -> dict[str, float]:
        free = dict(self.resources)
        for resource, units in used.items():
            if units:
                free[resource] = rounded(free.get(resource, 0.0) - units / UNITS)
        for resource, amount in self.elsewhere.items():
            free[resource] = max(0.0, rounded(free.get(resource, 0.0) - amount))
        return free

    def as_ray_counts(self, demand: Resources) -> dict[str, float]:
        """Return a task's resources in Ray's units, which may count a chip more than once."""
        per_chip = self.attributes.get(TPU_PER_CHIP)
        return {**demand} if per_chip is None else {**demand, TPU: demand.get(TPU, 0.0) * float(per_chip.value)}

    @property
    def held(self) -> Resources:
        """The total resources of all occupants."""
        return {resource: units / UNITS for resource, units in self._used.items() if units}

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"host {self.node_id}" if self.host_index is None else f"host {self.host_index}"


def accelerators(resources: Resources) -> float:
    """Return the number of TPU chips and GPUs among these resources."""
    return resources.get(TPU, 0.0) + resources.get(GPU, 0.0)


def units(amount: float) -> int:
    """Convert an amount to ten-thousandths, Ray's unit."""
    return round(amount * UNITS)


def rounded(amount: float) -> float:
    """Round to ten-thousandths, Ray's unit: 0.3 - 0.1 - 0.1 becomes 0.1."""
    return round(amount, 4)


def string_attribute(attributes: Attributes, key: str) -> str | None:
    """Return an attribute's value if it is a str, else None."""
    found = attributes.get(key)
    return found.value if found is not None and isinstance(found.value, str) else None
