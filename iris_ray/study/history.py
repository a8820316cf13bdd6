"""The record of a simulation: its jobs, attempts and hosts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.teams import NO_TEAM
from iris_ray.model.workers import TPU


@dataclass(slots=True)
class AttemptHistory:
    """One attempt, from its assignment until its hosts are free.

    Attributes:
        spare: whether it only held slices ready.
        groups: names of its slices, or of its host.
        held: the resources that it held in all, by Ray's names.
        beside_tpus: whether its hosts have chips.
        assigned_at: when it got its hosts; all times are in seconds.
        began_at: when its tasks began to run, or None.
        ended_at: when they ended, or None.
        freed_at: when its hosts were free, or None.
        kept_s: the seconds whose work counted in the end; work after the last save is lost.
        outcome: how it ended, in a word.
    """

    id: AttemptId
    user: str
    spare: bool
    groups: tuple[str, ...]
    held: Mapping[str, float]
    assigned_at: float
    began_at: float | None = None
    ended_at: float | None = None
    freed_at: float | None = None
    kept_s: float = 0.0
    outcome: str = ""
    beside_tpus: bool = True
    team: str = NO_TEAM

    @property
    def lost_s(self) -> float:
        """The seconds whose work was lost."""
        if self.spare or self.began_at is None or self.ended_at is None:
            return 0.0
        return self.ended_at - self.began_at - self.kept_s


@dataclass(slots=True)
class JobHistory:
    """One job. Times are in seconds; None: not yet.

    Attributes:
        submitted_at, assigned_at, ended_at: when it was submitted, first got hosts, and ended.
        state: the name of its final `JobState`.
    """

    spec: JobSpec
    submitted_at: float
    assigned_at: float | None = None
    ended_at: float | None = None
    state: str = "PENDING"

    def waited_s(self, now: float) -> float:
        """Return how many seconds it waited for its first hosts, or has waited by now."""
        until = now if self.assigned_at is None else self.assigned_at
        return max(0.0, min(until, now if self.ended_at is None else self.ended_at) - self.submitted_at)


@dataclass(slots=True)
class History:
    """The record of a simulation, in the order of time.

    Attributes:
        jobs: by id, without the spares that the state makes.
        attempts: all attempts, spares' included.
        capacity: the chips of all live hosts, and the CPUs of those without chips, from a time on, by Ray's names.
        events: the number of events that the state has handled.
        starved: the number of jobs that waited longer than the backfill bound, so that groups were kept for them.
        reclaimed: which attempts were told to leave their hosts to a job of another team, and when.
    """

    jobs: dict[str, JobHistory] = field(default_factory=dict)
    attempts: list[AttemptHistory] = field(default_factory=list)
    capacity: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    plans: int = 0
    events: int = 0
    starved: int = 0
    reclaimed: dict[AttemptId, float] = field(default_factory=dict)
    _live: dict[AttemptId, AttemptHistory] = field(default_factory=dict)

    def capacity_is(self, now: float, totals: Mapping[str, float]) -> None:
        """Note the capacity of all live hosts together from now on."""
        if self.capacity and self.capacity[-1][0] == now:
            self.capacity.pop()
        self.capacity.append((now, dict(totals)))

    def submitted(self, spec: JobSpec, now: float) -> None:
        """Note a new job."""
        self.jobs[spec.job_id] = JobHistory(spec, now)

    def assigned(self, job: Job, gang: Gang, held: Mapping[str, float], now: float, beside_tpus: bool = True) -> None:
        """Note that a gang has got hosts, and whether these have chips."""
        attempt, spec = job.current_attempt(gang), job.spec
        run = AttemptHistory(attempt, spec.user, spec.spare_for is not None, gang.groups, held, now)
        run.beside_tpus, run.team = beside_tpus, spec.team
        self.attempts.append(run)
        self._live[attempt] = run
        record = self.jobs.get(spec.job_id)
        if record is not None and record.assigned_at is None:
            record.assigned_at = now

    def began(self, attempt: AttemptId, now: float) -> None:
        """Note that the tasks of an attempt run."""
        self._live[attempt].began_at = now

    def ended(self, attempt: AttemptId, now: float, outcome: str, kept_s: float) -> None:
        """Note that the tasks of an attempt have ended, or are being stopped."""
        run = self._live[attempt]
        run.ended_at, run.outcome, run.kept_s = now, outcome, kept_s

    def freed(self, attempt: AttemptId, now: float) -> None:
        """Note that an attempt's hosts are free."""
        if (run := self._live.pop(attempt, None)) is not None:
            run.freed_at = now

    def finished(self, job_id: str, state: str, now: float) -> None:
        """Note that a job is over."""
        if (record := self.jobs.get(job_id)) is not None:
            record.ended_at, record.state = now, state


def size_of(spec: JobSpec) -> float:
    """Return the chips that a job needs at least, all tasks together; the CPUs if it uses no chips."""
    each = spec.resources.get(TPU, 0.0) or spec.resources.get("CPU", 0.0)
    groups = spec.coscheduling.num_groups[0] if spec.coscheduling else 1
    return each * spec.replicas * groups
