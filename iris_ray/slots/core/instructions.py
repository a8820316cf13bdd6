"""What the reconciler wants to be done. Carrying out an instruction twice does no harm."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from iris_ray.slots.core.devices import DeviceKey
from iris_ray.slots.core.models import ModelSpec, Request
from iris_ray.slots.core.slot import Allocation


class Refusal(Enum):
    """Why a request gets no answer."""

    DUPLICATE = "duplicate"
    UNKNOWN_MODEL = "unknown model"
    QUEUE_FULL = "queue full"
    FITS_NOWHERE = "fits nowhere"
    EXPIRED = "expired"
    LOAD_FAILED = "load failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class CreateSlot:
    """Start a process that loads the model on exactly these devices."""

    slot_id: str
    spec: ModelSpec
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class DeleteSlot:
    """End a slot's process, and say `SlotEnded` when it is gone. Repeated until that is said."""

    slot_id: str
    runner_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Have a slot serve a request. If its ``attempt`` is above 1, another slot may have served it before."""

    request: Request
    slot_id: str


@dataclass(frozen=True, slots=True)
class EndRequest:
    """Have a slot stop serving a request; nobody waits for it. Say `RequestEnded` when it has.

    A session takes no more calls, and has ended once those that it has have.
    """

    request_id: str
    slot_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequeueRequest:
    """Nothing to do: what ran the request is gone, and it waits again."""

    request: Request
    reason: str


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Tell whoever waits that there will be no answer, and why."""

    request_id: str
    refusal: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class AskRunner:
    """Have a runner report its slots."""

    runner_id: str


@dataclass(frozen=True, slots=True)
class RaiseAlarm:
    """Tell an operator."""

    text: str


Instruction = (
    CreateSlot | DeleteSlot | StartRequest | EndRequest | RequeueRequest | RefuseRequest | AskRunner | RaiseAlarm
)


# -- changes -----------------------------------------------------------------------------------------------------------
# Which devices have changed, for all who keep something about them.

KEPT, MOST = 20_000, 40_000
"""Changes; the oldest are forgotten when there are too many. A reader that was away for longer looks at all devices."""


@dataclass(slots=True)
class DeviceChangeLog:
    """The most recent changes, in order. Readers remember how far they have read.

    Attributes:
        runner_changes: how often a runner has come, gone, opened or closed.
    """

    runner_changes: int = 0
    _keys: list[DeviceKey] = field(default_factory=list)
    _forgotten: int = 0
    _last: Sequence[DeviceKey] = ()
    """The keys that `add` got last; empty once a reader has read them."""

    @property
    def end(self) -> int:
        """How far it can be read now."""
        return self._forgotten + len(self._keys)

    def add(self, keys: Sequence[DeviceKey]) -> None:
        """Note that something changed on these devices."""
        if keys == self._last:  # a slot changes several times in one decision
            return
        known, self._last = self._keys, keys
        known.extend(keys)
        if len(known) > MOST:
            self._forgotten += len(known) - KEPT
            del known[:-KEPT]

    def since(self, position: int) -> set[DeviceKey] | None:
        """Return what has changed since somebody read up to there; None: that is no longer known, it may be all."""
        self._last = ()
        return None if position < self._forgotten else set(self._keys[position - self._forgotten :])
