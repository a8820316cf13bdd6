"""What it costs to evict an attempt, and whether it may be evicted.

A victim is of a lower band than the waiting job and has run for the minimum time of its band; or it uses quota that
another team reclaims (`Reclaim`); or it is a spare or yields. `EvictionCosts` defines the cost of an attempt's end.
Sets of victims are compared lexicographically by: the number of borrowers that have just lost work to a lender and are
spared for as long (`Gang.spared_until`); the rank of their teams as borrowers; the number of victims of SYSTEM,
PRODUCTION, INTERACTIVE and BATCH, and within each band first those that run only once and so end for good; the lost
work in chip-seconds; and the number of spares. Spares and jobs that yield count only in the last, since they lose no
work.

A victim loses its work since its latest save that outlives its hosts, or since its attempt began if it has reported
none; or no work if it heeds notices or is about to save. It also loses the time to resume its work. A task without
chips counts as one chip.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from iris_ray.model.cluster_settings import EVICTIONS_PER_JOB, EVICTIONS_PER_TEAM, EVICTIONS_PER_USER
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import accelerators
from iris_ray.scheduler.team_quotas import Reclaim
from iris_ray.state.attempt_ends import BUDGET_S, Owner, owners

GRACE_S = 30.0
BACK_S = 120.0
"""Assumed seconds from new slices to the first step, for launch, restore and compilation, if not measured."""
LEAST_RUN_S = {band: 120.0 if band is PriorityBand.BATCH else 600.0 for band in PriorityBand}

Cost = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EvictionRules:
    """The conditions for evictions, and the grace period.

    Args:
        grace_s: seconds from the notice to the end.
        least_run_s: the minimum runtime of an attempt before it may be evicted, by band; seconds.
        per_job: the eviction budget of each gang, per hour; None: no limit.
        per_user: the budget of all gangs of a user. If none was evicted, one job may exceed it at once.
        per_team: the budget of all gangs of a team and its subteams.
    """

    grace_s: float = GRACE_S
    least_run_s: Mapping[PriorityBand, float] = field(default_factory=lambda: LEAST_RUN_S)
    per_job: int | None = EVICTIONS_PER_JOB.parse(EVICTIONS_PER_JOB.default)
    per_user: int | None = EVICTIONS_PER_USER.parse(EVICTIONS_PER_USER.default)
    per_team: int | None = EVICTIONS_PER_TEAM.parse(EVICTIONS_PER_TEAM.default)


DEFAULT_RULES = EvictionRules()


@dataclass(frozen=True, slots=True)
class Running:
    """The running attempts, for use in a plan; see the properties of `ControllerState` with these names.

    Args:
        jobs: all jobs by id.
        attempts: the attempts of each band that hold hosts, ordered by when they got them or last reported a save.
        evicted: the attempts that are being evicted.
        heeding: the attempts of each band that save their state when they receive a notice.
        evicted_at: the times of evictions, by user and team; ascending, seconds.
    """

    jobs: Mapping[str, Job] = field(default_factory=dict)
    attempts: Mapping[PriorityBand, dict[AttemptId, None]] = field(
        default_factory=lambda: {b: {} for b in PriorityBand}
    )
    evicted: Collection[AttemptId] = ()
    heeding: Mapping[PriorityBand, dict[AttemptId, None]] = field(default_factory=lambda: {b: {} for b in PriorityBand})
    evicted_at: Mapping[Owner, Sequence[float]] = field(default_factory=dict)


class EvictionCosts:
    """The costs of ending running attempts, during a plan.

    Args:
        running: the running attempts.
        rules: the conditions for evictions; None: no evictions.
        idle: the attempts that leave for a job of any band.
        now: seconds on the clock of the events.

    Attributes:
        now: seconds on the clock of the events.
        deadline: when attempts that are asked to leave now are stopped; seconds.
        leaving: the attempts that are about to leave their hosts.
    """

    def __init__(
        self, running: Running, rules: EvictionRules | None, idle: Mapping[AttemptId, Job], now: float
    ) -> None:
        self.now = now
        self._running = running
        self._least_run_s = {} if rules is None else rules.least_run_s
        self.deadline = now + (GRACE_S if rules is None else rules.grace_s)
        self._idle = idle
        self._rules = rules or EvictionRules()
        self._budgets: dict[Owner, float] = {}  # seconds until another gang of the owner may be evicted
        self._costs: dict[AttemptId, tuple[PriorityBand, Cost]] = {}
        self.leaving = set[AttemptId]()
        self._leaving_of = Counter[Owner]()  # by owner, without idle ones, which no budget counts
        self.leave(a for a in running.evicted if running.jobs[a.job_id].gangs[a.gang].eviction is not None)

    def of(
        self,
        attempt: AttemptId,
        taker: PriorityBand | None,
        reclaim: Reclaim,
        patient: bool,
        lent: Collection[AttemptId] = (),
    ) -> Cost | None:
        """Return the cost of an attempt's end; None if the attempt can't be a victim.

        An attempt that is about to leave costs nothing more, but only a job that could have evicted it may count on
        that: the attempt then leaves for this job as well.

        Args:
            attempt: the attempt.
            taker: the band of the job that would take its hosts; None if the job may not evict.
            reclaim: the job's right to reclaim quota.
            patient: whether to include attempts that have not yet run for the minimum time.
            lent: the attempts that were lent hosts reserved for that job, which they leave at any time.
        """
        if attempt in self.leaving:
            job = self._running.jobs[attempt.job_id]
            by_band = taker is not None and job.spec.priority > taker and reclaim.by_band(job.spec)
            return NO_COST if is_idle(job) or by_band or attempt in lent else None
        known = self._costs.get(attempt)
        if known is None:
            known = self._costs[attempt] = self._cost(attempt)
        band, cost = known
        if attempt in self._idle:
            return cost or None
        if taker is None or not cost:
            return None
        if attempt in lent:
            return (0.0, 0.0, 0.0, *cost[3:])
        gang, spec, wait_s = self._gang(attempt), self._running.jobs[attempt.job_id].spec, cost[0]
        rank, spared = 0, False
        if band <= taker or not reclaim.by_band(spec):
            owes = reclaim.rank(spec)
            if owes is None:
                return None
            rank, spared = owes, self.now < gang.spared_until
            if not gang.evicted_at:
                wait_s = 0.0  # borrowed hosts have no minimum runtime
        wait_s = max(wait_s, self.job_waits_s(attempt), *map(self.owner_waits_s, owners(spec)))
        return (wait_s, float(spared), float(rank), *cost[3:]) if patient or not wait_s else None

    def leave(self, attempts: Iterable[AttemptId]) -> None:
        """Record that attempts leave their hosts to a job."""
        for attempt in attempts:
            if attempt not in self.leaving and not is_idle(self._running.jobs[attempt.job_id]):
                self._leaving_of.update(self.owners_of(attempt))
            self.leaving.add(attempt)
        self._budgets.clear()

    def owners_of(self, attempt: AttemptId) -> tuple[Owner, ...]:
        """Return the owners of the eviction budgets that count an attempt."""
        return owners(self._running.jobs[attempt.job_id].spec)

    def is_of(self, attempt: AttemptId, some: Collection[Owner]) -> bool:
        """Return whether an attempt's job belongs to any of these users and teams."""
        return any(owner in some for owner in self.owners_of(attempt))

    def owner_waits_s(self, owner: Owner, count: int = 1) -> float:
        """Return the seconds until this number of gangs of a user or a team may be evicted at once."""
        if (most := self._rules.per_team if owner.is_team else self._rules.per_user) is None:
            return 0.0
        if count > 1 or owner not in self._budgets:
            evicted_at, leaving = self._running.evicted_at.get(owner, ()), self._leaving_of[owner]
            wait_s = _budget_s(evicted_at, leaving, count, most, self.now)
            if count > 1:
                return wait_s
            self._budgets[owner] = wait_s
        return self._budgets[owner]

    def hosts_of(self, attempt: AttemptId) -> Iterable[str | None]:
        """Return the node ids of an attempt's hosts."""
        return (task.node_id for task in self._running.jobs[attempt.job_id].gangs[attempt.gang].tasks)

    def job_waits_s(self, attempt: AttemptId) -> float:
        """Return the seconds until an attempt's gang is within its eviction budget."""
        if (most := self._rules.per_job) is None:
            return 0.0
        return _budget_s(self._gang(attempt).evicted_at, 0, 1, most, self.now)

    def _gang(self, attempt: AttemptId) -> Gang:
        return self._running.jobs[attempt.job_id].gangs[attempt.gang]

    def _cost(self, attempt: AttemptId) -> tuple[PriorityBand, Cost]:
        job = self._running.jobs[attempt.job_id]
        gang, band = job.gangs[attempt.gang], job.spec.priority
        if not gang.placed or gang.attempt != attempt.number:
            return band, ()  # the attempt has ended
        if is_idle(job):
            return band, _cost(band, victims=0, lost=0.0, spares=1)
        ran = self.now - gang.running_since
        protected_s = max(0.0, self._least_run_s.get(band, math.inf) - ran)
        if protected_s == math.inf:
            return band, ()
        lost_s = max(0.0, self.now - gang.loses_since(self.now, self.deadline))
        lost_s += BACK_S if job.times.back_s is None else job.times.back_s
        lost = lost_s * len(gang.tasks) * max(1.0, accelerators(job.spec.resources))
        return band, _cost(band, 1, lost, spares=0, protected_s=protected_s, runs_once=job.spec.runs_once)


def is_idle(job: Job) -> bool:
    """Return whether a job with hosts leaves them for any job that precedes it."""
    return job.yields or job.spec.spare_for is not None


def _budget_s(evicted_at: Sequence[float], leaving: int, count: int, most: int, now: float) -> float:
    """Return the seconds until more evictions are allowed.

    Args:
        evicted_at: the times of past evictions; ascending, seconds.
        leaving: the number of current evictions.
        count: the number of additional evictions. More than ``most`` are allowed only without any before.
        most: the budget for `BUDGET_S`.
        now: seconds on the clock of the events.
    """
    if not evicted_at and not leaving:
        return 0.0
    lately = [at for at in evicted_at if at > now - BUDGET_S]
    too_many = len(lately) + leaving + min(count, most) - most
    if too_many <= 0:
        return 0.0
    return lately[too_many - 1] + BUDGET_S - now if too_many <= len(lately) else BUDGET_S


def _cost(
    band: PriorityBand, victims: int, lost: float, spares: int, protected_s: float = 0.0, runs_once: bool = False
) -> Cost:
    """Return a cost: seconds until the eviction is allowed; 0, for whether it is spared; 0, for the rank of its team as
    a borrower; victims by band, high to low; lost work; spares.

    Each band has two numbers: the victims that run once, and all victims.
    """
    by_band = (float(count * (band is other)) for other in PriorityBand for count in (victims * runs_once, victims))
    return (protected_s, 0.0, 0.0, *by_band, lost, float(spares))


NO_COST: Cost = _cost(PriorityBand.BATCH, victims=0, lost=0.0, spares=0)
