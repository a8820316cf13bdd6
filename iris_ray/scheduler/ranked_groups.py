"""Ranked groups, searchable by the room that a task needs.

`RankedGroups` keeps groups in the order in which plans take them. `SuitableGroups` counts groups by their total
resources.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker
from iris_ray.scheduler.evaluation import Evaluation

Room = Mapping[str, float]
"""The amount of each resource that a task could take, by Ray's names."""

Needs = Sequence[tuple[str, float]]
"""The amounts of resources that a task needs, as pairs."""

Ranks = tuple[Any, ...]
"""A sort key of groups, best first, that ends with the group's name."""

BLOCK = 128
"""The number of groups in a new block."""


class _Block:
    """A run of adjacent groups in the order.

    Attributes:
        ranks: the groups' ranks, ascending.
        most, least: resource → upper and lower bounds of the groups' amounts, for resources that searches have used.
    """

    __slots__ = ("least", "most", "ranks")

    def __init__(self, ranks: list[Ranks]) -> None:
        self.ranks = ranks
        self.most: dict[str, float] = {}
        self.least: dict[str, float] = {}

    def copy(self) -> "_Block":
        block = _Block(self.ranks.copy())
        block.most, block.least = self.most.copy(), self.least.copy()
        return block

    def may_fit(self, needs: Needs, rooms: Mapping[str, Room]) -> bool:
        """Return whether any group may have room; False is definite."""
        most = self.most
        for resource, need in needs:
            if resource not in most:
                self._measure(resource, rooms)
            if most[resource] < need:
                return False
        return True

    def all_fit(self, needs: Needs) -> bool:
        """Return whether every group has room; True is definite. Call `may_fit` first."""
        return fits(self.least, needs)

    def room_changed(self, room: Room) -> None:
        """Update the bounds for a new or changed group."""
        for resource, most in self.most.items():
            have = room.get(resource, 0.0)
            if have > most:
                self.most[resource] = have
            elif have < self.least[resource]:
                self.least[resource] = have

    def forget(self) -> None:
        """Discard the bounds, because groups have shrunk or left."""
        self.most.clear()
        self.least.clear()

    def _measure(self, resource: str, rooms: Mapping[str, Room]) -> None:
        amounts = [rooms[rank[-1]].get(resource, 0.0) for rank in self.ranks]
        self.most[resource], self.least[resource] = max(amounts), min(amounts)


class RankedGroups:
    """Groups by rank, each with its room.

    A search skips blocks in which no group has enough of some resource. It therefore costs about the square root of the
    number of groups, and one structure serves all sizes of tasks. A search for more than the largest amount ends at
    once, since many jobs may ask for more than there is, each for another amount.

    Attributes:
        rooms: name → room of each group.
        mixed: names of groups whose members differ in room. The room of such a group has the maximum of each resource
            over its members, so the members with enough of all resources must be counted.
    """

    def __init__(self) -> None:
        self.rooms: dict[str, Room] = {}
        self.mixed: set[str] = set()
        self._blocks: list[_Block] = []
        self._most: dict[str, float] = {}  # upper bounds of the groups' amounts, of resources of which one lacked

    def __len__(self) -> int:
        return len(self.rooms)

    def copy(self) -> "RankedGroups":
        """Return an independent copy."""
        groups = RankedGroups()
        groups.rooms, groups.mixed = self.rooms.copy(), self.mixed.copy()
        groups._blocks = [block.copy() for block in self._blocks]
        groups._most = self._most.copy()
        return groups

    def fill(self, groups: Iterable[tuple[Ranks, Room, bool]]) -> None:
        """Add the initial groups: rank, room, and whether mixed."""
        ranks = []
        for rank, room, is_mixed in groups:
            ranks.append(rank)
            self.rooms[rank[-1]] = room
            if is_mixed:
                self.mixed.add(rank[-1])
        ranks.sort()
        self._blocks = [_Block(ranks[start : start + BLOCK]) for start in range(0, len(ranks), BLOCK)]
        self._most.clear()

    def add(self, rank: Ranks, room: Room, is_mixed: bool = False) -> None:
        """Add a group."""
        self.rooms[rank[-1]] = room
        if is_mixed:
            self.mixed.add(rank[-1])
        if not self._blocks:
            self._blocks.append(_Block([]))
        number = self._block_of(rank)
        block = self._blocks[number]
        insort(block.ranks, rank)
        block.room_changed(room)
        self._raise_bounds(room)
        if len(block.ranks) > 2 * BLOCK:
            self._blocks[number : number + 1] = _Block(block.ranks[:BLOCK]), _Block(block.ranks[BLOCK:])

    def remove(self, rank: Ranks) -> None:
        """Remove a group."""
        del self.rooms[rank[-1]]
        self.mixed.discard(rank[-1])
        number = self._block_of(rank)
        ranks = self._blocks[number].ranks
        del ranks[bisect_left(ranks, rank)]
        if not ranks:
            del self._blocks[number]

    def change_room(self, rank: Ranks, room: Room) -> None:
        """Set the room of a group."""
        self.rooms[rank[-1]] = room
        self._blocks[self._block_of(rank)].room_changed(room)
        self._raise_bounds(room)

    def fitting(self, needs: Needs) -> Iterator[Ranks]:
        """Iterate over the groups with room for a task, best first. Don't modify groups during the iteration."""
        rooms, none_at_all = self.rooms, True
        if not self._may_fit(needs):
            return
        for block in self._blocks:
            if not block.may_fit(needs, rooms):
                continue
            none_at_all, none = False, True
            for rank in block.ranks:
                room = rooms[rank[-1]]
                for resource, need in needs:
                    if room.get(resource, 0.0) < need:
                        break
                else:
                    none = False
                    yield rank
            if none:
                block.forget()
        if none_at_all:
            self._note_most(needs)

    def not_fitting(self, needs: Needs) -> Iterator[Ranks]:
        """Iterate over the groups without room for a task."""
        rooms = self.rooms
        return (rank for block in self._blocks for rank in block.ranks if not fits(rooms[rank[-1]], needs))

    def count(self, needs: Needs) -> int:
        """Return the number of groups with room for a task."""
        rooms, count = self.rooms, 0
        if not self._may_fit(needs):
            return 0
        for block in self._blocks:
            if block.may_fit(needs, rooms):
                all_fit = block.all_fit(needs)
                count += len(block.ranks) if all_fit else sum(fits(rooms[rank[-1]], needs) for rank in block.ranks)
        if not count:
            self._note_most(needs)
        return count

    def closest(self, needs: Needs, count: int) -> list[tuple[float, str]]:
        """Return (shortfall, name) of the ``count`` groups without room that lack least; ties are arbitrary."""
        found: list[tuple[float, str]] = []
        bounds = sorted((self._least_shortfall(block, needs), number) for number, block in enumerate(self._blocks))
        for bound, number in bounds:
            if len(found) == count and bound >= found[-1][0]:
                break
            found = heapq.nsmallest(count, chain(found, self._short(self._blocks[number], needs)))
        return found

    def contents(self) -> tuple[object, ...]:
        """Return the content, for comparisons in tests."""
        for block in self._blocks:
            for resource, most in block.most.items():
                amounts = [self.rooms[rank[-1]].get(resource, 0.0) for rank in block.ranks]
                assert most >= max(amounts), f"some group has more {resource} than its block says"
                assert block.least[resource] <= min(amounts), f"some group has less {resource} than its block says"
        for resource, most in self._most.items():
            assert all(room.get(resource, 0.0) <= most for room in self.rooms.values()), f"some has more {resource}"
        return self.rooms, self.mixed, [rank for block in self._blocks for rank in block.ranks]

    def _may_fit(self, needs: Needs) -> bool:
        """Return whether any group may have room for a task; False is definite."""
        if self._most:
            for resource, need in needs:
                if self._most.get(resource, need) < need:
                    return False
        return True

    def _note_most(self, needs: Needs) -> None:
        """Note the bounds of all blocks' amounts after a search in which no block had enough."""
        for resource, _ in needs:
            if all(resource in block.most for block in self._blocks):
                self._most[resource] = max((block.most[resource] for block in self._blocks), default=0.0)

    def _raise_bounds(self, room: Room) -> None:
        for resource, most in self._most.items():
            if room.get(resource, 0.0) > most:
                self._most[resource] = room[resource]

    def _block_of(self, rank: Ranks) -> int:
        return max(0, bisect_right(self._blocks, rank, key=_first) - 1)

    def _least_shortfall(self, block: _Block, needs: Needs) -> float:
        """Return a lower bound for the shortfalls of a block's groups."""
        if block.may_fit(needs, self.rooms):
            return 0.0
        most = block.most
        return max([1 - most[resource] / need for resource, need in needs if resource in most])

    def _short(self, block: _Block, needs: Needs) -> Iterator[tuple[float, str]]:
        """Iterate over (shortfall, name) of a block's groups without room for a task."""
        rooms = [self.rooms[rank[-1]] for rank in block.ranks]
        lacks = [0.0] * len(rooms)
        for resource, need in needs:
            lacks = [max(lack, 1 - room.get(resource, 0.0) / need) for lack, room in zip(lacks, rooms, strict=True)]
        return ((lack, rank[-1]) for lack, rank in zip(lacks, block.ranks, strict=True) if lack > 0)


class SuitableGroups:
    """Counts the groups that would be free without tasks on them, by the total resources of their hosts.

    Args:
        shape: a requirement without amounts.
        evaluations: the evaluations of all groups, by name.

    Attributes:
        buckets: bucket → number of groups with enough hosts for a gang; see `Evaluation.later`.
    """

    def __init__(self, shape: Requirement, evaluations: Mapping[str, Evaluation]) -> None:
        self.buckets: Counter[int] = Counter()
        self._shape = shape
        self._evaluations = evaluations
        self._groups: dict[tuple[int, bool], RankedGroups] = {}  # (bucket, later) → groups; made when first read

    def count(self, bucket: int, needs: Needs, later: bool = False) -> int:
        """Return the number of groups in a bucket that would be free for a task's needs without tasks on them.

        ``later`` includes groups that are unfit only for temporary reasons.
        """
        groups = self._groups.get((bucket, later))
        if groups is None:
            groups = self._groups[bucket, later] = self._made(bucket, later)
        unequal = (name for name in groups.mixed if fits(groups.rooms[name], needs))
        return groups.count(needs) - sum(not self.suits(name, needs, later) for name in unequal)

    def suits(self, name: str, needs: Needs, later: bool = False) -> bool:
        """Return whether a group would be free without tasks on it; ``later``: see `count`."""
        found = self._evaluations[name]
        members = _members(found, later)
        tasks = found.bucket or self._shape.replicas
        return len(members) >= tasks and sum(fits(worker.resources, needs) for worker in members) >= tasks

    def add(self, name: str, found: Evaluation) -> None:
        """Add an evaluated group."""
        self.buckets[found.bucket] += bool(found.later)
        for (bucket, later), groups in self._groups.items():
            if bucket == found.bucket and _members(found, later):
                groups.add((name,), *self._size(found, later))

    def remove(self, name: str, found: Evaluation) -> None:
        """Remove a group."""
        self.buckets[found.bucket] -= bool(found.later)
        for (bucket, later), groups in self._groups.items():
            if bucket == found.bucket and _members(found, later):
                groups.remove((name,))

    def _made(self, bucket: int, later: bool) -> RankedGroups:
        groups, made = RankedGroups(), self._groups.get((bucket, not later))
        found: list[tuple[Ranks, Room, bool]] = []
        for name, one in self._evaluations.items():
            if one.bucket == bucket and _members(one, later):
                if made is not None and one.later is one.eligible:
                    found.append(((name,), made.rooms[name], name in made.mixed))
                else:
                    found.append(((name,), *self._size(one, later)))
        groups.fill(found)
        return groups

    def _size(self, found: Evaluation, later: bool) -> tuple[Mapping[str, float], bool]:
        tasks = found.bucket or self._shape.replicas
        return room_of([worker.resources for worker in _members(found, later)], tasks)


def _members(found: Evaluation, later: bool) -> tuple[Worker, ...]:
    return found.later if later else found.eligible


def room_of(members: Sequence[Room], tasks: int) -> tuple[Room, bool]:
    """Return the room of a group of which a gang takes ``tasks`` members, and whether the group is mixed."""
    first = members[0]
    if len(members) == 1 or members.count(first) == len(members):
        return first, False
    which = min if len(members) == tasks else max
    names = dict.fromkeys(name for room in members for name in room)
    return {name: which(room.get(name, 0.0) for room in members) for name in names}, len(members) > tasks


def fits(room: Room, needs: Needs) -> bool:
    """Return whether a room suffices for a task's needs."""
    for resource, need in needs:  # noqa: SIM110 — faster than all() with a generator
        if room.get(resource, 0.0) < need:
            return False
    return True


def _first(block: _Block) -> Ranks:
    return block.ranks[0] if block.ranks else ()
