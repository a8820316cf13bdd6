"""What is to be done outside because of an event."""

from dataclasses import dataclass, field

from iris_ray.model.ids import AttemptId
from iris_ray.model.notices import Notice


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """End every task of this attempt; the reason is for people."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class ReclaimSlice:
    """The slice goes to another owner: the one that keeps it warm must let go first."""

    slice_name: str
    holder: str


@dataclass(frozen=True, slots=True)
class NotifyGang:
    """Tell every task of this attempt that it is to move."""

    attempt: AttemptId
    notice: Notice


@dataclass(frozen=True, slots=True)
class DropSpare:
    """This spare is not wanted any more: its owner forgets it, also if it has not heard of it yet."""

    job_id: str
    owner: str


@dataclass(slots=True)
class Instructions:
    """What is to be done outside because of an event."""

    notices: list[NotifyGang] = field(default_factory=list)
    dropped: list[DropSpare] = field(default_factory=list)
    stop: list[StopAttempt] = field(default_factory=list)
    reclaim: list[ReclaimSlice] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def add(self, others: "Instructions") -> None:
        """Put those of another event behind these."""
        self.notices += others.notices
        self.dropped += others.dropped
        self.stop += others.stop
        self.reclaim += others.reclaim
        self.finished += others.finished
