"""How a task ended, as values: failures travel as data and are judged in one place, never through `except`."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class TpuSuccess:
    """The function returned; ``result`` is its pickled value."""

    result: bytes


@dataclass(frozen=True, slots=True)
class TpuPreempted:
    """The provider took the host, with notice."""

    error: str


@dataclass(frozen=True, slots=True)
class TpuFailed:
    """The host, or a process of ours on it, was lost without notice. Charged like a preemption."""

    error: str


class RunErrorKind(Enum):
    """What a job did to itself."""

    APPLICATION = "application error"
    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class TpuRunError:
    """The job's own doing: an exception, an exit code, a crash on a healthy host, memory used up, or a hang.

    Attributes:
        error: one line for people.
        traceback: the remote traceback, if there was an exception.
        exception: the pickled exception, if there was one and it can be pickled.
        kind: which of these.
    """

    error: str
    traceback: str = ""
    exception: bytes | None = None
    kind: RunErrorKind = RunErrorKind.APPLICATION


@dataclass(frozen=True, slots=True)
class TpuCancelled:
    """Ended by us because of another task, or on request."""

    error: str


TpuResult = TpuSuccess | TpuPreempted | TpuFailed | TpuRunError | TpuCancelled


class EndKind(Enum):
    """How a task process ended, as its own host saw it."""

    RETURNED = "returned"
    RAISED = "raised"
    EXITED = "exited"  # by sys.exit(), with a code that is not 0
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out of memory"  # its own MemoryError, or killed because the host had none left
    NEVER_STARTED = "never started"  # the waiting process had died before any user code ran
    DEVICE_BUSY = "device busy"  # somebody else holds the host's chips, so no user code ran
    STOPPED = "stopped"  # by us


DID_NOT_RUN = frozenset({EndKind.NEVER_STARTED, EndKind.DEVICE_BUSY})
"""No user code ran in this task; that is nobody's fault, and explains whatever the others of its gang did."""


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """The facts about one task's end.

    Attributes:
        kind: what happened.
        ended_at: seconds since the epoch on the task's host; orders causes and instructions within a gang.
        payload: the pickled result (RETURNED) or exception (RAISED; None if it can't be pickled).
        error: one line for people.
        traceback: text (RAISED).
    """

    kind: EndKind
    ended_at: float
    payload: bytes | None = None
    error: str = ""
    traceback: str = ""


class ProviderState(Enum):
    """What the provider's API makes of a slice."""

    PREEMPTED = "preempted"  # taken by the provider
    FAILED = "failed"  # broken, or under maintenance
    READY = "ready"
    UNKNOWN = "unknown"  # it could not be asked, or its answer decides nothing


@dataclass(frozen=True, slots=True)
class ProviderWord:
    """What the provider says about the slice of a host, and in which words."""

    state: ProviderState
    reason: str


@dataclass(frozen=True, slots=True)
class HostEvidence:
    """What is known about a host at the moment of judgement.

    Attributes:
        lost: why the host counts as lost, or None if it answers.
        draining: the notice that the host had, or None.
        provider: what the provider says about a lost host's slice; None if it was not asked.
    """

    lost: str | None = None
    draining: str | None = None
    provider: ProviderWord | None = None


@dataclass(frozen=True, slots=True)
class TaskKey:
    """A task's place in its gang."""

    slice_id: int
    host_index: int
