"""What slots are there for: requests, which wait in a queue until a slot has a seat."""

from dataclasses import dataclass
from enum import Enum

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import is_name, is_positive_seconds, is_timeout, require
from iris_ray.slots.models import SlotIdentity


class WorkloadKind(Enum):
    """An inference is one question and its answer. A session keeps its seat for many, until it is stopped."""

    INFERENCE = "inference"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class Request:
    """One request for a model.

    Args:
        request_id: never used twice.
        identity: which slots can serve it.
        arrived_at: when it came; this and ``deadline`` are seconds on the caller's clock.
        priority: whether it goes before all that are not.
        deadline: when it is given up if it has not begun, or None.
        retriable: whether it may be run again if its runner is lost and nobody knows how far it got.
        kind: inference or session.
        idle_s: of a session: how long it keeps its seat without being used.
        size: bytes of what is asked.
        attempt: how often it has been given to a slot, this time included; 0 while it waits for the first. From 2 on, a
            slot may have run it before, in part or whole.
        crashes: how many slots have crashed while it ran there.
    """

    request_id: str
    identity: SlotIdentity
    arrived_at: float
    priority: bool = False
    deadline: float | None = None
    retriable: bool = True
    kind: WorkloadKind = WorkloadKind.INFERENCE
    idle_s: float | None = None
    size: int = 0
    attempt: int = 0
    crashes: int = 0

    def __post_init__(self) -> None:
        require(
            is_name(self.request_id), "a request's id", self.request_id, "a str that is not empty", InvalidSlotError
        )
        if self.deadline is not None and not is_timeout(self.deadline):
            raise InvalidSlotError(f"request {self.request_id}: its deadline is not a number; give a time, or None")
        holds = not self.is_session or is_positive_seconds(self.idle_s)
        require(holds, f"session {self.request_id}: idle_s", self.idle_s, "seconds above 0", InvalidSlotError)

    @property
    def is_session(self) -> bool:
        """Whether it keeps its seat until it is stopped."""
        return self.kind is WorkloadKind.SESSION
