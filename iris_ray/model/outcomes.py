"""How tasks end, as values: failures travel as data, and `verdict` judges them in one place."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class TpuSuccess:
    """The function returned; ``result`` is its pickled value."""

    result: bytes


@dataclass(frozen=True, slots=True)
class TpuPreempted:
    """The provider took the host: it gave notice, or says so afterwards."""

    error: str


@dataclass(frozen=True, slots=True)
class TpuFailed:
    """The host, or a process of iris_ray there, was lost without notice, or the gang hung. Charged as a preemption."""

    error: str


class RunErrorKind(Enum):
    """How a job failed by itself."""

    APPLICATION = "application error"
    CRASH = "crash"
    DISK = "disk error"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class TpuRunError:
    """The job failed by itself: an exception, an exit code, a crash on a healthy host, memory used up, or a hang.

    Attributes:
        error: one line for people.
        traceback: the remote traceback of an exception; otherwise empty.
        exception: the pickled exception; None if there was none, or if it can't be pickled.
        kind: how the job failed.
    """

    error: str
    traceback: str = ""
    exception: bytes | None = None
    kind: RunErrorKind = RunErrorKind.APPLICATION


@dataclass(frozen=True, slots=True)
class TpuCancelled:
    """iris_ray ended the task because of another task, or on request."""

    error: str


TpuResult = TpuSuccess | TpuPreempted | TpuFailed | TpuRunError | TpuCancelled


class EndKind(Enum):
    """How a task process ended, as its own host reports it."""

    RETURNED = "returned"
    RAISED = "raised"
    DISK_ERROR = "disk error"  # raised: an OSError that says that a disk is full, read-only or faulty
    EXITED = "exited"  # by sys.exit(), with a code that is not 0
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out of memory"  # its own MemoryError, or killed because the host had none left
    NEVER_STARTED = "never started"  # the waiting process had died before any user code ran
    HOST_UNFIT = "host unfit"  # another process holds its chips, or its disk is full or faulty, so no user code ran
    CHIPS_TAKEN = "chips taken"  # another task on the host holds its chips, so no user code ran
    STOPPED = "stopped"  # by iris_ray


DID_NOT_RUN = frozenset({EndKind.NEVER_STARTED, EndKind.HOST_UNFIT, EndKind.CHIPS_TAKEN})
"""Ends of tasks in which no user code ran. Such an end explains the errors of the other tasks of its gang."""


class Fault(Enum):
    """A kind of failure that may be a host's fault."""

    CRASH = "crash"  # of a task process, in user code
    DISK = "disk"  # user code raised that a disk is full or faulty
    NO_START = "no start"  # a task process ended before user code ran
    HANG = "hang"  # user code held up its gang, and did something else than the other tasks
    HOST = "host"  # the host itself is not fit: another process holds its chips, or its disk is full or faulty


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How one task ended.

    Attributes:
        kind: the kind of end.
        ended_at: seconds since the epoch on the clock of the process that holds this (`actors.calls.clocks.Moment`). It
            orders causes and consequences within a gang.
        payload: the pickled result (RETURNED) or exception (None if it can't be pickled). Between processes, a
            reference to a large result.
        error: one line for people.
        traceback: the traceback of an exception as text; otherwise empty.
        exit_code: the process's end as an exit code: 0 for RETURNED, 1 for an exception, 128 and its number
            for a signal; None if it is not known.
    """

    kind: EndKind
    ended_at: float
    payload: Any = None
    error: str = ""
    traceback: str = ""
    exit_code: int | None = None


class ProviderState(Enum):
    """The state of a slice, by the provider's API."""

    PREEMPTED = "preempted"  # taken by the provider
    FAILED = "failed"  # broken, or under maintenance
    READY = "ready"
    UNKNOWN = "unknown"  # it could not be asked, or its answer is not conclusive


@dataclass(frozen=True, slots=True)
class ProviderWord:
    """What the provider says about the slice of a host.

    Attributes:
        state: the slice's state.
        reason: the same in words, for people.
    """

    state: ProviderState
    reason: str


@dataclass(frozen=True, slots=True)
class HostEvidence:
    """The evidence about a host when its gang is judged.

    Attributes:
        lost: why the host counts as lost, or None if it answers.
        draining: the notice that the host had, in words, or None.
        provider: what the provider says about a lost host's slice; None if it was not asked.
        out_of_memory: that Ray killed processes of iris_ray there, because its memory was nearly used up; or None.
    """

    lost: str | None = None
    draining: str | None = None
    provider: ProviderWord | None = None
    out_of_memory: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class TaskKey:
    """A task's place in its gang. Keys sort by slice, host, and process of the host.

    Attributes:
        slice_id: the number of the slice in the gang, from 0.
        host_index: the number of the host in the slice, from 0.
        local_index: the number of the process on the host, from 0.
    """

    slice_id: int
    host_index: int
    local_index: int = 0
