"""The status of jobs, tasks and hosts as people see it: plain data, made from the Controller's state on request."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from iris_ray.model.goodput import Marks
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.pending_reason import PendingReason

if TYPE_CHECKING:  # pools and clients have no state of the Controller, and its import takes a tenth of a second
    from iris_ray.state import ControllerState

PAGE = 500
"""The number of jobs, tasks or hosts in one answer of the Controller. A full page may be followed by another one."""


READ = "read"
"""The key of the function that reads a field, in the metadata of the field."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Heard:
    """The latest progress of an attempt.

    Attributes:
        at: when it was reported, on the Controller's clock.
        beat_at: when a task last called ``heartbeat``, on the same clock; None if none has.
        step, status, marks, stragglers, stall_limit: see `GangProgress`.
    """

    gang: int
    attempt: int
    at: float
    beat_at: float | None
    step: int | None
    status: str | None
    marks: Marks
    stragglers: tuple[str, ...]
    stall_limit: str | None


class JobFacts(NamedTuple):
    """A job as the Controller knows it, from which all its other forms are read.

    Attributes:
        job, state: the job, and the state that holds it.
        wall: converts a time of the state to wall time.
        heard: the latest progress of its tasks, if there is any.
        waiting: why it, or a part of it, waits; None if no part waits, or nobody asks.
    """

    job: Job
    state: "ControllerState"
    wall: Callable[[float], float]
    heard: Heard | None = None
    waiting: PendingReason | None = None

    def wall_or_none(self, at: float | None) -> float | None:
        """Return the wall time at a time of the state; None for None."""
        return None if at is None else self.wall(at)

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def running(self) -> Heard | None:
        """The latest progress, if the job runs."""
        return self.heard if self.job.state is JobState.RUNNING else None


def seen(read: Callable[[JobFacts], T], *forms: str, **renamed: str) -> T:
    """Return a field of `JobStatus`, with what other forms of a job call it.

    Args:
        read: reads its value.
        forms: the other forms that have the field: "row" in the dashboard's table, "history" (a column of ``jobs``),
            "goodput" (`JobGoodput`), and "export" (a finished job in an exported file).
        renamed: further forms, each with the name that the field has there.
    """
    found: T = field(metadata={READ: read, **dict.fromkeys(forms), **renamed})
    return found


# To show one more fact of jobs, add a field: all forms that it names have it.
@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job.

    Its progress (``step``, ``status``, ``stragglers``, ``stall_limit`` and ``heartbeat_at``) is that of its gang. Of a
    job with several gangs, such as independent tasks, it is that of the first gang that reports some.

    Attributes:
        number: its number in the order of submission.
        job_id, name, user, priority, device: as submitted.
        priority_reason: why it is in the band SYSTEM; None in others.
        state: derived from its tasks.
        submitted_at: seconds since the epoch.
        attempt: the number of its gang's attempt, or the highest of its gangs.
        failures, preemptions: charged so far.
        max_retries_failure, max_retries_preemption: how many each gang may have.
        evictions: how often its gangs were ended for other jobs: of a higher band, of a team that reclaimed its quota,
            or for which the hosts were reserved; for any job if it yields. Evictions cost no retries; with
            ``max_retries_preemption=0`` an eviction ends the job.
        gives_way: why it must give its hosts to another job now, and the deadline, in seconds since the epoch; or None.
        num_groups: the numbers of slices (or of racks and the like) on which it can run; empty if it asks for none.
        spare_for: the job for which it only holds slices ready, or None.
        tasks: how many are in each state; to the Controller a host's processes are one task.
        groups: the names of the slices on which it runs now. For a gang without TPUs: the values of ``group_by``, such
            as names of racks; for independent tasks on hosts outside slices: Ray's node ids. Empty while it waits. Not
            to be confused with ``group``.
        error: why its latest attempt, or the job, ended.
        waiting: why it, or a part of it, waits; None if no part waits.
        step: the furthest step that a task has reported by ``heartbeat(step)`` in the latest attempt that has reported.
        status: the latest ``report_status`` of the first task that calls it.
        stragglers: tasks that are clearly slower than the others, in words, the slowest first; empty unless it runs.
        stall_limit: the time without a heartbeat after which it starts again, and why; None: never, not known yet, or
            it does not run.
        yields: whether it waits behind all others, and gives its hosts to any waiting job.
        heartbeat_at: when a task last called ``heartbeat``, seconds since the epoch; None if none has.
        processes_per_host: how many processes each of ``tasks`` consists of. Each has a log.
        failure_domain: the tasks that restart together: those of the whole "job", or of each "slice".
        team: the team for which it counts; empty for none.
        about_team: how that team's quota stands, in a sentence; None without teams, and in lists of jobs.
        started_at: when its first task ran, seconds since the epoch; None if none has.
        ended_at: when it ended, likewise; None if it has not.
        ends_at: when its ``max_runtime`` is over, seconds since the epoch; None if it has none, has not run, or has
            ended.
        group: the name of the `JobGroup` that it belongs to; empty for none.
        group_jobs: the ids of all jobs of that group.
    """

    number: int = seen(lambda of: of.job.number, "row", "goodput")
    job_id: str = seen(lambda of: of.spec.job_id, "history", "goodput", "export", row="id")
    name: str = seen(lambda of: of.spec.name or of.spec.job_id, "row", "history")
    user: str = seen(lambda of: of.spec.user, "row", "history", "goodput", "export")
    priority: PriorityBand = seen(lambda of: of.spec.priority, row="band", history="band")
    priority_reason: str | None = seen(lambda of: of.spec.priority_reason)
    device: str | None = seen(lambda of: of.spec.device, "export", row="type", history="type")
    state: JobState = seen(lambda of: of.job.state, "row", "history", "goodput", "export")
    submitted_at: float = seen(lambda of: of.wall(of.job.submitted_at), "history", "goodput", "export", row="submitted")
    attempt: int = seen(lambda of: of.job.attempt, "row", history="attempts", goodput="attempts", export="attempts")
    failures: int = seen(lambda of: of.job.failures, "row", "history", "export")
    preemptions: int = seen(lambda of: of.job.preemptions, "row", "history", "export")
    max_retries_failure: int = seen(lambda of: of.spec.max_retries_failure)
    max_retries_preemption: int = seen(lambda of: of.spec.max_retries_preemption)
    tasks: Mapping[TaskState, int] = seen(lambda of: dict(of.job.counts), "row")
    groups: tuple[str, ...] = seen(
        lambda of: tuple(dict.fromkeys(name for gang in of.state.placed_gangs(of.job) for name in gang.groups)), "row"
    )
    error: str | None = seen(lambda of: of.job.error, "row", "history", "export")
    waiting: PendingReason | None = seen(lambda of: of.waiting)
    evictions: int = seen(lambda of: of.job.evictions, "row", "history")
    gives_way: tuple[str, float] | None = seen(lambda of: _gives_way(of), "row")
    step: int | None = seen(lambda of: of.heard.step if of.heard else None, "row", "history")
    status: str | None = seen(lambda of: of.heard.status if of.heard else None, row="says", history="says")
    heartbeat_at: float | None = seen(lambda of: of.wall_or_none(of.heard.beat_at) if of.heard else None)
    num_groups: tuple[int, ...] = seen(
        lambda of: of.spec.coscheduling.num_groups if of.spec.coscheduling else (),
        row="wants",
        history="slices",
    )
    spare_for: str | None = seen(lambda of: of.spec.spare_for.job_id if of.spec.spare_for else None, "row")
    stragglers: tuple[str, ...] = seen(lambda of: of.running.stragglers if of.running else ())
    yields: bool = seen(lambda of: of.job.yields)
    processes_per_host: int = seen(lambda of: of.spec.processes_per_host)
    failure_domain: str = seen(lambda of: of.spec.failure_domain)
    stall_limit: str | None = seen(lambda of: of.running.stall_limit if of.running else None)
    team: str = seen(lambda of: of.state.teams.teams.nearest(of.spec.team), "row")
    started_at: float | None = seen(lambda of: None if math.isinf(of.job.began_at) else of.wall(of.job.began_at))
    ended_at: float | None = seen(lambda of: of.wall_or_none(of.job.times.ended_at))
    ends_at: float | None = seen(lambda of: None if of.job.over or math.isinf(end := of.job.ends_at) else of.wall(end))
    group: str = seen(lambda of: of.spec.group.name if of.spec.group else "", "row")
    group_jobs: tuple[str, ...] = seen(lambda of: tuple(of.spec.group.job_ids.values()) if of.spec.group else ())
    about_team: str | None = None

    @property
    def starting(self) -> bool:
        """Whether it has its slices and no task of it runs yet."""
        there = {state for state, count in self.tasks.items() if count}
        return TaskState.ASSIGNED in there and not there & {TaskState.RUNNING, TaskState.PENDING}

    @property
    def how_far(self) -> str:
        """Its step and status in words, or an empty string."""
        step = None if self.step is None else f"step {self.step}"
        return ": ".join(filter(None, (step, self.status)))

    @property
    def explanation(self) -> str:
        """Why it waits, or that it does not wait, in a sentence."""
        where = f" on {', '.join(self.groups)}" if self.groups else ""
        if self.state.finished:
            because = f": {self.error}" if self.error and self.state is not JobState.SUCCEEDED else ""
            return f"it does not wait, it has ended: {self.state.value}{because}"
        if self.waiting is not None:
            return str(self.waiting)
        if self.starting:
            return f"it does not wait: attempt {self.attempt} is being started{where}"
        if self.state is JobState.RUNNING:
            but = "; any job that waits may have its hosts" if self.yields else ""
            but = f"; its hosts are to go: {self.gives_way[0]}" if self.gives_way else but
            limit = f"; it starts again after {self.stall_limit} without a heartbeat" if self.stall_limit else ""
            return f"it does not wait: attempt {self.attempt} is running{where}{but}{limit}"
        return "it will be looked at in a moment"


def _gives_way(of: JobFacts) -> tuple[str, float] | None:
    """Return why the first gang with an eviction gives way, and the deadline."""
    evictions = (gang.eviction for gang in of.state.placed_gangs(of.job))
    return next(((one.reason, of.wall(one.deadline)) for one in evictions if one is not None), None)


def fields_in(form: str) -> dict[str, str]:
    """Return the names that the fields of a `JobStatus` have in another form, by their own names; see `seen`."""
    found = {one.name: one.metadata for one in fields(JobStatus)}
    return {name: metadata[form] or name for name, metadata in found.items() if form in metadata}


_READERS = {one.name: one.metadata[READ] for one in fields(JobStatus) if READ in one.metadata}


def job_status(of: JobFacts) -> JobStatus:
    return JobStatus(**{name: read(of) for name, read in _READERS.items()})


def job_in(form: str, of: JobFacts) -> dict[str, Any]:
    """Return the values of a job that another form has, by the names that they have there."""
    return {there: _READERS[name](of) for name, there in fields_in(form).items()}


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A past or announced event of a job.

    Attributes:
        at: seconds since the epoch.
        task_index: the event's task, if the job's tasks do not start together; of a gang its first process, by the
            index that logs have.
        attempt: the event's attempt; None for an event of the whole job.
        what: the event in words.
    """

    at: float
    task_index: int | None
    attempt: int | None
    what: str


@dataclass(frozen=True, slots=True)
class TaskAttempt:
    """One attempt of a task.

    Attributes:
        attempt: its number, from 1.
        state: COSCHED_FAILED: another task of its gang ended first. KILLED: also an attempt that could not be started,
            has moved, or was evicted, and was free of charge.
        group: the slice, or other group, that it ran on.
        started_at, ended_at: when it was reported to run and to have ended, or for an earlier attempt its gang; seconds
            since the epoch, None before that.
        exit_code: of its process, 128 plus the signal's number for a signal; None if it is not known, or if
            another task ended an earlier attempt first.
        error: why it ended.
    """

    attempt: int
    state: TaskState
    group: str | None
    started_at: float | None
    ended_at: float | None
    exit_code: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The status of a task.

    Attributes:
        state, attempt: now, or when its job ended.
        started_at, ended_at, exit_code: of that attempt, see `TaskAttempt`.
        failures, preemptions: charged so far to the task's gang.
        evictions: how often the gang was ended for another job, as in `JobStatus`.
        attempts: the latest attempts, the present one at the end.
        node_id, address, group, host: Ray's node id, IP address, slice (or other group), and the host's name for
            people; None while the task waits. The address and the name are also None once the host is gone.
        error: why its latest attempt ended.
        processes: how many processes of its host it consists of. Each counts as a task to its user: the first has the
            index ``task_index * processes``.
    """

    task_id: str
    task_index: int
    state: TaskState
    attempt: int
    started_at: float | None
    ended_at: float | None
    exit_code: int | None
    failures: int
    preemptions: int
    attempts: tuple[TaskAttempt, ...]
    node_id: str | None
    address: str | None
    group: str | None
    host: str | None
    error: str | None
    evictions: int = 0
    processes: int = 1

    @property
    def indices(self) -> range:
        """The indices by which users know the processes of the task: ``task_index``, if there is only one."""
        return range(self.task_index * self.processes, (self.task_index + 1) * self.processes)

    @property
    def worker_id(self) -> str | None:
        """``node_id`` under the name that Iris's clients know."""
        return self.node_id


class HostCondition(Enum):
    """The condition of a host in one word. If several hold, the first one counts.

    LOST: the dashboard's word for a missing host of a slice. SUSPECTED: it may be lost. DRAINING: it is about to go, or
    was drained. SPARE: it is held ready for a job. BUSY: tasks use it. QUARANTINED: iris_ray keeps jobs off it after
    faults. CLOSED: it has another taint. ELSEWHERE: a process outside iris_ray uses its chips. UNUSABLE: no job can
    ever get it. WARM: a process has reserved it for its next run. FREE: none of these.
    """

    LOST = "lost"
    SUSPECTED = "suspected"
    DRAINING = "draining"
    SPARE = "spare"
    BUSY = "busy"
    QUARANTINED = "quarantined"
    CLOSED = "closed"
    ELSEWHERE = "elsewhere"
    UNUSABLE = "unusable"
    WARM = "warm"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The status of a host.

    Attributes:
        node_id, address: Ray's node id and the IP address.
        slice_name, host_index, device: its slice, its number there, and the slice's type; None outside a slice.
        resources, free: by Ray's resource names.
        attributes: for constraints, including taints; empty if no job can ever get the host, because of its labels or
            chips.
        tasks: ids of the tasks that hold resources of it.
        unavailable: why it takes no new tasks, or only those that tolerate its taints; None if it takes any.
        holder: the id of the process (a SlicePoolManager) that has reserved its slice, for a running job or to keep it
            warm; None if nobody has.
        condition: all this in one word.
        draining: why it is draining, as a part of ``unavailable``, or None.
        suspected: why it may be lost, as a part of ``unavailable``, or None.
        foreign: the process outside iris_ray that uses its chips, as a part of ``unavailable``, or None.
    """

    node_id: str
    address: str
    slice_name: str | None
    host_index: int | None
    device: str | None
    resources: Mapping[str, float]
    free: Mapping[str, float]
    attributes: Mapping[str, str | int | float | bool]
    tasks: tuple[str, ...]
    unavailable: str | None
    holder: str | None
    condition: HostCondition
    draining: str | None = None
    suspected: str | None = None
    foreign: str | None = None

    @property
    def place(self) -> "Place":
        """The key by which hosts are sorted."""
        return self.slice_name or "", self.host_index or 0, self.node_id


Place = tuple[str, int, str]
"""A host's slice and its number there, and its node id."""


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """The limits and the usage of a user in one band.

    Attributes:
        user: the user; ``*`` for the limits of all users, which a user's own limits replace one by one.
        set_here: the limits that operators have set for this user in this band; the others are None.
        limits: the limits that hold; none of them is None.
        chips, running_jobs, queued_jobs, tasks: the usage that counts towards the limits.
    """

    user: str
    band: PriorityBand
    set_here: Limits
    limits: Limits
    chips: float
    running_jobs: int
    queued_jobs: int
    tasks: int
