"""Users' limits and teams' quotas during a plan. Resources that the plan grants count at once."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from types import MappingProxyType

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import accelerators, rounded
from iris_ray.scheduler.availability import Availability, num_groups
from iris_ray.scheduler.pending_reason import LimitAccount, ReachedLimit
from iris_ray.scheduler.team_quotas import GivenBack, QuotaExhausted, QuotaSource, TeamQuotas
from iris_ray.state.user_limits import Account, UserLimits


@dataclass(slots=True)
class _Allowance:
    """A user's usage and limits in one band.

    Attributes:
        most_chips: the limit on chips; infinite if the cluster has no more chips than the limit.
        most_jobs: the limit on running jobs.
        chips: number of chips that the user holds, including those granted by the plan.
        running: ids of the user's jobs that had hosts before the plan.
        started: ids of the jobs that got their first hosts from the plan.
        kept_for: the job that has waited too long for chips within the limit; later jobs get none.
        promised: job id → chips of promised hosts with victims.
        expected: job id → chips of promised hosts without victims. There are no evictions for later jobs that could not
            run at the same time.
        spares: ids of the spares in ``promised`` and ``expected``, which don't count as running jobs.
    """

    most_chips: float
    most_jobs: float
    chips: float
    running: set[str]
    started: set[str] = field(default_factory=set)
    kept_for: str | None = None
    promised: dict[str, float] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    spares: set[str] = field(default_factory=set)

    def is_new(self, job: Job, once_left: bool = False) -> bool:
        """Return whether a job will count as an additional running job once it has hosts.

        ``once_left``: once all attempts have left their hosts that have ended.
        """
        job_id, all_wait = job.spec.job_id, len(job.pending) == len(job.gangs)
        holds = job_id in self.running and not (once_left and all_wait)
        return job.spec.spare_for is None and not holds and job_id not in self.started

    def chips_beside(self, job: Job, expected: bool = False) -> float:
        """Return the user's chips, including those promised (and optionally expected) for the user's other jobs."""
        promised = self.promised | self.expected if expected else self.promised
        return self.chips + sum(more for job_id, more in promised.items() if job_id != job.spec.job_id)

    @property
    def most_jobs_beside(self) -> int:
        """A number that `jobs_beside` never exceeds."""
        return len(self.running) + len(self.started) + len(self.promised) + len(self.expected)

    def jobs_beside(self, job: Job, expected: bool = False) -> int:
        """Return the number of the user's other jobs that run or have promised (optionally expected) hosts."""
        promised = self.promised.keys() | self.expected.keys() if expected else self.promised.keys()
        others = promised - {job.spec.job_id} - self.started - self.spares
        itself = job.spec.job_id in self.running or job.spec.job_id in self.started
        return len(self.running) + len(self.started) - itself + sum(job_id not in self.running for job_id in others)


class Allowances:
    """The resources that each user and team may still get during a plan.

    Args:
        limits: the users' limits; None: no limits.
        chips: number of chips and GPUs in the cluster. A limit of at least this number is ignored.
        teams: the teams' quotas.
    """

    def __init__(self, limits: UserLimits | None, chips: float, teams: TeamQuotas) -> None:
        self._limits = limits
        self._chips = chips
        self.teams = teams
        self._of: dict[Account, _Allowance] = {}

    def reached(self, job: Job) -> ReachedLimit | None:
        """Return the limit that keeps a job from getting now the smallest group count that it can use, or None."""
        return self._reached_by_user(job) or self._reached_by_team(job)

    def limit_once_left(
        self, job: Job, chips: float, left: GivenBack = MappingProxyType({}), is_asked: bool = False
    ) -> ReachedLimit | None:
        """Return the limit that keeps a job from this number of chips once some attempts have left, or None.

        This is asked before attempts are asked to leave for the job, and by each plan until they have left.

        Args:
            job: the job.
            chips: the number of chips that it would get.
            left: these attempts, each with its job's spec and its chips.
            is_asked: whether attempts leave for the job already. The reservations without victims for its user's other
                jobs then don't count: those jobs wait, and nobody leaves in vain.
        """
        if self.teams.exist:
            found = self.teams.quota_source_once_left(job, chips, left)
            if (reached := _limit_of_team(job, chips, found)) is not None:
                return reached
        freed = sum(held for spec, held in left.values() if (spec.user, spec.priority) == _account(job))
        return self._limit_of_user(job, chips, freed, once_left=True, expected=not is_asked)

    def most_once_left(
        self, job: Job, chips: float, wanted: int, left: GivenBack = MappingProxyType({}), is_asked: bool = False
    ) -> int:
        """Return how many times, of those wanted, a job may get a number of chips; see `limit_once_left`."""
        counts = range(wanted, 0, -1)
        return next((n for n in counts if self.limit_once_left(job, n * chips, left, is_asked) is None), 0)

    def accounts(self, job: Job, reached: ReachedLimit) -> tuple[LimitAccount, ...]:
        """Return the accounts that determine when a job that has reached a limit is within its limits again."""
        mine = self._allowance(job)
        is_free = reached.team is None or mine is None or (mine.most_chips == mine.most_jobs == math.inf)
        return (reached.account,) if is_free else (reached.account, _account(job))

    def quota_source(self, job: Job) -> QuotaSource:
        """Return the quota source of a job, or of the group that it leads, at its smallest size."""
        if not self.teams.exist:
            return QuotaSource.OWN
        if job.members:
            return self._quota_source_of_all(job.members)
        found = self.teams.quota_source(job, num_groups(job)[0] * chips_per_group(job))
        return found if isinstance(found, QuotaSource) else found.in_turn_as

    def _quota_source_of_all(self, members: Sequence[Job]) -> QuotaSource:
        needed: dict[str | None, tuple[Job, float]] = {}  # by type
        for job in members:
            kind = self.teams.kind(job.spec)
            needed[kind] = job, needed.get(kind, (job, 0.0))[1] + least_chips(job)
        found = (self.teams.quota_source(job, chips) for job, chips in needed.values())
        return max(one if isinstance(one, QuotaSource) else one.in_turn_as for one in found)

    def keep_quota_for(self, job: Job, quota_source: int) -> None:
        """Reserve quota for a job that could run with a quota source if its own team's lower bands used less.

        The quota is reserved in every account that jobs with that source draw on.
        """
        needed = num_groups(job)[0] * chips_per_group(job)
        found = self.teams.quota_source_without(job, needed, (one for one in PriorityBand if one > job.spec.priority))
        source = found if isinstance(found, QuotaSource) else found.in_turn_as
        if source <= min(quota_source, QuotaSource.SHARED) and self._reached_by_user(job) is None:
            own, *above = self.teams.path(job.spec)[:-1]
            self.teams.keep_for(job, needed, above[-1] if above and quota_source > QuotaSource.OWN else own)

    def _reached_by_team(self, job: Job) -> ReachedLimit | None:
        if not self.teams.exist:
            return None
        needed = num_groups(job)[0] * chips_per_group(job)
        return _limit_of_team(job, needed, self.teams.quota_source_if_all_stay(job, needed))

    def _reached_by_user(self, job: Job) -> ReachedLimit | None:
        mine = self._allowance(job)
        needed = num_groups(job)[0] * chips_per_group(job) if mine and mine.most_chips < math.inf else 0.0
        reached = self._limit_of_user(job, needed)
        if reached is None and needed and mine and mine.kept_for is not None and not mine.promised.get(job.spec.job_id):
            return self.short_of_chips(job, needed)
        return reached

    def _limit_of_user(
        self, job: Job, chips: float, freed: float = 0.0, once_left: bool = False, expected: bool = False
    ) -> ReachedLimit | None:
        """Return the user's limit that keeps a job from this number of chips once others are freed, or None.

        ``once_left``: see `_Allowance.is_new`; ``expected``: see `_Allowance.chips_beside`.
        """
        if (mine := self._allowance(job)) is None:
            return None
        if mine.most_jobs_beside >= mine.most_jobs and mine.is_new(job, once_left):
            jobs = mine.jobs_beside(job, expected)
            if jobs >= mine.most_jobs:
                return ReachedLimit(*_account(job), "running jobs", mine.most_jobs, jobs, 1)
        if chips and rounded(mine.chips_beside(job, expected) - freed + chips) > mine.most_chips:
            return self.short_of_chips(job, chips)
        return None

    def short_of_chips(self, job: Job, needed: float) -> ReachedLimit:
        """Return the limit on chips as a job's reached limit."""
        mine = self._allowance(job)
        assert mine is not None
        held = mine.chips_beside(job)
        about = *_account(job), "chips", mine.most_chips, held, needed, mine.kept_for
        return ReachedLimit(*about, is_kept_back=rounded(held + needed) <= mine.most_chips)

    def num_groups(self, job: Job, ending: float = 0.0) -> tuple[int, ...]:
        """Return the group counts that a gang of the job can use within its limits, ascending.

        ``ending`` is the number of chips that its last attempt still holds and will soon free.
        """
        mine, wanted = self._allowance(job), num_groups(job)
        if not (each := chips_per_group(job)):
            return wanted
        if mine is not None and mine.most_chips < math.inf:
            chips = mine.chips_beside(job) - ending
            wanted = tuple(count for count in wanted if rounded(chips + count * each) <= mine.most_chips)
        if self.teams.exist and len(wanted) > 1:  # additional groups must not use others' quota
            source_of = self.teams.quota_source_if_all_stay
            least = source_of(job, wanted[0] * each - ending)
            wanted = tuple(n for n in wanted if source_of(job, n * each - ending) == least)
        return wanted

    def within(self, job: Job, names: list[str], wanted: Sequence[int], available: Availability) -> list[str]:
        """Return as many of the first groups as the user's limit allows, as hosts may have more chips than expected.

        ``names`` has the groups, best first, and ``wanted`` the group counts that the job can use, ascending.
        """
        mine = self._allowance(job)
        if mine is None or mine.most_chips == math.inf or not chips_per_group(job):
            return names
        for count in (count for count in reversed(wanted) if count <= len(names)):
            if rounded(mine.chips_beside(job) + chips_of(names[:count], available)) <= mine.most_chips:
                return names[:count]
        return []

    def granted(self, job: Job, resources: Mapping[str, float]) -> None:
        """Count resources that the plan has granted to a job."""
        mine, chips = self._allowance(job), accelerators(resources)
        if self.teams.exist:
            self.teams.took(job, chips)
        if mine is not None:
            mine.chips = rounded(mine.chips + chips)
            if mine.is_new(job):
                mine.started.add(job.spec.job_id)

    def not_granted(self, job: Job, resources: Mapping[str, float]) -> None:
        """Undo `granted` for a job that had no hosts before."""
        chips = accelerators(resources)
        self.teams.took(job, -chips)
        self.given_back(job, chips)
        if (mine := self._allowance(job)) is not None:
            mine.started.discard(job.spec.job_id)

    def counts_for(self, reached: ReachedLimit, spec: JobSpec) -> bool:
        """Return whether a job's resources count towards a limit."""
        if reached.team is None:
            return (spec.user, spec.priority) == (reached.user, reached.band)
        return self.teams.counts_for(spec, reached.team, reached.type)

    def promised(self, job: Job, chips: float) -> None:
        """Count the chips of a firm promise to a job, and the job as running unless it is a spare."""
        self.teams.promised(job, chips)
        if (mine := self._promises(job)) is not None:
            mine.promised[job.spec.job_id] = chips
            mine.expected.pop(job.spec.job_id, None)

    def expects(self, job: Job, chips: float) -> None:
        """Count the chips of a promise without victims to a job."""
        self.teams.promised(job, chips)
        if (mine := self._promises(job)) is not None:
            mine.expected[job.spec.job_id] = chips

    def released(self, job: Job) -> None:
        """Stop counting the promise to a job."""
        self.teams.released(job)
        if (mine := self._allowance(job)) is not None:
            mine.promised.pop(job.spec.job_id, None)
            mine.expected.pop(job.spec.job_id, None)

    def given_back(self, job: Job, chips: float) -> None:
        """Stop counting chips that spares of a job's user free towards its limit."""
        if (mine := self._allowance(job)) is not None:
            mine.chips = rounded(mine.chips - chips)

    def keep_for(self, job: Job, reached: ReachedLimit) -> ReachedLimit:
        """Reserve the rest of the limit for a job, if the limit allows the job at all and no other job has it."""
        mine = self._allowance(job)
        if reached.team is not None and reached.needed <= reached.limit:
            return replace(reached, kept=self.teams.keep_for(job, reached.needed, reached.team))
        if mine is None or mine.kept_for or reached.what != "chips" or reached.needed > mine.most_chips:
            return reached
        mine.kept_for = job.spec.job_id
        return replace(reached, kept=True)

    def _promises(self, job: Job) -> _Allowance | None:
        """Return the allowance of the user of a job that gets a promise, and record a spare in it."""
        if (mine := self._allowance(job)) is not None and job.spec.spare_for is not None:
            mine.spares.add(job.spec.job_id)
        return mine

    def _allowance(self, job: Job) -> _Allowance | None:
        if self._limits is None:
            return None
        account = _account(job)
        mine = self._of.get(account)
        if mine is None:
            limits, held = self._limits.of(*account), self._limits.held(*account)
            assert limits.chips is not None
            assert limits.running_jobs is not None
            most_chips = limits.chips if limits.chips < self._chips else math.inf
            mine = self._of[account] = _Allowance(most_chips, limits.running_jobs, held.chips, held.running)
        return mine


def chips_per_group(job: Job) -> float:
    """Return the number of chips that a gang expects to take of each group."""
    hosts, each = job.spec.replicas if job.spec.coscheduling else 1, accelerators(job.spec.resources)
    return hosts * (max(1.0, each) if job.requirement.chips else each)


def least_chips(job: Job) -> float:
    """Return the smallest number of chips that all gangs of a job expect to take."""
    return len(job.gangs) * num_groups(job)[0] * chips_per_group(job)


def chips_of(names: Sequence[str], available: Availability) -> float:
    """Return the number of chips that a gang would take of these groups."""
    demand = available.requirement.demand
    return sum(accelerators(demand(worker)) for name in names for worker in available.members(name))


def most_chips_of(names: Iterable[str], available: Availability) -> float:
    """Return the largest number of chips that a gang might take of these groups once they are free."""
    return sum(sum(nlargest(available.tasks(name), _chips_in(name, available))) for name in names)


def _chips_in(name: str, available: Availability) -> Iterator[float]:
    hosts, demand = available.candidates.evaluations[name].eligible, available.requirement.demand
    return (accelerators(demand(host)) for host in hosts if not available.avoids(host))


def _limit_of_team(job: Job, needed: float, found: QuotaSource | QuotaExhausted) -> ReachedLimit | None:
    if isinstance(found, QuotaSource):
        return None
    about = *_account(job), f"{found.kind} chips", found.most, found.used, needed
    return ReachedLimit(*about, team=found.team, is_kept_back=found.is_kept_back)


def _account(job: Job) -> Account:
    return job.spec.user, job.spec.priority
