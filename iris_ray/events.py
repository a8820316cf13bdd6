"""What can happen to the controller's state. Every change is one of these; times are seconds on the caller's clock.

Reports carry the attempt that they speak of; one about an older attempt changes nothing. Where an event is about a
gang, ``task_index`` is any of its tasks; a coscheduled job has one gang, any other one for every task.
"""

from dataclasses import dataclass

from iris_ray.constraints import Attributes
from iris_ray.jobs import JobSpec
from iris_ray.lifecycle import TaskState
from iris_ray.records import JobRecord


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
    """A worker appeared, or what is known about it changed. Its occupants are kept."""

    worker_id: str
    address: str
    attributes: Attributes
    resources: dict[str, float]
    draining: str | None = None
    foreign: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerDrainedEvent:
    """The worker takes nothing new; what runs there goes on."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TaintedEvent:
    """A worker, or all of a slice, keeps away jobs that don't tolerate the taint; what runs there goes on.

    It stays over new registrations, until it is lifted.

    Args:
        target: a worker's id or a slice's name; it need not be there yet.
        taint: its name, without the prefix.
        reason: why, for people.
    """

    target: str
    taint: str
    reason: str


@dataclass(frozen=True, slots=True)
class TaintLiftedEvent:
    """The opposite of TaintedEvent."""

    target: str
    taint: str


@dataclass(frozen=True, slots=True)
class WorkerSuspectedEvent:
    """The worker did not answer. It takes nothing new until it is known to be dead, or for a while."""

    worker_id: str
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class WorkerFailedEvent:
    """The worker is gone, with everything that ran on it."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GangAssignedEvent:
    """All tasks of a coscheduled job get their workers, at once: ``groups[slice_id][worker_id]`` is a worker's id."""

    job_id: str
    group_names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class TaskAssignedEvent:
    """A task of a job that is not coscheduled gets its worker."""

    job_id: str
    task_index: int
    worker_id: str


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

    job_id: str
    attempt: int
    error: str
    now: float
    task_index: int = 0


@dataclass(frozen=True, slots=True)
class TaskStateChangedEvent:
    """One task of an attempt reports RUNNING, SUCCEEDED, FAILED or WORKER_FAILED."""

    job_id: str
    task_index: int
    attempt: int
    new_state: TaskState
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptEndConfirmedEvent:
    """No process of the attempt is left on any host: its capacity is free."""

    job_id: str
    attempt: int
    task_index: int = 0


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
    | TaintedEvent
    | TaintLiftedEvent
    | WorkerSuspectedEvent
    | WorkerFailedEvent
    | GangAssignedEvent
    | TaskAssignedEvent
    | TaskUnschedulableEvent
    | TaskDispatchFailedEvent
    | TaskStateChangedEvent
    | AttemptEndConfirmedEvent
    | SliceHeldEvent
    | SliceReleasedEvent
)
