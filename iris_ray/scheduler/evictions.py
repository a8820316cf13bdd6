"""Who leaves hosts to a waiting job: as few and as cheap attempts as possible.

Spares, room to grow and jobs that yield leave for any job that comes before them. Gangs of lower bands leave for a job
that may evict. `victims.py` says what the end of an attempt costs, and which set of attempts is cheapest. If a job
can't take hosts yet because the victims have not run for the minimum time of their band, the pending reason says whose
hosts the job may take, and when (`Protected`). A job takes no more than the limit of its user allows.

The search is bounded. It looks at what costs nothing first, then at the attempts of the lowest bands: first at those
that heed notices, then at those that have saved or begun last.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import UNCONFIRMED_S, accelerators
from iris_ray.scheduler.availability import Availability, best_free, buckets_for, num_groups
from iris_ray.scheduler.fair_queue import Deadlines, SearchFairness, comes_last
from iris_ray.scheduler.limits import Allowances, chips_per_group, most_chips_of
from iris_ray.scheduler.pending_reason import Protected, ReachedLimit
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.team_quotas import Reclaim
from iris_ray.scheduler.victims import GRACE_S, EvictionCosts, EvictionRules, Room, Running, VictimSearch
from iris_ray.state.attempt_ends import Owner
from iris_ray.state.fleet import Fleet

SEARCHES = 64
"""A plan searches so often. The next plans search for the other kinds of jobs; see `SearchFairness`."""
SEARCHES_AMONG_GANGS = 6
"""So many of these look for victims of lower bands, which takes longer."""
ATTEMPTS_LOOKED_AT = 20_000
"""How many attempts all searches of a plan look at."""
GROUPS_COMPARED, MOST_COMPARED = 100, 500
"""A search compares ``GROUPS_COMPARED`` groups in use, or twice as many as the job needs, but at most
``MOST_COMPARED``."""
OWNERS_SPARED = 3
"""A search goes on without so many users and teams at most whose budgets of evictions its victims would exceed."""
TASKS_AT_ONCE = 16
"""How many hosts one search takes for a job whose tasks are placed one by one."""

_Key = tuple[Requirement, tuple[int, ...], PriorityBand, str, bool]


@dataclass(frozen=True, slots=True)
class Taking:
    """What a job takes from others.

    Attributes:
        names: the groups that are promised to the job, free ones included.
        node_ids: the hosts of these groups.
        leave: the attempts that have to leave.
        deadline: when those are stopped that get notice; seconds.
    """

    names: tuple[str, ...]
    node_ids: tuple[str, ...]
    leave: tuple[AttemptId, ...]
    deadline: float


class Evictor:
    """Chooses who leaves, while a plan is made.

    Args:
        running: what runs.
        rules: when gangs of lower bands may be evicted; None: never.
        idle: spares, room to grow and jobs that yield, which could give their hosts back. A replacement does not: its
            gang is about to lose a slice.
        fleet: the workers that the plan is made for.
        plan: the hosts that the plan has given away.
        allowances: what each user may still get.
        deadlines: tells the time, and which jobs are urgent.
        fairness: for which kinds of jobs earlier plans have searched in vain.
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
        self._taken: dict[str, frozenset[AttemptId]] = {}  # job id → who leaves for it by this plan
        self._hopeless: set[_Key] = set()
        self._fairness = fairness
        self._in_vain: set[_Key] = set()

    def go_on(self, job: Job) -> None:
        """Count that those leave who were told to leave for a job."""
        if self._allowances.teams.exist:
            for attempt in self._leave_for(job):
                self._leaves(attempt, job)

    def may_help(self, job: Job) -> bool:
        """Return whether `find` is worth a call for a job."""
        key = _key(job)
        if not self._has_time or key in self._hopeless or self._fairness.passes_over(key):
            return False
        return not comes_last(job) and bool(self._idle or self._bands(job))

    def end_plan(self, complete: bool) -> None:
        """Note for which kinds of jobs the plan has searched; ``complete``: whether it went through the whole queue."""
        self._fairness.end_plan(self._in_vain, complete and self._has_time)

    @property
    def _has_time(self) -> bool:
        return self._searches > 0 and self._searches_among_gangs > 0 and self._looks > 0

    def find(self, job: Job, available: Availability, own: Collection[str], placed: int) -> Taking | Protected | None:
        """Return what a job takes that found too few groups, or what it may take later.

        Return None if no victims would give it enough groups, and if it needs none: enough groups are about to be free.

        Args:
            job: the job.
            available: the groups that its requirement finds.
            own: node ids of the hosts that are promised to the job; the plan must not keep them meanwhile.
            placed: how many of the job's gangs the plan has given hosts.
        """
        needed = self._needed(job, own, placed)
        if not needed:
            return None  # its user's limit leaves nothing for it
        self._searches -= 1
        self._searches_among_gangs -= bool(self._bands(job))
        search = self._search(job, available, needed)
        room = search.room_without_victims(own) if search.exist else {}
        if len(room) >= needed:
            return None
        if self._hopes_for_more(job) and any(map(available.free_soon, buckets_for(job, available))):
            return None  # the gang waits for more groups, and might not take those that are left for it
        found = self._complete(search, room)
        if found is None:
            self._in_vain.add(_key(job))
            if not available.impaired:
                self._hopeless.add(_key(job))  # a plan takes nothing back
            return self._protected(search, room, available)
        if not self._allowances.may_take(job, most_chips_of(found, available)):
            return None
        return self._taking(job, found, available)

    def idle_on(self, job: Job, node_ids: Collection[str]) -> Taking:
        """Return that a job takes some hosts, which those leave at once that hold them ready or yield them."""
        occupants = (who for node_id in node_ids for who in self._fleet.workers[node_id].occupants)
        victims = frozenset(attempt for _, attempt in occupants if attempt in self._idle)
        self._costs.leave(victims)
        self._taken[job.spec.job_id] = victims
        for attempt in victims:
            if self._allowances.teams.exist:
                self._leaves(attempt, job)
            del self._idle[attempt]
        return Taking((), tuple(node_ids), tuple(sorted(victims)), self._deadline)

    @property
    def held_ready(self) -> Collection[AttemptId]:
        """The attempts of spares and of jobs that yield, which leave for any job before them."""
        return self._idle.keys()

    def find_within_limit(self, job: Job, available: Availability, reached: ReachedLimit) -> Taking | None:
        """Return what a job takes from attempts whose chips count towards the limit that it has reached.

        For a limit of the job's user, these are spares of the same user and band. For a limit of its team, these are
        also gangs of the team's lower bands.

        Args:
            job: the job, which waits for the limit.
            available: the groups that its requirement finds.
            reached: the limit.
        """
        least, needed = num_groups(job)[0], reached.needed
        own = self._own_spares(job) if reached.team is None else self._of_team(job)
        if not own or comes_last(job):
            return None
        search = self._search(job, available, least, only=own)
        names = search.groups_of(chain.from_iterable(map(self._costs.hosts_of, own)))
        free = best_free(max(0, least - len(names)), available, buckets_for(job, available))
        found = search.complete({name: frozenset() for name in free}, names)
        if found is None:
            return None
        chips = sum(map(self._chips_of, frozenset[AttemptId]().union(*found.values())))
        if not self._allowances.may_take(job, max(needed, most_chips_of(found, available)), given_back=chips):
            return None
        if reached.team is None:
            self._allowances.given_back(job, chips)
        return self._taking(job, found, available)

    def may_make_room(self, job: Job, reached: ReachedLimit) -> bool:
        """Return whether `find_within_limit` may find somebody for a job, now or later."""
        if reached.team is None:
            return bool(self._own_spares(job))
        first = next(iter(self._of_account(job)), None)
        return first is not None and (first in self._idle or self._band(first) > job.spec.priority)

    def _own_spares(self, job: Job) -> list[AttemptId]:
        account = job.spec.user, job.spec.priority
        return [a for a, spare in self._idle.items() if (spare.spec.user, spare.spec.priority) == account]

    def _of_team(self, job: Job) -> list[AttemptId]:
        """Return the spares of a job's team, and what may leave in its lower bands."""
        reclaim, taker = self._reclaim(job), job.spec.priority if may_evict(job) else None
        found = (
            a for a in self._of_account(job) if self._looks_at(a) and self._costs.of(a, taker, reclaim, patient=False)
        )
        return list(islice(found, GROUPS_COMPARED))

    def _of_account(self, job: Job) -> Sequence[AttemptId]:
        """Return the attempts that use the quota of a job's team; none if all are of its band or a higher one."""
        lower = (band for band in PriorityBand if band > job.spec.priority)
        if not self._idle and not any(map(self._running.attempts.get, lower)):
            return ()
        return self._by_account.get(self._allowances.teams.account(job.spec), ())

    def _band(self, attempt: AttemptId) -> PriorityBand:
        return self._running.jobs[attempt.job_id].spec.priority

    def _looks_at(self, attempt: AttemptId) -> bool:
        self._looks -= 1
        return self._looks > 0

    @cached_property
    def _by_account(self) -> Mapping[tuple[str, str | None], list[AttemptId]]:
        """The attempts by the quotas that they use; first the spares, then those of the lowest bands."""
        jobs, account = self._running.jobs, self._allowances.teams.account
        found = defaultdict[tuple[str, str | None], list[AttemptId]](list)
        for attempt in chain(self._idle, *map(self._in_turn, reversed(PriorityBand))):
            found[account(jobs[attempt.job_id].spec)].append(attempt)
        return found

    def _taking(self, job: Job, found: Room, available: Availability) -> Taking:
        names = tuple(sorted(found))
        node_ids = tuple(node_id for name in names for node_id in available.group(name).node_ids)
        victims = frozenset[AttemptId]().union(*found.values())
        self._costs.leave(victims)
        self._taken[job.spec.job_id] = victims
        for attempt in victims if self._allowances.teams.exist else ():
            self._leaves(attempt, job)
        for attempt in victims & self._idle.keys():
            del self._idle[attempt]
        return Taking(names, node_ids, tuple(sorted(victims)), self._deadline)

    def _leaves(self, attempt: AttemptId, taker: Job) -> None:
        self._allowances.teams.leaves(attempt, self._running.jobs[attempt.job_id], self._chips_of(attempt), taker)

    def _hopes_for_more(self, job: Job) -> bool:
        """Return whether a gang waits for more groups than it needs if some are about to be free."""
        return len(num_groups(job)) > 1 and self._deadlines.hopes_for_more(job.gang)

    def _search(
        self,
        job: Job,
        available: Availability,
        needed: int,
        patient: bool = False,
        only: Collection[AttemptId] | None = None,
    ) -> VictimSearch:
        reclaim = self._reclaim(job)
        return VictimSearch(self._costs, self._fleet, self._plan, job, available, needed, reclaim, patient, only)

    def _reclaim(self, job: Job) -> Reclaim:
        """Return which jobs of other teams have to leave for a job."""
        least = num_groups(job)[0] * chips_per_group(job) if self._allowances.teams.exist else 0.0
        return self._allowances.teams.reclaim(job, least)

    def _needed(self, job: Job, own: Collection[str], placed: int) -> int:
        """Return how many groups a job needs, and its user's limit allows.

        A job whose tasks are placed one by one needs a host for each task that does not pause.
        """
        if job.spec.coscheduling is not None:
            least = num_groups(job)[0]
            return least if self._allowances.may_take(job, least * chips_per_group(job)) else 0
        waiting = (position for position in job.pending if job.gangs[position].not_before <= self._now)
        needed = sum(1 for _ in islice(waiting, placed, placed + len(own) + TASKS_AT_ONCE))
        return self._allowances.most_groups(job, needed)

    def _complete(self, search: VictimSearch, room: Room) -> Room | None:
        """Return enough groups, but no more victims of a user or a team than its budget of evictions allows."""
        names = self._groups_in_use(search) if search.exist else ()
        for _ in range(OWNERS_SPARED + 1):
            found = search.complete(dict(room), names)
            if found is None:
                return None
            beyond = self._beyond(search, found)
            spared = {owner for owner, _ in self._at_budget(found)} if not search.patient else set()
            if not spared and not beyond:
                return found
            search.spared |= spared
            search.left_out |= beyond
        return None

    def _beyond(self, search: VictimSearch, found: Room) -> frozenset[AttemptId]:
        """Return the attempts of other teams that may stay since without them these teams are back at their quotas."""
        if not search.reclaim:
            return frozenset()
        jobs = self._running.jobs
        victims = frozenset[AttemptId]().union(*found.values()) - self._idle.keys() - self._leaving
        specs = {attempt: jobs[attempt.job_id].spec for attempt in victims}
        others = [a for a in victims if not search.reclaim.by_band(specs[a])]
        in_turn = sorted(others, key=lambda attempt: (search.cost_of(attempt) or (), attempt))
        return frozenset(search.reclaim.beyond((a, specs[a], self._chips_of(a)) for a in in_turn))

    def _at_budget(self, found: Room) -> list[tuple[Owner, float]]:
        """Return whose budgets these evictions would exceed, each with the seconds until they would not."""
        victims = frozenset[AttemptId]().union(*found.values()) - self._idle.keys() - self._leaving
        counts = Counter(chain.from_iterable(map(self._costs.owners_of, victims)))
        waits = [(owner, self._costs.owner_waits_s(owner, count)) for owner, count in sorted(counts.items())]
        return [(owner, wait_s) for owner, wait_s in waits if wait_s]

    def _protected(self, search: VictimSearch, room: Room, available: Availability) -> Protected | None:
        """Return what a job could take once the victims have run for the minimum time of their band."""
        if not self._bands(search.job):
            return None
        first = search.needed if search.job.spec.coscheduling else len(room) + 1
        patient = self._search(search.job, available, first, patient=True)
        found = self._complete(patient, room)
        if found is None:
            return None
        victims = sorted(frozenset[AttemptId]().union(*found.values()))
        waits = [cost[0] for victim in victims if (cost := patient.cost_of(victim)) is not None]
        some, jobs = self._at_budget(found), [(a.job_id, self._costs.job_waits_s(a)) for a in victims]
        at_budget = (*(job_id for job_id, wait_s in jobs if wait_s), *(f"jobs of {owner}" for owner, _ in some))
        wait_s = max([*waits, *(wait_s for _, wait_s in some)])
        return Protected(tuple(dict.fromkeys(victim.job_id for victim in victims)), wait_s, at_budget)

    def _bands(self, job: Job) -> list[PriorityBand]:
        """Return the bands from which a job may take hosts and in which attempts hold some, the lowest first.

        A job within a quota of its teams may take them from all bands of teams that are over theirs.
        """
        if self._rules is None or not may_evict(job):
            return []
        reclaims = bool(self._reclaim(job))
        bands = (band for band in reversed(PriorityBand) if reclaims or band > job.spec.priority)
        return [band for band in bands if self._running.attempts[band]]

    def taken_from(self, job: Job) -> tuple[str, ...]:
        """Return the ids of the jobs that leave hosts to a job, by this plan or an earlier one."""
        return tuple(dict.fromkeys(attempt.job_id for attempt in self._leave_for(job)))

    def _leave_for(self, job: Job) -> list[AttemptId]:
        """Return the attempts that are about to leave hosts to a job."""
        before = job.promise.given_up if job.promise is not None else ()
        told = [self._told[attempt] for attempt in before if attempt in self._told]
        return list(dict.fromkeys([*told, *sorted(self._taken.get(job.spec.job_id, ()))]))

    def leaving(self) -> frozenset[AttemptId]:
        """Return the attempts that are about to leave hosts to some job."""
        return frozenset(self._leaving)

    def told(self) -> Mapping[AttemptId, float]:
        """Return until when each attempt has notice that it must leave; seconds."""
        jobs = self._running.jobs
        gangs = ((attempt, jobs[attempt.job_id].gangs[attempt.gang]) for attempt in self._leaving)
        return {a: gang.eviction.deadline if gang.eviction is not None else self._deadline for a, gang in gangs}

    @property
    def _deadline(self) -> float:
        return self._now + (self._rules.grace_s if self._rules is not None else GRACE_S)

    def _groups_in_use(self, search: VictimSearch) -> list[str]:
        """Return the names of groups that attempts could leave: those about to leave, then those that lose least."""
        names: dict[str, None] = {}
        enough = min(max(GROUPS_COMPARED, 2 * search.needed), MOST_COMPARED)
        bands = self._bands(search.job)
        for attempt in chain(sorted(self._leaving), self._idle, *map(self._in_turn, bands)):
            if not self._looks or len(names) >= enough:
                break
            self._looks -= 1
            if search.cost_of(attempt) is not None:
                names.update(dict.fromkeys(search.groups_of(self._costs.hosts_of(attempt))))
        return list(names)

    def _in_turn(self, band: PriorityBand) -> Iterator[AttemptId]:
        """Iterate over the attempts of a band: those that heed notices, then those that have saved or begun last.

        Those that would have no further attempt come at the very end.
        """
        running, last = self._running, []
        jobs = running.jobs
        for attempt in chain(running.heeding[band], reversed(running.attempts[band])):
            if jobs[attempt.job_id].spec.runs_once:
                last.append(attempt)
            else:
                yield attempt
        yield from last

    def frees(self, node_ids: Iterable[str], reached: ReachedLimit) -> float:
        """Return how many chips count no more towards a limit once all have left that are about to leave.

        Those are about to leave that leave for any job, and those that have ended on hosts that are promised.

        Args:
            node_ids: the hosts that are promised to any job. Their chips count for that job already.
            reached: the limit.
        """
        jobs, workers = self._running.jobs, self._fleet.workers
        there = {who[1] for node_id in node_ids if node_id in workers for who in workers[node_id].ending}
        held = [(attempt, chips) for attempt, chips in self._ending if attempt in there]
        held += [(attempt, self._chips_of(attempt)) for attempt in self._leaving]
        specs = ((jobs[attempt.job_id].spec, chips) for attempt, chips in held)
        return sum(chips for spec, chips in specs if self._allowances.counts_for(reached, spec))

    @cached_property
    def _ending(self) -> list[tuple[AttemptId, float]]:
        """The chips that attempts hold that have ended, and whose end may be confirmed in time; host by host."""
        workers = (worker for worker in self._fleet.workers.values() if worker.ending)
        found = ((worker, who, since) for worker in workers for who, since in worker.ending.items())
        return [(who[1], accelerators(on.occupants[who])) for on, who, at in found if self._now < at + UNCONFIRMED_S]

    def _chips_of(self, attempt: AttemptId) -> float:
        """Return how many chips an attempt holds."""
        workers = (self._fleet.workers[i] for i in self._costs.hosts_of(attempt) if i in self._fleet.workers)
        held = (held for worker in workers for who, held in worker.occupants.items() if who[1] == attempt)
        return sum(map(accelerators, held))


def may_evict(job: Job) -> bool:
    """Return whether gangs of lower bands leave for a job."""
    return job.spec.may_evict and not job.yields and job.spec.spare_for is None


def _key(job: Job) -> _Key:
    """Return the kind of a job. A search that finds nothing for one job finds nothing for others of its kind."""
    return job.requirement, num_groups(job), job.spec.priority, job.spec.team, may_evict(job)
