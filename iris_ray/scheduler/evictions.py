"""Evictions: chooses the attempts that leave their hosts to a waiting job, as few and as cheap as possible.

Spares, growth spares and jobs that yield leave for any job that precedes them. Gangs of lower bands leave for a job
that may evict. `victims.py` defines the cost of an attempt's end and finds the cheapest set of victims. If the possible
victims have not run for the minimum time of their band, the pending reason says whose hosts the job may take, and when
(`Protected`). A job takes no more than its user's limit allows.

The search is bounded. It considers attempts without cost first, then those of the lowest bands: attempts that heed
notices, then those that saved or began most recently.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, takewhile
from types import MappingProxyType

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import UNCONFIRMED_S, accelerators
from iris_ray.scheduler.availability import Availability, best_free, buckets_for, fixed_size, num_groups
from iris_ray.scheduler.eviction_costs import EvictionCosts, EvictionRules, Running
from iris_ray.scheduler.fair_queue import Deadlines, SearchFairness, comes_last
from iris_ray.scheduler.limits import Allowances, chips_per_group, most_chips_of
from iris_ray.scheduler.pending_reason import Protected, ReachedLimit
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.team_quotas import GivenBack, Reclaim
from iris_ray.scheduler.victims import Room, Victims, VictimSearch, victims_in
from iris_ray.state.attempt_ends import Owner
from iris_ray.state.fleet import Fleet

SEARCHES = 64
"""The number of searches in a plan. The next plans search for the other kinds of jobs; see `SearchFairness`."""
SEARCHES_AMONG_GANGS = 6
"""The number of these searches that may consider lower bands, which takes longer."""
ATTEMPTS_LOOKED_AT = 20_000
"""The number of attempts that all searches of a plan consider."""
GROUPS_COMPARED, MOST_COMPARED = 100, 500
"""The number of groups in use that a search compares: ``GROUPS_COMPARED`` or twice the number that the job needs, but
at most ``MOST_COMPARED``."""
OWNERS_SPARED = 3
"""The number of users and teams that a search excludes, because its victims would exceed their eviction budgets."""
TASKS_AT_ONCE = 16
"""The number of hosts that one search takes for a job of independent tasks."""

_Key = tuple[Requirement, tuple[int, ...], int | None, PriorityBand, str, bool, bool]


@dataclass(frozen=True, slots=True)
class Taking:
    """The groups promised to a job, and the victims that leave them.

    Attributes:
        names: the promised groups, including free ones; none for a group of jobs.
        node_ids: the hosts of these groups.
        leave: the victims.
        deadline: when victims with a notice are stopped; seconds.
    """

    names: tuple[str, ...]
    node_ids: tuple[str, ...]
    leave: tuple[AttemptId, ...]
    deadline: float


class Evictor:
    """Chooses victims during a plan.

    Args:
        running: the running attempts.
        rules: the conditions for evicting gangs of lower bands; None: no evictions.
        idle: spares, growth spares and jobs that yield. Replacements are ignored, since their gangs are about to lose
            a slice.
        fleet: the workers.
        plan: the hosts that the plan has taken so far.
        allowances: the resources that each user may still get.
        deadlines: the time, and the urgency of jobs.
        fairness: the kinds of jobs for which earlier plans found no victims.
    """

    def __init__(
        self,
        running: Running,
        rules: EvictionRules | None,
        idle: Iterable[Job],
        fleet: Fleet,
        plan: Plan,
        allowances: Allowances,
        deadlines: Deadlines,
        fairness: SearchFairness,
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._allowances = allowances
        self._running = running
        self._rules = rules
        self._idle = {job.current_attempt(job.gang): job for job in idle if comes_last(job)}
        self._now = deadlines.now
        self._deadlines = deadlines
        self._searches, self._searches_among_gangs = SEARCHES, SEARCHES_AMONG_GANGS
        self._looks = ATTEMPTS_LOOKED_AT
        self._costs = EvictionCosts(running, rules, self._idle, self._now)
        self._leaving = self._costs.leaving
        self._told = {str(attempt): attempt for attempt in self._leaving}  # by earlier plans
        self._taken: dict[str, frozenset[AttemptId]] = {}  # job id → its victims by this plan
        self._hopeless: set[_Key] = set()
        self._fairness = fairness
        self._in_vain: set[_Key] = set()
        self._lent: dict[str, frozenset[AttemptId]] = {}  # by the id of the job with the reservation

    def go_on(self, job: Job) -> None:
        """Count the victims of a job's earlier promise as leaving."""
        self._leave(self._leave_for(job), job)

    def may_help(self, job: Job) -> bool:
        """Return whether `find` may succeed for a job."""
        key = _key(job)
        if not self._has_time or key in self._hopeless or self._fairness.passes_over(key):
            return False
        return not comes_last(job) and bool(self._idle or self._lent_by(job) or self._bands(job))

    def leaves_at(self, attempt: AttemptId, job: Job) -> float | None:
        """Return when an attempt leaves its hosts at the latest if a job evicts it now or as soon as possible.

        Returns None if the job can't evict it.
        """
        if attempt in self._idle:
            return self._now
        if (deadline := self.deadline_of(attempt)) is not None:
            return deadline
        if self._rules is None or not may_evict(job) or attempt.job_id not in self._running.jobs:
            return None
        cost = self._costs.of(attempt, job.spec.priority, self._reclaim(job), patient=True, lent=self._lent_by(job))
        return None if cost is None else self._costs.deadline + cost[0]

    def _lent_by(self, job: Job) -> frozenset[AttemptId]:
        """Return the attempts that were lent hosts reserved for a job, if they leave when it needs these hosts."""
        if job.promise is None or not job.promise.lent or self._rules is None or not may_evict(job):
            return frozenset()
        found = self._lent.get(job.spec.job_id)
        if found is None:
            lent, workers, jobs = job.promise.lent, self._fleet.workers, self._running.jobs
            hosts = (workers[node_id] for node_id in job.promise.node_ids if node_id in workers)
            there = {who[1] for host in hosts for who in host.occupants.keys() - host.ending.keys()}
            found = frozenset(a for a in there if a.job_id in lent and leaves_for(jobs[a.job_id], job))
            self._lent[job.spec.job_id] = found
        return found

    def loans_end(self, job: Job) -> None:
        """Forget what a job has lent, since another job takes some of the hosts reserved for it."""
        self._lent[job.spec.job_id] = frozenset()

    @property
    def evicts(self) -> bool:
        """Whether attempts may be evicted at all."""
        return self._rules is not None and bool(self._running.jobs)

    @property
    def running_jobs(self) -> Mapping[str, Job]:
        """All jobs by id."""
        return self._running.jobs

    def end_plan(self, complete: bool) -> None:
        """Record the kinds of jobs for which no victims were found; ``complete``: see `SchedulingResult`."""
        self._fairness.end_plan(self._in_vain, complete and self._has_time)

    @property
    def _has_time(self) -> bool:
        return self._searches > 0 and self._searches_among_gangs > 0 and self._looks > 0

    def find(self, job: Job, available: Availability, own: Collection[str], placed: int) -> Taking | Protected | None:
        """Return the hosts that a job without enough groups takes from victims, or those that it may take later.

        Returns None if no set of victims would suffice, or none is needed because enough groups are about to be free.

        Args:
            job, available: the job and the groups available to it.
            own: node ids of the hosts promised to the job, which must be lifted from the plan.
            placed: the number of the job's gangs that the plan has placed.
        """
        needed = self._needed(job, own, placed)
        if not needed:
            return None  # its user's limit is reached
        self._searches -= 1
        self._searches_among_gangs -= bool(self._bands(job))
        search = self._search(job, available, needed)
        room = search.room_without_victims(own) if search.exist else {}
        if len(room) >= needed:
            return None
        if self._waits_for_more(job) and any(map(available.free_soon, buckets_for(job, available))):
            return None  # the gang waits for more groups, and might not take the ones freed for it
        found = self._complete(search, room) or self._complete_from_above(search, room, available)
        if found is None:
            self._in_vain.add(_key(job))
            if not available.impaired:
                self._hopeless.add(_key(job))  # a plan never takes hosts back
            return self._protected(search, room, available)
        return self._taking(job, found, available)

    def victims_of_group(self, leader: Job, node_ids: Iterable[str]) -> frozenset[AttemptId]:
        """Return the attempts on some hosts that may leave for a group: those without use and those of lower bands."""
        taker, lent = leader.spec.priority if may_evict(leader) else None, self._lent_by(leader)
        if not (lent or self._idle or self._leaving or self._bands(leader)):
            return frozenset()
        by_band = self._reclaim(leader).by_band_only()
        there = {who[1] for node_id in node_ids for who in self._fleet.workers[node_id].occupants}
        known = (attempt for attempt in there if attempt.job_id in self._running.jobs)
        return frozenset(a for a in known if self._costs.of(a, taker, by_band, patient=False, lent=lent) is not None)

    def take(self, job: Job, node_ids: Iterable[str], victims: Victims, names: tuple[str, ...] = ()) -> Taking:
        """Take hosts for a job, or for the group that it leads: these victims leave them. ``names``: see `Taking`."""
        self._costs.leave(victims)
        self._taken[job.spec.job_id] = victims
        self._leave(sorted(victims), job)
        for attempt in victims & self._idle.keys():
            del self._idle[attempt]
        return Taking(names, tuple(node_ids), tuple(sorted(victims)), self._costs.deadline)

    def over_budgets(self, victims: Victims, job: Job) -> list[tuple[Owner, float]]:
        """Return the owners whose eviction budgets victims would exceed, each with the seconds until they don't."""
        counts = Counter(chain.from_iterable(map(self._costs.owners_of, self._chargeable(victims, job))))
        waits = [(owner, self._costs.owner_waits_s(owner, count)) for owner, count in sorted(counts.items())]
        return [(owner, wait_s) for owner, wait_s in waits if wait_s]

    def _chargeable(self, victims: Victims, job: Job) -> Victims:
        """Return the victims that would lose hosts which they were not merely lent."""
        return victims - self._idle.keys() - self._leaving - self._lent_by(job)

    @property
    def held_ready(self) -> Collection[AttemptId]:
        """The attempts of spares and of jobs that yield, which leave for any job that precedes them."""
        return self._idle.keys()

    def find_within_limit(self, job: Job, available: Availability, reached: ReachedLimit) -> Taking | None:
        """Return the hosts that a job takes from attempts whose chips count towards the limit that it has reached.

        For a limit of the job's user, the victims are spares of the same user and band; for a limit of its team, also
        gangs of the team's lower bands. A team above may be full as well even once these have left; then attempts that
        count towards its limit leave in addition. So do those that `find` would choose, if these are too few.
        """
        if comes_last(job):
            return None
        least, given_back, room = num_groups(job)[0], dict[AttemptId, tuple[JobSpec, float]](), Room()
        limit = reached
        while True:
            reclaim = self._reclaim(job, given_back)
            own = self._own_spares(job) if limit.team is None else self._of_team(job, limit, reclaim)
            search = self._search(job, available, least, only={*own, *given_back}, reclaim=reclaim)
            names = [n for n in search.groups_of(chain.from_iterable(map(self._costs.hosts_of, own))) if n not in room]
            free = best_free(max(0, least - len(room) - len(names)), available, buckets_for(job, available))
            with_free = room | {name: frozenset() for name in free}
            found = self._complete(search, with_free, names)
            if found is None and limit.team is not None:
                some = self._all_groups(search, with_free, names)
                found = some if len(some) < least else None  # eviction budgets don't allow them all
            if found is None or len(victims := self._specs_of(found)) == len(given_back):
                return None
            given_back, chips = victims, max(reached.needed, most_chips_of(found, available))
            room = {name: needs for name, needs in found.items() if needs}
            above = self._allowances.limit_once_left(job, chips, given_back)
            if above is None or above.team is None or reached.team is None:
                break
            limit = above
        if len(found) < least:
            search = self._search(job, available, least, reclaim=self._reclaim(job, given_back))
            found = self._complete(search, found) or self._complete_from_above(search, found, available)
            if found is None:
                return None
        found = self._with_fewer_victims(job, found, search, available, reached.needed)
        given_back, taking = self._specs_of(found), self._taking(job, found, available, reached.needed)
        if taking is not None and reached.team is None:
            self._allowances.given_back(job, sum(chips for _, chips in given_back.values()))
        return taking

    def _with_fewer_victims(
        self, job: Job, found: Room, search: VictimSearch, available: Availability, least_chips: float
    ) -> Room:
        """Replace groups that victims leave by free ones, if the job is within its limits without these victims.

        It must also have the same right to the others' hosts.
        """
        rights = self._reclaim(job, self._specs_of(found)).rights
        free = best_free(2 * len(found), available, buckets_for(job, available))
        free = [name for name in free if name not in found]
        victims = self._specs_of(found).keys() - self._leaving
        for victim in sorted(victims, key=lambda one: (search.cost_of(one) or (), one), reverse=True):
            names = [name for name, needs in found.items() if victim in needs]
            if not 0 < len(names) <= len(free):
                continue
            fewer = {name: needs for name, needs in found.items() if name not in names}
            fewer |= dict.fromkeys(free[: len(names)], frozenset())
            chips, leave = max(least_chips, most_chips_of(fewer, available)), self._specs_of(fewer)
            within = self._allowances.limit_once_left(job, chips, leave) is None
            if within and self._reclaim(job, leave).rights == rights:
                found, free = fewer, free[len(names) :]
        return found

    def may_make_room(self, job: Job, reached: ReachedLimit) -> bool:
        """Return whether `find_within_limit` may find victims for a job, now or later."""
        if reached.team is None:
            return bool(self._own_spares(job))
        if next(self._of_other_parts(job, reached, self._reclaim(job)), None) is not None:
            return True
        first = next(iter(self._of_account(job)), None)
        return first is not None and (first in self._idle or self._band(first) > job.spec.priority)

    def _own_spares(self, job: Job) -> list[AttemptId]:
        account = job.spec.user, job.spec.priority
        return [a for a, spare in self._idle.items() if (spare.spec.user, spare.spec.priority) == account]

    def _of_team(self, job: Job, reached: ReachedLimit, reclaim: Reclaim) -> list[AttemptId]:
        """Return the possible victims for a job whose team, or a team above it, has used up its quota.

        These are spares and lower bands of the job's team, spares of other teams, and attempts of other parts of the
        team above that use more than their quota.
        """
        taker = job.spec.priority if may_evict(job) else None
        found = (
            a
            for a in chain(self._of_account(job), self._of_other_parts(job, reached, reclaim))
            if self._looks_at(a) and self._costs.of(a, taker, reclaim, patient=False)
        )
        return list(islice(found, GROUPS_COMPARED))

    def _of_account(self, job: Job) -> Sequence[AttemptId]:
        """Return the attempts that use the quota of a job's team; none if no attempt is of a lower band."""
        lower = (band for band in PriorityBand if band > job.spec.priority)
        if not self._idle and not any(map(self._running.attempts.get, lower)):
            return ()
        return self._by_account.get(self._allowances.teams.account(job.spec), ())

    def _of_other_parts(self, job: Job, reached: ReachedLimit, reclaim: Reclaim) -> Iterator[AttemptId]:
        """Iterate over the attempts of other teams that count towards a reached quota and might leave for a job.

        These are spares and jobs that yield and, if the job may reclaim quota, all others.
        """
        own, reclaims = self._allowances.teams.account(job.spec), bool(reclaim)
        for account, attempts in self._by_account.items() if reclaims or self._idle else ():
            spec = self._running.jobs[attempts[0].job_id].spec
            if account != own and self._allowances.counts_for(reached, spec):
                yield from attempts if reclaims else takewhile(self._idle.__contains__, attempts)

    def _band(self, attempt: AttemptId) -> PriorityBand:
        return self._running.jobs[attempt.job_id].spec.priority

    def _looks_at(self, attempt: AttemptId) -> bool:
        self._looks -= 1
        return self._looks > 0

    @cached_property
    def _by_account(self) -> Mapping[tuple[str, str | None], list[AttemptId]]:
        """The attempts by the quota that they use: spares first, then lower bands first."""
        jobs, account = self._running.jobs, self._allowances.teams.account
        found = defaultdict[tuple[str, str | None], list[AttemptId]](list)
        for attempt in chain(self._idle, *map(self._in_turn, reversed(PriorityBand))):
            found[account(jobs[attempt.job_id].spec)].append(attempt)
        return found

    def _taking(self, job: Job, found: Room, available: Availability, needed: float = 0.0) -> Taking | None:
        """Take these groups for a job, which needs this number of chips or more, if it is then within its limits."""
        chips = max(needed, most_chips_of(found, available))
        if self._allowances.limit_once_left(job, chips, self._specs_of(found)) is not None:
            return None
        names = tuple(sorted(found))
        node_ids = (node_id for name in names for node_id in available.group(name).node_ids)
        return self.take(job, node_ids, victims_in(found), names)

    def _leave(self, victims: Iterable[AttemptId], job: Job) -> None:
        """Count that attempts leave their chips to a job, or to the jobs of the group that it leads."""
        for attempt in victims if self._allowances.teams.exist else ():
            spec, chips = self._running.jobs[attempt.job_id].spec, self._chips_of(attempt)
            for taker in job.members or (job,):
                self._allowances.teams.leaves(attempt, spec, chips, taker.spec)

    def _waits_for_more(self, job: Job) -> bool:
        """Return whether a gang waits for more groups than it needs when some are about to be free."""
        return len(num_groups(job)) > 1 and self._deadlines.waits_for_more(job.gang)

    def _search(
        self,
        job: Job,
        available: Availability,
        needed: int,
        patient: bool = False,
        only: Collection[AttemptId] | None = None,
        reclaim: Reclaim | None = None,
    ) -> VictimSearch:
        reclaim = self._reclaim(job) if reclaim is None else reclaim
        about = self._costs, self._fleet, self._plan, job, available, needed, reclaim
        return VictimSearch(*about, patient, only, self._lent_by(job))

    def _reclaim(self, job: Job, given_back: GivenBack = MappingProxyType({})) -> Reclaim:
        """Return the job's right to reclaim quota from other teams; ``given_back``: see `TeamQuotas.reclaim`."""
        least = num_groups(job)[0] * chips_per_group(job) if self._allowances.teams.exist else 0.0
        return self._allowances.teams.reclaim(job, least, given_back)

    def _needed(self, job: Job, own: Collection[str], placed: int) -> int:
        """Return the number of groups that a job needs and its user's limit allows.

        A job of independent tasks needs a host for each task that does not pause.
        """
        chips, most = chips_per_group(job), self._allowances.most_once_left
        if job.spec.coscheduling is not None:
            least = num_groups(job)[0]
            return least * most(job, least * chips, 1)
        waiting = (position for position in job.pending if job.gangs[position].not_before <= self._now)
        needed = sum(1 for _ in islice(waiting, placed, placed + len(own) + TASKS_AT_ONCE))
        return most(job, chips, needed)

    def _complete(self, search: VictimSearch, room: Room, names: Iterable[str] | None = None) -> Room | None:
        """Return enough groups, within the eviction budgets of users and teams, or None.

        ``names`` has the groups in use that may be freed; None: the search finds them.
        """
        if names is None:
            names = self._groups_in_use(search) if search.exist else ()
        for _ in range(OWNERS_SPARED + 1):
            found = search.complete(dict(room), names)
            if found is None:
                return None
            beyond = self._beyond(search, found, room)
            over = [] if search.patient else self.over_budgets(victims_in(found), search.job)
            spared = {owner for owner, _ in over}
            if not spared and not beyond:
                return found
            search.spare(spared, beyond)
        return None

    def _complete_from_above(self, search: VictimSearch, room: Room, available: Availability) -> Room | None:
        """Return enough groups, as `_complete` does, for a job that may reclaim more once the first victims have left.

        Its side of a team above is then within quota, so that teams beside that one return hosts as well.
        """
        while search.reclaim.is_partial:
            room = self._all_groups(search, room, self._groups_in_use(search))
            reclaim = self._reclaim(search.job, self._specs_of(room))
            if reclaim.rights <= search.reclaim.rights:
                return None
            search = self._search(search.job, available, search.needed, reclaim=reclaim)
            if (found := self._complete(search, room)) is not None:
                return found
        return None

    def _all_groups(self, search: VictimSearch, room: Room, names: Iterable[str]) -> Room:
        """Return a room with all groups in use that may be freed, for a job that needs still more."""
        while beyond := self._beyond(search, found := search.all_groups(room, names), room):
            search.spare((), beyond)
        return found

    def _specs_of(self, found: Room) -> dict[AttemptId, tuple[JobSpec, float]]:
        """Return the victims in a room, each with its job's spec and its chips."""
        victims = sorted(victims_in(found))
        return {attempt: (self._running.jobs[attempt.job_id].spec, self._chips_of(attempt)) for attempt in victims}

    def _beyond(self, search: VictimSearch, found: Room, room: Room) -> frozenset[AttemptId]:
        """Return the victims that may stay because without them their teams are already back at their quotas.

        The victims in ``room`` leave in any case.
        """
        if not search.reclaim:
            return frozenset()
        jobs, leave = self._running.jobs, victims_in(room)
        victims = self._chargeable(victims_in(found), search.job)
        specs = {attempt: jobs[attempt.job_id].spec for attempt in victims}
        others = [a for a in victims if not search.reclaim.by_band(specs[a])]
        in_turn = sorted(others, key=lambda attempt: (attempt not in leave, search.cost_of(attempt) or (), attempt))
        return frozenset(search.reclaim.beyond((a, specs[a], self._chips_of(a)) for a in in_turn)) - leave

    def _protected(self, search: VictimSearch, room: Room, available: Availability) -> Protected | None:
        """Return the hosts that a job can take once the victims have run for the minimum time of their band."""
        if not self._bands(search.job):
            return None
        first = search.needed if search.job.spec.coscheduling else len(room) + 1
        patient = self._search(search.job, available, first, patient=True)
        found = self._complete(patient, room)
        if found is None:
            return None
        victims, some = sorted(victims_in(found)), self.over_budgets(victims_in(found), search.job)
        waits = [cost[0] for victim in victims if (cost := patient.cost_of(victim)) is not None]
        jobs = [(victim.job_id, self._costs.job_waits_s(victim)) for victim in victims]
        at_budget = (*(job_id for job_id, wait_s in jobs if wait_s), *(f"jobs of {owner}" for owner, _ in some))
        wait_s = max([*waits, *(wait_s for _, wait_s in some)])
        return Protected(tuple(dict.fromkeys(victim.job_id for victim in victims)), wait_s, at_budget)

    def _bands(self, job: Job) -> list[PriorityBand]:
        """Return the bands with attempts from which a job may take hosts, lowest first.

        A job that may reclaim quota can take them from all bands of teams over their quotas.
        """
        if self._rules is None or not may_evict(job):
            return []
        reclaims = bool(self._reclaim(job))
        bands = (band for band in reversed(PriorityBand) if reclaims or band > job.spec.priority)
        return [band for band in bands if self._running.attempts[band]]

    def taken_from(self, job: Job) -> tuple[str, ...]:
        """Return the ids of the jobs that leave hosts to a job, by this or an earlier plan."""
        return tuple(dict.fromkeys(attempt.job_id for attempt in self._leave_for(job)))

    def _leave_for(self, job: Job) -> list[AttemptId]:
        """Return the attempts that leave hosts to a job."""
        before = job.promise.given_up if job.promise is not None else ()
        told = [self._told[attempt] for attempt in before if attempt in self._told]
        return list(dict.fromkeys([*told, *sorted(self._taken.get(job.spec.job_id, ()))]))

    def leaving(self) -> frozenset[AttemptId]:
        """Return all attempts that are about to leave their hosts."""
        return frozenset(self._leaving)

    def deadline_of(self, attempt: AttemptId) -> float | None:
        """Return when an attempt that is about to leave is stopped; seconds; None if it stays."""
        if attempt not in self._leaving:
            return None
        eviction = self._running.jobs[attempt.job_id].gangs[attempt.gang].eviction
        return self._costs.deadline if eviction is None else eviction.deadline

    def _groups_in_use(self, search: VictimSearch) -> list[str]:
        """Return the names of groups that attempts could leave, in the order of victims: leaving, idle, cheapest."""
        names: dict[str, None] = {}
        enough = min(max(GROUPS_COMPARED, 2 * search.needed), MOST_COMPARED)
        bands = self._bands(search.job)
        for attempt in chain(sorted(self._leaving), self._idle, sorted(search.lent), *map(self._in_turn, bands)):
            if not self._looks or len(names) >= enough:
                break
            self._looks -= 1
            if search.cost_of(attempt) is not None:
                names.update(dict.fromkeys(search.groups_of(self._costs.hosts_of(attempt))))
        return list(names)

    def _in_turn(self, band: PriorityBand) -> Iterator[AttemptId]:
        """Iterate over the attempts of a band: those that heed notices, then those that saved or began most recently.

        Attempts of jobs that run only once come last.
        """
        running, last = self._running, []
        jobs = running.jobs
        for attempt in chain(running.heeding[band], reversed(running.attempts[band])):
            if jobs[attempt.job_id].spec.runs_once:
                last.append(attempt)
            else:
                yield attempt
        yield from last

    def given_back(self) -> GivenBack:
        """Return the attempts that leave or have ended, with the chips that they hold."""
        jobs, chips = self._running.jobs, Counter[AttemptId]()
        for attempt, held in chain(self._ending, ((attempt, self._chips_of(attempt)) for attempt in self._leaving)):
            chips[attempt] += held  # type: ignore[assignment]
        return {attempt: (jobs[attempt.job_id].spec, held) for attempt, held in chips.items() if attempt.job_id in jobs}

    @cached_property
    def _ending(self) -> list[tuple[AttemptId, float]]:
        """The chips on each host held by attempts that have ended within `UNCONFIRMED_S`."""
        workers = (worker for worker in self._fleet.workers.values() if worker.ending)
        found = ((worker, who, since) for worker in workers for who, since in worker.ending.items())
        return [(who[1], accelerators(on.occupants[who])) for on, who, at in found if self._now < at + UNCONFIRMED_S]

    def _chips_of(self, attempt: AttemptId) -> float:
        """Return the number of chips that an attempt holds."""
        workers = (self._fleet.workers[i] for i in self._costs.hosts_of(attempt) if i in self._fleet.workers)
        held = (held for worker in workers for who, held in worker.occupants.items() if who[1] == attempt)
        return sum(map(accelerators, held))


def may_evict(job: Job) -> bool:
    """Return whether a job may evict gangs of lower bands."""
    return job.spec.may_evict and not job.yields and job.spec.spare_for is None


def _key(job: Job) -> _Key:
    """Return the search key of a job. A search that fails for one job fails for others with its key."""
    has_lent = job.promise is not None and bool(job.promise.lent)
    need = job.requirement, num_groups(job), fixed_size(job)
    return *need, job.spec.priority, job.spec.team, may_evict(job), has_lent


def leaves_for(victim: Job, job: Job) -> bool:
    """Return whether a job leaves hosts that it was lent within a notice for the job with the reservation."""
    bands = victim.spec.priority, job.spec.priority
    return victim.yields or bands[0] > bands[1] or bands == (PriorityBand.BATCH, PriorityBand.BATCH)
