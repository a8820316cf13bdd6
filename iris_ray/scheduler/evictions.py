"""Which running gangs give their hosts to a waiting job of a higher band: as few and as cheap ones as possible.

`victims.py` says who may be a victim, what its end costs, and which set of victims is cheapest. If a job can't take
hosts yet because the victims have not run for the minimum time of their band, the pending reason says whose hosts the
job may take, and when (`Protected`). A job takes no more than the limit of its user allows.

The search is bounded. It looks at the newest attempts of the lowest bands first, since they lose least.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import accelerators
from iris_ray.scheduler.availability import Availability, num_groups
from iris_ray.scheduler.fair_queue import SearchFairness
from iris_ray.scheduler.limits import Allowances, chips_per_group, most_chips_of
from iris_ray.scheduler.pending_reason import Protected
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.victims import EvictionCosts, EvictionRules, Room, Running, VictimSearch
from iris_ray.state.events import EvictionEvent
from iris_ray.state.fleet import Fleet

SEARCHES = 6
"""A plan searches so often for victims. The next plans search for the other kinds of jobs; see `SearchFairness`."""
ATTEMPTS_LOOKED_AT = 20_000
"""How many attempts of lower bands all searches of a plan look at."""
GROUPS_COMPARED, MOST_COMPARED = 100, 500
"""A search compares ``GROUPS_COMPARED`` groups in use, or twice as many as the job needs, but at most
``MOST_COMPARED``."""
TASKS_AT_ONCE = 16
"""How many hosts one search takes for a job whose tasks are placed one by one."""

_Key = tuple[Requirement, tuple[int, ...], PriorityBand]


@dataclass(frozen=True, slots=True)
class Taking:
    """What a job takes from lower bands.

    Attributes:
        names: the groups that are to be kept for the job, free ones included.
        node_ids: the hosts of these groups.
        event: tells the state which attempts have to end there, once the hosts are kept.
    """

    names: tuple[str, ...]
    node_ids: tuple[str, ...]
    event: EvictionEvent


class Evictor:
    """Chooses victims while a plan is made.

    Args:
        running: what runs.
        rules: when attempts may be evicted.
        fleet: the workers that the plan is made for.
        plan: the hosts that the plan has given away.
        allowances: what each user may still get.
        now: seconds on the clock of the events.
        fairness: for which kinds of jobs earlier plans have searched for victims in vain.
    """

    def __init__(
        self,
        running: Running,
        rules: EvictionRules,
        fleet: Fleet,
        plan: Plan,
        allowances: Allowances,
        now: float,
        fairness: SearchFairness,
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._allowances = allowances
        self._running = running
        self._rules = rules
        self._now = now
        self._searches = SEARCHES
        self._looks = ATTEMPTS_LOOKED_AT
        self._costs = EvictionCosts(running, rules, now)
        self._leaving = self._costs.leaving
        for taker in filter(None, map(running.jobs.get, dict.fromkeys(self._leaving.values()))):
            self._promise(taker, taker.kept)
        self._hopeless: set[_Key] = set()
        self._fairness = fairness
        self._in_vain: set[_Key] = set()

    @property
    def grace_s(self) -> float:
        """Seconds from the notice to the end."""
        return self._rules.grace_s

    def may_help(self, job: Job) -> bool:
        """Return whether `find` is worth a call for a job."""
        takes = job.spec.may_evict and not job.yields and job.spec.spare_for is None
        key, searchable = _key(job), self._has_time and takes
        if not searchable or key in self._hopeless or self._fairness.passes_over(key):
            return False
        return bool(self._bands_below(job))

    def end_plan(self, complete: bool) -> None:
        """Note for which kinds of jobs the plan has searched; ``complete``: whether it went through the whole queue."""
        self._fairness.end_plan(self._in_vain, complete and self._has_time)

    @property
    def _has_time(self) -> bool:
        return self._searches > 0 and self._looks > 0

    def find(self, job: Job, available: Availability, own: Collection[str], placed: int) -> Taking | Protected | None:
        """Return what a job takes that found too few groups, or what it may take later.

        Return None if no victims would give it enough groups, and if it needs none: enough groups are about to be free.

        Args:
            job: the job.
            available: the groups that its requirement finds.
            own: node ids of the room that is kept for the job; the plan must not keep them meanwhile.
            placed: how many of the job's gangs the plan has given hosts.
        """
        needed = self._needed(job, own, placed)
        if not needed:
            return None  # its user's limit leaves nothing for it
        self._searches -= 1
        search = self._search(job, available, needed)
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
        self._leaving.update(dict.fromkeys(victims, job.spec.job_id))
        names = tuple(sorted(found))
        node_ids = tuple(node_id for name in names for node_id in available.group(name).node_ids)
        self._promise(job, node_ids)
        deadline = self._now + self.grace_s
        return Taking(names, node_ids, EvictionEvent(job.spec.job_id, tuple(sorted(victims)), deadline))

    def _search(self, job: Job, available: Availability, needed: int, patient: bool = False) -> VictimSearch:
        return VictimSearch(self._costs, self._fleet, self._plan, job, available, needed, patient)

    def _needed(self, job: Job, own: Collection[str], placed: int) -> int:
        """Return how many groups a job needs, and its user's limit allows.

        A job whose tasks are placed one by one needs a host for each task that does not pause.
        """
        if job.spec.coscheduling is not None:
            least = num_groups(job)[0]
            return least if self._allowances.may_take(job, least * chips_per_group(job)) else 0
        waiting = (position for position in job.pending if job.gangs[position].not_before <= self._now)
        needed = sum(1 for _ in islice(waiting, placed, placed + len(own) + TASKS_AT_ONCE))
        while needed and not self._allowances.may_take(job, needed * chips_per_group(job)):
            needed -= 1
        return needed

    def _complete(self, search: VictimSearch, room: Room) -> Room | None:
        names = self._groups_in_use(self._bands_below(search.job), search) if search.exist else ()
        return search.complete(room, names)

    def _protected(self, search: VictimSearch, room: Room, available: Availability) -> Protected | None:
        """Return what a job could take once the victims have run for the minimum time of their band."""
        first = search.needed if search.job.spec.coscheduling else len(room) + 1
        patient = self._search(search.job, available, first, patient=True)
        found = self._complete(patient, room)
        if found is None:
            return None
        victims = sorted(frozenset[AttemptId]().union(*found.values()))
        waits = [cost[0] for victim in victims if (cost := patient.cost_of(victim)) is not None]
        return Protected(tuple(dict.fromkeys(victim.job_id for victim in victims)), max(waits))

    def _promise(self, job: Job, node_ids: Iterable[str]) -> None:
        """Count the chips of the hosts that a job takes towards its user's limit from now on."""
        workers = (self._fleet.workers.get(node_id) for node_id in node_ids)
        demands = (job.requirement.demand(worker) for worker in workers if worker is not None)
        self._allowances.promised(job, sum(map(accelerators, demands)))

    def _bands_below(self, job: Job) -> list[PriorityBand]:
        """Return the bands below a job's in which attempts hold hosts, the lowest first."""
        return [band for band in reversed(PriorityBand) if band > job.spec.priority and self._running.attempts[band]]

    def taken_from(self, job: Job) -> tuple[str, ...]:
        """Return the ids of the jobs that give hosts to a job, by this plan or an earlier one."""
        job_id = job.spec.job_id
        return tuple(dict.fromkeys(attempt.job_id for attempt, taker in self._leaving.items() if taker == job_id))

    def giving(self) -> set[str]:
        """Return the ids of the jobs that are about to give hosts to others."""
        return {attempt.job_id for attempt in self._leaving}

    def gives_to(self, job: Job) -> bool:
        """Return whether any attempt is about to give its hosts to a job."""
        return job.spec.job_id in self._leaving.values()

    def _groups_in_use(self, bands: Iterable[PriorityBand], search: VictimSearch) -> list[str]:
        """Return the names of groups where attempts could be evicted, the groups of the newest attempts first."""
        names: dict[str, None] = {}
        enough = min(max(GROUPS_COMPARED, 2 * search.needed), MOST_COMPARED)
        for band in bands:
            for attempt in reversed(self._running.attempts[band]):
                if not self._looks or len(names) >= enough:
                    return list(names)
                self._looks -= 1
                if search.cost_of(attempt) is not None:
                    names.update(dict.fromkeys(search.groups_of(self._costs.hosts_of(attempt))))
        return list(names)


def _key(job: Job) -> _Key:
    """Return the kind of a job. A search that finds nothing for one job finds nothing for others of its kind."""
    return job.requirement, num_groups(job), job.spec.priority
