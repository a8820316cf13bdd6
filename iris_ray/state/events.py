"""What can happen to the controller's state. Every change is one of these; times are seconds on the caller's clock.

Reports carry the attempt that they speak of; one about an older attempt changes nothing.
"""

from dataclasses import dataclass

from iris_ray.model.constraints import Attributes
from iris_ray.model.ids import AttemptId
from iris_ray.model.jobs import JobSpec
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.notices import NoticeKind
from iris_ray.state.records import JobRecord


@dataclass(frozen=True, slots=True)
class JobSubmittedEvent:
    spec: JobSpec
    now: float


@dataclass(frozen=True, slots=True)
class JobRestoredEvent:
    """A job that an earlier Controller knew. The workers that are alive have been registered before."""

    record: JobRecord


@dataclass(frozen=True, slots=True)
class TimePassedEvent:
    """It is so late now. What comes back to the queue after it has waited since then."""

    now: float


@dataclass(frozen=True, slots=True)
class JobCancelledEvent:
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRegisteredEvent:
    """A worker appeared, or what is known about it changed. Its occupants are kept.

    Args:
        node_id, address, attributes, resources: see `Worker`.
        draining: the notice that it has, in words, or None.
        foreign: who outside iris_ray uses it, or None.
        deadline: when it is to go, if it has a notice that says so; seconds.
    """

    node_id: str
    address: str
    attributes: Attributes
    resources: dict[str, float]
    draining: str | None = None
    foreign: str | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerDrainedEvent:
    """The worker is to go: it takes nothing new, and gangs that run there are told.

    Args:
        node_id: which.
        reason: why, for people.
        kind: why, for programs.
        deadline: when it will be gone at the latest, or None if nobody knows; seconds.
    """

    node_id: str
    reason: str
    kind: NoticeKind = NoticeKind.PREEMPTION
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class MaintenanceCalledOffEvent:
    """A maintenance that the worker had notice of is not planned any more; drains and preemptions stay as they are."""

    node_id: str


@dataclass(frozen=True, slots=True)
class TaintedEvent:
    """A worker, or all of a slice, keeps away jobs that don't tolerate the taint; what runs there goes on.

    It stays over new registrations, until it is lifted.

    Args:
        target: a worker's id or a slice's name; it need not be there yet.
        taint: its name, without the prefix.
        reason: why, for people.
        until: when it is lifted by itself; None: never; seconds.
    """

    target: str
    taint: str
    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class TaintLiftedEvent:
    """The opposite of TaintedEvent."""

    target: str
    taint: str


@dataclass(frozen=True, slots=True)
class WorkerSuspectedEvent:
    """The worker did not answer. It takes nothing new until it is known to be dead, or for a while."""

    node_id: str
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class WorkerFailedEvent:
    """The worker is gone, with everything that ran on it."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GangAssignedEvent:
    """All tasks of a coscheduled job get their workers, at once: ``groups[slice_id][node_id]`` is a worker's id."""

    job_id: str
    group_names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class TaskAssignedEvent:
    """A task of a job that is not coscheduled gets its worker."""

    job_id: str
    task_index: int
    node_id: str


AssignedEvent = GangAssignedEvent | TaskAssignedEvent


@dataclass(frozen=True, slots=True)
class TaskUnschedulableEvent:
    """A gang that never ran is given up, and its job with it."""

    job_id: str
    task_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class TaskDispatchFailedEvent:
    """An attempt could not be started whole: the gang goes back to the queue, uncharged, after a pause."""

    attempt: AttemptId
    error: str
    now: float


@dataclass(frozen=True, slots=True)
class TaskStateChangedEvent:
    """One task of an attempt reports RUNNING, SUCCEEDED, FAILED or WORKER_FAILED."""

    attempt: AttemptId
    task_index: int
    new_state: TaskState
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GangMovedEvent:
    """An attempt was ended so that the gang can run elsewhere, by its own leave: back to the queue, uncharged."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class GangReturnedEvent:
    """Its caller has the results of an attempt that was taken back: a host was lost after its task had returned."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class WorkerBlamedEvent:
    """A task process could not be started on the worker, or crashed there and nowhere else in the gang before.

    Args:
        node_id: which.
        job_id: whose task it was.
        reason: what happened, in words.
        by_user_code: whether user code ran in it; the worker is only to blame if the job's tasks live elsewhere.
    """

    node_id: str
    job_id: str
    reason: str
    by_user_code: bool


@dataclass(frozen=True, slots=True)
class AttemptEndConfirmedEvent:
    """No process of the attempt is left on any host: its capacity is free."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PoolRestartedEvent:
    """The process of a pool died and was started anew: all that ran there is gone, and results that it had."""

    owner: str


@dataclass(frozen=True, slots=True)
class SliceHeldEvent:
    """The owner says that it holds the slice: an earlier Controller knew that, this one does not."""

    slice_name: str
    owner: str


@dataclass(frozen=True, slots=True)
class SliceReleasedEvent:
    """The owner holds the slice no longer."""

    slice_name: str
    owner: str


Event = (
    JobSubmittedEvent
    | JobRestoredEvent
    | TimePassedEvent
    | JobCancelledEvent
    | WorkerRegisteredEvent
    | WorkerDrainedEvent
    | MaintenanceCalledOffEvent
    | TaintedEvent
    | TaintLiftedEvent
    | WorkerSuspectedEvent
    | WorkerFailedEvent
    | GangAssignedEvent
    | TaskAssignedEvent
    | TaskUnschedulableEvent
    | TaskDispatchFailedEvent
    | TaskStateChangedEvent
    | GangMovedEvent
    | GangReturnedEvent
    | WorkerBlamedEvent
    | AttemptEndConfirmedEvent
    | PoolRestartedEvent
    | SliceHeldEvent
    | SliceReleasedEvent
)
