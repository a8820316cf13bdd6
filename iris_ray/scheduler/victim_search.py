"""The search for running gangs that have to end so that a job finds room: as few and as cheap ones as possible.

A victim that turns out to be superfluous is left alone.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import TPU, Worker, rounded
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evaluation import Status
from iris_ray.scheduler.eviction_costs import Cost, EvictionCosts
from iris_ray.scheduler.placement import best_free, buckets_for
from iris_ray.scheduler.plan import Plan
from iris_ray.state.fleet import Fleet

Victims = frozenset[AttemptId]
Room = dict[str, Victims]
"""Groups, each with the attempts that have to end so that it is free."""


class VictimSearch:
    """Looks for victims for one job.

    Args:
        costs: what their ends cost.
        fleet, plan: what the plan is made from, and what it has given away.
        available: where the job looks for room.
        patient: whether those count, too, that have not run for the minimum time.

    Attributes:
        job: which.
        needed: how many groups it needs.
        exist: whether there are so many that suit it.
    """

    def __init__(
        self,
        costs: EvictionCosts,
        fleet: Fleet,
        plan: Plan,
        job: Job,
        available: Availability,
        needed: int,
        patient: bool = False,
    ) -> None:
        self.job = job
        self.needed = needed
        self._costs = costs
        self._fleet = fleet
        self._plan = plan
        self._available = available
        self._patient = patient
        self._need = job.requirement
        self._grouping = fleet.grouping(job.requirement.group_by)
        self._buckets = buckets_for(job, available)
        least = needed if job.spec.coscheduling else 1
        self.exist = sum(map(available.suitable, self._buckets)) >= least

    # -- the whole -------------------------------------------------------------------------------------------------

    def room_without_victims(self, own: Collection[str]) -> Room:
        """Return groups that are free, that the job is taking already, or that are about to be free, as far as needed.

        Args:
            own: node ids of the hosts that were kept for it.
        """
        free = best_free(self.needed, self._available, self._buckets, self._fleet.held_by(self.job.spec.owner))
        leaving = (node_id for attempt in self._costs.leaving for node_id in self._costs.hosts_of(attempt))
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
        workers = self._fleet.workers
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
        return self._costs.of(attempt, self.job.spec.priority, self._patient)

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
            if occupant in host.ending or attempt in self._costs.leaving:
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
            if (occupant[1] in victims or occupant[1] in self._costs.leaving) and occupant not in host.ending:
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
