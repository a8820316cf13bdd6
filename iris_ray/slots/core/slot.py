"""One slot: a model on some devices of a runner, from the plan to the confirmed end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from iris_ray.errors import IllegalTransitionError
from iris_ray.slots.core.models import ModelSpec


class SlotState(Enum):
    """Where a slot is in its life. Only GONE frees its memory."""

    PLANNED = "planned"
    """Its place is promised, but slots that still end there hold some of the memory. It has no process yet."""
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It takes no new requests and was told to end. It is READY again if nobody needs its memory any more."""
    FAILED = "failed"
    """Its model could not be loaded, or its process broke; its end is not confirmed yet."""
    GONE = "gone"

    __hash__ = object.__hash__  # each state exists once; Enum's own hash is slower


_S = SlotState

SLOT_TRANSITIONS: Mapping[SlotState, frozenset[SlotState]] = {
    _S.PLANNED: frozenset({_S.STARTING, _S.GONE}),
    _S.STARTING: frozenset({_S.READY, _S.DRAINING, _S.FAILED, _S.GONE}),
    _S.READY: frozenset({_S.DRAINING, _S.FAILED, _S.GONE}),
    _S.DRAINING: frozenset({_S.READY, _S.GONE}),
    _S.FAILED: frozenset({_S.GONE}),
    _S.GONE: frozenset(),
}
USES_MEMORY = frozenset({_S.STARTING, _S.READY, _S.DRAINING, _S.FAILED})
"""States in which a process may use the slot's memory."""
WANTED = frozenset({_S.PLANNED, _S.STARTING, _S.READY})
"""States of slots that are to stay."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices that a slot has for its whole life.

    Attributes:
        devices: numbers of the runner's devices, in the order in which the process sees them: ascending, unless the
            model needs different bytes on each.
        bytes_each: bytes that the slot takes on each of them: all of an exclusive device.
        needs: each device's number with its bytes.
        total: bytes on all devices together.
    """

    runner_id: str
    devices: tuple[int, ...]
    bytes_each: tuple[int, ...]
    needs: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    total: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", tuple(zip(self.devices, self.bytes_each, strict=True)))
        object.__setattr__(self, "total", sum(self.bytes_each))

    def on(self, device: int) -> int:
        """Return the bytes that the slot takes on a device; 0 if it does not use the device."""
        return self.bytes_each[self.devices.index(device)] if device in self.devices else 0


@dataclass(slots=True, eq=False)
class Slot:
    """One slot. Its model and allocation never change; only `SlotFleet` changes the rest.

    Attributes:
        slot_id: never used again.
        created_at: when it was planned; this and other times are seconds on the caller's clock.
        started_at: when its creation was ordered, or None.
        ready_at: when it became ready, or None.
        last_activity: when a request last began or ended on it, or it became ready.
        active: the requests that run on it now, by id, and when each began; the oldest first.
        claimed: whether it counts for a model's replicas, and is never evicted.
        leaving: whether its memory is promised to another slot, though it still loads, or serves for a last while.
        stuck: whether it should have ended long ago, so that no plan counts on its end.
        going_since: since when it has been leaving or ending.
        moves: how often it was planned elsewhere before, because its place did not become free.
        asked_at: since when its model waited when it was planned; infinity if no request waited.
        most_together: how many requests it may serve at a time: fewer than usual while it serves a request that was on
            a slot that crashed.
    """

    slot_id: str
    spec: ModelSpec
    allocation: Allocation
    created_at: float
    state: SlotState = SlotState.PLANNED
    started_at: float | None = None
    ready_at: float | None = None
    last_activity: float = 0.0
    active: dict[str, float] = field(default_factory=dict)
    claimed: bool = False
    leaving: bool = False
    stuck: bool = False
    going_since: float = -math.inf
    moves: int = 0
    asked_at: float = math.inf
    most_together: int = field(init=False)
    model: str = field(init=False)

    def __post_init__(self) -> None:
        self.most_together = self.spec.requests_at_a_time
        self.model = self.spec.name

    @property
    def wanted(self) -> bool:
        """Whether the slot is to stay. Only then its memory is promised to it."""
        return self.state in WANTED and not self.leaving

    @property
    def free_seats(self) -> int:
        """The number of requests that it can take now."""
        return self.most_together - len(self.active) if self.state is SlotState.READY else 0

    @property
    def ends(self) -> bool:
        """Whether it was told to end, or has failed, and may still have a process."""
        return self.state in (SlotState.DRAINING, SlotState.FAILED)

    def seats_for(self, most: int) -> int:
        """Return how many more requests it can take if at most ``most`` may run together; 0 or less: none."""
        return min(self.free_seats, most - len(self.active))

    def move_to(self, state: SlotState) -> None:
        """Change the state.

        Raises:
            IllegalTransitionError: `SLOT_TRANSITIONS` does not hold this change.
        """
        if state not in SLOT_TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"slot {self.slot_id} is {self.state.value}; it can't become {state.value}")
        self.state = state
