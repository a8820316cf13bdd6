"""The hosts that a plan has taken so far, and the remaining capacity of a shape's groups.

A plan changes copies; the candidates continue to reflect the fleet.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from iris_ray.model.workers import TPU, Resources, Worker
from iris_ray.scheduler.candidates import Candidates, Distance, Ranking
from iris_ray.scheduler.evaluation import Evaluation, Rank
from iris_ray.scheduler.ranked_groups import RankedGroups, Room, room_of
from iris_ray.state.groups import Group, Grouping


@dataclass(slots=True)
class Plan:
    """The hosts that a plan has given to gangs or reserves for them. Given resources are never taken back.

    Attributes:
        taken: node_id → the resources taken on the host.
        kept: node_id → the only job that may use the host.
        takers: node_id → the job that takes resources on the host.
        without_chips: the ids of the hosts whose chips are taken.
        touched: the workers of all these hosts, in chronological order.
        tasks: number of tasks that were given resources.
        lifts: number of times that a worker ceased to be reserved.
    """

    taken: dict[str, Resources] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    takers: dict[str, str] = field(default_factory=dict)
    without_chips: set[str] = field(default_factory=set)
    touched: list[Worker] = field(default_factory=list)
    tasks: int = 0
    lifts: int = 0
    _groups: dict[Grouping, tuple[int, list[str]]] = field(default_factory=dict)

    def take(self, workers: Sequence[Worker], demand: Resources, job_id: str) -> None:
        """Give the same resources on each of these workers to a job."""
        node_ids = [worker.node_id for worker in workers]
        taken = self.taken
        if taken.keys().isdisjoint(node_ids):
            taken.update(dict.fromkeys(node_ids, demand))
        else:
            for node_id in node_ids:
                taken[node_id] = _sum(taken[node_id], demand) if node_id in taken else demand
        if demand.get(TPU):
            self.without_chips.update(node_ids)
        self.takers.update(dict.fromkeys(node_ids, job_id))
        self.touched += workers
        self.tasks += len(workers)

    def take_more(self, worker: Worker, demand: Resources, number: int) -> None:
        """Give the resources of more tasks to the job that has just got some on a worker."""
        if number:
            more = {resource: amount * number for resource, amount in demand.items()}
            self.taken[worker.node_id] = _sum(self.taken[worker.node_id], more)
            self.touched.append(worker)
            self.tasks += number

    def groups(self, grouping: Grouping) -> list[str]:
        """Return the names of all touched workers' groups, in chronological order. Don't modify the list."""
        seen, names = self._groups.get(grouping, (0, []))
        if seen < len(self.touched):
            names += filter(None, dict.fromkeys(map(grouping.name_of, self.touched[seen:])))
            self._groups[grouping] = len(self.touched), names
        return names

    def keep(self, worker: Worker, job_id: str) -> None:
        """Reserve a worker for a job."""
        self.kept[worker.node_id] = job_id
        self.touched.append(worker)

    def lift(self, worker: Worker) -> None:
        """Stop reserving a worker, for now."""
        del self.kept[worker.node_id]
        self.touched.append(worker)
        self.lifts += 1


NO_GROUPS = RankedGroups()


class RemainingCapacity:
    """The groups of a shape during a plan, ranked by some preferences.

    It is shared by all requirements of that shape with these preferences. Every read accounts first for the hosts that
    the plan has taken since the last one.

    Args:
        ranking: the groups that are free, disregarding amounts.
        plan: the hosts that the plan has taken so far.

    Attributes:
        candidates: the groups as they were before the plan.
        plan: the hosts that the plan has taken so far.
    """

    def __init__(self, ranking: Ranking, plan: Plan) -> None:
        self.candidates: Candidates = ranking.candidates
        self.plan = plan
        self._changed: dict[str, Rank | None] = {}
        self._kept: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._ranking = ranking
        self._copies: dict[int, RankedGroups] = {}  # by bucket: the free groups, if the plan has changed some
        self._missing: dict[str, int] = {}  # changed groups with too few idle hosts → number of missing hosts
        self._used_up: list[Distance] | None = []  # `_missing`, sorted; None if outdated
        self._seen = 0  # number of the plan's touched workers accounted for
        self._groups_seen = 0  # number of their groups accounted for
        self._idle: dict[str, list[tuple[Worker, Room]]] = {}  # the idle hosts of changed groups

    def _catch_up(self) -> None:
        plan = self.plan
        if self._seen < len(plan.touched):
            touched, known = plan.groups(self.candidates.grouping), self.candidates.known
            names = dict.fromkeys(touched[self._groups_seen :])
            self._seen, self._groups_seen = len(plan.touched), len(touched)
            if new := [name for name in names if name not in known]:
                self.candidates.evaluate(new)
            self._take_over()
            for name in names:
                self._idle.pop(name, None)
                self._account_for(name, known[name])

    # -- many groups -----------------------------------------------------------------------------------------------

    def groups(self, bucket: int) -> RankedGroups:
        """Return the groups of a bucket, among those evaluated so far, that are free, disregarding amounts."""
        self._catch_up()
        self._take_over()
        copy = self._copies.get(bucket)
        return self._ranking.free.get(bucket, NO_GROUPS) if copy is None else copy

    def all_groups(self) -> dict[int, RankedGroups]:
        """Return all groups that are free, disregarding amounts, by bucket."""
        self.candidates.complete()
        return {bucket: self.groups(bucket) for bucket in tuple(self._ranking.free)}

    @property
    def changed(self) -> Mapping[str, Rank | None]:
        """The groups that were free before the plan and that it has changed, in chronological order.

        Each has its current rank; None if too few hosts are idle.
        """
        self._catch_up()
        return self._changed

    def kept(self, bucket: int) -> Iterable[str]:
        """Return the names of groups of a bucket with a reserved host, including groups with a suspected host."""
        self._catch_up()
        return self._kept.get(bucket, ())

    def _take_over(self) -> None:
        """Account for groups evaluated since the last call."""
        if self._ranking.version == self.candidates.changes.version:
            return
        for name in self._ranking.catch_up():
            rank, copy = self._ranking.ranks.get(name), self._copies.get(self.candidates.known[name].bucket)
            if rank is not None and copy is not None:
                copy.add(rank, *self.candidates.room(name))

    # -- one group -------------------------------------------------------------------------------------------------

    def group(self, name: str) -> Group:
        """Return a group by its name."""
        group = self.candidates.grouping.get(name)
        assert group is not None, f"{name} is a candidate, but not a group"
        return group

    def rank(self, name: str) -> Rank | None:
        """Return a group's current rank among the free ones; None if it has too few idle hosts."""
        self._catch_up()
        if name in self._changed:
            return self._changed[name]
        self.candidates.evaluation(name)
        self._take_over()
        return self._ranking.ranks.get(name)

    def idle(self, name: str) -> list[tuple[Worker, Room]]:
        """Return the hosts of a free group that are available for a task with or without chips, with their room."""
        self._catch_up()
        return self._idle.get(name) or self._find_idle(name)

    def _find_idle(self, name: str) -> list[tuple[Worker, Room]]:
        kept, taken = self.plan.kept, self.plan.taken
        without_chips = self.plan.without_chips if self.candidates.shape.chips else frozenset[str]()
        idle: list[tuple[Worker, Room]] = []
        if without_chips and without_chips.issuperset(self.group(name).node_ids):
            return idle
        for worker in self.usable(name):
            node_id = worker.node_id
            if node_id not in kept and node_id not in without_chips:
                amounts = taken.get(node_id)
                idle.append((worker, worker.free if amounts is None else _less(worker.free, amounts)))
        return idle

    def usable(self, name: str) -> tuple[Worker, ...]:
        """Return the hosts of a group whose chips were idle before the plan. The group must have been free."""
        usable = self.candidates.evaluation(name).usable
        return self.group(name).workers if usable is None else usable

    def closest(self) -> Iterator[Distance]:
        """Iterate over the groups that are not free for any amounts, the closest to being free first."""
        self._catch_up()
        if self._used_up is None:
            self._used_up = sorted((missing, float(missing), name) for name, missing in self._missing.items())
        return heapq.merge(self._used_up, self.candidates.closest) if self._used_up else iter(self.candidates.closest)

    @property
    def not_free(self) -> int:
        """The number of groups that are not free for any amounts but may become free."""
        self._catch_up()
        return len(self._missing) + len(self.candidates.closest)

    def _account_for(self, name: str, found: Evaluation) -> None:
        if not found.later:
            return
        if self.plan.kept and not self.plan.kept.keys().isdisjoint(self.group(name).node_ids):
            self._kept[found.bucket][name] = None
        else:
            self._kept[found.bucket].pop(name, None)
        first = self._ranking.ranks.get(name)
        if first is not None:
            self._change(name, found, first)

    def _change(self, name: str, found: Evaluation, first: Rank) -> None:
        """Update the rank of a group that was free before the plan, with the rank ``first``."""
        free = self._copies.get(found.bucket)
        if free is None:
            free = self._copies[found.bucket] = self._ranking.free[found.bucket].copy()
        tasks, before = self.candidates.tasks(found), self._changed.get(name, first)
        if idle := self._find_idle(name):
            self._idle[name] = idle
        rooms = [room for _, room in idle]
        now: Rank | None = None
        if len(rooms) >= tasks:
            counts_left = self.candidates.shape.group_by and self.candidates.grouping.shape is None
            now = (*first[:3], len(rooms) - tasks, name) if counts_left else first
            room, is_mixed = room_of(rooms, tasks)
            if now == before and is_mixed == (name in free.mixed):
                free.change_room(now, room)
                self._changed[name] = now
                return
            self._missing.pop(name, None)
        else:
            self._missing[name] = tasks - len(rooms)
        self._used_up = None
        if before is not None:
            free.remove(before)
        if now is not None:
            free.add(now, room, is_mixed)
        self._changed[name] = now


def _sum(some: Resources, more: Resources) -> Resources:
    return {r: some.get(r, 0.0) + more.get(r, 0.0) for r in {**some, **more}}


def _less(free: Resources, taken: Resources) -> Room:
    left = dict(free)
    for resource, amount in taken.items():
        left[resource] = round(left.get(resource, 0.0) - amount, 4)  # like `rounded`, inlined for speed
    return left
