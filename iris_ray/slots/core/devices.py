"""Runners and their devices, on which slots are placed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from types import MappingProxyType

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import Whole, require
from iris_ray.model.constraints import Attributes, Constraint

DeviceSet = tuple[int, ...]
"""Numbers of devices of one runner, ascending."""

Needs = tuple[tuple[int, int], ...]
"""Bytes that several devices need, the largest first, with the number of devices that need at least as much:
``((1, 12), (3, 6))`` is one device with 12 bytes and two with 6. Devices that need equal bytes are one entry."""

MOST_DEVICES = 64
"""The limit for a runner whose legal sets of devices are not listed."""
MOST_CHIPS = 2**14
"""The limit for the devices of a slot. No slice has more chips."""

UNKNOWN = 2**60
"""Stands for the bytes of a device that have not been read yet: every model may fit."""


class DeviceKind(Enum):
    """The kind of a device. Slots share the memory of a GPU or a host; a TPU chip belongs to one process at a time."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"

    __hash__ = object.__hash__  # each kind exists once; Enum's own hash is slower


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a runner: a GPU, a TPU chip, or the memory of a host.

    Args:
        kind: GPU, TPU or host.
        memory: bytes that slots may use. Leave out the memory that the driver and other programs need.
    """

    kind: DeviceKind
    memory: int
    exclusive: bool = field(init=False)
    """Whether only one slot at a time can use the device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclusive", self.kind is DeviceKind.TPU)
        require("a device's memory in bytes", self.memory, Whole(1, exactly=True), InvalidSlotError)

    def charge(self, need: int) -> int:
        """Return how many bytes a slot that needs ``need`` bytes takes: all of an exclusive device."""
        return self.memory if self.exclusive else need


def needs_of(sizes: Iterable[int]) -> Needs:
    """Return what devices need, from the bytes of each in any order."""
    found = {size: count for count, size in enumerate(sorted(sizes, reverse=True), start=1)}
    return tuple([(count, size) for size, count in found.items()])


@dataclass(frozen=True, slots=True)
class Runner:
    """A host that holds slots on devices of one kind, or a slice that does. A host of two kinds has two runners.

    Args:
        runner_id: a name that no other runner has.
        devices: its devices; a device's number is its place here.
        attributes: typed facts about the host, for the constraints of models.
        legal_sets: the sets of chips that one slot can use together; None: the sets of `tpu_sets`. Other devices can be
            used together in every combination.

    Raises:
        InvalidSlotError: there are no devices, or devices of several kinds; a set names a device that isn't there, or
            is not one of chips.
    """

    runner_id: str
    devices: tuple[Device, ...]
    attributes: Attributes = field(default_factory=dict, hash=False)
    legal_sets: tuple[DeviceSet, ...] | None = None
    hardware: tuple[object, ...] = field(init=False, repr=False, compare=False)
    """What decides which slots fit on it while it is empty."""

    def __post_init__(self) -> None:
        count = len(self.devices)
        most = MOST_DEVICES if self.legal_sets is None else count
        if not 1 <= count <= most or len({device.kind for device in self.devices}) != 1:
            raise InvalidSlotError(f"runner {self.runner_id} needs 1 to {MOST_DEVICES} devices, all of one kind")
        if self.legal_sets is not None and self.kind is not DeviceKind.TPU:
            raise InvalidSlotError(f"runner {self.runner_id}: only TPU chips have sets that can be used together")
        if self.legal_sets is None and self.kind is DeviceKind.TPU:
            object.__setattr__(self, "legal_sets", tpu_sets(count))
        for devices in self.legal_sets or ():
            if not devices or list(devices) != sorted(set(devices) & set(range(count))):
                raise InvalidSlotError(f"runner {self.runner_id}: {devices} are not devices below {count}, ascending")
        hardware = self.kind, tuple([device.memory for device in self.devices]), self.legal_sets
        object.__setattr__(self, "hardware", hardware)

    @property
    def kind(self) -> DeviceKind:
        """The kind of its devices."""
        return self.devices[0].kind

    def sets(self, degree: int) -> Iterable[DeviceSet]:
        """Return the sets of ``degree`` devices that one slot can use together."""
        if self.legal_sets is None:
            return combinations(range(len(self.devices)), degree)
        return (devices for devices in self.legal_sets if len(devices) == degree)

    def satisfies(self, constraints: Iterable[Constraint]) -> bool:
        """Return whether it satisfies all constraints. A constraint that can't be evaluated here is not satisfied."""
        try:
            return all(constraint.matches(self.attributes) for constraint in constraints)
        except TypeError:
            return False


def runner_of_slice(runner_id: str, chips: int, memory: int, attributes: Attributes = MappingProxyType({})) -> Runner:
    """Return a whole slice as a runner: one slot at a time uses all its chips, with a process on each host.

    Args:
        runner_id: a name that no other runner has.
        chips: the number of chips of all its hosts together.
        memory: bytes of each chip that slots may use.
        attributes: typed facts about its hosts.
    """
    return Runner(runner_id, (Device(DeviceKind.TPU, memory),) * chips, attributes, (tuple(range(chips)),))


def tpu_sets(chips: int) -> tuple[DeviceSet, ...]:
    """Return the sets of chips of one host that a process can use: 1, 2, 4, … neighbours, and all of them.

    Libtpu takes chips that form a rectangle. Chips are numbered row by row, so aligned runs of a power of two do.
    """
    sizes = [size for size in (1, 2, 4, 8, 16) if size < chips]
    runs = [tuple(range(first, first + size)) for size in sizes for first in range(0, chips - size + 1, size)]
    return (*runs, tuple(range(chips)))
