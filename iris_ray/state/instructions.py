"""Instructions: the actions that an event requires outside the state; and logs of changes for readers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """Stop every task of this attempt. The reason is for people."""

    attempt: AttemptId
    reason: str
    is_eviction: bool = False


@dataclass(frozen=True, slots=True)
class ReclaimSlice:
    """The holder must release a warm slice, or a part of one, whose hosts a gang needs.

    ``wanted`` is the slice or part that the gang gets, which may share only some hosts with the one to be released.
    """

    slice_name: str
    holder: str
    wanted: str


@dataclass(frozen=True, slots=True)
class NotifyGang:
    """Give every task of this attempt a notice that its gang must move."""

    attempt: AttemptId
    notice: Notice


@dataclass(frozen=True, slots=True)
class DropSpare:
    """The owner must drop a spare, even if it has not heard of it yet."""

    job_id: str
    owner: str


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """An event that the state could not handle because of a defect in iris_ray. It may have been applied in part."""

    event: object
    error: Exception


@dataclass(slots=True)
class Instructions:
    """The actions that an event requires outside. ``finished`` has job ids; jobs of ``failed`` are to be set aside."""

    notices: list[NotifyGang] = field(default_factory=list)
    dropped: list[DropSpare] = field(default_factory=list)
    stop: list[StopAttempt] = field(default_factory=list)
    reclaim: list[ReclaimSlice] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    failed: list[FailedEvent] = field(default_factory=list)

    def add(self, others: "Instructions") -> None:
        """Append the instructions of another event."""
        self.notices += others.notices
        self.dropped += others.dropped
        self.stop += others.stop
        self.reclaim += others.reclaim
        self.finished += others.finished
        self.failed += others.failed


@dataclass(slots=True)  # not frozen, which would slow down its construction for every event
class Change:
    """The context of the event being handled: the time, and the instructions collected so far."""

    now: float
    instructions: Instructions = field(default_factory=Instructions)


T = TypeVar("T")


class ChangeLog(Generic[T]):
    """A log of the latest changes, for readers that remember the version up to which they have read.

    Attributes:
        version: the number of changes so far.
    """

    def __init__(self) -> None:
        self.version = 0
        self._changed: list[T] = []
        self._forgotten = 0  # how many older changes were dropped

    def note(self, what: T, most: int) -> None:
        """Add a change. If there are more than ``most``, drop the older half."""
        self.version += 1
        self._changed.append(what)
        if len(self._changed) > most:
            old = len(self._changed) // 2
            self._forgotten += old
            del self._changed[:old]

    def since(self, version: int) -> Sequence[T] | None:
        """Return the changes since a version, oldest first; None if some of them were dropped."""
        return None if version < self._forgotten else self._changed[version - self._forgotten :]
