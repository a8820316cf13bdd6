"""The instructions that the reconciler returns. Carrying out an instruction twice does no harm."""

from dataclasses import dataclass
from enum import Enum

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
    """End a slot's process, and report `SlotEnded` when it is gone. The order is repeated until that report."""

    slot_id: str
    runner_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Have a slot serve a request. If ``request.attempt`` is above 1, another slot may have served it before."""

    request: Request
    slot_id: str


@dataclass(frozen=True, slots=True)
class EndRequest:
    """Have a slot stop serving a request, for which nobody waits, and report `RequestEnded` when it has stopped.

    A session takes no more calls, and ends with the last call that runs.
    """

    request_id: str
    slot_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequeueRequest:
    """Only a note: the slot that ran the request is gone, and the request waits again."""

    request: Request
    reason: str


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Tell the client that there will be no answer, and why."""

    request_id: str
    refusal: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class AskRunner:
    """Ask a runner for a report of its slots."""

    runner_id: str


@dataclass(frozen=True, slots=True)
class RaiseAlarm:
    """Tell an operator."""

    text: str


Instruction = (
    CreateSlot | DeleteSlot | StartRequest | EndRequest | RequeueRequest | RefuseRequest | AskRunner | RaiseAlarm
)
