"""The order of the queue, its time limits, and turns for bounded searches.

1. With teams, jobs within their own team's quota, then within that of a team above it, then those that borrow
   (`QuotaSource`).
2. Then by priority band: SYSTEM, PRODUCTION, INTERACTIVE, BATCH. Within a band:
    a. Gangs that have just lost their hosts and return, by age (`Urgency.RETURNING`).
    b. All others, by fair share (`Urgency.NONE`).
3. Spares, growth spares and jobs that yield come after all jobs of all bands, in the order above.

Fair share: the next job is that of the team, and within it of the user, with the smallest share of the cluster. A share
covers current and past usage. Age, the order of submission, decides between equal shares and between jobs of one user,
but never overrides a share.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import chain
from operator import attrgetter

from iris_ray.model.job_spec import SparePurpose
from iris_ray.model.jobs import Gang, Job, Kind
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import NO_TEAM
from iris_ray.scheduler.team_quotas import QuotaSource
from iris_ray.state.events import TaskUnschedulableEvent
from iris_ray.state.team_use import TeamUse
from iris_ray.state.user_limits import PastUsage
from iris_ray.state.waiting_jobs import Run, WaitingJobs

Usage = Mapping[str, Mapping[str, float]]
"""The resources that each user's gangs hold, by Ray's names."""

WAITS_FOR_MORE_S = 30.0
"""Seconds in the queue for which a gang that can use more groups waits for groups about to be free."""
WAITS_FOR_OWN_S = 10.0
"""Seconds after an attempt for which its gang waits for its former slices, while their last processes end."""


class Urgency(IntEnum):
    """The classes of jobs within a band, first class first."""

    RETURNING = 0
    NONE = 1


def comes_last(job: Job) -> bool:
    """Return whether a job can do without its hosts: a spare, a growth spare, or a job that yields."""
    spare_for = job.spec.spare_for
    return job.yields or (spare_for is not None and spare_for.purpose is not SparePurpose.REPLACEMENT)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The time limits of waiting jobs at one point in time.

    Attributes:
        now: seconds on the clock of the events.
        backfill_bound_s: seconds for which later jobs may pass a waiting gang; see `bound_s`.
        returned: ids of the jobs whose returning gangs have had their turn in this plan.
    """

    now: float
    backfill_bound_s: float
    returned: set[str] = field(default_factory=set)

    def seconds_paused(self, gang: Gang) -> float:
        """Return the remaining seconds of the gang's pause; 0 or less if it does not pause."""
        return gang.not_before - self.now

    def bound_s(self, band: PriorityBand) -> float:
        """Return the backfill bound of a band in seconds.

        It is 0 for PRODUCTION and SYSTEM, since small jobs of lower bands would otherwise keep their gangs waiting.
        """
        return 0.0 if band <= PriorityBand.PRODUCTION else self.backfill_bound_s

    def is_starving(self, job: Job, gang: Gang) -> bool:
        """Return whether a gang of the job has waited longer than the backfill bound."""
        return self.now - gang.waiting_since >= self.bound_s(job.spec.priority)

    def waits_for_more(self, gang: Gang) -> bool:
        """Return whether the gang entered the queue, or ended its pause, within `WAITS_FOR_MORE_S`."""
        return self.now <= max(gang.waiting_since, gang.not_before) + WAITS_FOR_MORE_S

    def waits_for_own_slices(self, gang: Gang) -> bool:
        """Return whether the gang's last attempt or its pause ended within `WAITS_FOR_OWN_S`."""
        return self.now <= max(gang.waiting_since, gang.not_before) + WAITS_FOR_OWN_S

    def is_returning(self, job: Job) -> bool:
        """Return whether a waiting gang of the job has just run. It comes first, since a lost host costs no turn."""
        if job.spec.coscheduling is None or job.yields or job.spec.job_id in self.returned:
            return False
        return any(self.now < job.gangs[position].returning_until for position in job.pending)

    def in_turn(self, job: Job) -> Iterator[int]:
        """Return the positions of the job's gangs to place in a plan, in order.

        Gangs that return have a turn before the others of their job; see `FairQueue.comes_by_share`.
        """
        if len(job.gangs) == 1 or not (self.is_returning(job) or job.spec.job_id in self.returned):
            return iter(job.pending)
        returns = {i for i in job.pending if job.gangs[i].not_before <= self.now < job.gangs[i].returning_until}
        return iter([i for i in job.pending if (i in returns) == self.is_returning(job)])

    def timed_out(self, job: Job) -> TaskUnschedulableEvent | None:
        """Return the event that ends a job without any run within its ``scheduling_timeout``, or None."""
        timeout = job.spec.scheduling_timeout
        if timeout is None or job.started or self.now - max(job.submitted_at, job.ready_at) <= timeout:
            return None
        why = f"it did not get to run within its scheduling_timeout of {timeout:g} s"
        first = job.gangs[next(iter(job.pending))].tasks[0]
        return TaskUnschedulableEvent(job.spec.job_id, first.index, why)


Tier = tuple[int, PriorityBand]
"""A class of jobs in the queue: the `QuotaSource`, or a higher number for jobs that come last; and the band."""


_number = attrgetter("number")


class FairQueue:
    """One pass over the pending jobs, in the order in which they are placed.

    A share is the largest fraction of any resource of the cluster that a user or a team holds (dominant resource
    fairness, Ghodsi et al., NSDI 2011). An hour of past usage counts as much as current usage, with exponential decay;
    see `PastUsage`. Resources granted during the pass count. A team's share is divided by its weight.

    Args:
        pending: the jobs.
        usage: each user's current usage.
        past: each user's past usage; None to ignore it.
        totals: the cluster's resources.
        deadlines: the urgency of jobs.
        teams: each team's current and past usage; None without teams.
        quota_source: returns a job's `QuotaSource`.
        passed_over: called with each job that is deferred because it needs quota from further up, and with the quota
            source of the jobs in turn.
        share_reason: whether plain jobs of a kind wait like an earlier one and so need no turn.

    Attributes:
        tier: the tier of the latest job.
    """

    def __init__(
        self,
        pending: WaitingJobs,
        usage: Usage,
        past: PastUsage | None,
        totals: Mapping[str, float],
        deadlines: Deadlines,
        teams: TeamUse | None = None,
        quota_source: Callable[[Job], int] = lambda job: QuotaSource.OWN,
        passed_over: Callable[[Job, int], None] = lambda job, quota_source: None,
        share_reason: Callable[[Run], bool] = lambda run: False,
    ) -> None:
        self._pending = pending
        self._deadlines = deadlines
        self._users = _Shares(usage, past, totals, deadlines.now)
        self._teams = teams if teams is not None and teams.teams else None
        self._of_teams = _Shares(self._teams.usage, self._teams.past, totals, deadlines.now) if self._teams else None
        self._quota_source = quota_source
        self._passed_over = passed_over
        self._share_reason = share_reason
        self._later: list[Run] = []  # jobs that need quota from further up
        self._by_share_too: list[Run] = []  # jobs of the band whose other gangs have returned
        self._kinds_later: set[Kind] = set()  # the kinds of these jobs
        self._was_granted = False  # whether the latest job got hosts
        self._again = False
        self._in_line: _Line | None = None
        self.tier: Tier = QuotaSource.OWN, PriorityBand.SYSTEM

    def __iter__(self) -> Iterator[Job]:
        waiting: list[Run] = []
        last: list[Run] = []
        for run in self._pending.runs():
            (last if comes_last(run[0]) else waiting).append(run)
        for quota_source in QuotaSource:
            yield from self._by_class(waiting, quota_source)
            waiting, self._later = self._later, []
        yield from self._by_class(last, len(QuotaSource))

    @property
    def is_alone(self) -> bool:
        """Whether the latest job's user is the only one in its class, so that the job comes again at once."""
        return self._in_line is not None and self._in_line.is_alone

    def granted(self, job: Job, resources: Mapping[str, float], comes_again: bool) -> None:
        """Count the resources granted to the latest job, and record whether it comes again at its user's next turn."""
        self._users.count(job.spec.user, resources)
        if self._teams is not None and self._of_teams is not None:
            for name in self._teams.path(job.spec.team):
                self._of_teams.count(name, resources)
        self._was_granted, self._again = True, comes_again

    def comes_by_share(self, job: Job) -> None:
        """Give the other gangs of a job whose returning gangs have had their turn a turn by share in the same band."""
        self._deadlines.returned.add(job.spec.job_id)
        self._by_share_too.append(deque((job,)))

    def _by_class(self, runs: Iterable[Run], quota_source: int) -> Iterator[Job]:
        """Yield jobs by band, returning ones first, and defer those that need quota from further up."""
        classes: defaultdict[tuple[PriorityBand, Urgency], list[Run]] = defaultdict(list)
        for run in runs:
            urgency = Urgency.RETURNING if self._deadlines.is_returning(run[0]) else Urgency.NONE
            classes[run[0].spec.priority, urgency].append(run)
        for band, urgency in sorted({(band, urgency) for band, _ in classes for urgency in Urgency}):
            of_class = classes[band, urgency]
            if urgency is Urgency.NONE:
                of_class += self._by_share_too
                self._by_share_too.clear()
            if not of_class:
                continue
            self.tier = quota_source, band
            self._kinds_later.clear()
            in_turn = self._by_age(of_class) if urgency is Urgency.RETURNING else self._by_share(of_class)
            if self._teams is None or quota_source >= QuotaSource.BORROWED:
                yield from in_turn
                continue
            for job in in_turn:
                if self._quota_source(job) > quota_source:
                    self._passed_over(job, quota_source)
                    self._later.append(deque((job,)))
                    if job.is_plain:
                        self._kinds_later.add(job.kind)
                else:
                    yield job

    def _needs_no_turns(self, run: Run) -> bool:
        """Return whether plain jobs wait like an earlier one of their kind."""
        if run[0].kind in self._kinds_later:
            if (head := self._later[-1])[0].kind is run[0].kind:
                head.extend(run)
            else:
                self._later.append(run)
            return True
        return self._share_reason(run)

    def _by_age(self, runs: Iterable[Run]) -> Iterator[Job]:
        self._in_line = None
        for job in sorted(chain.from_iterable(runs), key=_number):
            self._again = True
            while self._again:  # several of its gangs may return
                self._again = False
                yield job

    def _by_share(self, runs: Iterable[Run]) -> Iterator[Job]:
        """Yield the jobs of a class by the shares of teams, the shares of users, and age."""
        line = self._in_line = self._line(runs)
        while line.first is not None:
            self._was_granted = self._again = False
            yield line.first
            line.had_its_turn(self._was_granted, self._again)

    def _line(self, runs: Iterable[Run]) -> "_Line":
        """Return the line of all jobs, composed of the lines of teams and users."""
        by_user: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in runs:
            by_user[run[0].spec.team, run[0].spec.user].append(run)
        whole = _Line(lambda: 0.0)
        lines = {NO_TEAM: whole}
        for (team, user), of_user in by_user.items():
            line = whole
            for name in reversed(self._teams.path(team)[:-1]) if self._teams is not None else ():
                if name not in lines:
                    lines[name] = _Line(partial(self._share_of_team, name))
                    line.parts.append(lines[name])
                line = lines[name]
            line.parts.append(_Line(partial(self._users.of, user), of_user, self._needs_no_turns))
        whole.begin()
        return whole

    def _share_of_team(self, name: str) -> float:
        assert self._teams is not None
        assert self._of_teams is not None
        team = self._teams.teams.by_name.get(name)
        return self._of_teams.of(name) / (team.weight if team is not None else 1.0)


class _Shares:
    """The shares of users or teams during a pass."""

    def __init__(self, usage: Usage, past: PastUsage | None, totals: Mapping[str, float], now: float) -> None:
        self._usage = usage
        self._past = past
        self._totals = totals
        self._now = now
        self._counted: dict[str, dict[str, float]] = {}  # name → amounts that count
        self._shares: dict[str, float] = {}

    def of(self, who: str) -> float:
        """Return the share of a user or team."""
        share = self._shares.get(who)
        if share is None:
            self._counted[who] = {} if self._past is None else self._past.hours(who, self._now)
            share = self._add(who, self._usage.get(who, {}))
        return share

    def count(self, who: str, resources: Mapping[str, float]) -> None:
        """Count resources granted during the pass."""
        if who not in self._shares:
            self.of(who)
        self._add(who, resources)

    def _add(self, who: str, resources: Mapping[str, float]) -> float:
        counted, totals = self._counted[who], self._totals
        for resource, amount in resources.items():
            counted[resource] = counted.get(resource, 0.0) + amount
        shares = [amount / totals[resource] for resource, amount in counted.items() if totals.get(resource)]
        share = self._shares[who] = max(shares, default=0.0)
        return share


class _Line:
    """Jobs in the order of their turns: those of a user, or those of the users and subteams of a team.

    Args:
        share: returns the share that orders this line among its siblings.
        runs: the jobs of a user.
        needs_no_turns: whether the rest of a run needs no turns.

    Attributes:
        parts: the lines that a team's line consists of; fill it before calling `begin`.
        first: the job in turn, or None if none is left.
    """

    __slots__ = ("_needs_no_turns", "_runs", "_share", "_turns", "first", "parts")

    def __init__(
        self,
        share: Callable[[], float],
        runs: Iterable[Run] = (),
        needs_no_turns: Callable[[Run], bool] = lambda run: False,
    ) -> None:
        self.parts: list[_Line] = []
        self._share = share
        self._runs = [(run[0].number, index, run) for index, run in enumerate(runs)]
        self._needs_no_turns = needs_no_turns
        self._turns: list[tuple[float, int, int, _Line]] = []
        heapq.heapify(self._runs)
        self.first: Job | None = self._runs[0][-1][0] if self._runs else None

    def begin(self) -> None:
        """Order the parts by their shares."""
        for part in self.parts:
            part.begin()
        self._turns = [part._turn(number) for number, part in enumerate(self.parts)]
        heapq.heapify(self._turns)
        if self._turns:
            self.first = self._turns[0][-1].first

    @property
    def is_alone(self) -> bool:
        """Whether the first job's user is the only one in the line."""
        return bool(self._runs) or (len(self._turns) == 1 and self._turns[0][-1].is_alone)

    def had_its_turn(self, was_granted: bool, comes_again: bool) -> None:
        """Advance past the first job, unless it comes again."""
        if self._runs:
            if not comes_again:
                self._drop_first()
                self.first = self._runs[0][-1][0] if self._runs else None
            return
        turns = self._turns
        share, _, number, part = turns[0]
        part.had_its_turn(was_granted, comes_again)
        if len(turns) == 1:
            self.first = part.first
            return
        if part.first is None:
            heapq.heappop(turns)
        else:
            if was_granted or not part.parts:  # a team's share changes only in its own turns
                share = part._share()
            heapq.heapreplace(turns, (share, part.first.number, number, part))
        self.first = turns[0][-1].first

    def _drop_first(self) -> None:
        _, index, run = self._runs[0]
        run.popleft()
        if not run or self._needs_no_turns(run):
            heapq.heappop(self._runs)
        else:
            heapq.heapreplace(self._runs, (run[0].number, index, run))

    def _turn(self, number: int) -> "tuple[float, int, int, _Line]":
        first = self.first
        return self._share(), first.number if first is not None else 0, number, self


class SearchFairness:
    """Shares the bounded number of searches of each plan between all kinds of jobs.

    After a failed search for a kind, plans skip that kind until one of them has had time for all other kinds. The first
    kinds in the queue therefore can't use up the searches of every plan.
    """

    def __init__(self) -> None:
        self._searched: set[Hashable] = set()

    def passes_over(self, kind: Hashable) -> bool:
        """Return whether a search for this kind has failed and other kinds are still due."""
        return kind in self._searched

    def end_plan(self, in_vain: Collection[Hashable], had_time: bool) -> None:
        """Record the kinds with failed searches, and whether the plan had time for all kinds that were due."""
        if had_time:
            self._searched.clear()
        else:
            self._searched.update(in_vain)
