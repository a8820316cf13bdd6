"""Victims: the attempts that may have to leave for a waiting job, and the search for the cheapest set.

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

`VictimSearch` finds the cheapest set for a job, without superfluous victims.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from operator import add

from iris_ray.model.cluster_settings import EVICTIONS_PER_JOB, EVICTIONS_PER_TEAM, EVICTIONS_PER_USER
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU, UNITS, Resources, Worker, accelerators, units
from iris_ray.scheduler.availability import Availability, best_free, buckets_for, preferred
from iris_ray.scheduler.evaluation import Status
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.team_quotas import Reclaim
from iris_ray.state.attempt_ends import BUDGET_S, Owner, owners
from iris_ray.state.fleet import Fleet

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


Victims = frozenset[AttemptId]
Room = dict[str, Victims]
"""Groups, each with the victims that must end so that it is free."""


def victims_in(room: Room) -> Victims:
    """Return all victims that must end so that the groups are free."""
    return frozenset[AttemptId]().union(*room.values())


class VictimSearch:
    """Finds victims for a job.

    Args:
        costs: the costs of ending attempts.
        fleet: the workers.
        plan: the hosts that the plan has taken so far.
        available: the groups available to the job.
        only: the possible victims; None: any attempt.

    Attributes:
        job: the job that needs room.
        reclaim: the job's right to reclaim quota.
        patient: whether to include attempts that have not yet run for the minimum time.
        lent: the attempts that were lent hosts reserved for the job.
        needed: the number of groups that the job needs.
        exist: whether that many groups suit the job, free or in use.
    """

    def __init__(
        self,
        costs: EvictionCosts,
        fleet: Fleet,
        plan: Plan,
        job: Job,
        available: Availability,
        needed: int,
        reclaim: Reclaim,
        patient: bool = False,
        only: Collection[AttemptId] | None = None,
        lent: frozenset[AttemptId] = frozenset(),
    ) -> None:
        self.job = job
        self.reclaim = reclaim
        self.lent = lent
        self._spared: frozenset[Owner] = frozenset()
        self._left_out: frozenset[AttemptId] = frozenset()
        self.needed = needed
        self._costs = costs
        self._fleet = fleet
        self._plan = plan
        self._available = available
        self.patient = patient
        self._only = only
        self._taker = job.spec.priority if job.spec.may_evict else None
        self._need = job.requirement
        self._grouping = fleet.grouping(job.requirement.group_by)
        self._buckets = buckets_for(job, available)
        self._known_hosts: dict[str, _Host] = {}
        self._known_costs: dict[AttemptId, Cost | None] = {}
        least = needed if job.spec.coscheduling else 1
        self.exist = sum(map(available.suitable, self._buckets)) >= least

    # -- searching -------------------------------------------------------------------------------------------------

    def room_without_victims(self, own: Collection[str]) -> Room:
        """Return the needed number of groups that are free or about to be free without victims, or fewer.

        ``own`` has the node ids of hosts promised to the job.
        """
        free = best_free(self.needed, self._available, self._buckets, preferred(self.job, self._fleet))
        room = dict.fromkeys(filter(self._is_unreserved, free), frozenset[AttemptId]())
        for name in chain(self.groups_of(own), self._about_to_be_free()):
            if len(room) >= self.needed:
                break
            if self._is_freed(name, frozenset()):
                room[name] = frozenset()
        return room

    def complete(self, room: Room, names: Iterable[str]) -> Room | None:
        """Return enough groups, each with the victims that must end there; None if there are too few groups.

        Args:
            room: groups that need no victims.
            names: groups in use that may be freed.
        """
        options = {name: more for name in names if name not in room and (more := self._option(name)) is not None}
        enough, victims = self.needed, frozenset[AttemptId]()
        if self.job.spec.coscheduling is None:
            enough = min(enough, len(room) + len(options))
        if not len(room) < enough <= len(room) + len(options):
            return None
        left, offers = dict(options), _Offers(self._total)
        while len(room) < enough:
            freed = [name for name, needs in left.items() if needs <= victims]
            room |= {name: left.pop(name) for name in freed[: enough - len(room)]}
            if len(room) < enough:
                victims |= offers.best(left.values(), victims, enough - len(room))
        return self._without_superfluous(room, victims, options)

    def all_groups(self, room: Room, names: Iterable[str]) -> Room:
        """Return a room, and all other groups that may be freed, with the victims that must end there."""
        options = ((name, self._option(name)) for name in names if name not in room)
        return room | {name: needs for name, needs in options if needs is not None}

    def groups_of(self, node_ids: Iterable[str | None]) -> list[str]:
        """Return the names of these hosts' groups that are in use and that the job could use if they were freed."""
        workers = self._fleet.workers
        there = (workers[node_id] for node_id in dict.fromkeys(node_ids) if node_id in workers)
        names = dict.fromkeys(map(self._grouping.name_of, there))
        return [name for name in names if name is not None and self._may_use(name)]

    def _about_to_be_free(self) -> Iterator[str]:
        ending = self._available.candidates.ending
        names = sorted(name for bucket in self._buckets for name in ending.get(bucket, ()))
        return (name for name in names if self._is_unreserved(name) and self._available.is_free_soon(name))

    def _without_superfluous(self, room: Room, victims: Victims, options: Room) -> Room:
        """Remove superfluous victims, the most expensive first.

        Another group that the remaining victims free may replace the group of a removed victim.
        """
        others = {name: needs for name, needs in options.items() if name not in room and needs <= victims}
        where = defaultdict[AttemptId, set[str]](set)  # the groups that each victim may have to leave
        for name, needs in chain(room.items(), others.items()):
            for victim in needs:
                where[victim].add(name)
        left = set(victims)
        for victim in sorted(victims, key=lambda attempt: (self._total({attempt}), attempt), reverse=True):
            left.remove(victim)
            without = sorted(name for name in where[victim] if victim in room.get(name, ()))
            freed = {name: fewer for name in without if (fewer := self._needed_of(name, left)) is not None}
            more = [name for name, needs in others.items() if victim not in needs] if len(freed) < len(without) else []
            if len(freed) + len(more) < len(without):
                left.add(victim)
                continue
            for name, needs in freed.items():
                for attempt in needs:
                    where[attempt].add(name)
            room = {name: needs for name, needs in room.items() if name not in without} | freed
            room |= {name: others.pop(name) for name in more[: len(without) - len(freed)]}
            for name in where[victim] & others.keys():
                del others[name]
        return room

    def _total(self, victims: Collection[AttemptId]) -> Cost:
        costs = [cost for victim in victims if (cost := self.cost_of(victim)) is not None]
        if len(costs) == 1:
            return costs[0]
        return tuple(map(sum, zip(*costs, strict=True))) or NO_COST

    # -- one group -------------------------------------------------------------------------------------------------

    def spare(self, owners: Collection[Owner], attempts: Collection[AttemptId]) -> None:
        """Find other victims than the gangs of these users and teams, and these attempts, from now on."""
        self._spared |= frozenset(owners)
        self._left_out |= frozenset(attempts)
        self._known_costs.clear()

    def cost_of(self, attempt: AttemptId) -> Cost | None:
        """Return the cost of an attempt's end; None if it can't be a victim."""
        if attempt not in self._known_costs:
            self._known_costs[attempt] = self._cost_of(attempt)
        return self._known_costs[attempt]

    def _cost_of(self, attempt: AttemptId) -> Cost | None:
        if self._only is not None and attempt not in self._only:
            return None
        if attempt in self._left_out:
            return None
        if self._spared and attempt not in self._costs.leaving and self._costs.is_of(attempt, self._spared):
            return None
        return self._costs.of(attempt, self._taker, self.reclaim, self.patient, self.lent)

    def _may_use(self, name: str) -> bool:
        """Return whether the job could use a group if the attempts there ended."""
        available = self._available
        found = available.candidates.evaluations.get(name)
        if found is None or found.bucket not in self._buckets or found.status is Status.UNSUITABLE:
            return False
        return available.suits(name) and not available.is_free(name) and self._is_unreserved(name)

    def _is_unreserved(self, name: str) -> bool:
        """Return whether no host of a group is reserved for a job."""
        return self._plan.kept.keys().isdisjoint(self._available.group(name).node_ids)

    def _option(self, name: str) -> Victims | None:
        """Return the victims that must end so that a group is free, on the cheapest hosts; None if none suffice."""
        hosts = [victims for host in self._hosts(name) if (victims := self._victims_on(host)) is not None]
        tasks = self._available.tasks(name)
        if len(hosts) < tasks:
            return None
        return frozenset[AttemptId]().union(*sorted(hosts, key=self._total)[:tasks])

    def _is_freed(self, name: str, victims: Collection[AttemptId]) -> bool:
        """Return whether a group is free once these victims have ended."""
        return sum(self._fits(host, victims) for host in self._hosts(name)) >= self._available.tasks(name)

    def _needed_of(self, name: str, victims: Collection[AttemptId]) -> Victims | None:
        """Return those of the victims that are in a group; None if it is not free once they have ended."""
        if not self._is_freed(name, victims):
            return None
        return frozenset(a for host in self._hosts(name) for a in self._host(host).held if a in victims)

    def _hosts(self, name: str) -> list[Worker]:
        """Return the hosts of a group that suit the job's shape, including those in use."""
        suitable = self._available.candidates.evaluations[name].eligible
        return [host for host in suitable if not self._available.avoids(host)]

    # -- one host --------------------------------------------------------------------------------------------------

    def _host(self, host: Worker) -> "_Host":
        found = self._known_hosts.get(host.node_id)
        if found is None:
            taken = self._plan.taken.get(host.node_id, {})
            found = self._known_hosts[host.node_id] = _Host(host, self._need, taken, self._costs.now)
        return found

    def _fits(self, host: Worker, victims: Collection[AttemptId]) -> bool:
        """Return whether a task fits on a host once these victims have ended."""
        there = self._host(host)
        return there.fits(there.free_without(victims))

    def _victims_on(self, host: Worker) -> Victims | None:
        """Return the victims that must end on a host so that a task fits; None if no victims suffice.

        The next victim is always the one that frees most of the missing resources for its cost. That is never more than
        it would have freed before, so only the first few are compared again.
        """
        there = self._host(host)
        costs = {attempt: cost for attempt in there.held if (cost := self.cost_of(attempt)) is not None}
        victims = {attempt for attempt in there.held if there.has_chips(attempt)}
        if not victims <= costs.keys():
            return None  # an attempt that can't be a victim uses the host's chips
        free = there.free_without(victims)
        turns: list[tuple[Cost, AttemptId, float]] = []

        def take_turn(attempt: AttemptId) -> None:
            if freed := there.freed(attempt, free):
                heappush(turns, (tuple(part / freed for part in costs[attempt]), attempt, freed))

        for attempt in costs.keys() - victims:
            take_turn(attempt)
        while not there.fits(free):
            if not turns:
                return None
            _, attempt, freed = heappop(turns)
            if there.freed(attempt, free) < freed:
                take_turn(attempt)
            else:
                victims.add(attempt)
                free = list(map(add, free, there.held[attempt]))
        return frozenset(victims)


class _Offers:
    """Chooses the next victims among those that groups need, by the cost for each group that they free.

    Args:
        total: returns the cost of some victims.
    """

    def __init__(self, total: Callable[[Collection[AttemptId]], Cost]) -> None:
        self._total = total
        self._turns: list[tuple[Cost, list[AttemptId], Victims, int, int]] = []
        self._last: Victims = frozenset()

    def best(self, options: Collection[Victims], victims: Victims, missing: int) -> Victims:
        """Return the additional victims with the least cost for each group that they free.

        Args:
            options: the victims that each remaining group needs.
            victims: the victims so far.
            missing: the number of groups still needed, which no call increases.
        """
        if not self._turns or not all(map(self._last.isdisjoint, options)):
            self._begin(options, victims, missing)
        while True:
            _, names, more, frees, divisor = heappop(self._turns)
            if min(frees, missing) == divisor:
                self._last = more
                return more
            self._offer(names, more, frees, missing)

    def _begin(self, options: Iterable[Victims], victims: Victims, missing: int) -> None:
        counts = Counter(needs - victims for needs in options)
        touching = defaultdict[AttemptId, set[Victims]](set)
        for more in counts:
            for attempt in more:
                touching[attempt].add(more)
        self._turns = []
        for more in counts:
            others = set[Victims]().union(*(touching[attempt] for attempt in more))
            frees = sum(counts[other] for other in others if other <= more)
            self._offer(sorted(more), more, frees, missing)

    def _offer(self, names: list[AttemptId], more: Victims, frees: int, missing: int) -> None:
        divisor = min(frees, missing)
        heappush(self._turns, (tuple(part / divisor for part in self._total(more)), names, more, frees, divisor))


class _Host:
    """The resources of a host that a task needs, and the attempts that hold some of them.

    Attributes:
        held: the amounts that each attempt holds which has not ended, in Ray's units.
    """

    def __init__(self, host: Worker, need: Requirement, taken: Resources, now: float) -> None:
        names = [resource for resource, _ in need.resources]
        self._needs = [amount for _, amount in need.resources]
        self._chips = names.index(TPU) if need.chips else None
        if self._chips is not None:  # a task gets all chips
            self._needs[self._chips] = max(self._needs[self._chips], host.resources.get(TPU, 0.0))
        free = host.free_soon(now)
        self._free = [units(free.get(name, 0.0)) - units(taken.get(name, 0.0)) for name in names]
        self.held: dict[AttemptId, list[int]] = {}
        for occupant, amounts in host.occupants.items():
            if occupant not in host.ending:
                there = [units(amounts.get(name, 0.0)) for name in names]
                before = self.held.get(occupant[1])
                self.held[occupant[1]] = there if before is None else list(map(add, before, there))

    def has_chips(self, attempt: AttemptId) -> bool:
        """Return whether an attempt holds chips that a task needs."""
        return self._chips is not None and self.held[attempt][self._chips] > 0

    def free_without(self, victims: Collection[AttemptId]) -> list[int]:
        """Return the free amounts once these victims have ended, in Ray's units."""
        free = self._free
        for attempt, amounts in self.held.items():
            if attempt in victims:
                free = list(map(add, free, amounts))
        return free

    def fits(self, free: Sequence[int]) -> bool:
        """Return whether these amounts suffice for a task."""
        return all(have / UNITS >= need for have, need in zip(free, self._needs, strict=True))

    def freed(self, attempt: AttemptId, free: Sequence[int]) -> float:
        """Return the share of a task's needs, over all resources, that is missing and that an attempt would free."""
        return sum(
            min(held / UNITS, max(0.0, need - have / UNITS)) / need
            for held, have, need in zip(self.held[attempt], free, self._needs, strict=True)
            if held
        )
