"""The rows of the history, made from the Controller's state. Pure: times of the state become wall time by a function.

The names of the fields are those of the columns; docs/history.md says what they mean.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice

from iris_ray.actors.protocol.status import JobFacts, job_in
from iris_ray.history.calls import Value
from iris_ray.model.goodput import JobTimes, Totals, failures, measure, time_lost
from iris_ray.model.jobs import Gang, Job, PastAttempt
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.workers import TPU_TOPOLOGY, accelerators, string_attribute
from iris_ray.state import ControllerState
from iris_ray.state.job_table import is_measured

GANGS_KEPT = 1000
"""The limit for the gangs of a job whose attempts are kept: the first ones."""
TEXT_CHARACTERS = 1000
"""Length to which errors and reasons are cut."""


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """The columns of ``jobs`` that no field of a `JobStatus` has."""

    team: str | None
    tasks: int
    chips: float
    started_at: float | None
    ended_at: float | None
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
        job: its row, by column.
        attempts: the rows of the attempts that the state remembers; the history may have earlier ones.
        time: its seconds and chip-seconds until now, by the value of `TimeKind`; empty if its time is not measured.
        losses: the number of its failures until now, and the seconds and chip-seconds that these cost, by cause.
    """

    job: Mapping[str, Value]
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
    """Return whether the history has a job: it has had hosts or has ended, and it is not a spare."""
    return job.spec.spare_for is None and (job.attempt > 0 or job.over is not None)


def stage(job: Job) -> tuple[object, ...]:
    """Return a value that changes when a job starts, restarts or ends, so that its rows are written again."""
    counts = job.counts
    there = counts[TaskState.ASSIGNED], counts[TaskState.RUNNING], counts[TaskState.SUCCEEDED]
    return job.over, job.attempt, job.requeues, *there


def job_story(of: JobFacts, times: JobTimes, now: float) -> JobStory:
    """Return the rows of a job.

    Args:
        of: the job.
        times: its times, with the latest marks that are known.
        now: seconds on the clock of the state.
    """
    job = of.job
    attempts = tuple(attempt for gang in islice(job.gangs, GANGS_KEPT) for attempt in _attempts(of, gang, times, now))
    totals = Totals.of(measure(times, job.submitted_at, now)) if is_measured(job) else Totals()
    shared = job_in("history", of)
    row = shared | {
        "submitted_at": round(shared["submitted_at"], 3),
        "band": job.spec.priority.name.lower(),
        "slices": ",".join(map(str, shared["slices"])),
        "state": job.state.value,
        "error": cut(job.error) if job.over is not JobState.SUCCEEDED else None,
    }
    own = OwnColumns(
        team=job.spec.team or None,
        tasks=job.size,
        chips=max([accelerators(job.spec.resources) * job.size, *(one.chips for one in attempts)]),
        started_at=None if math.isinf(job.began_at) else of.wall(job.began_at),  # its attempts may be forgotten
        ended_at=of.wall_or_none(times.ended_at),
        seen_at=of.wall(now),
    )
    time = {kind: (seconds, totals.chip_seconds.get(kind, 0.0)) for kind, seconds in totals.seconds.items()}
    losses = {cause.value: (one.count, one.seconds, one.chip_seconds) for cause, one in time_lost(times, now).items()}
    return JobStory(row | asdict(own), attempts, time, losses)


_NUMBER = re.compile(r"(?<!\S)([A-Za-z_]\w{0,39})=([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?=[\s,;]|$)")
MOST_CURVES = 8


def curve_point(of: JobFacts, now: float) -> CurvePoint | None:
    """Return a job's step now and the numbers in its status, such as ``loss=2.31``; None if it has neither."""
    step, says = (of.heard.step, of.heard.status) if of.heard else (None, None)
    told = {name: float(number) for name, number in _NUMBER.findall(says or "")[:MOST_CURVES]}
    numbers = {name: number for name, number in told.items() if math.isfinite(number)}
    if step is None and not numbers:
        return None
    return CurvePoint(of.job.spec.job_id, round(of.wall(of.job.submitted_at), 3), of.wall(now), step, numbers)


_CAUSES = {TaskState.FAILED: "crashed", TaskState.WORKER_FAILED: "lost"}
"""Causes by how attempts were charged, where the cause itself is not known any more."""


def _attempts(of: JobFacts, gang: Gang, times: JobTimes, now: float) -> Iterator[AttemptRow]:
    """Yield the attempts of a gang that are remembered, the earliest first."""
    job, begin, measured = of.job, gang.tasks[0].index, {one.number: one for one in times.attempts}
    lost = {one.attempt: (one.lost_s, one.chip_seconds) for one in failures(times, now) if one.is_over}
    for past in gang.attempts:
        state, ended_at, ended = (past.state.value, past.ended_at, past) if past else _latest(job, gang, times)
        known, hosts = measured.get(ended.number), _hosts(job, gang, ended.groups) if past else len(gang.tasks)
        lost_s, lost_chip_s = lost.get(ended.number, (None, None))
        yield AttemptRow(
            gang=gang.position,
            number=ended.number,
            state=state,
            cause=known.cause.value if known and known.cause else _CAUSES.get(ended.state),
            slices=", ".join(ended.groups),
            hosts=hosts,
            chips=known.chips if known and known.chips else accelerators(job.spec.resources) * hosts,
            assigned_at=of.wall_or_none(known.assigned_at) if known else None,
            started_at=of.wall_or_none(ended.started_at),
            ended_at=of.wall_or_none(ended_at),
            task=ended.cause,
            host=None if ended.cause is None else _host(ended.groups, ended.cause - begin, hosts),
            exit_code=ended.exit_code,
            error=cut(ended.error) or None,
            lost_s=lost_s,
            lost_chip_s=lost_chip_s,
        )


def _latest(job: Job, gang: Gang, times: JobTimes) -> tuple[str, float | None, PastAttempt]:
    """Return the state of a gang's latest attempt, when it ended if it has, and the attempt as a past one."""
    state, has_run = job.gang_state(gang.position), gang.running_since < math.inf
    blamed = next((task for task in gang.tasks if task.state in _CAUSES), None)  # the others ended with it
    ended = max((task.ended_at for task in gang.tasks if task.ended_at is not None), default=times.ended_at)
    is_over, has_failed = state.finished, state.finished and state is not JobState.SUCCEEDED
    latest = PastAttempt(
        number=gang.attempt,
        state=blamed.state if blamed else TaskState.KILLED,
        groups=gang.groups,
        started_at=gang.running_since if has_run else None,
        ended_at=math.inf,
        cause=blamed.index if blamed else None,
        exit_code=blamed.exit_code if blamed else None,
        error=gang.error or "" if has_failed else "",
    )
    word = state.value if is_over else "running" if has_run else "starting"
    return word, ended if is_over else None, latest


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


def cut(text: str | None) -> str | None:
    """Return a text of at most `TEXT_CHARACTERS`."""
    return text if text is None else text[:TEXT_CHARACTERS]


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
