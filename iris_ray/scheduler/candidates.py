"""All groups, as seen by jobs whose requests differ in amounts only: evaluated, sorted and counted once."""

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker
from iris_ray.scheduler.evaluation import Evaluation, Rank, evaluate
from iris_ray.scheduler.ranked_groups import RankedGroups, Room, room_of
from iris_ray.scheduler.suitable_groups import SuitableGroups
from iris_ray.state.groups import Group, Grouping

Distance = tuple[int, float, str]
"""Sorts groups that are not free, the closest to it first: hosts missing, what they lack, name."""


Amounts = tuple[tuple[str, float], ...]
"""What one task needs of its worker; see `Requirement.resources`."""


class Standing(NamedTuple):
    """Where a group stands: among the free ones, or among the others.

    Attributes:
        rank: its place among the free ones, or None.
        room: how much room it has; see `RankedGroups`.
        mixed: whether its members' rooms differ.
        distance: its place among the others, or None.
    """

    rank: Rank | None = None
    room: Room = MappingProxyType({})
    mixed: bool = False
    distance: Distance | None = None


class Candidates:
    """All groups as requirements of one shape see them. What they say of a size of tasks is up to `Availability`.

    A bucket holds the groups of which a gang takes the same number of hosts; see `Evaluation.bucket`.

    Attributes:
        shape: the requirements without amounts.
        evaluations: by group name.
        free: bucket → groups that are free but for amounts.
        closest: the groups that are not free whatever the amounts, and may be once; the closest to it first.
        suitable: counts groups that are free or in use.
        ending: bucket → names of groups with workers that an ended attempt is about to leave.
        excluded: how many workers each constraint (by position) or taint (by name) excludes.
        in_words: name → the evaluation for the amounts that were asked for last, of a few groups that reasons name.
        moved: name → what stood where before a plan moved it, in the order of the plan.
        fleet_version: the version of the fleet that the evaluations are up to date with.
    """

    def __init__(self, shape: Requirement, grouping: Grouping, holders: Mapping[str, str]) -> None:
        self.shape = shape
        self.grouping = grouping
        self.fleet_version = 0
        self.evaluations: dict[str, Evaluation] = {}
        self.free: dict[int, RankedGroups] = {}
        self.closest: list[Distance] = []
        self.suitable = SuitableGroups(shape, self.evaluations)
        self.ending: defaultdict[int, set[str]] = defaultdict(set)
        self.excluded: Counter[int | str] = Counter()
        self.in_words: dict[str, tuple[Amounts, Evaluation]] = {}
        self.moved: dict[str, tuple[Standing, Standing]] = {}  # with where it stands now
        self._holders = holders
        self._rechecks: list[tuple[float, str]] = []  # a heap: when a group is to be evaluated again, and its name

    def evaluate_all(self, now: float) -> None:
        """Evaluate every group for the first time."""
        free: defaultdict[int, list[tuple[Rank, Room, bool]]] = defaultdict(list)
        for group in self.grouping.groups():
            name = group.name
            found = self.evaluations[name] = evaluate(group, self.shape, self._is_held(group), now)
            self._note(name, found, group)
            if found.rank is not None:
                free[found.bucket].append((found.rank, *self._room(found, group)))
            elif found.obstacle:
                self.closest.append((found.hosts_missing, found.shortfall, name))
        self.closest.sort()
        for bucket, groups in free.items():
            self.free[bucket] = RankedGroups()
            self.free[bucket].fill(groups)

    def update(self, changed: Iterable[Worker], now: float) -> None:
        """Evaluate the groups of changed workers again, and those that time has changed. Undo what a plan has moved."""
        names = dict.fromkeys(map(self.grouping.name_of, changed))
        while self._rechecks and self._rechecks[0][0] <= now:
            names[heapq.heappop(self._rechecks)[1]] = None
        self.undo_moves(except_for=names)
        for name in names:
            if name is not None:
                self._evaluate_again(name, now)
        self.moved.clear()

    def move(self, name: str, to: Standing) -> None:
        """Put a group elsewhere while a plan is made."""
        before = self.moved.get(name)
        original, now = before or (self._standing(name),) * 2
        bucket = self.evaluations[name].bucket
        if now.rank is not None and now.rank == to.rank and now.mixed == to.mixed:
            self.free[bucket].change_room(to.rank, to.room)
        else:
            self._remove(bucket, now)
            self._insert(bucket, to)
        self.moved[name] = original, to

    def undo_moves(self, except_for: Mapping[str | None, object] | None = None) -> None:
        """Put every group back to where it stood before the plan."""
        for name, (original, now) in self.moved.items():
            if except_for is None or name not in except_for:
                bucket = self.evaluations[name].bucket
                self._remove(bucket, now)
                self._insert(bucket, original)
        self.moved = {name: moves for name, moves in self.moved.items() if except_for and name in except_for}

    def contents(self) -> tuple[object, ...]:
        """Return everything that two equal candidates have in common, for comparisons in tests."""
        self.undo_moves()
        free = {bucket: groups.contents() for bucket, groups in self.free.items() if len(groups)}
        ending = {bucket: names for bucket, names in self.ending.items() if names}
        return self.evaluations, free, self.closest, ending, +self.excluded

    def _evaluate_again(self, name: str, now: float) -> None:
        before, group = self.evaluations.get(name), self.grouping.get(name)
        if before is not None:
            if before.rejected is not None and before.rejected is group and before.recheck_at is None:
                return  # only what tasks use of it has changed
            self._remove(before.bucket, self.moved[name][1] if name in self.moved else self._standing(name))
            self._forget(name, before)
            self.in_words.pop(name, None)
            del self.evaluations[name]
        if group is not None:
            found = self.evaluations[name] = evaluate(group, self.shape, self._is_held(group), now)
            self._note(name, found, group)
            self._insert(found.bucket, self._new_standing(name, found, group))

    def _is_held(self, group: Group) -> bool:
        if group.is_slice:
            return group.name in self._holders
        if not self.shape.chips:
            return False
        return any(worker.slice_name in self._holders for worker in group.workers)

    # -- where groups stand ----------------------------------------------------------------------------------------

    def _standing(self, name: str) -> Standing:
        found = self.evaluations[name]
        if found.rank is None:
            return Standing(distance=(found.hosts_missing, found.shortfall, name) if found.obstacle else None)
        free = self.free[found.bucket]
        return Standing(found.rank, free.rooms[name], name in free.mixed)

    def _new_standing(self, name: str, found: Evaluation, group: Group) -> Standing:
        if found.rank is None:
            return Standing(distance=(found.hosts_missing, found.shortfall, name) if found.obstacle else None)
        return Standing(found.rank, *self._room(found, group))

    def _room(self, found: Evaluation, group: Group) -> tuple[Room, bool]:
        if found.usable is None and len(group.workers) == self.tasks(found):
            return group.room[0], False
        return room_of([worker.free for worker in found.usable or group.workers], self.tasks(found))

    def _insert(self, bucket: int, standing: Standing) -> None:
        if standing.rank is not None:
            self.free.setdefault(bucket, RankedGroups()).add(standing.rank, standing.room, standing.mixed)
        elif standing.distance is not None:
            insort(self.closest, standing.distance)

    def _remove(self, bucket: int, standing: Standing) -> None:
        if standing.rank is not None:
            self.free[bucket].remove(standing.rank)
        elif standing.distance is not None:
            del self.closest[bisect_left(self.closest, standing.distance)]

    def tasks(self, found: Evaluation) -> int:
        """Return how many hosts a gang takes of a group."""
        return found.bucket or self.shape.replicas

    # -- what is counted -------------------------------------------------------------------------------------------

    def _note(self, name: str, found: Evaluation, group: Group) -> None:
        if found.later:
            self.suitable.add(name, found)
            if found.eligible and _is_ending(group.workers):
                self.ending[found.bucket].add(name)
        if found.excluded:
            for what, count in found.excluded:
                self.excluded[what] += count
        if found.recheck_at is not None:
            heapq.heappush(self._rechecks, (found.recheck_at, name))

    def _forget(self, name: str, found: Evaluation) -> None:
        self.suitable.remove(name, found)
        self.ending[found.bucket].discard(name)
        for what, count in found.excluded:
            self.excluded[what] -= count


def _is_ending(workers: Sequence[Worker]) -> bool:
    for worker in workers:  # noqa: SIM110 — faster than any() with a generator
        if worker.ending:
            return True
    return False
