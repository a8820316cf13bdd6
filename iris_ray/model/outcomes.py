"""Task outcomes as values: failures are data, and `verdict` judges them in one place."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class TpuSuccess:
    """The function returned.

    Attributes:
        result: its return value, pickled.
    """

    result: bytes


@dataclass(frozen=True, slots=True)
class TpuPreempted:
    """The host was taken away: with a notice, or the cloud provider's API said so afterwards.

    Charged to the preemption budget if a task of the gang had run.

    Attributes:
        error: one line for people.
    """

    error: str


@dataclass(frozen=True, slots=True)
class TpuFailed:
    """The task ended through no fault of its own code.

    The host, or a process of iris_ray on it, was lost without notice; or the gang made no progress for far longer than
    its own steps take, without a ``stall_timeout``. Both are charged to the preemption budget if a task of the gang had
    run. If the task's own code did not run, because its host was unfit, nothing is charged.

    Attributes:
        error: one line for people.
    """

    error: str


class RunErrorKind(Enum):
    """The kind of a job's own failure."""

    APPLICATION = "application error"
    CRASH = "crash"
    DISK = "disk error"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class TpuRunError:
    """The job's own code failed. Charged to the failure budget.

    The task raised an exception, exited with a code other than 0, crashed on a healthy host, or used up its host's
    memory; or its gang made no progress for the job's ``stall_timeout``.

    Attributes:
        error: one line for people.
        traceback: the remote traceback of an exception; otherwise empty.
        exception: the pickled exception; None without one, or if it can't be pickled or exceeds 1 MiB.
        kind: the kind of failure.
    """

    error: str
    traceback: str = ""
    exception: bytes | None = None
    kind: RunErrorKind = RunErrorKind.APPLICATION


@dataclass(frozen=True, slots=True)
class TpuCancelled:
    """iris_ray stopped the task: its gang moved, another task of it ended, or the job did. Charged to nothing.

    Attributes:
        error: one line for people.
    """

    error: str


TpuResult = TpuSuccess | TpuPreempted | TpuFailed | TpuRunError | TpuCancelled


class EndKind(Enum):
    """How a task process ended, as its own host reports it."""

    RETURNED = "returned"
    RAISED = "raised"
    DISK_ERROR = "disk error"  # raised an OSError that reports a full, read-only or faulty disk
    EXITED = "exited"  # by sys.exit(), with a code that is not 0
    CRASHED = "crashed"
    ZYGOTE_ENDED = "zygote ended"  # iris_ray's process that had forked it has ended, and the kernel has killed it then
    OUT_OF_MEMORY = "out of memory"  # raised MemoryError, or was killed because the host had none left
    NEVER_STARTED = "never started"  # the waiting process had died before any user code ran
    HOST_UNFIT = "host unfit"  # a foreign process holds its chips, or its disk is full or faulty; no user code ran
    CHIPS_TAKEN = "chips taken"  # another task on the host holds its chips; no user code ran
    STOPPED = "stopped"  # by iris_ray


DID_NOT_RUN = frozenset({EndKind.NEVER_STARTED, EndKind.HOST_UNFIT, EndKind.CHIPS_TAKEN})
"""Ends without any user code having run. Such an end explains the errors of the gang's other tasks."""


class Fault(Enum):
    """A kind of failure that may be a host's fault."""

    CRASH = "crash"  # of a task process, in user code
    DISK = "disk"  # user code raised an error about a full or faulty disk
    NO_START = "no start"  # a task process ended before user code ran
    HANG = "hang"  # user code held up its gang, at another place than the other tasks
    HOST = "host"  # the host is unfit: a foreign process holds its chips, or its disk is full or faulty


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How one task ended.

    Attributes:
        kind: the kind of end.
        ended_at: seconds since the epoch on this process's clock (see `actors.calls.clocks.Moment`). It separates
            causes from consequences within a gang.
        payload: the pickled result (RETURNED) or exception (None if it can't be pickled). A large result travels
            between processes as a reference.
        error: one line for people.
        traceback: the traceback of an exception as text; otherwise empty.
        exit_code: the process's exit code: 0 for RETURNED, 1 for an exception, 128 plus the number of a signal; None if
            unknown.
        never_joined: whether the process is known to have never joined a Ray cluster. Then nothing of its making runs
            in the reservation of its host.
    """

    kind: EndKind
    ended_at: float
    payload: Any = None
    error: str = ""
    traceback: str = ""
    exit_code: int | None = None
    never_joined: bool = False


class ProviderState(Enum):
    """The state of a slice according to the provider's API."""

    PREEMPTED = "preempted"  # taken by the provider
    FAILED = "failed"  # broken, or under maintenance
    READY = "ready"
    UNKNOWN = "unknown"  # the API could not be reached, or its answer is inconclusive


@dataclass(frozen=True, slots=True)
class ProviderWord:
    """The provider's statement about a host's slice.

    Attributes:
        state: the slice's state.
        reason: the state, for people.
    """

    state: ProviderState
    reason: str


@dataclass(frozen=True, slots=True)
class HostEvidence:
    """The evidence about a host at the time its gang is judged.

    Attributes:
        lost: why the host counts as lost; None if it answers.
        draining: the host's notice as text, or None.
        provider: the provider's statement about a lost host's slice; None if it was not asked.
        out_of_memory: a description of Ray's killing iris_ray's processes there for lack of memory, or None.
    """

    lost: str | None = None
    draining: str | None = None
    provider: ProviderWord | None = None
    out_of_memory: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class TaskKey:
    """The position of a task in its gang. Keys sort by slice, host, and process on the host.

    Attributes:
        slice_id: the number of the slice in the gang, from 0.
        host_index: the number of the host in the slice, from 0.
        local_index: the number of the process on the host, from 0.
    """

    slice_id: int
    host_index: int
    local_index: int = 0
