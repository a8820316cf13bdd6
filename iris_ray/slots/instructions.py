"""What the reconciler wants to be done. Carrying out an instruction twice does no harm."""

from dataclasses import dataclass
from enum import Enum

from iris_ray.slots.models import ModelSpec
from iris_ray.slots.requests import Request
from iris_ray.slots.slot import Allocation


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
