"""What users ask to be served: models, with the memory they need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import is_name, is_plain_int, require
from iris_ray.model.constraints import Constraint
from iris_ray.slots.devices import DeviceKind

CONCURRENCY: Final = {"vllm": 256, "ollama": 2}
"""Requests at a time by runtime. Others: one."""


class SlotIdentity(NamedTuple):
    """What a slot serves. Slots of the same identity can stand for one another."""

    model: str
    runtime: str
    lora: str

    def __str__(self) -> str:
        return f"{self.model} with {self.lora}" if self.lora else self.model


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be loaded into slots.

    Args:
        name: the model's name, which requests give.
        memory: bytes on each device, by the number of devices that share the model: ``{1: 16 * GB, 2: 9 * GB}``. If
            the devices need different amounts, the largest. A number that is missing is never tried.
        kind: the kind of device that it runs on.
        runtime: what runs it; decides the concurrency if that isn't given.
        lora: the directory of an adapter, or "".
        concurrency: requests that one slot serves at a time. None: 256 for "vllm", 2 for "ollama", else 1.
        constraints: what its runners' attributes must satisfy.

    Raises:
        InvalidSlotError: a value that can't work; the message names it.
    """

    name: str
    memory: Mapping[int, int] = field(hash=False)
    kind: DeviceKind = DeviceKind.GPU
    runtime: str = "actor"
    lora: str = ""
    concurrency: int | None = None
    constraints: tuple[Constraint, ...] = ()
    identity: SlotIdentity = field(init=False)

    def __post_init__(self) -> None:
        require(is_name(self.name), "a model's name", self.name, "a str that is not empty", InvalidSlotError)
        self._require(isinstance(self.memory, Mapping), "memory", "bytes by number of devices")
        if not self.memory:
            raise InvalidSlotError(f"model {self.name} has no memory; give bytes for each device, such as {{1: 10**9}}")
        for number in (*self.memory.keys(), *self.memory.values(), self.requests_at_a_time):
            if not is_plain_int(number, 1):
                raise InvalidSlotError(f"model {self.name}: {number!r} is no int of 1 or more (memory, concurrency)")
        for name in ("runtime", "lora"):
            self._require(isinstance(getattr(self, name), str), name, "a str")
        self._require(isinstance(self.kind, DeviceKind), "kind", "a DeviceKind")
        constraints = self.constraints if isinstance(self.constraints, (list, tuple)) else (self.constraints,)
        self._require(all(isinstance(each, Constraint) for each in constraints), "constraints", "a list of Constraint")
        object.__setattr__(self, "constraints", tuple(constraints))
        object.__setattr__(self, "memory", dict(sorted(self.memory.items())))
        object.__setattr__(self, "identity", SlotIdentity(self.name, self.runtime, self.lora))

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        require(holds, f"model {self.name}: {name}", getattr(self, name), wanted, InvalidSlotError)

    @property
    def requests_at_a_time(self) -> int:
        """How many requests one slot serves at a time."""
        return CONCURRENCY.get(self.runtime, 1) if self.concurrency is None else self.concurrency
