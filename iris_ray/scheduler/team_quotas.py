"""Teams' quotas during a plan: which jobs are within quota, what may be borrowed, and what is reclaimed.

A job uses the quota of its own team. If that is used up, it uses quota of a team above that other subteams leave
unused, and finally quota that other teams lend. `QuotaSource` says which of these a job needs.

Between teams, only quotas decide which jobs leave. A job may take hosts of another team if, below their closest common
ancestor, the job's side stays within its quota and the other side exceeds its own at every level. What leaves for the
job from below counts as gone. The team that has borrowed most in the past hours is the first to return hosts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, log2
from types import MappingProxyType
from typing import NamedTuple

from iris_ray.errors import UnknownTPUTypeError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import NO_TEAM, Quota
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import GPU, rounded
from iris_ray.state.fleet import Fleet
from iris_ray.state.team_use import TeamUse, in_band, own_part

GivenBack = Mapping[AttemptId, tuple[JobSpec, float]]
"""Attempts that would leave for a job, each with its job's spec and the chips that it holds."""


class QuotaSource(IntEnum):
    """The source of the quota that a job needs, which orders the queue."""

    OWN = 0  # its own team's quota, or none is needed
    SHARED = 1  # the quota of a team above its own
    BORROWED = 2  # quota that other teams lend


@dataclass(frozen=True, slots=True)
class QuotaExhausted:
    """The account whose quota is used up for a job.

    Attributes:
        team: the team that can't borrow more; `NO_TEAM` if other teams don't lend the rest.
        kind: the quota's type.
        most: the number of chips that the team may use.
        used: the number of chips in use, including those that its subteams don't lend.
        is_kept_back: whether quota would be left without reservations for other jobs.
        in_turn_as: the job's quota source in the queue's order. A job within its own team's quota keeps its turn even
            if a team above can't borrow more.
    """

    team: str
    kind: str
    most: float
    used: float
    is_kept_back: bool
    in_turn_as: QuotaSource = QuotaSource.BORROWED


@dataclass(slots=True)
class _Account:
    """The account of a team, or of a team's own jobs without its subteams, for one type, in chips.

    Attributes:
        chips: its quota.
        keeps: the part of the quota that it does not lend.
        most: the quota plus the amount that it may borrow.
        by_band: the parts of the quota for jobs of a band.
        used: chips held by, granted by the plan to, or promised to its jobs. Chips that a victim holds and that are
            promised to a job for which it leaves count once.
        kept: unused chips that its subteams don't lend.
        in_bands: used chips by band, for the bands in ``by_band``.
        promised: chips promised to its jobs, by band.
        aside: chips reserved for its jobs that wait for quota, by band; not part of ``used``.
        leaving: chips in ``used`` that its jobs are about to leave, by band.
    """

    chips: float
    keeps: float
    most: float
    by_band: Mapping[PriorityBand, float]
    used: float
    kept: float
    in_bands: dict[PriorityBand, float]
    promised: Counter[PriorityBand] = field(default_factory=Counter)
    aside: Counter[PriorityBand] = field(default_factory=Counter)
    leaving: Counter[PriorityBand] = field(default_factory=Counter)

    @property
    def unused(self) -> float:
        """The unused chips that it does not lend."""
        return max(self.kept, self.keeps - self.used)

    def over(self, band: PriorityBand) -> float:
        """Return the number of chips by which its jobs, or those of a band, exceed its quota."""
        over = self.used - self.promised.total() - self.leaving.total() - self.chips
        if (part := self.by_band.get(band)) is not None:
            over = max(over, self.in_bands[band] - self.promised[band] - self.leaving[band] - part)
        return rounded(over)


class _Aside(NamedTuple):
    """Chips reserved for a job of a band, and the names of the accounts in which they are reserved."""

    band: PriorityBand
    chips: float
    names: tuple[str, ...]


@dataclass(slots=True)
class _Leaving:
    """An attempt that leaves its chips to waiting jobs.

    Attributes:
        spec: the spec of its job.
        chips: the chips that it holds, without those in ``takers``.
        takers: id of each job for which it leaves → the chips that count only as promised to that job.
    """

    spec: JobSpec
    chips: float
    takers: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Taker:
    """A job for which attempts leave.

    Attributes:
        spec: its spec.
        victims: these attempts.
        missing: the chips promised to it, without those that its victims hold.
    """

    spec: JobSpec
    missing: float
    victims: list[AttemptId] = field(default_factory=list)


class TeamQuotas:
    """The teams' usage and remaining quotas during a plan.

    Args:
        use: the teams and their usage; None: no teams.
        fleet: the number of chips by type.
        now: seconds on the clock of the events.

    Attributes:
        exist: whether any team has a quota.
    """

    def __init__(self, use: TeamUse | None, fleet: Fleet, now: float) -> None:
        self._use = use or TeamUse()
        self._fleet = fleet
        self._now = now
        self._accounts: dict[tuple[str, str], _Account] = {}  # by name and type
        self._kept: dict[str, dict[str, float]] = {}  # type → team → unused chips that its subteams don't lend
        self._promised: dict[str, float] = {}  # job id → chips
        self._kept_for: dict[tuple[str, str | None], str] = {}  # team and type → id of a job with a reservation
        self._aside: dict[str, _Aside] = {}  # by the job's id
        self._leaving: dict[AttemptId, _Leaving] = {}
        self._takers: dict[str, _Taker] = {}  # by the job's id
        self._orders: dict[tuple[str, str], dict[str, int]] = {}  # by team and type: its subteams, by past borrowing
        self._sources: dict[tuple[str, float, float], QuotaSource | QuotaExhausted] = {}  # valid until a count changes
        self.exist = bool(self._use.teams.types)

    # -- the queue's order and limits ----------------------------------------------------------------------------------

    def kind(self, spec: JobSpec) -> str | None:
        """Return the type whose quota a job needs, or None."""
        return self._use.kind(spec) if self.exist else None

    def account(self, spec: JobSpec) -> tuple[str, str | None]:
        """Return the name of a job's team, and the type whose quota the job needs, or None."""
        return self._use.path(spec.team)[0], self.kind(spec)

    def quota_source_if_all_stay(self, job: Job, chips: float) -> QuotaSource | QuotaExhausted:
        """Return the job's quota source if it ran at once: what leaves for it counts, unless it leaves for others."""
        job_id = job.spec.job_id
        if (taker := self._takers.get(job_id)) is None:
            return self.quota_source(job, chips)
        promised = self._promised.get(job_id, 0.0)
        leaving = [self._leaving[attempt] for attempt in taker.victims]
        before = [dict(one.takers) for one in leaving]
        self.promised(job, 0.0)
        found = self.quota_source(job, chips)
        self.promised(job, promised)
        for one, counted in zip(leaving, before, strict=True):
            for name, chips_before in counted.items():
                self._count_once(one, self._takers[name], chips_before - one.takers[name])
        return found

    def quota_source_once_left(self, job: Job, chips: float, given_back: GivenBack) -> QuotaSource | QuotaExhausted:
        """Return the job's quota source as if some attempts had left."""
        with self._as_if_left(given_back):
            return self.quota_source(job, chips)

    def quota_source(self, job: Job, chips: float, less: float = 0.0) -> QuotaSource | QuotaExhausted:
        """Return the quota source of a job with this number of chips, or the account whose quota is used up.

        ``less`` is the number of chips by which the usage of its team is reduced for this check.
        """
        kind = self.kind(job.spec)
        if kind is None or not chips:
            return QuotaSource.OWN
        about = job.spec.job_id, chips, less
        found = self._sources.get(about)
        if found is None:
            found = self._sources[about] = self._find_quota_source(job, kind, chips, less)
        return found

    def _find_quota_source(self, job: Job, kind: str, chips: float, less: float) -> QuotaSource | QuotaExhausted:
        path, band = self._use.path(job.spec.team), job.spec.priority
        more = chips - self._promised.get(job.spec.job_id, 0.0)
        own = self._aside.get(job.spec.job_id)
        source: QuotaSource | None = None
        for name, account, used, kept in self._after(path, kind, more - less):
            own_here = own.chips if own is not None and name in own.names else 0.0
            aside = account.aside.total() - own_here if account.aside else 0.0
            is_over = rounded(used + aside + kept) > account.most
            if is_over and (source is None or name != NO_TEAM):  # a team above may be full, and reclaims nothing
                there_are, is_kept_back = rounded(used + aside + kept - more), rounded(used + kept) <= account.most
                in_turn_as = QuotaSource.BORROWED if source is None else source
                return QuotaExhausted(name.rstrip("/"), kind, account.most, there_are, is_kept_back, in_turn_as)
            in_band = more + account.aside[band] - own_here
            if source is None and name != NO_TEAM and _is_within(account, used + aside, kept, band, in_band):
                source = QuotaSource.OWN if name == path[0] else QuotaSource.SHARED
        if source is not None:
            return source
        return QuotaSource.BORROWED

    def quota_source_without(
        self, job: Job, chips: float, bands: Iterable[PriorityBand]
    ) -> QuotaSource | QuotaExhausted:
        """Return the job's quota source as if jobs of some bands of its own team had no chips."""
        team, kind = self.account(job.spec)
        usage: Mapping[str, float] = self._use.usage.get(team, {})
        return self.quota_source(job, chips, less=sum(usage.get(in_band(kind, one), 0.0) for one in bands if kind))

    def took(self, job: Job, chips: float) -> None:
        """Count chips that the plan grants to a job; a negative number for chips that are freed."""
        if self._kept_for and self._kept_for.get(self.account(job.spec)) == job.spec.job_id:
            del self._kept_for[self.account(job.spec)]
            self._set_aside(job, self._aside.pop(job.spec.job_id), sign=-1)
        self._count(job.spec, chips)

    def promised(self, job: Job, chips: float) -> None:
        """Replace the number of chips promised to a job."""
        if not self.exist:
            return
        job_id, more = job.spec.job_id, chips - self._promised.pop(job.spec.job_id, 0.0)
        if chips:
            self._promised[job_id] = chips
        self._count(job.spec, more, promised=True)
        if more and (taker := self._takers.get(job_id)) is not None:
            taker.missing = rounded(taker.missing + more)
            for attempt in taker.victims:
                self._count_once(self._leaving[attempt], taker, -self._leaving[attempt].takers[job_id])
            self._share_out(taker.victims)

    def released(self, job: Job) -> None:
        """Stop counting the chips promised to a job. Attempts that would have left only for this job stay."""
        self.promised(job, 0.0)
        taker = self._takers.pop(job.spec.job_id, None)
        for attempt in taker.victims if taker is not None else ():
            leaving = self._leaving[attempt]
            del leaving.takers[job.spec.job_id]
            if not leaving.takers:
                del self._leaving[attempt]
                self._count_leaving(leaving.spec, -leaving.chips)

    def keep_for(self, job: Job, chips: float, up_to: str) -> bool:
        """Reserve quota for a job, unless quota is reserved for another job of its team. Return whether it is reserved.

        Args:
            job: the job.
            chips: the number of chips that it needs.
            up_to: the last account on the job's path in which to reserve them.
        """
        job_id, (team, kind) = job.spec.job_id, self.account(job.spec)
        if kind is None or self._kept_for.setdefault((team, kind), job_id) != job_id:
            return False
        path = self._use.path(job.spec.team)
        names = path[: path.index(up_to) + 1]
        if (before := self._aside.get(job_id)) is not None:
            self._set_aside(job, before, sign=-1)
        self._aside[job_id] = _Aside(job.spec.priority, chips, names)
        self._set_aside(job, self._aside[job_id], sign=1)
        return True

    def _set_aside(self, job: Job, aside: _Aside, sign: int) -> None:
        kind = self.kind(job.spec)
        assert kind is not None
        self._sources.clear()
        for name in aside.names:
            self._account(name, kind).aside[aside.band] += sign * aside.chips  # type: ignore[assignment]

    def leaves(self, attempt: AttemptId, spec: JobSpec, chips: float, taker: JobSpec) -> None:
        """Count that an attempt leaves its chips to a job.

        As many chips as are promised to that job then count once. The others count until the attempt has left, so that
        no other job exceeds a quota meanwhile.
        """
        if self.kind(spec) is None:
            return
        if (leaving := self._leaving.get(attempt)) is None:
            leaving = self._leaving[attempt] = _Leaving(spec, chips)
            self._count_leaving(spec, chips)
        if taker.job_id not in self._takers:
            self._takers[taker.job_id] = _Taker(taker, self._promised.get(taker.job_id, 0.0))
        if taker.job_id not in leaving.takers:
            leaving.takers[taker.job_id] = 0.0
            self._takers[taker.job_id].victims.append(attempt)
            self._share_out([attempt])

    def _share_out(self, attempts: Iterable[AttemptId]) -> None:
        """Count the chips of leaving attempts only once where they are promised to jobs for which these leave."""
        for leaving in map(self._leaving.__getitem__, attempts):
            for job_id in leaving.takers:
                taker = self._takers[job_id]
                if self.kind(taker.spec) == self.kind(leaving.spec):
                    self._count_once(leaving, taker, min(leaving.chips, taker.missing))

    def _count_once(self, leaving: _Leaving, taker: _Taker, chips: float) -> None:
        """Stop counting chips of a leaving attempt that are promised to a job; count them again if negative."""
        if not chips:
            return
        leaving.chips, taker.missing = rounded(leaving.chips - chips), rounded(taker.missing - chips)
        leaving.takers[taker.spec.job_id] = rounded(leaving.takers[taker.spec.job_id] + chips)
        path, of_taker = self._use.path(leaving.spec.team), self._use.path(taker.spec.team)
        shared = next(i for i, name in enumerate(path) if name in of_taker)
        self._count(leaving.spec, -chips, path[shared:])
        self._count_leaving(leaving.spec, -chips, path[shared:])

    # -- reclaiming ----------------------------------------------------------------------------------------------------

    def reclaim(self, job: Job, chips: float, given_back: GivenBack = MappingProxyType({})) -> "Reclaim":
        """Return the right of a job that needs this number of chips to reclaim quota from other teams.

        ``given_back`` has the attempts that leave for it in any case.
        """
        kind = self.kind(job.spec)
        if kind is None:
            return Reclaim(self, None, (), frozenset(), in_part=True)
        path, band = self._use.path(job.spec.team), job.spec.priority
        more = chips - self._promised.get(job.spec.job_id, 0.0)
        with self._as_if_left(given_back):
            after = self._after(path, kind, more)
            within = [_is_within(account, used, kept, band, more) for _, account, used, kept in after]
            is_in_part = _is_in_part(self._account(path[0], kind), band, more)
        rights = (above for is_within, above in zip(within, path[1:], strict=False) if is_within)
        return Reclaim(self, kind, path, frozenset(rights), is_in_part)

    def counts_for(self, spec: JobSpec, team: str, kind: str) -> bool:
        """Return whether a job's chips count towards a team's quota."""
        return self.kind(spec) == kind and team in self._use.path(spec.team)

    def path(self, spec: JobSpec) -> tuple[str, ...]:
        """Return the accounts towards which a job counts; see `TeamUse.path`."""
        return self._use.path(spec.team)

    def over(self, name: str, kind: str, band: PriorityBand) -> float:
        """Return the number of chips by which a team's jobs, or those of a band, exceed its quota."""
        return self._account(name, kind).over(band)

    def order(self, team: str, kind: str) -> Mapping[str, int]:
        """Return the ranks of a team's subteams with usage, by past borrowing, most first.

        Subteams that borrowed about the same, by a factor of up to two, share a rank.
        """
        order = self._orders.get((team, kind))
        if order is None:
            prefix = f"{team}/" if team else ""
            parts = {
                own_part(team) if name == own_part(team) else prefix + name[len(prefix) :].partition("/")[0]
                for name in self._use.usage
                if name.startswith(prefix) and name != team
            }
            past, now = self._use.past, self._now
            borrowed = {name: past.mean(name, kind, now) - self._account(name, kind).chips for name in parts}
            sizes = {name: round(log2(chips)) if chips > 0 else -inf for name, chips in borrowed.items()}
            ranks = {size: rank for rank, size in enumerate(sorted({*sizes.values()}, reverse=True))}
            order = {name: ranks[size] for name, size in sizes.items()}
            self._orders[team, kind] = order
        return order

    # -- helpers -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _as_if_left(self, attempts: GivenBack) -> Iterator[None]:
        """Stop counting some attempts for a while."""
        left = [
            (spec, held if (leaving := self._leaving.get(attempt)) is None else leaving.chips)
            for attempt, (spec, held) in attempts.items()
        ]
        for spec, held in left:
            self._count(spec, -held)
        try:
            yield
        finally:
            for spec, held in left:
                self._count(spec, held)

    def _after(self, path: Iterable[str], kind: str, more: float) -> Iterator[tuple[str, _Account, float, float]]:
        """Yield each account of a path, with its usage and its subteams' kept chips if a job got more chips."""
        change = 0.0  # in the kept chips of the subteam below
        for name in path:
            account = self._account(name, kind)
            used, kept, before = account.used + more, account.kept + change, account.unused
            yield name, account, used, kept
            change = max(kept, account.keeps - used) - before

    def _count(self, spec: JobSpec, chips: float, path: Sequence[str] | None = None, promised: bool = False) -> None:
        kind = self.kind(spec) if chips else None
        if kind is None:
            return
        for _, account, used, kept in self._after(path or self._use.path(spec.team), kind, chips):
            self._set(account, used, kept, spec.priority, chips)
            account.promised[spec.priority] += chips * promised  # type: ignore[assignment]

    def _count_leaving(self, spec: JobSpec, chips: float, path: Sequence[str] | None = None) -> None:
        kind = self.kind(spec)
        assert kind is not None
        for name in path or self._use.path(spec.team):  # does not affect sources
            self._account(name, kind).leaving[spec.priority] += chips  # type: ignore[assignment]

    def _set(self, account: _Account, used: float, kept: float, band: PriorityBand, more: float) -> None:
        self._sources.clear()
        account.used, account.kept = rounded(used), rounded(kept)
        if band in account.in_bands:
            account.in_bands[band] = rounded(account.in_bands[band] + more)

    def _account(self, name: str, kind: str) -> _Account:
        account = self._accounts.get((name, kind))
        if account is None:
            account = self._accounts[name, kind] = self._new_account(name, kind)
        return account

    def _new_account(self, name: str, kind: str) -> _Account:
        teams = self._use.teams
        usage: Mapping[str, float] = self._use.usage.get(name, {})
        used = usage.get(kind, 0.0)
        if name == NO_TEAM:
            chips = max(self._in_fleet(kind), self._of_parts(NO_TEAM, kind))
            return _Account(chips, 0.0, chips, {}, used, self._kept_in(kind).get(NO_TEAM, 0.0), {})
        if name.endswith("/"):
            whole = name[:-1]
            chips = self._in_fleet(kind) if whole == NO_TEAM else teams.chips(whole, kind)
            return _Account(max(0.0, chips - self._of_parts(whole, kind)), 0.0, inf, {}, used, 0.0, {})
        chips, quota = teams.chips(name, kind), teams.by_name[name].quotas.get(kind, Quota(0.0))
        most = inf if quota.borrow is None else chips + quota.borrow
        in_bands = {band: usage.get(in_band(kind, band), 0.0) for band in quota.by_band}
        kept = self._kept_in(kind).get(name, 0.0)
        return _Account(chips, _keeps(quota), most, quota.by_band, used, kept, in_bands)

    def _of_parts(self, name: str, kind: str) -> float:
        return sum(self._use.teams.chips(part, kind) for part in self._use.teams.parts(name))

    def _in_fleet(self, kind: str) -> float:
        if kind == GPU:
            return self._fleet.totals.get(GPU, 0.0)
        chips = self._fleet.chips
        return sum(n for name, n in chips.items() if n and (name == kind or _generation(name) == kind))

    def _kept_in(self, kind: str) -> Mapping[str, float]:
        """Return the unused chips that each team's subteams don't lend, for the teams with any."""
        kept = self._kept.get(kind)
        if kept is None:
            kept = self._kept[kind] = {}
            for team in self._use.teams.keepers(kind):  # subteams before their parents
                usage: Mapping[str, float] = self._use.usage.get(team.name, {})
                used = usage.get(kind, 0.0)
                quota = team.quotas.get(kind, Quota(0.0))
                unused = max(kept.get(team.name, 0.0), _keeps(quota) - used)
                kept[team.parent] = kept.get(team.parent, 0.0) + unused
        return kept


class Reclaim:
    """The right of a job to reclaim quota: which jobs of other teams must leave for it.

    Args:
        quotas: the teams' quotas.
        kind: the type whose quota the job needs, or None.
        path: the accounts towards which the job counts.
        rights: the teams in ``path`` within which the job's side stays within its quota.
        in_part: whether the job's band stays within its part of its team's quota. Otherwise lower bands don't leave.

    Attributes:
        rights: see above.
    """

    def __init__(
        self, quotas: TeamQuotas, kind: str | None, path: tuple[str, ...], rights: frozenset[str], in_part: bool
    ) -> None:
        self._in_part = in_part
        self._quotas = quotas
        self._kind = kind
        self._path = path
        self.rights = rights
        self._known: dict[tuple[str, PriorityBand], int | None] = {}

    def __bool__(self) -> bool:
        return bool(self.rights)

    @property
    def is_partial(self) -> bool:
        """Whether the job may reclaim quota in some of the teams above its own, but not in all."""
        return 0 < len(self.rights) < len(self._path) - 1

    def by_band_only(self) -> "Reclaim":
        """Return the job's right to hosts of lower bands, without its right to reclaim quota from other teams."""
        return Reclaim(self._quotas, self._kind, self._path, frozenset(), self._in_part)

    def by_band(self, victim: JobSpec) -> bool:
        """Return whether bands decide if a job must leave: both jobs are of one team, or no quota applies to it."""
        kind = self._quotas.kind(victim)
        if kind is None:
            return True
        return self._in_part and self._kind is not None and self._quotas.path(victim)[0] == self._path[0]

    def rank(self, victim: JobSpec) -> int | None:
        """Return the rank, from 0, of a job's side among those that must return hosts; None if it need not."""
        if not self.rights or self._quotas.kind(victim) != self._kind:
            return None
        key = victim.team, victim.priority
        if key not in self._known:
            self._known[key] = self._rank(victim)
        return self._known[key]

    def beyond(self, victims: Iterable[tuple[AttemptId, JobSpec, float]]) -> set[AttemptId]:
        """Return the attempts that may stay because the others bring their teams back to their quotas.

        ``victims`` has the attempts in the order in which they should leave, with their jobs' specs and chips.
        """
        gone: dict[str, float] = {}
        stay: set[AttemptId] = set()
        for attempt, spec, chips in victims:
            side = self._side(spec)
            assert self._kind is not None
            if any(self._quotas.over(name, self._kind, spec.priority) <= gone.get(name, 0.0) for name in side):
                stay.add(attempt)
                continue
            for name in side:
                gone[name] = rounded(gone.get(name, 0.0) + chips)
        return stay

    def _rank(self, victim: JobSpec) -> int | None:
        side = self._side(victim)
        assert self._kind is not None
        above = self._quotas.path(victim)[len(side)]
        if not side or above not in self.rights:
            return None
        if any(self._quotas.over(name, self._kind, victim.priority) <= 0 for name in side):
            return None
        return self._quotas.order(above, self._kind).get(side[-1], 0)

    def _side(self, victim: JobSpec) -> tuple[str, ...]:
        """Return the accounts of a job below the closest common ancestor of both jobs' teams."""
        path = self._quotas.path(victim)
        return path[: next(i for i, name in enumerate(path) if name in self._path)]


def _keeps(quota: Quota) -> float:
    return 0.0 if quota.lend is None else quota.chips - quota.lend


def _is_within(account: _Account, used: float, kept: float, band: PriorityBand, more: float) -> bool:
    return rounded(used + kept) <= account.chips and _is_in_part(account, band, more)


def _is_in_part(account: _Account, band: PriorityBand, more: float) -> bool:
    part = account.by_band.get(band)
    return part is None or rounded(account.in_bands[band] + more) <= part


def _generation(name: str) -> str:
    try:
        return get_tpu_config(name).generation
    except UnknownTPUTypeError:
        return ""
