"""Instructions: what an event requires outside the state."""

from dataclasses import dataclass, field

from iris_ray.model.ids import AttemptId
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
    """Tell every task of this attempt that it is to move."""

    attempt: AttemptId
    notice: Notice


@dataclass(frozen=True, slots=True)
class DropSpare:
    """This spare is not needed any more. Its owner forgets it, even if it has not heard of it yet."""

    job_id: str
    owner: str


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """An event that the state could not handle, by a defect of iris_ray.

    Attributes:
        event: what was to be handled.
        error: what came of it. Some of the event may have been done.
    """

    event: object
    error: Exception


@dataclass(slots=True)
class Instructions:
    """What an event requires outside.

    Attributes:
        notices: gangs to be told that they are to move.
        dropped: spares that are not needed any more.
        stop: attempts to be stopped.
        reclaim: slices that their holders must release.
        finished: ids of jobs that have finished.
        failed: events that could not be handled: their jobs are to be set aside.
    """

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
