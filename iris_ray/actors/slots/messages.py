"""What a client tells a SlotManager, and what it sees."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from iris_ray.errors import InvalidSlotError
from iris_ray.slots.devices import DeviceKind
from iris_ray.slots.models import ModelSpec


@dataclass(frozen=True, slots=True)
class SlotHosts:
    """Hosts that are to hold slots. Each is reserved in Ray as a whole, so that no gang and no other work uses it.

    Args:
        count: how many.
        kind: what slots use there.
        devices: GPUs or chips of each host, all of them; for CPUs, how many CPUs to reserve there.
        memory: bytes that slots may use: of each GPU or chip, or of the host for CPUs.
        labels: of the Ray nodes, such as ``{"zone": "us-a"}``.

    Raises:
        InvalidSlotError: a number makes no sense.
    """

    count: int = 1
    kind: DeviceKind = DeviceKind.CPU
    devices: int = 1
    memory: int = 2**30
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("count", "devices", "memory"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidSlotError(f"SlotHosts: {name} is {value!r}; give an int of 1 or more")

    @property
    def bundle(self) -> dict[str, float]:
        """What is reserved on each host."""
        if self.kind is DeviceKind.CPU:
            return {"CPU": float(self.devices), "memory": float(self.memory)}
        return {self.kind.name: float(self.devices)}


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """A model to be served.

    Attributes:
        spec: what it needs.
        pickled: the user's class and its arguments, by cloudpickle.
        replicas: slots to keep, whether there are requests or not.
        prewarm: whether each new runner gets a slot if there is room.
    """

    spec: ModelSpec
    pickled: bytes
    replicas: int = 0
    prewarm: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        request_id: of its own.
        model: the model's name.
        payload: what the model's ``__call__`` gets, by cloudpickle.
        timeout_s: seconds until it is given up if it has not begun.
        priority: whether it goes before those that have none.
        retriable: whether it may run again if its process is lost.
    """

    request_id: str
    model: str
    payload: bytes
    timeout_s: float | None = None
    priority: bool = False
    retriable: bool = True


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot, for people.

    Attributes:
        slot_id: its id.
        model: what it serves.
        runner: where.
        devices: numbers of its devices.
        memory: bytes on all of them.
        state: such as "ready".
        active: requests that run on it.
        idle_s: seconds since a request last began or ended.
        pid: of its process; 0 before it has started.
    """

    slot_id: str
    model: str
    runner: str
    devices: tuple[int, ...]
    memory: int
    state: str
    active: int
    idle_s: float
    pid: int


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model, for people.

    Attributes:
        model: its name.
        slots: how many are ready.
        starting: how many are about to be.
        waiting: requests in the queue.
        replicas: slots that are kept.
        load_s: how long loading took, last.
        failures: loads that failed since a request was served.
        waits_for: why there is no further slot now, or "".
    """

    model: str
    slots: int
    starting: int
    waiting: int
    replicas: int
    load_s: float
    failures: int
    waits_for: str


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """What there is: runners with their free bytes by device, slots and models."""

    runners: Mapping[str, tuple[int, ...]]
    slots: tuple[SlotRow, ...]
    models: tuple[ModelRow, ...]
