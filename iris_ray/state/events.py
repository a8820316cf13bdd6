"""Events: everything that can change the Controller's state. Times are in seconds on the caller's clock.

Reports name the attempt that they concern; a report about an earlier attempt has no effect.
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
    """A job is submitted. A duplicate submission has no effect; a different job with the same id is refused.

    If another pool submits a group again that ended before its start, the group's ended jobs are forgotten first.
    """

    spec: JobSpec
    now: float


@dataclass(frozen=True, slots=True)
class JobRestoredEvent:
    """A job is restored from an earlier Controller's record. Live workers must be registered first."""

    record: JobRecord


@dataclass(frozen=True, slots=True)
class TimePassedEvent:
    """The clock has reached this time. Gangs that are requeued later count as waiting from then on."""

    now: float


@dataclass(frozen=True, slots=True)
class JobCancelledEvent:
    """A user, or the job's pool, cancels the job. Attempts that have hosts are stopped."""

    job_id: str
    reason: Words


@dataclass(frozen=True, slots=True)
class WorkerRegisteredEvent:
    """A worker has appeared, or its properties have changed.

    Its occupants are kept, unless it comes back in another group than their gangs', or with less than they hold: then
    it counts as lost and new.

    Args:
        node_id, address, attributes, resources, foreign, elsewhere: see `Worker`.
        draining: why the worker is about to be lost, for people, or None.
        deadline: when the worker will be lost, or None if unknown; seconds.
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
    """A worker is about to be lost. It takes no new tasks, and its gangs get a notice.

    Args:
        node_id, reason, kind: the worker and the cause.
        deadline: the latest time at which it will be lost, or None if unknown; seconds.
        told_by: the owner of the pool that reports it and has told its own gangs, or None.
    """

    node_id: str
    reason: Words
    kind: NoticeKind = NoticeKind.PREEMPTION
    deadline: float | None = None
    told_by: str | None = None


@dataclass(frozen=True, slots=True)
class MaintenanceCalledOffEvent:
    """An announced maintenance of the worker is cancelled. Its drains and preemptions stay."""

    node_id: str


@dataclass(frozen=True, slots=True)
class TaintedEvent:
    """A worker or a slice gets a taint: jobs that don't tolerate it are not placed there. Running tasks continue.

    The taint persists across registrations until it expires or is lifted.

    Args:
        target: a worker's node id or a slice's name, which need not exist yet.
        taint: the taint's name, without the prefix.
        reason: the reason, for people.
        until: when the taint expires, or None for never; seconds.
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
    """The past usage of all users and teams is restored from an earlier Controller's record.

    Args:
        hours: user → amount-hours by Ray's resource names; see `PastUsage`.
        at: when these sums were recorded; seconds.
        of_teams: team → amount-hours.
    """

    hours: Mapping[str, Mapping[str, float]]
    at: float
    of_teams: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TeamsSetEvent:
    """An operator replaces the tree of teams. Running jobs count for their team or its closest remaining ancestor."""

    teams: tuple[Team, ...]


@dataclass(frozen=True, slots=True)
class LimitsSetEvent:
    """An operator replaces the limits of a user in a band. Running jobs continue.

    ``user`` can be `EVERYBODY`, for all users without limits of their own. A limit of None falls back to everybody's.
    """

    user: str
    band: PriorityBand
    limits: Limits


@dataclass(frozen=True, slots=True)
class SettingSetEvent:
    """An operator changes a setting. None restores its default."""

    name: str
    to: WasSet | None


@dataclass(frozen=True, slots=True)
class WorkerSuspectedEvent:
    """The worker did not answer. It takes no new tasks for 20 s, in which Ray usually finds a dead host."""

    node_id: str
    reason: Words
    now: float


@dataclass(frozen=True, slots=True)
class WorkerFailedEvent:
    """The worker is lost, with all tasks on it."""

    node_id: str
    reason: Words


@dataclass(frozen=True, slots=True)
class GangAssignedEvent:
    """All tasks of a gang get workers at once: ``groups`` has the node ids of each group, in order.

    The state numbers the groups; groups that the gang ran on before keep their numbers. ``gang`` is its position.
    ``lent_by`` has the ids of the jobs for which some of the hosts are reserved and which lend them.
    """

    job_id: str
    group_names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    gang: int = 0
    lent_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TasksAssignedEvent:
    """Independent tasks of a job get a worker. ``lent_by``: see `GangAssignedEvent`."""

    job_id: str
    task_indices: tuple[int, ...]
    node_id: str
    lent_by: tuple[str, ...] = ()


JobAssignedEvent = GangAssignedEvent | TasksAssignedEvent


@dataclass(frozen=True, slots=True)
class GroupAssignedEvent:
    """All gangs of all jobs of a group get hosts: the group starts. The leader's assignments come first."""

    assignments: tuple[JobAssignedEvent, ...]

    @property
    def job_id(self) -> str:
        """The id of the group's leader, the job that represents the group in the queue."""
        return self.assignments[0].job_id


AssignedEvent = JobAssignedEvent | GroupAssignedEvent


@dataclass(frozen=True, slots=True)
class PromiseEvent:
    """Exactly these hosts are reserved for a job, until it runs or a later event ends that.

    Without hosts, its promise ends.

    Args:
        job_id, node_ids: the job and its hosts.
        leave: attempts on these hosts that must leave: spares at once, others by the deadline.
        deadline: the deadline for the attempts in ``leave``; seconds. One whose next save is due soon may finish it.
        reason: why an earlier promise is revoked, for people; otherwise empty.
        removed_by: when the slices of the hosts must be gone, if they are to be removed; seconds. 0: they stay.
    """

    job_id: str
    node_ids: tuple[str, ...]
    leave: tuple[AttemptId, ...] = ()
    deadline: float = 0.0
    reason: str = ""
    removed_by: float = 0.0


@dataclass(frozen=True, slots=True)
class JobYieldsEvent:
    """The owner of a job of one gang offers the job's hosts to any waiting job, or withdraws the offer."""

    job_id: str
    yields: bool


@dataclass(frozen=True, slots=True)
class TaskUnschedulableEvent:
    """A waiting gang of a job that never ran is given up, which ends the job. If the job has run, nothing happens."""

    job_id: str
    task_index: int
    reason: Words


@dataclass(frozen=True, slots=True)
class TaskDispatchFailedEvent:
    """An attempt could not be launched. Its gang waits again and pauses for a while, and no budget is charged.

    A job that never ran ends after 19 failed launches of a gang in a row, unless it has a ``scheduling_timeout``.

    Args:
        attempt, error, now: the attempt, the cause and the time.
        groups: names of the groups in which a host could not be prepared. If the attempt has no group of these names,
            any of its hosts may be at fault.
        counts: whether it counts among the consecutive failed launches that end a job. It does not if the gang only
            has to wait for another task of iris_ray, or has found that these hosts have another version.
        blames_hosts: whether the hosts may be at fault. They are not if something that the job needs is missing
            elsewhere.
    """

    attempt: AttemptId
    error: Words
    now: float
    groups: tuple[str, ...] = ()
    counts: bool = True
    blames_hosts: bool = True


@dataclass(frozen=True, slots=True)
class TaskStateChangedEvent:
    """A task of an attempt reports RUNNING, SUCCEEDED, FAILED or WORKER_FAILED.

    Args:
        attempt, task_index, new_state: the attempt, the task and its new state.
        error: why the task failed, for people.
        exit_code: the exit code of a failed task's process; None if unknown.
        is_hopeless: whether the task FAILED because none of several hosts could set up the job's environment, or all
            suitable hosts have another version. If no task of the job has run before, the job then ends at once.
        is_hang: whether the attempt ended because no task of the gang made progress for too long.
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
    """A task reports how it used the time of its attempt, soon after its second step and at its end."""

    attempt: AttemptId
    marks: Marks


@dataclass(frozen=True, slots=True)
class AttemptSavesEvent:
    """A task reports that it has saved its state, or that it asks for notices.

    Args:
        attempt: the task's attempt.
        saved_at: when its latest save that outlives the hosts ended; 0 if it has reported none; seconds.
        every_s: seconds between its latest two saves; infinite without two.
        heeds_notices: whether it asks for notices.
    """

    attempt: AttemptId
    saved_at: float = 0.0
    every_s: float = math.inf
    heeds_notices: bool = False


@dataclass(frozen=True, slots=True)
class GangMovedEvent:
    """A gang has ended its attempt in order to move: it has saved its state, or its hosts are lost before its start.

    It is requeued, and no budget is charged. But if the job's ``max_runtime`` is nearly over, the gang doesn't run
    again; and an evicted job that has run ends if ``max_retries_preemption`` is 0. ``started``: whether its tasks ran.
    """

    attempt: AttemptId
    reason: Words
    started: bool = True


@dataclass(frozen=True, slots=True)
class GangReturnedEvent:
    """The caller has the results of an attempt that was ended because a host was lost after its task returned."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class WorkerBlamedEvent:
    """Something has failed that may be the worker's fault.

    A task process could not be started, was the first of its gang to crash, found the disk full or faulty, or held up
    its gang; or the host reports that it is unfit.

    Args:
        node_id, job_id: the worker and the task's job.
        reason: a description for people.
        fault: the kind of failure. Unless the host itself reports it, it counts against the pair of user and host.
    """

    node_id: str
    job_id: str
    reason: Words
    fault: Fault


@dataclass(frozen=True, slots=True)
class AttemptEndConfirmedEvent:
    """All processes of the attempt are gone on all hosts. Its resources are free once the attempt has ended."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PoolRestartedEvent:
    """A pool's process died and was restarted. Its tasks and undelivered results are lost."""

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

# -- a pool's reports about an attempt, in order, as real and simulated pools send them ------------------------------


def all_reached(attempt: AttemptId, tasks: Iterable[int], state: TaskState) -> list[TaskStateChangedEvent]:
    """Return the reports that these tasks of an attempt, by index, have reached a state."""
    return [TaskStateChangedEvent(attempt, index, state) for index in tasks]


def attempt_over(
    attempt: AttemptId, why: Iterable[E] = (), released: Iterable[SliceReleasedEvent] = ()
) -> list[E | SliceReleasedEvent | AttemptEndConfirmedEvent]:
    """Return the reports of an attempt whose processes are all gone.

    The confirmation comes last, since it gives the hosts to other attempts. After success it is the only report: the
    results arrive long before the processes are gone.

    Args:
        attempt: the attempt.
        why: reports about its hosts, followed by the report of its end, so that the requeued gang avoids the hosts.
        released: the slices that its pool releases. Its other slices may stay warm.
    """
    return [*why, *released, AttemptEndConfirmedEvent(attempt)]
