"""What the allocator is asked, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from iris_ray.slots.devices import Runner
from iris_ray.slots.models import ModelSpec, SlotIdentity
from iris_ray.slots.slot import Allocation, Slot


class Requirement(NamedTuple):
    """One more slot of a model is needed.

    Attributes:
        spec: the model.
        avoid: ids of runners not to use now, for instance because loads of the model have failed there.
        starving: whether slots that serve requests may be evicted too. They take no more, and end when these have.
    """

    spec: ModelSpec
    avoid: frozenset[str] = frozenset()
    starving: bool = False


class Place(NamedTuple):
    """Put the slot there, and evict exactly these slots for it.

    The slot may have to wait until memory is really free: until the evicted slots, or others that end there, are gone.
    """

    allocation: Allocation
    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Full:
    """There is no place now; there may be one later. Nothing is to be evicted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Never:
    """No runner could hold it even if it were empty. Waiting is of no use."""

    reason: str


Decision = Place | Full | Never


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Runners and slots at one moment. Slots are copied before anything is changed."""

    runners: tuple[Runner, ...]
    slots: tuple[Slot, ...] = ()
    closed: frozenset[str] = frozenset()
    prices: Mapping[SlotIdentity, int] = field(default_factory=dict, hash=False)
