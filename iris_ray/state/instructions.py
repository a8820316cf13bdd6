"""Instructions, which an event requires outside the state, and logs of changes for readers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """End every task of this attempt. The reason is for people."""

    attempt: AttemptId
    reason: str
    is_eviction: bool = False


@dataclass(frozen=True, slots=True)
class ReclaimSlice:
    """The slice goes to another owner. Its holder, which keeps it warm, must release it first."""

    slice_name: str
    holder: str


@dataclass(frozen=True, slots=True)
class NotifyGang:
    """Tell every task of this attempt that its gang must move."""

    attempt: AttemptId
    notice: Notice


@dataclass(frozen=True, slots=True)
class DropSpare:
    """The spare is not needed any more. Its owner forgets it, also if it has not heard of it yet."""

    job_id: str
    owner: str


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """An event that the state could not handle, because of a defect in iris_ray. It may have been applied in part."""

    event: object
    error: Exception


@dataclass(slots=True)
class Instructions:
    """What an event requires outside. ``finished`` has ids of jobs; jobs of ``failed`` events are to be set aside."""

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


@dataclass(slots=True)  # frozen, it would take longer to make, for every event
class Change:
    """One event being handled: the time, and the instructions to which the parts of the state add."""

    now: float
    instructions: Instructions = field(default_factory=Instructions)


T = TypeVar("T")


class ChangeLog(Generic[T]):
    """The latest changes, for readers that look now and then. A reader keeps the version up to which it has read."""

    def __init__(self) -> None:
        self._changed: list[T] = []
        self._forgotten = 0  # how many older changes were dropped

    @property
    def version(self) -> int:
        """How many changes there have been."""
        return self._forgotten + len(self._changed)

    def note(self, what: T, most: int) -> None:
        """Note a change. If there are more than ``most``, the older half is dropped."""
        self._changed.append(what)
        if len(self._changed) > most:
            old = len(self._changed) // 2
            self._forgotten += old
            del self._changed[:old]

    def since(self, version: int) -> Sequence[T] | None:
        """Return what has changed since a version, oldest change first; None if some of that was dropped."""
        return None if version < self._forgotten else self._changed[version - self._forgotten :]
