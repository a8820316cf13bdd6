"""Jobs in progress, with their gangs and tasks. Pure data that only `ControllerState` changes.

A *gang* consists of the tasks that start and fail together: all tasks of a coscheduled job, or those of one slice if
the job's failure domain is the slice. An independent task is a gang of one. Every rule about attempts, budgets and
capacity therefore exists once, for gangs. All gangs of a job have the same number of tasks.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass, field

from iris_ray.model.goodput import JobTimes
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import Requirement

_S = TaskState

MOST_FAILED_LAUNCHES = 10
"""The number of consecutive failed launches of a gang after which the pauses between them grow longer."""


@dataclass(slots=True)
class Task:
    """A process on a host, in its latest attempt.

    Attributes:
        task_id, index, state: its id, its index in the job, and its state.
        node_id: its host; None while it waits for one.
        error: why its latest attempt ended.
        started_at, ended_at: when its latest attempt was reported as running and as ended; None before that.
        exit_code: its process's exit code, once the attempt has ended; None if unknown.
    """

    task_id: str
    index: int
    state: TaskState = TaskState.PENDING
    node_id: str | None = None
    error: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None


ATTEMPTS_KEPT = 5
"""The number of past attempts that are kept for each gang."""
ATTEMPT_ERROR_CHARACTERS = 300
"""The number of characters that are kept of a past attempt's error."""


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """A past attempt of a gang that was requeued afterwards.

    Attributes:
        number: the attempt's number within the gang, from 1.
        state: FAILED or WORKER_FAILED, according to the budget charged; KILLED if no budget was charged, because the
            attempt could not be started, moved, or was evicted.
        groups: names of the groups that it ran on.
        started_at: when its first task was reported as running; None if none was.
        ended_at: when its end became known.
        cause: index of the task that ended first; None if none did.
        exit_code: that task's exit code; None if unknown.
        error: the beginning of the error that ended it.
    """

    number: int
    state: TaskState
    groups: tuple[str, ...]
    started_at: float | None
    ended_at: float
    cause: int | None
    exit_code: int | None
    error: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """An order to a running gang to leave its hosts to another job.

    Attributes:
        job_id: the job to which the hosts are promised.
        deadline: when the gang's attempt is stopped, unless it moves earlier; seconds.
        reason: the job that takes the hosts, and why, for people.
    """

    job_id: str
    deadline: float
    reason: str

    @property
    def notice(self) -> Notice:
        """The notice that its tasks receive."""
        return Notice(NoticeKind.EVICTION, self.reason, self.deadline)


@dataclass(frozen=True, slots=True)
class Promise:
    """A reservation of hosts for a job until it runs there.

    Attributes:
        node_ids: the hosts.
        given_up: the victims: attempts, as text, that were asked to leave for the job. With victims the promise is
            firm: until it is kept, only a job of a higher band, or one that comes first by quota, can get a host of it.
        lent: ids of jobs that run on some of the hosts until the job needs them.
        removed_by: when the slices of the hosts must be gone, if they are to be removed so that the job gets slices of
            another type with their chips; seconds. 0: the job is to run on the hosts. Without victims, the slices are
            held until enough of them are idle.
    """

    node_ids: tuple[str, ...]
    given_up: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()
    removed_by: float = 0.0

    @property
    def is_firm(self) -> bool:
        """Whether any attempt was asked to leave for it."""
        return bool(self.given_up)


LAST_SAVE_S = 30.0
"""Seconds beyond the grace period for which a gang that ignores notices may run to finish a regular save."""
SAVES_LATE_S = 5.0
"""The delay of a regular save that is still tolerated, in seconds."""


Layout = tuple[tuple[str, tuple[str, ...]], ...]
"""The hosts of an attempt: for each group (slice) id, the group's name and the node id of each task's host."""


@dataclass(slots=True)
class Gang:
    """Tasks that start and fail together.

    Attributes:
        tasks: in the order of their hosts, group by group.
        succeeded: number of the tasks that have succeeded.
        attempt: number of the current or latest attempt; 0 before the first.
        failures, preemptions: attempts charged to each budget so far; an attempt is charged to one at most.
        evictions: attempts that left their hosts to other jobs; no budget is charged for these.
        dispatch_failures: failed launches since the last successful one.
        not_before: the earliest time at which the gang can be scheduled; seconds on the caller's clock.
        waiting_since: when it last entered the queue; seconds on the caller's clock.
        requeued: the number of its latest requeue within its job; 0 if it was never requeued. The gangs of a job wait
            in this order.
        groups: names of the groups that the current attempt runs on, by group (slice) id.
        returning_until: the time until which it precedes the other gangs of its band, after losing its hosts; seconds.
        running_since: when the first task of its latest attempt began to run; infinite before that; seconds.
        quick_ends: consecutive attempts that ended soon after their start.
        groups_wanted: the number of groups that it ran on before it lost some.
        notice: the notice given to its current attempt, or None.
        end_confirmed: whether the processes of its current attempt are gone, although the last report is still due.
        error: the first cause of the latest attempt's end, for people.
        past: its past attempts, latest last; at most `ATTEMPTS_KEPT`.
        eviction: the eviction of its current attempt, or None.
        last_ran: the layout of its last past attempt in which a task ran; empty without one.
        pays_at: when its latest move to more groups will have paid for itself; seconds.
        growths_undone: consecutive moves to more groups that were undone before they had paid for themselves.
        asks_at: the earliest time at which it asks for room to grow, after it gave room back; seconds.
        saved_at: when a task's latest save that outlives the hosts ended; 0 without one; seconds.
        saves_every_s: seconds between its latest two saves; infinite if unknown.
        heeds_notices: whether it saves its state when it receives a notice, judged by its last notice, or else by
            whether a task asks for notices; None if unknown.
        evicted_at: the latest times of its evictions; seconds.
        spared_until: until when borrowed quota is taken back from others first; seconds.
    """

    tasks: list[Task]
    succeeded: int = 0
    attempt: int = 0
    failures: int = 0
    preemptions: int = 0
    evictions: int = 0
    dispatch_failures: int = 0
    not_before: float = 0.0
    waiting_since: float = 0.0
    requeued: int = 0
    groups: tuple[str, ...] = ()
    returning_until: float = 0.0
    running_since: float = 0.0
    quick_ends: int = 0
    groups_wanted: int = 0
    notice: Notice | None = None
    end_confirmed: bool = False
    error: str | None = None
    past: tuple[PastAttempt, ...] = ()
    eviction: Eviction | None = None
    last_ran: Layout = ()
    pays_at: float = 0.0
    growths_undone: int = 0
    asks_at: float = 0.0
    saved_at: float = 0.0
    saves_every_s: float = math.inf
    heeds_notices: bool | None = None
    evicted_at: tuple[float, ...] = ()
    spared_until: float = 0.0

    # All tasks of a gang are pending, or none is; all have ended for good, or none has. So the first task decides.

    @property
    def position(self) -> int:
        """Its index among the gangs of its job."""
        return self.tasks[0].index // len(self.tasks)

    @property
    def groups_had(self) -> int:
        """The number of groups that it ran on before its last attempt ended or shrank."""
        return max(len(self.groups), self.groups_wanted)

    @property
    def pending(self) -> bool:
        """Whether it waits for hosts."""
        return self.tasks[0].state is _S.PENDING

    @property
    def placed(self) -> bool:
        """Whether its current attempt has hosts and has not ended."""
        state = self.tasks[0].state
        live = state is _S.ASSIGNED or state is _S.RUNNING or state is _S.SUCCEEDED
        return live and self.succeeded < len(self.tasks)

    @property
    def layout(self) -> Layout:
        """The layout of its current attempt. Requires that its tasks have hosts."""
        size = len(self.tasks) // len(self.groups)
        node_ids = [task.node_id or "" for task in self.tasks]
        return tuple((name, tuple(node_ids[i * size : (i + 1) * size])) for i, name in enumerate(self.groups))

    @property
    def attempts(self) -> list[PastAttempt | None]:
        """Its attempts that are remembered, the earliest first; None for the latest one, unless it has been requeued.

        An attempt that was called past and then succeeded after all is the latest one.
        """
        earlier: list[PastAttempt | None] = [p for p in self.past if p.number < self.attempt or not self.succeeded]
        is_past = earlier and earlier[-1] is not None and earlier[-1].number == self.attempt
        return earlier if is_past or not self.attempt else [*earlier, None]

    @property
    def previous_indices(self) -> dict[str, int]:
        """The index of the task on each host, by node id, in its last past attempt that ran."""
        node_ids = (node_id for _, node_ids in self.last_ran for node_id in node_ids)
        return {node_id: self.tasks[0].index + number for number, node_id in enumerate(node_ids)}

    def loses_since(self, now: float, deadline: float) -> float:
        """Return the time since which its work would be lost if it got a notice with this deadline now; seconds."""
        if self.heeds_notices or now <= self._next_save_at <= self.leaves_by(now, deadline):
            return now
        return max(self.running_since, self.saved_at)

    def leaves_by(self, now: float, deadline: float) -> float:
        """Return when it would be stopped if it got a notice with this deadline now; it may finish a save due soon."""
        if self.heeds_notices or not now <= self._next_save_at <= deadline + LAST_SAVE_S - SAVES_LATE_S:
            return deadline
        return max(deadline, self._next_save_at + SAVES_LATE_S)

    @property
    def _next_save_at(self) -> float:
        """The expected end of its current attempt's next save; infinite if unknown."""
        return self.saved_at + self.saves_every_s if self.saved_at > self.running_since else math.inf

    @property
    def is_to_grow(self) -> bool:
        """Whether its notice is to move to more slices."""
        return self.notice is not None and self.notice.kind is NoticeKind.GROWTH


Allocation = tuple[tuple[str, str, dict[str, float]], ...]
"""The resources that an attempt holds until its end is confirmed: (node id, task id, resources) of each task."""


@dataclass(frozen=True, slots=True, eq=False)  # equal kinds are the same object
class Kind:
    """A class of jobs for the scheduler: if one job finds too few groups, the others of its kind usually do.

    Attributes:
        has_equal_groups: whether it has several gangs, which take whole groups of one size.
        may_be_plain: see `Job.is_plain`.
    """

    requirement: Requirement
    device: str | None
    num_groups: tuple[int, ...]
    user: str
    team: str
    band: PriorityBand
    may_evict: bool
    has_equal_groups: bool
    may_be_plain: bool


@functools.lru_cache(maxsize=50_000)
def _kind(
    requirement: Requirement,
    device: str | None,
    num_groups: tuple[int, ...],
    user: str,
    team: str,
    band: PriorityBand,
    may_evict: bool,
    has_equal_groups: bool,
    may_be_plain: bool,
) -> Kind:
    return Kind(requirement, device, num_groups, user, team, band, may_evict, has_equal_groups, may_be_plain)


@dataclass(slots=True)
class Job:
    """A job with its progress.

    Attributes:
        number: its number in the order of submission.
        gangs: one if it is coscheduled, or one for each slice, otherwise one for each task.
        counts: the number of tasks in each state.
        pending: positions of the gangs that wait for hosts, in the order in which they are placed.
        attempt: the highest attempt number of its gangs.
        requeues: the number of times that its gangs were requeued.
        failures, preemptions, evictions: sums over its gangs.
        spares_made: the number of spares made for it so far, which numbers their ids.
        promise: the hosts reserved for it until it runs, or None.
        awaits: the unmet conditions on other jobs for it to enter the queue, by their ids; see `JobSpec.after`.
        ready_at: when its last such condition was met; 0 if it had none; seconds.
        started: whether any of its tasks ever ran; then nothing makes it unschedulable.
        began_at: when its first task ran; infinite before that; seconds.
        furthest_step: the furthest step that its attempts have reported, or None; only with ``stop_without_progress``.
        fruitless: the number of consecutive attempts without a new step; only with ``stop_without_progress``.
        over: the state in which it ended, or None.
        avoided: node ids of hosts on which its launches failed; see `iris_ray.state.quarantine`.
        avoided_until: when it tries these hosts again; seconds on the caller's clock.
        error: why its latest attempt, or the job, ended, for people.
        yields: whether its owner offers its hosts to any waiting job. When it waits itself, it comes last.
        times: when its attempts held chips and ran, if it is one gang.
        members: all jobs of its group, including itself, while it represents the group in the queue; otherwise empty.
        kind: the kind that it shares with jobs that ask for the same; see `Kind`.
    """

    spec: JobSpec
    number: int
    submitted_at: float
    requirement: Requirement
    gangs: list[Gang]
    counts: Counter[TaskState]
    pending: dict[int, None]
    attempt: int = 0
    requeues: int = 0
    failures: int = 0
    preemptions: int = 0
    evictions: int = 0
    spares_made: int = 0
    promise: Promise | None = None
    awaits: dict[str, str] = field(default_factory=dict)
    ready_at: float = 0.0
    started: bool = False
    began_at: float = math.inf
    furthest_step: int | None = None
    fruitless: int = 0
    over: JobState | None = None
    avoided: tuple[str, ...] = ()
    avoided_until: float = 0.0
    error: str | None = None
    yields: bool = False
    times: JobTimes = field(default_factory=JobTimes)
    members: tuple["Job", ...] = field(default=(), init=False, repr=False, compare=False)
    kind: Kind = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spec = self.spec
        about = self.requirement, spec.device, spec.groups_per_gang, spec.user, spec.team, spec.priority, spec.may_evict
        may_be_plain = spec.spare_for is None and spec.scheduling_timeout is None and spec.group is None
        self.kind = _kind(*about, spec.whole_groups and not spec.is_one_gang, may_be_plain)

    @property
    def is_plain(self) -> bool:
        """Whether it differs from other plain jobs of its kind only by age: it never had hosts and has no promise."""
        return self.kind.may_be_plain and not (self.attempt or self.avoided or self.promise or self.yields)

    @property
    def forms_group(self) -> bool:
        """Whether it belongs to a group that has not started, so that all its jobs get hosts at once."""
        return self.spec.group is not None and not self.attempt

    @property
    def gang(self) -> Gang:
        """The gang of a job that is one gang."""
        (gang,) = self.gangs
        return gang

    @property
    def tasks(self) -> list[Task]:
        """All tasks by index, as a new list. `task` and `size` take constant time."""
        return [task for gang in self.gangs for task in gang.tasks]

    @property
    def size(self) -> int:
        """The number of its tasks."""
        return len(self.gangs) * len(self.gangs[0].tasks)

    @property
    def ends_at(self) -> float:
        """When its ``max_runtime`` is over, in seconds; infinite if it has none or has not run."""
        return math.inf if self.spec.max_runtime is None else self.began_at + self.spec.max_runtime

    @property
    def num_processes(self) -> int:
        """The number of its processes, one or more for each task. Its user sees each process as a task."""
        return self.size * self.spec.processes_per_host

    def task_of(self, process: int) -> Task:
        """Return the task that a process belongs to."""
        return self.task(process // self.spec.processes_per_host)

    def task(self, index: int) -> Task:
        """Return a task by its index."""
        gang = self.gang_of(index)
        return gang.tasks[index - gang.tasks[0].index]

    def gang_of(self, task_index: int) -> Gang:
        """Return the gang that a task belongs to."""
        return self.gangs[task_index // len(self.gangs[0].tasks)]

    def current_attempt(self, gang: Gang) -> AttemptId:
        """Return the id of a gang's current or latest attempt."""
        return AttemptId(self.spec.job_id, gang.attempt, gang.position)

    @property
    def state(self) -> JobState:
        """The job's state, derived from the counts of its tasks' states until it ends."""
        if self.over is not None:
            return self.over
        counts = self.counts
        if len(counts) == 1:
            return _ALONE[next(iter(counts))]
        if counts.keys().isdisjoint(_ENDED_EARLY):
            return JobState.RUNNING
        if counts[_S.FAILED] and (self.spec.max_task_failures is None or self.too_many_failures):
            return JobState.FAILED
        for task_state, job_state in _DECISIVE:
            if counts[task_state]:
                return job_state
        total = counts.total()
        if counts[_S.SUCCEEDED] + counts[_S.FAILED] + counts[_S.COSCHED_FAILED] == total:
            return JobState.SUCCEEDED if counts[_S.SUCCEEDED] else JobState.FAILED
        return JobState.PENDING if counts[_S.PENDING] == total else JobState.RUNNING

    def gang_state(self, position: int) -> JobState:
        """Return the state that a gang would have as a job of its own."""
        if len(self.gangs) == 1:
            return self.state
        states = {task.state for task in self.gangs[position].tasks}
        ended = next((state for state in _ENDS_GANG if state in states), None)
        if ended is not None:
            return _ALONE[ended]
        return _ALONE[states.pop()] if len(states) == 1 else JobState.RUNNING

    @property
    def too_many_failures(self) -> bool:
        """Whether more of its attempts have failed than its ``max_task_failures`` allows."""
        return self.spec.max_task_failures is not None and self.failures > self.spec.max_task_failures


_ALONE = {
    _S.PENDING: JobState.PENDING,
    _S.ASSIGNED: JobState.RUNNING,
    _S.RUNNING: JobState.RUNNING,
    _S.SUCCEEDED: JobState.SUCCEEDED,
    _S.FAILED: JobState.FAILED,
    _S.KILLED: JobState.KILLED,
    _S.WORKER_FAILED: JobState.WORKER_FAILED,
    _S.UNSCHEDULABLE: JobState.UNSCHEDULABLE,
    _S.COSCHED_FAILED: JobState.FAILED,
}
"""The state of a job whose tasks are all in one state."""

_ENDS_GANG = (_S.FAILED, _S.WORKER_FAILED, _S.UNSCHEDULABLE, _S.KILLED)
"""Task states that end the whole gang, whose other tasks become `COSCHED_FAILED`."""
_ENDED_EARLY = frozenset({_S.FAILED, _S.KILLED, _S.WORKER_FAILED, _S.UNSCHEDULABLE, _S.COSCHED_FAILED})
_DECISIVE = (
    (_S.WORKER_FAILED, JobState.WORKER_FAILED),
    (_S.UNSCHEDULABLE, JobState.UNSCHEDULABLE),
    (_S.KILLED, JobState.KILLED),
)
