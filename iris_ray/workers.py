"""One host as the scheduler sees it. Pure data; changed by the `Fleet` alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from iris_ray.constraints import TAINT_PREFIX, Attributes, AttributeValue

TPU = "TPU"
"""Ray's resource name for chips."""

TPU_NAME = "tpu-name"
TPU_WORKER_ID = "tpu-worker-id"
TPU_TOPOLOGY = "tpu-topology"
TPU_VM_COUNT = "tpu-vm-count"

Resources = Mapping[str, float]
Occupant = tuple[str, int]  # (task id, attempt)


@dataclass(slots=True)
class Worker:
    """One host.

    Attributes:
        worker_id: Ray's node id.
        address: the host's IP address.
        attributes: typed facts about the host and its slice, and the taints that were set on it.
        resources: what the host has in all, by Ray's resource names.
        draining: why the host takes nothing new, or None.
        foreign: who outside iris_ray uses the chips, or None.
        suspected: why the host may be gone, or None.
        suspected_until: seconds on the caller's clock; later the suspicion counts no more.
        occupants: tasks that hold resources here until their end is confirmed.
        ending: those among them that are over and will be confirmed in a moment.
        reported: the attributes that the host itself reports.
        free: what no occupant holds.
    """

    worker_id: str
    address: str
    attributes: Attributes
    resources: Resources
    draining: str | None = None
    foreign: str | None = None
    suspected: str | None = None
    suspected_until: float = 0.0
    occupants: dict[Occupant, Resources] = field(default_factory=dict)
    ending: set[Occupant] = field(default_factory=set)
    reported: Attributes = field(default_factory=dict)
    free: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self._recount()

    def occupy(self, occupant: Occupant, resources: Resources) -> None:
        self.occupants[occupant] = resources
        self._recount()

    def vacate(self, occupant: Occupant) -> None:
        """The occupant's end is confirmed."""
        self.occupants.pop(occupant, None)
        self.ending.discard(occupant)
        self._recount()

    def _recount(self) -> None:
        # Counted anew each time: adding and taking away fractions would drift.
        free = dict(self.resources)
        for held in self.occupants.values():
            for resource, amount in held.items():
                free[resource] = free.get(resource, 0.0) - amount
        self.free = free

    @property
    def host_number(self) -> int | None:
        """The 0-based number of the host within its slice; None if it has none, which is not 0."""
        value = self.attributes.get(TPU_WORKER_ID)
        number = None if value is None else value.value
        return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None

    @property
    def taints(self) -> list[str]:
        """The names of its attributes that keep jobs away."""
        return [key for key in self.attributes if key.startswith(TAINT_PREFIX)]

    @property
    def name(self) -> str:
        """What people call it."""
        return f"host {self.worker_id}" if self.host_number is None else f"host {self.host_number}"


def string_attribute(attributes: Attributes, key: str) -> str | None:
    """The attribute's value if it is a str."""
    value = attributes.get(key, AttributeValue(0)).value
    return value if isinstance(value, str) else None


def job_of(task_id: str) -> str:
    """The job that a task belongs to."""
    return task_id.rpartition("/")[0]


def index_of(task_id: str) -> int:
    """The index of a task in its job."""
    return int(task_id.rpartition("-")[2])
