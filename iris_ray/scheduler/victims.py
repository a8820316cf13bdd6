"""The search for the cheapest set of attempts that leave for a waiting job, without superfluous ones."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from operator import add

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU, UNITS, Resources, Worker, units
from iris_ray.scheduler.availability import Availability, best_free, buckets_for, preferred
from iris_ray.scheduler.evaluation import Status
from iris_ray.scheduler.eviction_costs import NO_COST, Cost, EvictionCosts
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.team_quotas import Reclaim
from iris_ray.state.attempt_ends import Owner
from iris_ray.state.fleet import Fleet

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
