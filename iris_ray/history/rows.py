"""The rows of the history, made from the Controller's state. Pure: times of the state become wall time by a function.

The names of the fields are those of the columns; docs/history.md says what they mean.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from iris_ray.model.goodput import JobTimes, Totals, failures, measure, time_lost
from iris_ray.model.jobs import Gang, Job, PastAttempt, Task
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.workers import TPU_TOPOLOGY, Worker, accelerators, string_attribute
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    Event,
    LimitsSetEvent,
    MaintenanceCalledOffEvent,
    SettingSetEvent,
    TaintedEvent,
    TaintLiftedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.job_table import is_measured

GANGS_KEPT = 1000
"""The limit for the gangs of a job whose attempts are kept: the first ones."""
TEXT_CHARACTERS = 1000
"""Length to which errors and reasons are cut."""

Wall = Callable[[float | None], float | None]
"""Returns the wall time at a time of the state; None for None."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row of ``jobs``."""

    job_id: str
    submitted_at: float
    name: str
    user: str
    team: str | None
    band: str
    type: str | None
    slices: str
    tasks: int
    chips: float
    state: str
    started_at: float | None
    ended_at: float | None
    attempts: int
    failures: int
    preemptions: int
    evictions: int
    step: int | None
    says: str | None
    error: str | None
    seen_at: float


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """A row of ``attempts``, without its job."""

    gang: int
    number: int
    state: str
    cause: str | None
    slices: str
    hosts: int
    chips: float
    assigned_at: float | None
    started_at: float | None
    ended_at: float | None
    task: int | None
    host: str | None
    exit_code: int | None
    error: str | None
    lost_s: float | None
    lost_chip_s: float | None


@dataclass(frozen=True, slots=True)
class JobStory:
    """The rows of a job at one moment.

    Attributes:
        job: its row.
        attempts: the rows of the attempts that the state remembers; the history may have earlier ones.
        time: its seconds and chip-seconds until now, by the value of `TimeKind`; empty if its time is not measured.
        losses: the number of its failures until now, and the seconds and chip-seconds that these cost, by cause.
    """

    job: JobRow
    attempts: tuple[AttemptRow, ...]
    time: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    losses: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventRow:
    """A row of ``events``."""

    at: float
    kind: str
    subject: str
    job_id: str | None
    what: str


@dataclass(frozen=True, slots=True)
class UserSample:
    """A row of ``user_samples``, without its time."""

    type: str
    band: str
    user: str
    team: str
    busy_chips: float = 0.0
    waiting_jobs: float = 0.0
    waiting_chips: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment.

    Attributes:
        at: when; seconds since the epoch.
        chips: how many chips there are, by type.
        users: what users hold and wait for.
    """

    at: float
    chips: Mapping[str, float]
    users: tuple[UserSample, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The step of a running job and the numbers in its status at one moment.

    Attributes:
        job_id, submitted_at: the job, as in its row.
        at: when; seconds since the epoch.
        step: its furthest step; None if it names none.
        numbers: by name.
    """

    job_id: str
    submitted_at: float
    at: float
    step: int | None
    numbers: Mapping[str, float]


Record = JobStory | EventRow | Sample | CurvePoint


# -- jobs --------------------------------------------------------------------------------------------------------------


def is_kept(job: Job) -> bool:
    """Return whether the history has a job: it has had hosts or has ended, and is no spare."""
    return job.spec.spare_for is None and (job.attempt > 0 or job.over is not None)


def stage(job: Job) -> tuple[object, ...]:
    """Return a value that changes when a job starts, restarts or ends, so that its rows are written again."""
    counts = job.counts
    there = counts[TaskState.ASSIGNED], counts[TaskState.RUNNING], counts[TaskState.SUCCEEDED]
    return job.over, job.attempt, job.requeues, *there


def job_story(
    job: Job, times: JobTimes, now: float, wall: Wall, step: int | None = None, says: str | None = None
) -> JobStory:
    """Return the rows of a job.

    Args:
        job: the job.
        times: its times, with the latest marks that are known.
        now: seconds on the clock of the state.
        wall: makes times of the state wall times.
        step, says: the latest step and status that its tasks have reported.
    """
    gangs = list(islice(job.gangs, GANGS_KEPT))
    lost = {one.attempt: (one.lost_s, one.chip_seconds) for one in failures(times, now) if one.is_over}
    attempts = tuple(row for gang in gangs for row in _attempts(job, gang, times, lost, wall))
    spec, submitted_at = job.spec, wall(job.submitted_at) or 0.0
    totals = Totals.of(measure(times, job.submitted_at, now)) if is_measured(job) else Totals()
    row = JobRow(
        job_id=spec.job_id,
        submitted_at=round(submitted_at, 3),
        name=spec.name or spec.job_id,
        user=spec.user,
        team=spec.team or None,
        band=spec.priority.name.lower(),
        type=spec.device,
        slices=",".join(map(str, spec.coscheduling.num_groups)) if spec.coscheduling else "",
        tasks=job.size,
        chips=max([accelerators(spec.resources) * job.size, *(one.chips for one in attempts)]),
        state=job.state.value,
        started_at=min((one.started_at for one in attempts if one.started_at is not None), default=None),
        ended_at=wall(times.ended_at),
        attempts=job.attempt,
        failures=job.failures,
        preemptions=job.preemptions,
        evictions=job.evictions,
        step=step,
        says=says,
        error=_cut(job.error) if job.over is not JobState.SUCCEEDED else None,
        seen_at=wall(now) or 0.0,
    )
    time = {kind: (seconds, totals.chip_seconds.get(kind, 0.0)) for kind, seconds in totals.seconds.items()}
    losses = {cause.value: (one.count, one.seconds, one.chip_seconds) for cause, one in time_lost(times, now).items()}
    return JobStory(row, attempts, time, losses)


_NUMBER = re.compile(r"(?<!\S)([A-Za-z_]\w{0,39})=([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?=[\s,;]|$)")
MOST_CURVES = 8


def curve_point(job: Job, now: float, wall: Wall, step: int | None, says: str | None) -> CurvePoint | None:
    """Return a job's step now and the numbers in its status, such as ``loss=2.31``; None if it has neither."""
    told = {name: float(number) for name, number in _NUMBER.findall(says or "")[:MOST_CURVES]}
    numbers = {name: number for name, number in told.items() if math.isfinite(number)}
    if step is None and not numbers:
        return None
    return CurvePoint(job.spec.job_id, round(wall(job.submitted_at) or 0.0, 3), wall(now) or 0.0, step, numbers)


_CAUSES = {TaskState.FAILED: "crashed", TaskState.WORKER_FAILED: "lost"}
"""Causes by how attempts were charged, where the cause itself is not known any more."""


def _attempts(
    job: Job, gang: Gang, times: JobTimes, lost: Mapping[int, tuple[float, float]], wall: Wall
) -> Iterator[AttemptRow]:
    """Yield the attempts of a gang that are remembered, the earliest first."""
    earlier = [past for past in gang.past if past.number < gang.attempt or not gang.succeeded]
    for past in earlier:
        yield _row_of_past(past, job, gang, times, lost, wall)
    if gang.attempt and not (earlier and earlier[-1].number == gang.attempt):
        yield _row_of_latest(job, gang, times, lost, wall)


def _row_of_past(
    past: PastAttempt, job: Job, gang: Gang, times: JobTimes, lost: Mapping[int, tuple[float, float]], wall: Wall
) -> AttemptRow:
    known = next((one for one in times.attempts if one.number == past.number), None)
    cause = known.cause.value if known is not None and known.cause is not None else _CAUSES.get(past.state)
    lost_s, lost_chip_s = lost.get(past.number, (None, None))
    hosts = _hosts(job, gang, past.groups)
    return AttemptRow(
        gang=gang.position,
        number=past.number,
        state=past.state.value,
        cause=cause,
        slices=", ".join(past.groups),
        hosts=hosts,
        chips=known.chips if known is not None and known.chips else accelerators(job.spec.resources) * hosts,
        assigned_at=wall(known.assigned_at) if known is not None else None,
        started_at=wall(past.started_at),
        ended_at=wall(past.ended_at),
        task=past.cause,
        host=None if past.cause is None else _host(past.groups, past.cause - gang.tasks[0].index, hosts),
        exit_code=past.exit_code,
        error=_cut(past.error),
        lost_s=lost_s,
        lost_chip_s=lost_chip_s,
    )


def _row_of_latest(
    job: Job, gang: Gang, times: JobTimes, lost: Mapping[int, tuple[float, float]], wall: Wall
) -> AttemptRow:
    known = next((one for one in times.attempts if one.number == gang.attempt), None)
    state, blamed = job.gang_state(gang.position), _first_to_fail(gang)
    ended = [task.ended_at for task in gang.tasks if task.ended_at is not None] if state.finished else []
    cause = known.cause.value if known is not None and known.cause is not None else None
    lost_s, lost_chip_s = lost.get(gang.attempt, (None, None))
    has_run = gang.running_since < math.inf
    return AttemptRow(
        gang=gang.position,
        number=gang.attempt,
        state=state.value if state.finished else "running" if has_run else "starting",
        cause=cause or (_CAUSES.get(blamed.state) if blamed is not None else None),
        slices=", ".join(gang.groups),
        hosts=len(gang.tasks),
        chips=known.chips if known is not None and known.chips else accelerators(job.spec.resources) * len(gang.tasks),
        assigned_at=wall(known.assigned_at) if known is not None else None,
        started_at=wall(gang.running_since) if has_run else None,
        ended_at=wall(max(ended, default=times.ended_at)) if state.finished else None,
        task=None if blamed is None else blamed.index,
        host=None if blamed is None else _host(gang.groups, blamed.index - gang.tasks[0].index, len(gang.tasks)),
        exit_code=None if blamed is None else blamed.exit_code,
        error=_cut(gang.error) if state.finished and state is not JobState.SUCCEEDED else None,
        lost_s=lost_s,
        lost_chip_s=lost_chip_s,
    )


def _first_to_fail(gang: Gang) -> Task | None:
    """Return the task that ended its gang for good; the others ended with it."""
    return next((task for task in gang.tasks if task.state in _CAUSES), None)


def _hosts(job: Job, gang: Gang, groups: tuple[str, ...]) -> int:
    """Return how many hosts an attempt on these groups had."""
    return job.spec.replicas * len(groups) if job.spec.coscheduling else len(gang.tasks)


def _host(groups: tuple[str, ...], number: int, hosts: int) -> str | None:
    """Return the name of a host of an attempt, as ``slice/number``; of a host without a slice, that of its group."""
    if not groups or not 0 <= number < hosts:
        return None
    size = max(1, hosts // len(groups))
    name = groups[min(number // size, len(groups) - 1)]
    return f"{name}/{number % size}" if hosts > 1 else name


def _cut(text: str | None) -> str | None:
    return text if text is None else text[:TEXT_CHARACTERS]


# -- events ------------------------------------------------------------------------------------------------------------


def event_row(event: Event, state: ControllerState, at: float, now: float) -> EventRow | None:
    """Return the row of an event that people may want to find later; None if it is none, or changes nothing.

    Events of jobs are in their attempts. Call this before the event is applied.

    Args:
        event: the event.
        state: before the event.
        at: the wall time.
        now: seconds on the clock of the state.
    """
    match event:
        case WorkerRegisteredEvent(node_id) if node_id not in state.workers:
            return _of_host(at, "host joined", Worker(node_id, event.address, event.attributes, {}), "it has joined")
        case WorkerFailedEvent(node_id, reason) if node_id in state.workers:
            return _of_host(at, "host lost", state.workers[node_id], reason)
        case WorkerDrainedEvent(node_id, reason) if (worker := state.workers.get(node_id)) is not None:
            return _of_host(at, "notice", worker, reason) if worker.draining is None else None
        case WorkerSuspectedEvent(node_id, reason) if (worker := state.workers.get(node_id)) is not None:
            return _of_host(at, "host silent", worker, reason) if worker.suspected_until <= now else None
        case WorkerBlamedEvent(node_id, job_id, reason, fault) if node_id in state.workers:
            return _of_host(at, "host blamed", state.workers[node_id], f"{fault.value}: {reason}", job_id)
        case MaintenanceCalledOffEvent(node_id) if (worker := state.workers.get(node_id)) is not None:
            return _of_host(at, "notice called off", worker, "the maintenance is called off")
        case TaintedEvent(target, taint, reason) if taint not in state.fleet.taints.get(target, {}):
            worker = state.workers.get(target)
            return EventRow(at, "tainted", _name(worker) if worker else target, None, _cut(f"{taint}: {reason}") or "")
        case TaintLiftedEvent(target, taint):
            worker = state.workers.get(target)
            return EventRow(at, "taint lifted", _name(worker) if worker else target, None, taint)
        case LimitsSetEvent(user, band, limits):
            values = ", ".join(f"{name}={value}" for name, value in limits.items() if value is not None)
            return EventRow(at, "limits set", user, None, f"{band.name.lower()}: {values or 'none'}")
        case SettingSetEvent(name, to):
            return EventRow(at, "setting", name, None, f"{to.text} (by {to.user})" if to else "its default again")
    return None


NOTABLE = frozenset({
    WorkerRegisteredEvent, WorkerFailedEvent, WorkerDrainedEvent, WorkerSuspectedEvent, WorkerBlamedEvent,
    MaintenanceCalledOffEvent, TaintedEvent, TaintLiftedEvent, LimitsSetEvent, SettingSetEvent,
})  # fmt: skip
"""The classes of events that may have a row. All other events cost only a look at their class."""


def _of_host(at: float, kind: str, worker: Worker, what: str, job_id: str | None = None) -> EventRow:
    return EventRow(at, kind, _name(worker), job_id, _cut(what) or "")


def _name(worker: Worker) -> str:
    if worker.slice_name is None:
        return worker.address
    return worker.slice_name if worker.host_index is None else f"{worker.slice_name}/{worker.host_index}"


# -- samples -----------------------------------------------------------------------------------------------------------


def sample(state: ControllerState, at: float) -> Sample:
    """Return the present use of the cluster's chips and GPUs, and the waiting jobs."""
    chips: dict[str, float] = {}
    held: dict[tuple[str, str, str, str], list[float]] = {}
    for worker in state.workers.values():
        kind = string_attribute(worker.attributes, TPU_TOPOLOGY) or ""
        if there := accelerators(worker.resources):
            chips[kind] = chips.get(kind, 0.0) + there
        for (_, attempt), demand in worker.occupants.items():
            if (taken := accelerators(demand)) and (job := state.jobs.get(attempt.job_id)) is not None:
                _of(held, job, kind)[0] += taken
    for job in state.pending():
        if job.spec.spare_for is None:
            of_it = _of(held, job, job.spec.device or "")
            of_it[1] += 1
            of_it[2] += accelerators(job.spec.resources) * len(job.pending) * len(job.gangs[0].tasks)
    users = tuple(UserSample(*key, *amounts) for key, amounts in held.items())
    return Sample(at, chips or {"": 0.0}, users)


def _of(held: dict[tuple[str, str, str, str], list[float]], job: Job, kind: str) -> list[float]:
    key = kind, job.spec.priority.name.lower(), job.spec.user, getattr(job.spec, "team", None) or ""
    return held.setdefault(key, [0.0, 0.0, 0.0])
