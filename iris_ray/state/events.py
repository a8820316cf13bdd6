"""Events: everything that can change the controller's state. Times are seconds on the caller's clock.

Reports carry the attempt that they are about; a report about an older attempt changes nothing.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.constraints import Attributes
from iris_ray.model.goodput import Marks
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.model.outcomes import Fault
from iris_ray.model.plain_values import Words
from iris_ray.model.teams import Team
from iris_ray.state.records import JobRecord


@dataclass(frozen=True, slots=True)
class JobSubmittedEvent:
    """A new job. A submission that is delivered twice counts once; another job of the same id is refused."""

    spec: JobSpec
    now: float


@dataclass(frozen=True, slots=True)
class JobRestoredEvent:
    """A job comes back from the record of an earlier Controller. Live workers are registered before."""

    record: JobRecord


@dataclass(frozen=True, slots=True)
class TimePassedEvent:
    """The clock has reached this time. A gang that is requeued later has waited since then."""

    now: float


@dataclass(frozen=True, slots=True)
class JobCancelledEvent:
    """A user, or the job's pool, cancels the job. Attempts that have hosts are stopped."""

    job_id: str
    reason: Words


@dataclass(frozen=True, slots=True)
class WorkerRegisteredEvent:
    """A worker appeared, or its facts changed. Its occupants are kept.

    Args:
        node_id, address, attributes, resources: see `Worker`.
        draining: why the worker is about to go, in words, or None.
        foreign: which process outside iris_ray uses the worker's chips, in words, or None.
        deadline: when the worker goes, or None if unknown; seconds.
        elsewhere: the resources that work outside iris_ray uses, without chips.
    """

    node_id: str
    address: str
    attributes: Attributes
    resources: dict[str, float]
    draining: str | None = None
    foreign: str | None = None
    deadline: float | None = None
    elsewhere: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerDrainedEvent:
    """A worker is about to go. It takes no new tasks, and the gangs that run there are told.

    Args:
        node_id: the worker.
        reason: why, for people.
        kind: why, for programs.
        deadline: when it will be gone at the latest, or None if unknown; seconds.
    """

    node_id: str
    reason: Words
    kind: NoticeKind = NoticeKind.PREEMPTION
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class MaintenanceCalledOffEvent:
    """A maintenance that was announced for the worker is cancelled. Drains and preemptions stay."""

    node_id: str


@dataclass(frozen=True, slots=True)
class TaintedEvent:
    """A worker or a slice gets a taint: jobs that don't tolerate it are not placed there. What runs there goes on.

    The taint survives new registrations until it is lifted.

    Args:
        target: a worker's node id or a slice's name; it need not exist yet.
        taint: its name, without the prefix.
        reason: why, for people.
        until: when it expires, or None for never; seconds.
    """

    target: str
    taint: str
    reason: Words
    until: float | None = None


@dataclass(frozen=True, slots=True)
class TaintLiftedEvent:
    """A taint is removed."""

    target: str
    taint: str


@dataclass(frozen=True, slots=True)
class PastUsageEvent:
    """The past usage of all users and teams comes back from the records of an earlier Controller.

    Args:
        hours: user → amount-hours by Ray's resource names, see `PastUsage`.
        at: when these sums were recorded; seconds.
        of_teams: the same by team.
    """

    hours: Mapping[str, Mapping[str, float]]
    at: float
    of_teams: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TeamsSetEvent:
    """An operator replaces all teams. Jobs that run go on, and count for their team or the closest one above it.

    Args:
        teams: the whole tree.
    """

    teams: tuple[Team, ...]


@dataclass(frozen=True, slots=True)
class LimitsSetEvent:
    """An operator replaces the limits of a user in a band. Jobs that run go on.

    Args:
        user: the user, or `EVERYBODY` for all users without limits of their own.
        band: the band.
        limits: a limit that is None falls back to everybody's.
    """

    user: str
    band: PriorityBand
    limits: Limits


@dataclass(frozen=True, slots=True)
class SettingSetEvent:
    """An operator has set the setting of this name. None restores its default."""

    name: str
    to: WasSet | None


@dataclass(frozen=True, slots=True)
class WorkerSuspectedEvent:
    """The worker did not answer. It takes no new tasks for a while; Ray may declare it dead before."""

    node_id: str
    reason: Words
    now: float


@dataclass(frozen=True, slots=True)
class WorkerFailedEvent:
    """The worker is lost, with everything that ran on it."""

    node_id: str
    reason: Words


@dataclass(frozen=True, slots=True)
class GangAssignedEvent:
    """All tasks of a gang get their workers at once: ``groups`` has the node ids of each group, in order.

    The state numbers the groups: those that the gang ran on before keep their numbers. ``gang`` is the gang's position.
    """

    job_id: str
    group_names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    gang: int = 0


@dataclass(frozen=True, slots=True)
class TasksAssignedEvent:
    """Tasks of a job that is not coscheduled get a worker."""

    job_id: str
    task_indices: tuple[int, ...]
    node_id: str


JobAssignedEvent = GangAssignedEvent | TasksAssignedEvent


@dataclass(frozen=True, slots=True)
class GroupAssignedEvent:
    """All jobs of a group get hosts, each with all its gangs: the group starts.

    Args:
        assignments: those of the job that stands for the group come first.
    """

    assignments: tuple[JobAssignedEvent, ...]

    @property
    def job_id(self) -> str:
        """The job that stands for the group."""
        return self.assignments[0].job_id


AssignedEvent = JobAssignedEvent | GroupAssignedEvent


@dataclass(frozen=True, slots=True)
class PromiseEvent:
    """These hosts, and no others, are kept for a job until it runs. Without hosts, its promise ends.

    Args:
        job_id: the job.
        node_ids: the hosts.
        leave: attempts on these hosts that have to leave: spares at once, others at the deadline if not before.
        deadline: seconds.
        reason: why an earlier promise is called off, in words, or an empty string.
    """

    job_id: str
    node_ids: tuple[str, ...]
    leave: tuple[AttemptId, ...] = ()
    deadline: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobYieldsEvent:
    """The owner of a job of one gang offers the job's hosts to any job that waits, or takes that offer back."""

    job_id: str
    yields: bool


@dataclass(frozen=True, slots=True)
class TaskUnschedulableEvent:
    """A gang that never ran is given up, and its job with it."""

    job_id: str
    task_index: int
    reason: Words


@dataclass(frozen=True, slots=True)
class TaskDispatchFailedEvent:
    """An attempt could not be started as a whole. Its gang is requeued after a pause and not charged.

    Args:
        attempt, error, now: which attempt failed, why and when.
        groups: names of the attempt's groups in which a host could not be made ready. If the attempt has no group of
            these names, any of its hosts may be at fault.
        counts: whether it counts among the failed launches in a row that end a job. It does not if the gang only has
            to wait for another task of iris_ray.
        blames_hosts: whether its hosts may be at fault. They are not if what the job asks for is missing elsewhere.
    """

    attempt: AttemptId
    error: Words
    now: float
    groups: tuple[str, ...] = ()
    counts: bool = True
    blames_hosts: bool = True


@dataclass(frozen=True, slots=True)
class TaskStateChangedEvent:
    """One task of an attempt reports RUNNING, SUCCEEDED, FAILED or WORKER_FAILED.

    Args:
        attempt, task_index, new_state: the attempt, the task and its state now.
        error: why the task failed, for people.
        exit_code: of its process if the task failed, or None if that is not known.
        is_hopeless: whether the task FAILED because none of several hosts could set up what its job asks for. A job
            that has never run then ends at once.
        is_hang: whether the attempt ended because no task of the gang had made progress for too long.
    """

    attempt: AttemptId
    task_index: int
    new_state: TaskState
    error: Words | None = None
    exit_code: int | None = None
    is_hopeless: bool = False
    is_hang: bool = False


@dataclass(frozen=True, slots=True)
class AttemptMarkedEvent:
    """A task has reported how the time of its attempt was used: soon after its second step, and at its end."""

    attempt: AttemptId
    marks: Marks


@dataclass(frozen=True, slots=True)
class AttemptSavesEvent:
    """A task has told that it has saved its state again, or that it asks for notices.

    Args:
        attempt: the task's.
        saved_at: when its latest save ended that outlives the hosts; 0 if it has said nothing of one; seconds.
        every_s: the seconds between its latest two saves; infinite if there were no two.
        heeds_notices: whether it asks for notices.
    """

    attempt: AttemptId
    saved_at: float = 0.0
    every_s: float = math.inf
    heeds_notices: bool = False


@dataclass(frozen=True, slots=True)
class GangMovedEvent:
    """A gang ended its attempt to run elsewhere: it has saved its state, or its hosts leave before it has started.

    It is requeued and not charged.

    Attributes:
        started: whether its tasks ran.
    """

    attempt: AttemptId
    reason: Words
    started: bool = True


@dataclass(frozen=True, slots=True)
class GangReturnedEvent:
    """The caller has the results of an attempt that had been ended, because a host was lost after its task returned."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class WorkerBlamedEvent:
    """A task process could not be started on the worker, or crashed there before any other task of its gang.

    Args:
        node_id: the worker.
        job_id: the task's job.
        reason: what happened, in words.
        fault: the kind of failure. Unless the host itself shows it, it counts against the pair of user and host.
    """

    node_id: str
    job_id: str
    reason: Words
    fault: Fault


@dataclass(frozen=True, slots=True)
class AttemptEndConfirmedEvent:
    """None of the attempt's processes is left on any host. Its capacity is free."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PoolRestartedEvent:
    """The process of a pool died and was restarted. Its tasks are gone, and so are results not handed over."""

    owner: str


@dataclass(frozen=True, slots=True)
class SliceHeldEvent:
    """The owner reports that it holds the slice. A restarted Controller learns this from its pools."""

    slice_name: str
    owner: str


@dataclass(frozen=True, slots=True)
class SliceReleasedEvent:
    """The owner no longer holds the slice."""

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
    | PastUsageEvent
    | LimitsSetEvent
    | TeamsSetEvent
    | SettingSetEvent
    | WorkerSuspectedEvent
    | WorkerFailedEvent
    | GangAssignedEvent
    | TasksAssignedEvent
    | GroupAssignedEvent
    | PromiseEvent
    | JobYieldsEvent
    | TaskUnschedulableEvent
    | TaskDispatchFailedEvent
    | TaskStateChangedEvent
    | AttemptMarkedEvent
    | AttemptSavesEvent
    | GangMovedEvent
    | GangReturnedEvent
    | WorkerBlamedEvent
    | AttemptEndConfirmedEvent
    | PoolRestartedEvent
    | SliceHeldEvent
    | SliceReleasedEvent
)


E = TypeVar("E")

# -- the reports of a pool about an attempt, in their order, as real and simulated pools send them -------------------


def all_reached(attempt: AttemptId, tasks: Iterable[int], state: TaskState) -> list[TaskStateChangedEvent]:
    """Return the reports that these tasks of an attempt, given by their indexes, run or have returned."""
    return [TaskStateChangedEvent(attempt, index, state) for index in tasks]


def attempt_over(
    attempt: AttemptId, why: Iterable[E] = (), released: Iterable[SliceReleasedEvent] = ()
) -> list[E | SliceReleasedEvent | AttemptEndConfirmedEvent]:
    """Return the reports of an attempt of which no process is left.

    The confirmation of the end comes last, since it gives the hosts to other attempts. After success there is nothing
    else to report: the results come long before the processes are gone.

    Args:
        attempt: the attempt.
        why: reports about its hosts, and after them the report of its end, so that a requeued gang avoids these hosts.
        released: its slices that its pool gives back. Its other slices may stay warm.
    """
    return [*why, *released, AttemptEndConfirmedEvent(attempt)]
