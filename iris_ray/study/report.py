"""The results of a simulation: waits, shares, use of the hosts, starvation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.teams import NO_TEAM
from iris_ray.model.workers import TPU
from iris_ray.study.history import AttemptHistory, History, JobHistory, size_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waits:
    """How long jobs waited from submission to their first hosts. A job that still waits counts with its wait so far.

    Attributes:
        jobs: the number of jobs.
        waiting: the number of jobs that still wait.
        p50_s, p90_s, p99_s, longest_s: percentiles of the waits, in seconds.
    """

    jobs: int
    waiting: int
    p50_s: float
    p90_s: float
    p99_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Use:
    """How the time of hosts was used, as parts of 1.

    Attributes:
        useful: tasks ran, and their work counted.
        lost: tasks ran, and their work had to be done again.
        starting: attempts started or ended.
        spare: slices were held ready.
        idle: no attempt held the hosts.
    """

    useful: float
    lost: float
    starting: float
    spare: float
    idle: float

    @property
    def utilisation(self) -> float:
        """The part of the hosts' time in which attempts held them."""
        return 1.0 - self.idle


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a simulation.

    Attributes:
        seconds: the time that it covers.
        resource: Ray's name of the resource that `use` and `shares` count: chips, or CPUs if there are none.
        waits_by_size: by the chips that a job needs at least, of the jobs that use chips.
        waits_by_cpus: by CPUs, of all other jobs.
        waits_by_team: of the jobs that belong to a team.
        turnarounds_by_band: the times from the submission of jobs to their end; ``waiting`` counts unfinished jobs.
        shares: each user's part of the resources that all users held.
        shares_by_team: each team's part of the same total. Jobs that belong to no team count in the total only.
        cpu_hosts: how the CPUs of hosts without chips were used; None if there are none, or no others.
        finished: the number of jobs, of those submitted in this time, that have ended in each state.
        attempts: the number of attempts that got hosts in this time, without spares'. `preempted`, `evicted` and
            `failed_launches` count some of these.
        preempted: the number of attempts that lost hosts, were cancelled, or moved after a notice, also to more slices.
        evicted: the number of attempts that gave their hosts to a job of a higher band, of a team that reclaims its
            quota, or with a reservation.
        reclaimed: the number of attempts that were told in this time to give their hosts to a job of another team.
        failed_launches: the number of attempts that never started.
        starved: the number of jobs, since the simulation began, that waited longer than the backfill bound, so that
            groups were kept for them.
        plans: the number of plans since the simulation began.
        events: the number of events since the simulation began.
    """

    seconds: float
    resource: str
    waits: Waits
    waits_by_band: Mapping[str, Waits]
    waits_by_user: Mapping[str, Waits]
    waits_by_size: Mapping[float, Waits]
    waits_by_cpus: Mapping[float, Waits]
    waits_by_team: Mapping[str, Waits]
    turnarounds_by_band: Mapping[str, Waits]
    shares: Mapping[str, float]
    shares_by_team: Mapping[str, float]
    use: Use
    cpu_hosts: Use | None
    finished: Mapping[str, int]
    attempts: int
    preempted: int
    evicted: int
    reclaimed: int
    failed_launches: int
    starved: int
    plans: int
    events: int

    @property
    def decisions(self) -> int:
        """How often gangs were given hosts, without spares."""
        return self.attempts


def report_on(history: History, until: float, since: float = 0.0) -> Report:
    """Return the results from one time to another, in seconds. Waits are those of jobs submitted in between."""
    have = {name for _, totals in history.capacity for name, amount in totals.items() if amount}
    resource = TPU if TPU in have else "CPU"
    jobs = [job for job in history.jobs.values() if since <= job.submitted_at <= until]
    sizes = {has: [job for job in jobs if bool(job.spec.resources.get(TPU)) is has] for has in (True, False)}
    own = [one for one in history.attempts if not one.spare and since <= one.assigned_at <= until]
    ended = [job.state for job in jobs if job.ended_at is not None]

    def by(key: Callable[[JobSpec], Any], of: Sequence[JobHistory] = jobs) -> dict[Any, list[JobHistory]]:
        ordered = sorted(of, key=lambda job: key(job.spec))
        return {value: list(those) for value, those in groupby(ordered, lambda job: key(job.spec))}

    bands = {band.name.lower(): those for band, those in by(lambda spec: spec.priority).items()}
    teams = _without_none(by(lambda spec: spec.team))
    return Report(
        seconds=until - since,
        resource=resource,
        waits=waits(jobs, until),
        waits_by_band={band: waits(those, until) for band, those in bands.items()},
        waits_by_user={user: waits(those, until) for user, those in by(lambda spec: spec.user).items()},
        waits_by_size={size: waits(those, until) for size, those in by(size_of, sizes[True]).items()},
        waits_by_cpus={size: waits(those, until) for size, those in by(size_of, sizes[False]).items()},
        waits_by_team={team: waits(those, until) for team, those in teams.items()},
        turnarounds_by_band={band: turnarounds(those, until) for band, those in bands.items()},
        shares=shares(history, resource, since, until),
        shares_by_team=_without_none(shares(history, resource, since, until, lambda one: one.team)),
        use=use(history, resource, since, until),
        cpu_hosts=use(history, "CPU", since, until) if have == {TPU, "CPU"} else None,
        finished={state: ended.count(state) for state in sorted(set(ended))},
        attempts=len(own),
        preempted=sum(one.outcome in ("moved", "stopped") for one in own),
        evicted=sum(one.outcome == "evicted" for one in own),
        reclaimed=sum(since <= at <= until for at in history.reclaimed.values()),
        failed_launches=sum(one.outcome == "no launch" for one in own),
        starved=history.starved,
        plans=history.plans,
        events=history.events,
    )


def waits(jobs: Sequence[JobHistory], now: float) -> Waits:
    """Return the waits of jobs, as seen at a time."""
    still = sum(job.assigned_at is None and job.ended_at is None for job in jobs)
    return _spread((job.waited_s(now) for job in jobs), still)


def turnarounds(jobs: Sequence[JobHistory], now: float) -> Waits:
    """Return how long it took from the submission of jobs to their end, as seen at a time."""
    ends = ((now if job.ended_at is None else job.ended_at) - job.submitted_at for job in jobs)
    return _spread(ends, sum(job.ended_at is None for job in jobs))


def _spread(seconds: Iterable[float], waiting: int) -> Waits:
    waited = sorted(seconds)
    return Waits(
        jobs=len(waited),
        waiting=waiting,
        p50_s=percentile(waited, 50),
        p90_s=percentile(waited, 90),
        p99_s=percentile(waited, 99),
        longest_s=percentile(waited, 100),
    )


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the least value that ``percent`` of the values don't exceed (nearest rank); 0 if there are no values."""
    return ascending[max(0, -int(-len(ascending) * percent // 100) - 1)] if ascending else 0.0


def shares(
    history: History,
    resource: str,
    since: float,
    until: float,
    of: Callable[[AttemptHistory], str] = lambda one: one.user,
) -> dict[str, float]:
    """Return each user's part of the resources that all users held, or each team's."""
    held: dict[str, float] = {}
    for one in history.attempts:
        held[of(one)] = held.get(of(one), 0.0) + _held(one, resource, since, until)
    total = sum(held.values())
    return {who: amount / total if total else 0.0 for who, amount in sorted(held.items())}


def _without_none(by_team: Mapping[str, T]) -> dict[str, T]:
    return {team: part for team, part in by_team.items() if team != NO_TEAM}


def use(history: History, resource: str, since: float, until: float) -> Use:
    """Return how the time of the chips was used, or of the CPUs of hosts without chips."""
    total = _capacity(history, resource, since, until) or 1.0
    there = [one for one in history.attempts if resource == TPU or not one.beside_tpus]
    spare = sum(_held(one, resource, since, until) for one in there if one.spare)
    own = [one for one in there if not one.spare]
    held = sum(_held(one, resource, since, until) for one in own)
    ran = lost = 0.0
    for one in own:
        amount, seconds = one.held.get(resource, 0.0), _overlap(one.began_at, one.ended_at, since, until)
        ran += amount * seconds
        if one.ended_at is not None and since <= one.ended_at <= until:
            lost += amount * min(one.lost_s, seconds)
    parts = [part / total for part in (ran - lost, lost, held - ran, spare, total - held - spare)]
    return Use(*parts)


def _held(one: AttemptHistory, resource: str, since: float, until: float) -> float:
    return one.held.get(resource, 0.0) * _overlap(one.assigned_at, one.freed_at, since, until)


def _capacity(history: History, resource: str, since: float, until: float) -> float:
    ends = [at for at, _ in history.capacity[1:]] + [until]
    return sum(
        totals.get(resource, 0.0) * _overlap(at, end, since, until)
        for (at, totals), end in zip(history.capacity, ends, strict=True)
    )


def _overlap(begin: float | None, end: float | None, since: float, until: float) -> float:
    """Return the seconds of an interval between two times. Without a beginning it is empty; without an end it lasts."""
    if begin is None:
        return 0.0
    return max(0.0, min(until, until if end is None else end) - max(since, begin))
