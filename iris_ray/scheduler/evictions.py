"""Which running gangs give their hosts to a job of a higher band that waits: as few and as cheap ones as possible.

A victim is of a lower band than the job that waits, and has run for the minimum time of its band. Sets of victims are
compared by these, in this order: how many victims they have of INTERACTIVE, then of BATCH; how much they lose, in
seconds of hosts since their attempts began; how many spares they have. Spares count for nothing else, since nothing
runs there; nor do jobs that yield. A victim that turns out to be superfluous is left alone. If only the minimum time is
in the way, the search says for whom, and how long (`Protected`).

No more is taken than the limit of the job's user lets it use.

The search is bounded: it takes the newest attempts of the lowest bands first, since they lose least.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import PriorityBand
from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU, Worker, accelerators, rounded
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evaluation import Status
from iris_ray.scheduler.limits import Allowances, chips_per_group, most_chips_of
from iris_ray.scheduler.pending_reason import Protected
from iris_ray.scheduler.placement import best_free, buckets_for, num_groups
from iris_ray.scheduler.plan import Plan
from iris_ray.scheduler.turns import Turns
from iris_ray.state.events import EvictionEvent
from iris_ray.state.fleet import Fleet

GRACE_S = 30.0
LEAST_RUN_S = {PriorityBand.INTERACTIVE: 600.0, PriorityBand.BATCH: 120.0}
SEARCHES = 6
"""A plan looks so often for victims; what it has no time for is left to the next one, see `Turns`."""
ATTEMPTS_LOOKED_AT = 20_000
"""So many attempts of lower bands a plan looks at, in all its searches."""
GROUPS_COMPARED, MOST_COMPARED = 100, 500
"""Among so many groups in use one search chooses; among twice as many as the job needs, if it needs more."""
TASKS_AT_ONCE = 16
"""For so many tasks of a job that are placed one by one, one search takes hosts."""

Victims = frozenset[AttemptId]
Room = dict[str, Victims]
"""Groups, each with the attempts that have to end so that it is free."""
Cost = tuple[float, ...]
_Key = tuple[Requirement, tuple[int, ...], PriorityBand]


@dataclass(frozen=True, slots=True)
class EvictionRules:
    """When gangs give way to higher bands.

    Args:
        grace_s: seconds from the notice to the end.
        least_run_s: so many seconds an attempt of a band runs before it may be evicted.
    """

    grace_s: float = GRACE_S
    least_run_s: Mapping[PriorityBand, float] = field(default_factory=lambda: LEAST_RUN_S)


DEFAULT_RULES = EvictionRules()


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, as a plan sees it.

    Args:
        jobs: all jobs by id.
        attempts: those of each band that hold something, in the order in which they got it.
        evicted: those that are about to give their hosts to other jobs.
    """

    jobs: Mapping[str, Job]
    attempts: Mapping[PriorityBand, dict[AttemptId, None]]
    evicted: Collection[AttemptId] = ()

    def leaving(self) -> frozenset[str]:
        """Return the ids of the jobs that give their hosts to nobody in particular, but to those that wait."""
        gangs = ((attempt.job_id, self.jobs[attempt.job_id].gangs[attempt.gang]) for attempt in self.evicted)
        return frozenset(job_id for job_id, gang in gangs if gang.eviction is not None and not gang.eviction.job_id)


@dataclass(frozen=True, slots=True)
class Taking:
    """What a job takes from lower bands.

    Attributes:
        names: of the groups that are to be kept for it, free ones included.
        node_ids: their hosts.
        event: the attempts that have to end there: an event for the state, once the hosts are kept.
    """

    names: tuple[str, ...]
    node_ids: tuple[str, ...]
    event: EvictionEvent


class Evictor:
    """Chooses victims while a plan is made.

    Args:
        running: what runs.
        rules: who may be evicted.
        fleet, plan: what the plan is made from, and what it has given away.
        allowances: what each user may still get.
        now: seconds on the clock of the events.
        turns: for which kinds of jobs earlier plans have looked for victims.
    """

    def __init__(
        self,
        running: Running,
        rules: EvictionRules,
        fleet: Fleet,
        plan: Plan,
        allowances: Allowances,
        now: float,
        turns: Turns,
    ) -> None:
        self.fleet = fleet
        self.plan = plan
        self._allowances = allowances
        self._running = running
        self._rules = rules
        self._now = now
        self._searches = SEARCHES
        self._looks = ATTEMPTS_LOOKED_AT
        self._going: dict[AttemptId, str] = {}  # with the job to which it gives its hosts
        for attempt in running.evicted:
            if (eviction := running.jobs[attempt.job_id].gangs[attempt.gang].eviction) is not None:
                self._going[attempt] = eviction.job_id
        for taker in filter(None, map(running.jobs.get, dict.fromkeys(self._going.values()))):
            self._promise(taker, taker.kept)
        self._hopeless: set[_Key] = set()
        self._turns = turns
        self._in_vain: set[_Key] = set()
        self._costs: dict[AttemptId, tuple[PriorityBand, Cost]] = {}

    @property
    def grace_s(self) -> float:
        """Seconds from the notice to the end."""
        return self._rules.grace_s

    def may_help(self, job: Job) -> bool:
        """Return whether `find` is worth a call for a job."""
        takes = job.spec.may_evict and not job.yields and job.spec.spare_for is None
        key, searchable = _key(job), self._has_time and takes
        if not searchable or key in self._hopeless or self._turns.had(key):
            return False
        return bool(self._bands_below(job))

    def end_plan(self, complete: bool) -> None:
        """Note whose turn it was; ``complete``: whether the plan went through the whole queue."""
        self._turns.end_plan(self._in_vain, complete and self._has_time)

    @property
    def _has_time(self) -> bool:
        return self._searches > 0 and self._looks > 0

    def find(self, job: Job, available: Availability, own: Collection[str], placed: int) -> Taking | Protected | None:
        """Return what a job that found too little room is to take; None if nothing would do, or if it only has to wait.

        If it could take something later, return what that is.

        Args:
            job: which.
            available: where it looks for room.
            own: the node ids of its room, which must not be kept in the plan meanwhile.
            placed: how many of its gangs the plan has given hosts.
        """
        needed = self._needed(job, own, placed)
        if not needed:
            return None  # its user's limit leaves nothing for it
        self._searches -= 1
        search = _Search(self, job, available, needed)
        room = search.room_without_victims(own) if search.exist else {}
        if len(room) >= needed:
            return None
        found = self._complete(search, room)
        if found is None:
            self._in_vain.add(_key(job))
            if not available.impaired:
                self._hopeless.add(_key(job))  # a plan takes nothing back
            return self._protected(search, room, available)
        if not self._allowances.may_take(job, most_chips_of(found, available)):
            return None
        victims = frozenset[AttemptId]().union(*found.values())
        self._going.update(dict.fromkeys(victims, job.spec.job_id))
        names = tuple(sorted(found))
        node_ids = tuple(node_id for name in names for node_id in available.group(name).node_ids)
        self._promise(job, node_ids)
        deadline = self._now + self.grace_s
        return Taking(names, node_ids, EvictionEvent(job.spec.job_id, tuple(sorted(victims)), deadline))

    def _needed(self, job: Job, own: Collection[str], placed: int) -> int:
        """Return how many groups a job needs: one for each task that does not pause, if it is no gang.

        None that the limit of its user would keep from it.
        """
        if job.spec.coscheduling is not None:
            least = num_groups(job)[0]
            return least if self._allowances.may_take(job, least * chips_per_group(job)) else 0
        waiting = (position for position in job.pending if job.gangs[position].not_before <= self._now)
        needed = sum(1 for _ in islice(waiting, placed, placed + len(own) + TASKS_AT_ONCE))
        while needed and not self._allowances.may_take(job, needed * chips_per_group(job)):
            needed -= 1
        return needed

    def _complete(self, search: "_Search", room: Room) -> Room | None:
        names = self._groups_in_use(self._bands_below(search.job), search) if search.exist else ()
        return search.complete(room, names)

    def _protected(self, search: "_Search", room: Room, available: Availability) -> Protected | None:
        """Return what a job could take once it has run for the minimum time of its band."""
        first = search.needed if search.job.spec.coscheduling else len(room) + 1
        patient = _Search(self, search.job, available, first, patient=True)
        found = self._complete(patient, room)
        if found is None:
            return None
        victims = sorted(frozenset[AttemptId]().union(*found.values()))
        waits = [cost[0] for victim in victims if (cost := patient.cost_of(victim)) is not None]
        return Protected(tuple(dict.fromkeys(victim.job_id for victim in victims)), max(waits))

    def _promise(self, job: Job, node_ids: Iterable[str]) -> None:
        """Have what a job takes count towards its user's limit from now on."""
        workers = (self.fleet.workers.get(node_id) for node_id in node_ids)
        demands = (job.requirement.demand(worker) for worker in workers if worker is not None)
        self._allowances.promised(job, sum(map(accelerators, demands)))

    def _bands_below(self, job: Job) -> list[PriorityBand]:
        """Return the bands below a job's that hold something, the lowest first."""
        return [band for band in reversed(PriorityBand) if band > job.spec.priority and self._running.attempts[band]]

    def taken_from(self, job: Job) -> tuple[str, ...]:
        """Return the ids of the jobs that give hosts to a job, by this plan or an earlier one."""
        job_id = job.spec.job_id
        return tuple(dict.fromkeys(attempt.job_id for attempt, taker in self._going.items() if taker == job_id))

    def gives_to(self, job: Job) -> bool:
        """Return whether something is about to give its hosts to a job."""
        return job.spec.job_id in self._going.values()

    def going(self) -> Iterable[AttemptId]:
        """Return the attempts that are about to give their hosts to other jobs."""
        return self._going

    def _groups_in_use(self, bands: Iterable[PriorityBand], search: "_Search") -> list[str]:
        """Return the names of groups where something could be evicted, the newest attempts' groups first."""
        names: dict[str, None] = {}
        enough = min(max(GROUPS_COMPARED, 2 * search.needed), MOST_COMPARED)
        for band in bands:
            for attempt in reversed(self._running.attempts[band]):
                if not self._looks or len(names) >= enough:
                    return list(names)
                self._looks -= 1
                if search.cost_of(attempt) is not None:
                    names.update(dict.fromkeys(search.groups_of(self.hosts_of(attempt))))
        return list(names)

    def hosts_of(self, attempt: AttemptId) -> Iterable[str | None]:
        """Return the node ids of an attempt's hosts."""
        return (task.node_id for task in self._running.jobs[attempt.job_id].gangs[attempt.gang].tasks)

    # -- one attempt -----------------------------------------------------------------------------------------------

    def cost(self, attempt: AttemptId, taker: PriorityBand, patient: bool) -> Cost | None:
        """Return what the end of an attempt costs, if a gang of this band may take its hosts; see the module.

        Args:
            attempt: which.
            taker: the band of the job that takes them.
            patient: whether those count, too, that have not run for the minimum time.
        """
        if attempt in self._going:
            return None
        known = self._costs.get(attempt)
        if known is None:
            known = self._costs[attempt] = self._cost(attempt)
        band, cost = known
        return cost if band > taker and cost and (patient or not cost[0]) else None

    def goes(self, attempt: AttemptId) -> bool:
        """Return whether an attempt is about to give its hosts to another job."""
        return attempt in self._going

    def _cost(self, attempt: AttemptId) -> tuple[PriorityBand, Cost]:
        job = self._running.jobs[attempt.job_id]
        gang, band = job.gangs[attempt.gang], job.spec.priority
        if not gang.placed or gang.attempt != attempt.number:
            return band, ()  # it ends already
        if job.yields or job.spec.spare_for is not None:
            return band, _cost(band, victims=0, lost=0.0, spares=1)
        ran = self._now - gang.running_since
        protected_s = max(0.0, self._rules.least_run_s.get(band, math.inf) - ran)
        if protected_s == math.inf:
            return band, ()
        return band, _cost(band, victims=1, lost=max(0.0, ran) * len(gang.tasks), spares=0, protected_s=protected_s)


def _key(job: Job) -> _Key:
    """Return what jobs have in common for which the same would do."""
    return job.requirement, num_groups(job), job.spec.priority


def _cost(band: PriorityBand, victims: int, lost: float, spares: int, protected_s: float = 0.0) -> Cost:
    """Return a cost: seconds until it may be evicted; victims by band, the highest first; seconds of hosts; spares."""
    by_band = (float(victims * (band is other)) for other in PriorityBand if other > PriorityBand.PRODUCTION)
    return (protected_s, *by_band, lost, float(spares))


class _Search:
    """Looks for victims for one job.

    Args:
        patient: whether those count, too, that have not run for the minimum time.

    Attributes:
        job: which.
        needed: how many groups it needs.
        exist: whether there are so many that suit it.
    """

    def __init__(self, evictor: Evictor, job: Job, available: Availability, needed: int, patient: bool = False) -> None:
        self.job = job
        self.needed = needed
        self._patient = patient
        self._evictor = evictor
        self._available = available
        self._need = job.requirement
        self._grouping = evictor.fleet.grouping(job.requirement.group_by)
        self._buckets = buckets_for(job, available)
        self._plan = evictor.plan
        least = needed if job.spec.coscheduling else 1
        self.exist = sum(map(available.suitable, self._buckets)) >= least

    # -- the whole -------------------------------------------------------------------------------------------------

    def room_without_victims(self, own: Collection[str]) -> Room:
        """Return groups that are free, that the job is taking already, or that are about to be free, as far as needed.

        Args:
            own: node ids of the hosts that were kept for it.
        """
        free = best_free(self.needed, self._available, self._buckets, self._evictor.fleet.held_by(self.job.spec.owner))
        leaving = (node_id for attempt in self._evictor.going() for node_id in self._evictor.hosts_of(attempt))
        room = dict.fromkeys(filter(self._is_nobodys, free), frozenset[AttemptId]())
        for name in chain(self.groups_of(own), self.groups_of(leaving), self._about_to_be_free()):
            if len(room) >= self.needed:
                break
            if self._is_freed(name, frozenset()):
                room[name] = frozenset()
        return room

    def complete(self, room: Room, names: Iterable[str]) -> Room | None:
        """Return enough groups, with what has to end there; None if there are too few.

        Args:
            room: groups that need no victims.
            names: groups that may be freed.
        """
        options = {name: more for name in names if name not in room and (more := self._option(name)) is not None}
        enough, victims = self.needed, frozenset[AttemptId]()
        if self.job.spec.coscheduling is None:
            enough = min(enough, len(room) + len(options))
        if not len(room) < enough <= len(room) + len(options):
            return None
        left = dict(options)
        while len(room) < enough:
            freed = [name for name, needs in left.items() if needs <= victims]
            room |= {name: left.pop(name) for name in freed[: enough - len(room)]}
            if len(room) < enough:
                victims |= self._best(left.values(), victims, enough - len(room))
        return self._without_superfluous(room, victims, options)

    def groups_of(self, node_ids: Iterable[str | None]) -> list[str]:
        """Return the names of the groups of some hosts that are in use, and that the job could use otherwise."""
        workers = self._evictor.fleet.workers
        there = (workers[node_id] for node_id in dict.fromkeys(node_ids) if node_id in workers)
        names = dict.fromkeys(map(self._grouping.name_of, there))
        return [name for name in names if name is not None and self._may_use(name)]

    def _about_to_be_free(self) -> Iterator[str]:
        ending = self._available.candidates.ending
        names = sorted(name for bucket in self._buckets for name in ending.get(bucket, ()))
        return (name for name in names if self._is_nobodys(name) and self._available.is_free_soon(name))

    def _best(self, options: Iterable[Victims], victims: Victims, missing: int) -> Victims:
        """Return what costs least beside these victims, for each group that it frees with them."""
        counts = Counter(needs - victims for needs in options)
        touching: dict[AttemptId, set[Victims]] = {}
        for more in counts:
            for attempt in more:
                touching.setdefault(attempt, set()).add(more)

        def price(more: Victims) -> tuple[Cost, list[AttemptId]]:
            others = set[Victims]().union(*(touching[attempt] for attempt in more))
            frees = sum(counts[other] for other in others if other <= more)
            return tuple(part / min(frees, missing) for part in self._total(more)), sorted(more)

        return min(counts, key=price)

    def _without_superfluous(self, room: Room, victims: Victims, options: Room) -> Room:
        """Leave out the victims without which there is room as well, the most expensive ones first.

        What others free besides may do instead.
        """
        for victim in sorted(victims, key=lambda attempt: (self._total({attempt}), attempt), reverse=True):
            fewer = victims - {victim}
            left = {name: needs for name, needs in room.items() if victim not in needs}
            left |= {name: fewer for name, needs in room.items() if victim in needs and self._is_freed(name, fewer)}
            others = {name: needs for name, needs in options.items() if name not in room and needs <= fewer}
            left |= dict(islice(others.items(), len(room) - len(left)))
            if len(left) == len(room):
                room, victims = left, fewer
        return room

    def _total(self, victims: Collection[AttemptId]) -> Cost:
        costs = [cost for victim in victims if (cost := self.cost_of(victim)) is not None]
        return tuple(map(sum, zip(*costs, strict=True))) or (0.0,) * 5

    # -- one group -------------------------------------------------------------------------------------------------

    def cost_of(self, attempt: AttemptId) -> Cost | None:
        """Return what the end of an attempt costs; None if it is no victim."""
        return self._evictor.cost(attempt, self.job.spec.priority, self._patient)

    def _may_use(self, name: str) -> bool:
        """Return whether the job could use a group if what runs there ended."""
        available = self._available
        found = available.candidates.evaluations.get(name)
        if found is None or found.bucket not in self._buckets or found.status is Status.UNSUITABLE:
            return False
        return available.suits(name) and not available.is_free(name) and self._is_nobodys(name)

    def _is_nobodys(self, name: str) -> bool:
        """Return whether nothing of a group is kept for a job."""
        return self._plan.kept.keys().isdisjoint(self._available.group(name).node_ids)

    def _option(self, name: str) -> Victims | None:
        """Return what has to end so that a group is free: on the hosts where it costs least."""
        hosts = [victims for host in self._hosts(name) if (victims := self._victims_on(host)) is not None]
        tasks = self._available.tasks(name)
        if len(hosts) < tasks:
            return None
        return frozenset[AttemptId]().union(*sorted(hosts, key=self._total)[:tasks])

    def _is_freed(self, name: str, victims: Victims) -> bool:
        """Return whether a group is free once these have ended."""
        return sum(self._fits(host, victims) for host in self._hosts(name)) >= self._available.tasks(name)

    def _hosts(self, name: str) -> list[Worker]:
        """Return the hosts of a group that suit the job but for the amounts that it asks for, used or not."""
        suitable = self._available.candidates.evaluations[name].eligible
        return [host for host in suitable if not self._available.avoids(host)]

    # -- one host --------------------------------------------------------------------------------------------------

    def _victims_on(self, host: Worker) -> Victims | None:
        """Return what has to end on a host so that there is room for a task; None if there never is."""
        victims: Victims = frozenset()
        there: dict[AttemptId, float] = {}
        for occupant, held in host.occupants.items():
            attempt = occupant[1]
            if occupant in host.ending or self._evictor.goes(attempt):
                continue
            if self.cost_of(attempt) is not None:
                there[attempt] = 0.0
            if self._need.chips and held.get(TPU):
                victims |= {attempt}
        if not victims <= there.keys():
            return None  # its chips are in use by what is no victim
        while not self._fits(host, victims):
            left = [attempt for attempt in there if attempt not in victims]
            if not left:
                return None
            victims |= {min(left, key=lambda attempt: self._worth(host, attempt, victims))}
        return victims

    def _worth(self, host: Worker, attempt: AttemptId, victims: Victims) -> tuple[float, Cost, AttemptId]:
        """Sort what could end on a host: what frees most of what is missing, for its price, comes first."""
        cost = self._total({attempt})
        missing = self._missing(host, victims)
        freed = missing - self._missing(host, victims | {attempt})
        return (float("inf") if freed <= 0 else 0.0), tuple(part / max(freed, 1e-9) for part in cost), attempt

    def _fits(self, host: Worker, victims: Victims) -> bool:
        return self._missing(host, victims) == 0.0

    def _missing(self, host: Worker, victims: Victims) -> float:
        """Return how much of a task's needs is missing once these have ended, over all resources; 0 if it fits."""
        free = dict(host.free_soon())
        for occupant, held in host.occupants.items():
            if (occupant[1] in victims or self._evictor.goes(occupant[1])) and occupant not in host.ending:
                for resource, amount in held.items():
                    free[resource] = free.get(resource, 0.0) + amount
        for resource, amount in self._plan.taken.get(host.node_id, {}).items():
            free[resource] = free.get(resource, 0.0) - amount
        missing = 0.0
        if self._need.chips and rounded(free.get(TPU, 0.0)) != host.resources.get(TPU, 0.0):
            missing += 1.0
        for resource, need in self._need.resources:
            missing += max(0.0, 1.0 - rounded(free.get(resource, 0.0)) / need)
        return missing
