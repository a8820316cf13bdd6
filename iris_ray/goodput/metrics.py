"""The Controller's metrics: their definitions, and the measurement of the queue, jobs, hosts and users."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from itertools import chain
from typing import Protocol

from ray.util import metrics

from iris_ray.actors.calls.service_parts import ServiceHealth
from iris_ray.actors.controller.services import Gauge
from iris_ray.actors.controller.views import conditions_of
from iris_ray.actors.protocol.status import HostCondition
from iris_ray.model.goodput import Totals, measure, time_lost
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.time_lost import FailureCause, TimeLost
from iris_ray.model.workers import TPU_TOPOLOGY, Worker, string_attribute
from iris_ray.state import ControllerState
from iris_ray.state.job_table import is_measured

# -- definitions: Ray exports each metric with ``ray_`` before its name ------------------------------------------------

WAIT_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600)
"""Bucket limits for waits in the queue and for recoveries, in seconds."""
START_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
"""Bucket limits for launches, in seconds."""
STORE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
"""Bucket limits for writings into the cluster's store, in seconds."""


class MetricKind(Enum):
    """A gauge shows a present number, a counter a total, a histogram durations."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without Ray's prefix.
        labels: the names of its labels.
        meaning: in words.
        buckets: the bucket limits of a histogram, in seconds.
        largest: for a gauge that services publish: whether values that share a label, because there are too many
            labels, are shown by their maximum, not their sum.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    largest: bool = False


METRICS: list[Metric] = []


def _metric(
    kind: MetricKind, name: str, labels: str, meaning: str, buckets: tuple[float, ...] = (), largest: bool = False
) -> Metric:
    """Return a new metric, and add it to `METRICS`. Names of labels are separated by spaces."""
    METRICS.append(Metric(name, kind, tuple(labels.split()), meaning, buckets, largest))
    return METRICS[-1]


_gauge, _counter, _histogram = (partial(_metric, kind) for kind in MetricKind)

PENDING_JOBS = _gauge("iris_pending_jobs", "band tpu_type", "jobs that wait for hosts, for all or some of their tasks")
RUNNING_JOBS = _gauge("iris_running_jobs", "band tpu_type", "jobs that have hosts")
ADMISSION_WAIT = _histogram("iris_admission_wait_seconds", "band tpu_type", "time in the queue, per attempt", WAIT_S)
LAUNCH = _histogram("iris_launch_seconds", "tpu_type", "time from getting hosts to the first running task", START_S)
RECOVERY = _histogram(
    "iris_recovery_seconds",
    "tpu_type cause",
    "time from an attempt's end to the first running task of the next",
    WAIT_S,
)
TIME_LOST = _histogram(
    "iris_time_lost_seconds", "tpu_type cause", "time lost by a failure of a gang, until its next new step", WAIT_S
)
TIME_LOST_CHIPS = _counter("iris_time_lost_chip_seconds_total", "user cause", "chip-seconds lost by failures of gangs")
ATTEMPTS_ENDED = _counter("iris_attempts_ended_total", "band tpu_type cause", "attempts that ended early")
JOBS_FINISHED = _counter("iris_jobs_finished_total", "band tpu_type state", "jobs that have ended, by final state")
HOSTS = _gauge("iris_hosts", "tpu_type condition", "hosts by condition")
USER_CHIPS = _gauge("iris_user_chips", "user", "chips and GPUs held by the jobs of a user")
USER_CHIP_SECONDS = _counter("iris_user_chip_seconds_total", "user", "chip-seconds held by the jobs of a user")
TEAM_CHIPS = _gauge("iris_team_chips", "team tpu_type", "chips held by a team and its subteams, of types with quotas")
TEAM_QUOTA = _gauge("iris_team_quota_chips", "team tpu_type", "the quota of a team in chips")
FINISHED_CHIP_SECONDS = _counter(
    "iris_finished_chip_seconds_total", "user kind", "chip-seconds of gangs that have ended, by kind of use"
)
CONTROLLER_EPOCH = _gauge(
    "iris_controller_epoch", "version", "the Controller's number, which grows with each new Controller"
)
CONTROLLER_ALIVE = _gauge(
    "iris_controller_alive_timestamp_seconds", "version", "Unix time of the Controller's latest measurement"
)
JOURNAL = _histogram("iris_journal_seconds", "", "time that the cluster's store took to write decisions", STORE_S)
JOURNAL_WAITING = _gauge("iris_journal_waiting_seconds", "", "time that the current write has waited")
SET_ASIDE = _gauge(
    "iris_set_aside", "kind", "jobs that the Controller could not handle, and records that it can't read"
)
SET_ASIDE_AT = _gauge(
    "iris_set_aside_newest_timestamp_seconds", "kind", "Unix time at which the newest of them was set aside; 0 for none"
)
SERVICE_FAILING = _gauge("iris_service_failing", "service", "1 while a service fails, otherwise 0")
SERVICE_FAILURES = _counter("iris_service_failures_total", "service", "failures of a service's part")

PUBLISHED = (
    _gauge("iris_missing_slices", "tpu_type", "additional slices that waiting jobs need"),
    _gauge(
        "iris_missing_slices_seconds",
        "tpu_type",
        "time for which slices have been missing without interruption",
        largest=True,
    ),
    _gauge("iris_provisioned_chips", "tpu_type source market state", "chips that provisioners have requested or hold"),
    _gauge(
        "iris_provisioning_oldest_request",
        "tpu_type source",
        "age of the oldest waiting request of a provisioner, in seconds",
        largest=True,
    ),
    _gauge(
        "iris_provisioned_cost_per_hour",
        "tpu_type source market currency",
        "price of the slices that provisioners hold, where known",
    ),
    _gauge(
        "iris_provisioner_failures",
        "provisioner source",
        "consecutive failures at a source of slices, for the type with most",
        largest=True,
    ),
    _gauge(
        "iris_provisioner_overdue_seconds",
        "provisioner",
        "time by which a provisioner's report is late",
        largest=True,
    ),
    _gauge(
        "iris_provisioner_undeleted_slices",
        "provisioner",
        "slices that a provisioner can't delete and that still cost money",
    ),
)
"""Gauges that services publish."""
PUBLISHED_BY_NAME = {metric.name: metric for metric in PUBLISHED}


# -- meter: Ray's metrics, which Prometheus reads from every node ------------------------------------------------------

Labels = Mapping[str, str]


class Meter(Protocol):
    """Takes measurements."""

    def set(self, metric: Metric, value: float, labels: Labels) -> None:
        """Set a gauge."""

    def add(self, metric: Metric, amount: float, labels: Labels) -> None:
        """Add to a counter."""

    def observe(self, metric: Metric, seconds: float, labels: Labels) -> None:
        """Add one duration to a histogram."""


class RayMeter:
    """Gives measurements to Ray. The node's agent exports them every ten seconds; without an agent they are lost."""

    def __init__(self) -> None:
        of = {kind: [metric for metric in METRICS if metric.kind is kind] for kind in MetricKind}
        self._gauges = {m: metrics.Gauge(m.name, m.meaning, tag_keys=m.labels) for m in of[MetricKind.GAUGE]}
        self._counters = {m: metrics.Counter(m.name, m.meaning, tag_keys=m.labels) for m in of[MetricKind.COUNTER]}
        self._histograms = {
            m: metrics.Histogram(m.name, m.meaning, boundaries=list(m.buckets), tag_keys=m.labels)
            for m in of[MetricKind.HISTOGRAM]
        }

    def set(self, metric: Metric, value: float, labels: Labels) -> None:
        self._gauges[metric].set(value, dict(labels))

    def add(self, metric: Metric, amount: float, labels: Labels) -> None:
        if amount > 0:
            self._counters[metric].inc(amount, dict(labels))

    def observe(self, metric: Metric, seconds: float, labels: Labels) -> None:
        self._histograms[metric].observe(seconds, dict(labels))


@cache
def ray_meter() -> Meter:
    """Return the meter of this process: Ray takes each metric once."""
    return RayMeter()


# -- measurements ------------------------------------------------------------------------------------------------------

MOST_VALUES = 100
"""The limit for the values of a label that users choose. Further ones count as `OTHER`."""
OTHER, NO_TYPE = "other", "none"

Values = tuple[str, ...]
"""The values of a metric's labels, in their order."""

_CAUSES = {TaskState.FAILED: "failure", TaskState.WORKER_FAILED: "preemption", TaskState.KILLED: "eviction"}


@dataclass(frozen=True, slots=True)
class ControllerFacts:
    """What is measured of the Controller itself.

    Attributes:
        epoch, version: its number, and its version of iris_ray.
        wall: the time, in Unix time.
        writings: how long the journal's latest writings took; seconds.
        writing_for: for how long the present writing has waited; 0 if nothing is being written; seconds.
        set_aside: when the jobs and records that are set aside were, by kind, in Unix time.
    """

    epoch: int
    version: str
    wall: float
    writings: Sequence[float]
    writing_for: float
    set_aside: Mapping[str, Sequence[float]]


class Measurements:
    """Measures a state. Call `look` every few seconds; it reads only what has changed, so it costs next to nothing.

    Args:
        state: read only. What its jobs did before is not measured.
        unusable: node ids of the live hosts that no job gets; read only.
        meter: takes the measurements.
        now: seconds on the events' clock.
    """

    def __init__(self, state: ControllerState, unusable: Collection[str], meter: Meter, now: float) -> None:
        self._state = state
        self._unusable = unusable
        self._meter = meter
        self._names: defaultdict[str, dict[str, None]] = defaultdict(dict)  # the values of each label
        self._shown: dict[Metric, set[Values]] = {}  # the label values for which each gauge has been set
        self._jobs_read = state.job_changes.version
        self._ends: dict[str, Counter[str]] = {}  # job id → how many of its attempts have ended, by cause
        self._lost: dict[str, Mapping[FailureCause, TimeLost]] = {}  # job id → the time lost that has been measured
        self._starting: dict[str, dict[tuple[int, int], float]] = {}  # job id → gang, attempt → when it got hosts
        self._hosts_read = -1
        self._hosts: dict[str, tuple[str, str]] = {}  # node id → its type and condition
        self._looked_at = now
        self._failures: Counter[str] = Counter()  # of each service, as measured
        for job in state.jobs.values():  # their earlier ends are not measured again
            self._ends[job.spec.job_id] = _ends_of(job)
            if is_measured(job):
                self._lost[job.spec.job_id] = time_lost(job.times, now)

    def placed(self, job: Job, gang: Gang, now: float) -> None:
        """Measure the wait of a gang that gets hosts now."""
        if job.spec.spare_for is None:
            labels = self._of_job(job.spec, "band", "tpu_type")
            self._meter.observe(ADMISSION_WAIT, max(0.0, now - gang.waiting_since), labels)
            self._starting.setdefault(job.spec.job_id, {})[gang.position, gang.attempt] = now

    def look(self, now: float) -> None:
        """Measure changes since the last look, and set the gauges."""
        changed = self._state.job_changes.since(self._jobs_read)
        known = self._state.jobs, self._ends, self._starting  # the state may have forgotten some of these jobs
        for job_id in dict.fromkeys(chain(*known) if changed is None else changed):
            self._look_at_job(job_id, now)
        self._jobs_read = self._state.job_changes.version
        self._look_at_hosts(now)
        self._count_jobs()
        self._count_chips(now)
        self._count_team_chips()

    def look_at_controller(self, facts: "ControllerFacts") -> None:
        """Measure the Controller itself."""
        version = (facts.version,)
        self._set(CONTROLLER_EPOCH, {version: facts.epoch})
        self._set(CONTROLLER_ALIVE, {version: facts.wall})
        for seconds in facts.writings:
            self._meter.observe(JOURNAL, seconds, {})
        self._set(JOURNAL_WAITING, {(): facts.writing_for})
        self._set(SET_ASIDE, {(kind,): len(times) for kind, times in facts.set_aside.items()})
        self._set(SET_ASIDE_AT, {(kind,): max(times, default=0.0) for kind, times in facts.set_aside.items()})

    def look_at_services(self, health: Iterable[ServiceHealth], gauges: Iterable[Gauge]) -> None:
        """Measure the services' parts, and set the gauges that services publish. Unknown gauges are left out."""
        health = list(health)
        self._set(SERVICE_FAILING, {(one.service,): float(one.trouble is not None) for one in health})
        for one in health:
            self._meter.add(SERVICE_FAILURES, one.failures - self._failures[one.service], {"service": one.service})
            self._failures[one.service] = one.failures
        found: dict[str, dict[Values, float]] = {metric.name: {} for metric in PUBLISHED}
        for name, labels, value in gauges:
            if (metric := PUBLISHED_BY_NAME.get(name)) is not None and len(labels) == len(metric.labels):
                values, known = tuple(map(self._named, metric.labels, labels)), found[name]
                before = known.get(values, 0.0)
                known[values] = max(before, value) if metric.largest else before + value
        for metric in PUBLISHED:
            self._set(metric, found[metric.name])

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _look_at_job(self, job_id: str, now: float) -> None:
        job = self._state.jobs.get(job_id)
        if job is None or job.spec.spare_for is not None:
            self._ends.pop(job_id, None)
            self._lost.pop(job_id, None)
            self._starting.pop(job_id, None)
            return
        self._measure_starts(job)
        self._measure_ends(job)
        if is_measured(job) and (len(job.times.attempts) > 1 or job.times.settled_failures):
            self._measure_time_lost(job, now)

    def _measure_time_lost(self, job: Job, now: float) -> None:
        """Measure the failures that are over since the last look."""
        known, found = self._lost.get(job.spec.job_id, {}), time_lost(job.times, now)
        self._lost[job.spec.job_id] = found
        labels, user = self._of_job(job.spec, "tpu_type"), self._named("user", job.spec.user)
        for cause, lost in found.items():
            before = known.get(cause, TimeLost())
            for lost_s, _ in lost.latest[before.count - lost.count :] if lost.count > before.count else ():
                self._meter.observe(TIME_LOST, lost_s, {**labels, "cause": cause.value})
            more = max(0.0, lost.chip_seconds - before.chip_seconds)
            self._meter.add(TIME_LOST_CHIPS, more, {"user": user, "cause": cause.value})

    def _measure_starts(self, job: Job) -> None:
        waits = self._starting.pop(job.spec.job_id, {})
        for (position, attempt), placed_at in waits.items():
            gang = job.gangs[position]
            started_at = _start_of(gang, attempt)
            if started_at is not None:
                self._measure_start(job, gang, attempt, started_at, placed_at)
            elif gang.attempt == attempt and job.over is None:
                self._starting.setdefault(job.spec.job_id, {})[position, attempt] = placed_at

    def _measure_start(self, job: Job, gang: Gang, attempt: int, started_at: float, placed_at: float) -> None:
        labels = self._of_job(job.spec, "tpu_type")
        self._meter.observe(LAUNCH, max(0.0, started_at - placed_at), labels)
        before = next((past for past in reversed(gang.past) if past.number < attempt), None)
        if before is not None and before.started_at is not None:
            away_s = max(0.0, started_at - before.ended_at)
            self._meter.observe(RECOVERY, away_s, {**labels, "cause": _CAUSES[before.state]})

    def _measure_ends(self, job: Job) -> None:
        ends, known = _ends_of(job), self._ends.get(job.spec.job_id, Counter())
        self._ends[job.spec.job_id] = ends
        labels = self._of_job(job.spec, "band", "tpu_type")
        for cause, count in (ends - known).items():
            if job.over is not None and cause == job.over.value:
                self._meter.add(JOBS_FINISHED, 1, {**labels, "state": cause})
                self._measure_goodput(job)
            else:
                self._meter.add(ATTEMPTS_ENDED, count, {**labels, "cause": cause})

    def _measure_goodput(self, job: Job) -> None:
        """Measure the chip-seconds of a job that has just ended, by their use."""
        if not is_measured(job):
            return
        user = self._named("user", job.spec.user)
        spent = Totals.of(measure(job.times, job.submitted_at, self._looked_at)).chip_seconds
        for kind, chip_seconds in spent.items():
            self._meter.add(FINISHED_CHIP_SECONDS, chip_seconds, {"user": user, "kind": kind})

    def _count_jobs(self) -> None:
        jobs = self._state.jobs
        running = {attempt.job_id for attempts in self._state.attempts.values() for attempt in attempts}
        waiting: Counter[Values] = Counter(self._kind(job.spec) for job in self._state.pending() if _counts(job))
        self._set(PENDING_JOBS, waiting)
        live = (job for job in map(jobs.get, running) if job is not None and _counts(job) and job.over is None)
        having_hosts: Counter[Values] = Counter(map(self._kind, (job.spec for job in live)))
        self._set(RUNNING_JOBS, having_hosts)

    def _kind(self, spec: JobSpec) -> tuple[str, str]:
        return spec.priority.name.lower(), self._named("tpu_type", spec.device or NO_TYPE)

    # -- hosts and users -------------------------------------------------------------------------------------------

    def _look_at_hosts(self, now: float) -> None:
        fleet = self._state.fleet
        changed = fleet.changes_since(self._hosts_read) if self._hosts_read >= 0 else None
        if changed is None:
            self._hosts.clear()
        for worker in fleet.workers.values() if changed is None else changed:
            live = fleet.workers.get(worker.node_id)
            if live is None:
                self._hosts.pop(worker.node_id, None)
            else:
                self._hosts[worker.node_id] = self._host(live, now)
        self._hosts_read = fleet.version
        conditions: Counter[Values] = Counter(self._hosts.values())
        if unusable := sum(node_id not in fleet.workers for node_id in self._unusable):
            conditions[NO_TYPE, HostCondition.UNUSABLE.value] = unusable
        self._set(HOSTS, conditions)

    def _host(self, worker: Worker, now: float) -> tuple[str, str]:
        device = string_attribute(worker.attributes, TPU_TOPOLOGY)
        return self._named("tpu_type", device or NO_TYPE), next(conditions_of(worker, self._state, now)).value

    def _count_chips(self, now: float) -> None:
        held: dict[Values, float] = {}
        for user, band in self._state.limits.accounts:
            if (chips := self._state.limits.held(user, band).chips) > 0:
                values = (self._named("user", user),)
                held[values] = held.get(values, 0.0) + chips
        passed, self._looked_at = max(0.0, now - self._looked_at), now
        for (user,), chips in held.items() if passed else ():
            self._meter.add(USER_CHIP_SECONDS, chips * passed, {"user": user})
        self._set(USER_CHIPS, held)

    def _count_team_chips(self) -> None:
        teams, usage = self._state.teams.teams, self._state.teams.usage
        quotas: dict[Values, float] = {}
        held: dict[Values, float] = {}
        for kind in teams.types:
            for team in teams:
                of_team: Mapping[str, float] = usage.get(team.name, {})
                quota, used = teams.chips(team.name, kind), of_team.get(kind, 0.0)
                if quota or used:
                    values = self._named("team", team.name), self._named("tpu_type", kind)
                    quotas[values] = quotas.get(values, 0.0) + quota
                    held[values] = held.get(values, 0.0) + used
        self._set(TEAM_QUOTA, quotas)
        self._set(TEAM_CHIPS, held)

    # -- labels ----------------------------------------------------------------------------------------------------

    def _set(self, metric: Metric, amounts: Mapping[Values, float]) -> None:
        """Set a gauge for all values of its labels. Set earlier values that have no amount now to 0."""
        known = self._shown.setdefault(metric, set())
        known.update(amounts)
        for values in known:
            self._meter.set(metric, amounts.get(values, 0.0), dict(zip(metric.labels, values, strict=True)))

    def _of_job(self, spec: JobSpec, *names: str) -> dict[str, str]:
        band, tpu_type = self._kind(spec)
        return {name: {"band": band, "tpu_type": tpu_type}[name] for name in names}

    def _named(self, label: str, value: str) -> str:
        """Return the value of a label; `OTHER` if there are too many values already."""
        known = self._names[label]
        if value not in known and len(known) >= MOST_VALUES:
            return OTHER
        known[value] = None
        return value


def _start_of(gang: Gang, attempt: int) -> float | None:
    """Return when the first task of an attempt ran; None if none has, or the gang's record has dropped the attempt."""
    if gang.attempt == attempt:
        return gang.running_since if gang.running_since < math.inf else None
    return next((past.started_at for past in gang.past if past.number == attempt), None)


def _ends_of(job: Job) -> Counter[str]:
    """Return how many of a job's attempts have ended early, by cause, and 1 for the state in which the job ended."""
    ends = Counter(failure=job.failures, preemption=job.preemptions, eviction=job.evictions)
    if job.over is not None:
        ends[job.over.value] = 1
    return ends


def _counts(job: Job) -> bool:
    """Return whether people see it as a job, which a spare is not."""
    return job.spec.spare_for is None
