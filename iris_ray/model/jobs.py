"""Jobs in progress: their gangs and tasks. Pure data, which only `ControllerState` changes.

A *gang* is the tasks that start and fail together: all tasks of a coscheduled job, those of one slice if the job's
failure domain is the slice, or any single task of another job. So every rule about attempts, budgets and capacity
exists once, for gangs. The gangs of a job have the same number of tasks.
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


@dataclass(slots=True)
class Task:
    """One process on one host, in its latest attempt.

    Attributes:
        task_id, index, state: its id, its place in the job, and its state.
        node_id: its host; None while it waits.
        error: why its latest attempt ended.
        started_at, ended_at: when its latest attempt was reported to run, and to have ended; None before that.
        exit_code: of its process, if the attempt has ended and the code is known.
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
"""Earlier attempts of a gang that are remembered, the latest ones."""
ATTEMPT_ERROR_CHARACTERS = 300
"""Length to which the error of an earlier attempt is cut."""


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An attempt of a gang that has ended, and after which the gang was requeued.

    Attributes:
        number: counts the gang's attempts from 1.
        state: FAILED or WORKER_FAILED, as it was charged; KILLED if it was free of charge: it could not be started, has
            moved, or was evicted.
        groups: names of the groups that it ran on.
        started_at: when its first task was reported to run; None if none was.
        ended_at: when its end was known.
        cause: index of the task that ended first; None if none did.
        exit_code: of that task's process, if it is known.
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
    """A running gang must give its hosts to another job.

    Attributes:
        job_id: the job that takes the hosts, which are promised to it.
        deadline: when its attempt is stopped, unless it has moved before; seconds.
        reason: who takes its hosts, in words.
    """

    job_id: str
    deadline: float
    reason: str

    @property
    def notice(self) -> Notice:
        """What its tasks are told."""
        return Notice(NoticeKind.EVICTION, self.reason, self.deadline)


@dataclass(frozen=True, slots=True)
class Promise:
    """Hosts that are kept for a job until it runs there.

    Attributes:
        node_ids: the hosts.
        given_up: the attempts that were asked to leave for it, in words. With any, the promise is firm: only a job of a
            higher band gets one of the hosts meanwhile.
    """

    node_ids: tuple[str, ...]
    given_up: tuple[str, ...] = ()

    @property
    def is_firm(self) -> bool:
        """Whether anything is given up for it."""
        return bool(self.given_up)


LAST_SAVE_S = 30.0
"""How long a gang that heeds no notices may run beyond the grace period to finish a regular save."""
SAVES_LATE_S = 5.0
"""How many seconds later than expected a regular save may end."""


Layout = tuple[tuple[str, tuple[str, ...]], ...]
"""Where an attempt runs: by group (slice) id, the group's name and the node ids of its hosts by task."""


@dataclass(slots=True)
class Gang:
    """Tasks that start and fail together.

    Attributes:
        tasks: in the order of their hosts, group by group.
        succeeded: how many of the tasks have succeeded.
        attempt: number of the current or latest attempt; 0 before the first.
        failures, preemptions: charged so far, at most one of them per attempt.
        evictions: attempts that gave their hosts to higher bands; they cost nothing.
        dispatch_failures: launches that never started, since the last one that did.
        not_before: the gang is not scheduled earlier; seconds on the caller's clock.
        waiting_since: when it last entered the queue, on the same clock.
        requeued: the number of its latest requeue among those of its job, 0 if it was never requeued. Gangs of a job
            wait in this order.
        groups: names of the groups that the current attempt runs on, by group (slice) id.
        returning_until: until then it goes before the waiting gangs of its band, since it ran a moment ago; seconds.
        running_since: when the first task of its latest attempt began to run; infinite before that; seconds.
        quick_ends: attempts in a row that ended soon after their start.
        groups_wanted: the number of groups that it ran on before it lost some.
        notice: the notice that its current attempt has, or None.
        end_confirmed: whether no process of its current attempt is left, though the last report has not come yet.
        error: the first cause of the latest attempt's end, in words.
        past: its earlier attempts, the latest at the end; at most `ATTEMPTS_KEPT`.
        eviction: why and when its current attempt must give its hosts to another job, or None.
        last_ran: where its last attempt ran that is over and in which a task ran; empty before there was one.
        pays_at: when its latest move to more groups has paid for itself; seconds.
        growths_undone: how many such moves in a row were undone before that.
        asks_at: it asks for room to grow no earlier, since the last room was given back; seconds.
        saved_at: when its latest save ended that outlives its hosts, as a task said; 0 if none has; seconds.
        saves_every_s: the seconds between its latest two saves; infinite if they are not known.
        heeds_notices: whether it saves its state when it is told to leave: what it did the last time, or else whether a
            task asks for notices; None: nothing is known.
        evicted_at: when it gave its hosts to higher bands; the latest times; seconds.
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

    # All tasks of a gang are pending, or none is; all are over for good, or none is. So the first one decides.

    @property
    def position(self) -> int:
        """Its number among the gangs of its job, all of which have as many tasks."""
        return self.tasks[0].index // len(self.tasks)

    @property
    def pending(self) -> bool:
        """Whether it waits for hosts."""
        return self.tasks[0].state is _S.PENDING

    @property
    def placed(self) -> bool:
        """Whether its current attempt has hosts and is not over."""
        state = self.tasks[0].state
        live = state is _S.ASSIGNED or state is _S.RUNNING or state is _S.SUCCEEDED
        return live and self.succeeded < len(self.tasks)

    @property
    def layout(self) -> Layout:
        """Where its current attempt runs. Its tasks must have hosts."""
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
        """The index of the task that ran on each host, by node id, in its last attempt that ran."""
        node_ids = (node_id for _, node_ids in self.last_ran for node_id in node_ids)
        return {node_id: self.tasks[0].index + number for number, node_id in enumerate(node_ids)}

    def loses_since(self, now: float, deadline: float) -> float:
        """Return since when its work is lost if it is told now to leave by a deadline; seconds."""
        if self.heeds_notices or now <= self._next_save_at <= self.leaves_by(now, deadline):
            return now
        return max(self.running_since, self.saved_at)

    def leaves_by(self, now: float, deadline: float) -> float:
        """Return when it is stopped if it is told now to leave by a deadline: it may end a save that is due soon."""
        if self.heeds_notices or not now <= self._next_save_at <= deadline + LAST_SAVE_S - SAVES_LATE_S:
            return deadline
        return max(deadline, self._next_save_at + SAVES_LATE_S)

    @property
    def _next_save_at(self) -> float:
        """When the next save of its current attempt is expected to end."""
        return self.saved_at + self.saves_every_s if self.saved_at > self.running_since else math.inf

    @property
    def is_to_grow(self) -> bool:
        """Whether its tasks were told to move to more slices."""
        return self.notice is not None and self.notice.kind is NoticeKind.GROWTH


Allocation = tuple[tuple[str, str, dict[str, float]], ...]
"""What an attempt holds until its end is confirmed: (node id, task id, resources) of every task."""


@dataclass(frozen=True, slots=True, eq=False)  # equal kinds are the same object
class Kind:
    """The requirement and owner of jobs. If one job finds too few groups, so do the others of its kind, as a rule."""

    requirement: Requirement
    device: str | None
    num_groups: tuple[int, ...]
    user: str
    team: str
    band: PriorityBand
    may_evict: bool
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
    may_be_plain: bool,
) -> Kind:
    return Kind(requirement, device, num_groups, user, team, band, may_evict, may_be_plain)


@dataclass(slots=True)
class Job:
    """A job and its progress.

    Attributes:
        number: its number in the order of submission.
        gangs: one if it is coscheduled, or one for every slice, else one for every task.
        counts: how many tasks are in each state.
        pending: positions of the gangs that wait for hosts, in the order in which they are placed.
        attempt: the highest of its gangs' attempts.
        requeues: how often one of its gangs was requeued.
        failures, preemptions: charged to any of its gangs so far.
        evictions: how often one of its gangs gave its hosts to a higher band.
        spares_made: how many spares have been made for it; numbers their ids.
        promise: the hosts that are kept for it until it runs, or None.
        awaits: what other jobs have yet to do before it enters the queue, by their ids; see `JobSpec.after`.
        ready_at: when it entered the queue after that; 0 if it awaited nothing; seconds.
        started: whether any task of it ever ran; such a job waits for as long as it takes.
        began_at: when a task of it first ran; infinite before that; seconds.
        furthest_step: the furthest step that its attempts have named, or None; with ``stop_without_progress`` only.
        fruitless: how many attempts in a row have named no new step; likewise.
        over: the state in which it has ended, or None.
        avoided: ids of hosts on which launches of it have failed; see `iris_ray.state.quarantine`.
        avoided_until: when it tries these hosts again; seconds on the caller's clock.
        error: why its latest attempt, or the job, ended, in words.
        yields: whether its owner offers its hosts to any job that waits. It then waits behind all other jobs itself.
        times: when its attempts held chips and ran, if it is one gang.
        members: all jobs of its group, itself included, if it stands for them in the queue: none has started yet.
        kind: the jobs that ask for the same; see `Kind`.
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
        self.kind = _kind(*about, may_be_plain)

    @property
    def is_plain(self) -> bool:
        """Whether it differs from other plain jobs of its kind only by age: it never had hosts, and has no promise."""
        return self.kind.may_be_plain and not (self.attempt or self.avoided or self.promise or self.yields)

    @property
    def forms_group(self) -> bool:
        """Whether it belongs to a group that has not started: it gets hosts with all others, or none."""
        return self.spec.group is not None and not self.attempt

    @property
    def gang(self) -> Gang:
        """The only gang of a job that is one gang."""
        (gang,) = self.gangs
        return gang

    @property
    def tasks(self) -> list[Task]:
        """All tasks by index. The list is made anew; `task` and `size` cost the same for any job."""
        return [task for gang in self.gangs for task in gang.tasks]

    @property
    def size(self) -> int:
        """How many tasks it has."""
        return len(self.gangs) * len(self.gangs[0].tasks)

    @property
    def num_processes(self) -> int:
        """How many processes it has, which count as tasks to its user: one or more for each task."""
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
        """Return the latest attempt of one of its gangs."""
        return AttemptId(self.spec.job_id, gang.attempt, gang.position)

    @property
    def state(self) -> JobState:
        """The job's state, derived from the counts of its tasks' states until it is over."""
        if self.over is not None:
            return self.over
        counts = self.counts
        if len(counts) == 1:
            return _ALONE[next(iter(counts))]
        if counts.keys().isdisjoint(_ENDED_EARLY):
            return JobState.RUNNING
        if counts[_S.FAILED] and not self._tolerates_failures:
            return JobState.FAILED
        for task_state, job_state in _DECISIVE:
            if counts[task_state]:
                return job_state
        total = counts.total()
        if counts[_S.SUCCEEDED] + counts[_S.FAILED] + counts[_S.COSCHED_FAILED] == total:
            return JobState.SUCCEEDED if counts[_S.SUCCEEDED] else JobState.FAILED
        return JobState.PENDING if counts[_S.PENDING] == total else JobState.RUNNING

    def gang_state(self, position: int) -> JobState:
        """Return the state of one of its gangs, as if the gang were a job."""
        if len(self.gangs) == 1:
            return self.state
        states = {task.state for task in self.gangs[position].tasks}
        ended = next((state for state in _ENDS_GANG if state in states), None)
        if ended is not None:
            return _ALONE[ended]
        return _ALONE[states.pop()] if len(states) == 1 else JobState.RUNNING

    @property
    def _tolerates_failures(self) -> bool:
        limit = self.spec.max_task_failures
        return limit is not None and self.failures <= limit


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
"""States of a task that end its gang. The other tasks of the gang may be `COSCHED_FAILED`."""
_ENDED_EARLY = frozenset({_S.FAILED, _S.KILLED, _S.WORKER_FAILED, _S.UNSCHEDULABLE, _S.COSCHED_FAILED})
_DECISIVE = (
    (_S.WORKER_FAILED, JobState.WORKER_FAILED),
    (_S.UNSCHEDULABLE, JobState.UNSCHEDULABLE),
    (_S.KILLED, JobState.KILLED),
)
