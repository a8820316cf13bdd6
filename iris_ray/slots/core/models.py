"""Models that users want to be served, and requests for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, Final, NamedTuple

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import (
    FLAG,
    NAME,
    Check,
    Holds,
    ListOf,
    Seconds,
    Whole,
    require,
    require_fields,
)
from iris_ray.model.constraints import Constraint
from iris_ray.slots.core.devices import MOST_CHIPS, DeviceKind, Needs, needs_of

CONCURRENCY: Final = {"vllm": 256, "program": 64, "ollama": 2}
"""Requests that one slot serves at a time, by runtime; 1 for others."""
MOST_SEATS: Final = 2_000
"""The limit for these requests. Each has two threads of the slot's process, and Ray makes all of them at its start."""


class Shape(NamedTuple):
    """The facts that decide where slots of a model may go. Models of equal shape get equal answers."""

    kind: DeviceKind
    constraints: tuple[Constraint, ...]
    needs: tuple[Needs, ...]


_CHECKS: Final[Mapping[str, Check]] = {
    "memory": Holds(Mapping, "bytes by number of devices"),
    "runtime": Holds(str, "a str"),
    "lora": Holds(str, "a str"),
    "group": Holds(str, "a str"),
    "alone": FLAG,
    "concurrency": Whole(1, MOST_SEATS, or_none=True, exactly=True),
    "kind": Holds(DeviceKind, "a DeviceKind"),
    "load_s": Seconds(above=True, or_none=True),
    "idle_s": Seconds(above=True, endless=True, or_none=True),
    "constraints": ListOf(Constraint, "a list of Constraint"),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be loaded into slots.

    Args:
        name: the model's name, which requests give.
        memory: bytes on each device, by the number of devices that share the model: ``{1: 16 * GB, 2: 9 * GB}``; or
            bytes of each, if they differ: ``{2: (12 * GB, 6 * GB)}``. Of free devices, the largest gets the one with
            the most room; the process sees its devices in the order of these bytes. TPU chips are alike: each needs
            room for the largest. A number of devices that is missing is never tried.
        kind: the kind of device that it runs on.
        runtime: the program that runs it, such as "vllm". It only sets the default of ``concurrency``.
        lora: the directory of an adapter, or "". It only tells slots apart; the class gets its adapter by its
            arguments.
        concurrency: requests that one slot serves at a time, 2,000 at most. None: 256 if ``runtime`` is "vllm", 64 for
            "program" (the default of a `ServedCommand`), 2 for "ollama", else 1.
        constraints: conditions that its runners' attributes must satisfy.
        load_s: seconds for which it may load before the load counts as failed; None: `ServingPolicy.load_s`. For a
            `ServedCommand`, the default is 30 s more than its own ``load_s``.
        idle_s: seconds after which an idle slot of it ends even if no other slot needs its memory, replicas excepted;
            infinity: never; None: `ServingPolicy.idle_s`.
        group: a runner has slots of one model of a group at a time. "": of no group.
        alone: whether a runner with a slot of it has slots of no other model.

    Attributes:
        memory: the largest number of bytes on a device, by the number of devices.
        sizes: the bytes of each device, by the number of devices, where they differ.
        needs: what the devices need, by the number of devices.

    Raises:
        InvalidSlotError: a value can't work; the message names it.
    """

    name: str
    memory: Mapping[int, Any] = field(hash=False)
    kind: DeviceKind = DeviceKind.GPU
    runtime: str = "actor"
    lora: str = ""
    concurrency: int | None = None
    constraints: tuple[Constraint, ...] = ()
    load_s: float | None = field(default=None, compare=False)
    idle_s: float | None = field(default=None, compare=False)
    group: str = ""
    alone: bool = False
    sizes: Mapping[int, tuple[int, ...]] = field(init=False, hash=False)
    needs: Mapping[int, Needs] = field(init=False, hash=False, repr=False, compare=False)
    shape: "Shape" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require("a model's name", self.name, NAME, InvalidSlotError)
        if not isinstance(self.constraints, (list, tuple)):
            object.__setattr__(self, "constraints", (self.constraints,))
        require_fields(f"model {self.name}: ", self, _CHECKS, InvalidSlotError)
        if not self.memory:
            raise InvalidSlotError(f"model {self.name} has no memory; give bytes for each device, such as {{1: 10**9}}")
        several = {degree: tuple(each) for degree, each in self.memory.items() if isinstance(each, (list, tuple))}
        single = [each for degree, each in self.memory.items() if degree not in several]
        for number in (*self.memory.keys(), *single, *chain(*several.values())):
            if Whole(1, exactly=True).problem(number):
                raise InvalidSlotError(f"model {self.name}: memory has {number!r}; give ints of 1 or more")
        if max(self.memory) > MOST_CHIPS:
            raise InvalidSlotError(
                f"model {self.name}: memory is for {max(self.memory):,} devices, and a slot has {MOST_CHIPS:,} at most;"
                " give bytes by the number of devices, such as {2: 9 * 10**9}"
            )
        if wrong := [degree for degree, each in several.items() if len(each) != degree]:
            given = len(several[wrong[0]])
            raise InvalidSlotError(f"model {self.name}: memory[{wrong[0]}] has {given} sizes; give one for each device")
        memory = {**self.memory, **{degree: max(each) for degree, each in several.items()}}
        object.__setattr__(self, "sizes", several)
        object.__setattr__(self, "constraints", tuple(self.constraints))
        object.__setattr__(self, "memory", dict(sorted(memory.items())))
        alike = self.kind is DeviceKind.TPU
        needs = {
            degree: ((degree, most),) if alike or degree not in several else needs_of(several[degree])
            for degree, most in self.memory.items()
        }
        object.__setattr__(self, "needs", needs)
        object.__setattr__(self, "shape", Shape(self.kind, self.constraints, tuple(needs.values())))

    def sizes_on(self, degree: int) -> tuple[int, ...]:
        """Return the bytes of each device, in their order, if the model has ``degree`` devices."""
        return self.sizes.get(degree) or (self.memory[degree],) * degree

    def excludes(self, other: "ModelSpec") -> bool:
        """Return whether slots of the two models must not share a runner."""
        together = not (self.alone or other.alone or (self.group and self.group == other.group))
        return not together and self.name != other.name

    @property
    def requests_at_a_time(self) -> int:
        """The number of requests that one slot serves at a time."""
        return CONCURRENCY.get(self.runtime, 1) if self.concurrency is None else self.concurrency


# -- requests ----------------------------------------------------------------------------------------------------------


class WorkloadKind(Enum):
    """An inference is one question and its answer. A session keeps its seat for many calls, until it is stopped."""

    INFERENCE = "inference"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class Request:
    """One request for a model.

    Args:
        request_id: never used twice.
        model: the name of its model.
        arrived_at: when it came; this and ``deadline`` are seconds on the caller's clock.
        priority: whether it goes before all requests without priority.
        deadline: when it is given up if it has not begun, or None.
        retriable: whether it may run again if its runner is lost, though it may have run in part.
        kind: inference or session.
        idle_s: how long a session keeps its seat without being used.
        size: bytes of the payload.
        attempt: how often it has been given to a slot, including this time; 0 while it waits for its first slot. From 2
            on, a slot may have run it before, in part or whole.
        crashes: how many slots have crashed while it ran there.
    """

    request_id: str
    model: str
    arrived_at: float
    priority: bool = False
    deadline: float | None = None
    retriable: bool = True
    kind: WorkloadKind = WorkloadKind.INFERENCE
    idle_s: float | None = None
    size: int = 0
    attempt: int = 0
    crashes: int = 0

    @property
    def is_session(self) -> bool:
        """Whether the request is a session."""
        return self.kind is WorkloadKind.SESSION
