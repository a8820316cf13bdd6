"""The evaluations of groups for a shape of requirements (`Candidates`), and the ranking of free groups (`Ranking`).

Requirements of one shape differ only in amounts and preferences, and share one evaluation of the fleet. Groups are
evaluated when a plan first needs them, potentially best ones first. The next plan evaluates only groups that have
changed since.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from iris_ray.model.constraints import Constraint
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU_NAME, Worker, accelerators
from iris_ray.scheduler.evaluation import Evaluation, Rank, evaluate, hosts_left_idle, unmet
from iris_ray.scheduler.ranked_groups import RankedGroups, Room, SuitableGroups, room_of
from iris_ray.state.fleet import Fleet
from iris_ray.state.groups import Group
from iris_ray.state.instructions import ChangeLog

RANKS_PER_EVALUATION = 4
"""The number of groups whose ranking by preferences costs as much as one evaluation."""
CONSTRAINTS_PER_EVALUATION = 10
"""The number of constraints whose comparison with a group costs about as much as the rest of its evaluation."""
AT_ONCE = 16
"""The minimum number of groups that are evaluated in a batch."""

Distance = tuple[int, float, str]
"""Sort key of groups that are not free, the closest to being free first: missing hosts, total shortfall, name."""

Amounts = tuple[tuple[str, float], ...]
"""The resources that one task needs; see `Requirement.resources`."""

Preferences = tuple[Constraint, ...]


class _Ahead:
    """The groups that are not evaluated yet, ordered by the best rank that each may have."""

    def __init__(self, shape: Requirement, fleet: Fleet) -> None:
        alike: defaultdict[tuple[float, bool, int], list[str]] = defaultdict(list)
        holders, workers = fleet.holders, fleet.workers.items()
        if shape.group_by is None and not shape.chips:
            for name, worker in workers:
                alike[accelerators(worker.resources), False, 0].append(name)
        elif shape.group_by is None:
            for name, worker in workers:
                alike[0.0, worker.slice_name in holders, hosts_left_idle(worker)].append(name)
        else:
            for name in fleet.grouping(shape.group_by):
                alike[0.0, shape.group_by == TPU_NAME and name in holders, 0].append(name)
        for names in alike.values():
            heapq.heapify(names)
        self._alike = sorted(alike.items(), reverse=True)

    def __bool__(self) -> bool:
        return bool(self._alike)

    @property
    def best(self) -> Rank:
        """A lower bound for the ranks of all groups."""
        (accelerators, is_held, hosts_left), names = self._alike[-1]
        return 0, accelerators, int(is_held), hosts_left, names[0]

    def pop(self) -> str:
        """Remove the first group and return its name."""
        names = self._alike[-1][1]
        name = heapq.heappop(names)
        if not names:
            self._alike.pop()
        return name

    def names(self) -> Iterable[str]:
        """Return the names of all groups."""
        return chain.from_iterable(names for _, names in self._alike)


class Ranking:
    """The free groups of a shape, ranked first by the number of unmet preferences, and kept up to date between plans.

    Attributes:
        free: bucket → groups that are free, disregarding amounts.
        ranks: the ranks of these groups, by name.
        version: the version of the candidates' changes that is accounted for.
    """

    def __init__(self, candidates: "Candidates", preferences: Preferences) -> None:
        self.candidates = candidates
        self.free: dict[int, RankedGroups] = {}
        self.ranks: dict[str, Rank] = {}
        self.version = -1
        self._preferences = preferences

    @property
    def cost(self) -> int:
        """The approximate cost of ranking by preferences, in evaluations."""
        return cost_of_ranks(len(self.ranks)) if self._preferences else 0

    def catch_up(self) -> Iterable[str]:
        """Account for the groups evaluated since the last call, and return their names."""
        changes = self.candidates.changes
        changed = changes.since(self.version) if self.version >= 0 else None
        self.version = changes.version
        if changed is None:
            return self._fill()
        names = dict.fromkeys(changed)
        for name in names:
            if (rank := self.ranks.pop(name, None)) is not None:
                next(groups for groups in self.free.values() if name in groups.rooms).remove(rank)
            found = self.candidates.known.get(name)
            if found is not None and found.rank is not None:
                rank = self.ranks[name] = self._rank(found.rank)
                self.free.setdefault(found.bucket, RankedGroups()).add(rank, *self.candidates.room(name))
        return names

    def contents(self) -> tuple[object, ...]:
        """Return the content of the ranking, for comparisons in tests."""
        self.candidates.complete()
        self.catch_up()
        return {bucket: groups.contents() for bucket, groups in self.free.items() if len(groups)}, self.ranks

    def _fill(self) -> Iterable[str]:
        self.free.clear()
        known = self.candidates.known
        self.ranks = {name: self._rank(found.rank) for name, found in known.items() if found.rank is not None}
        free: defaultdict[int, list[tuple[Rank, Room, bool]]] = defaultdict(list)
        for name, rank in self.ranks.items():
            free[known[name].bucket].append((rank, *self.candidates.room(name)))
        for bucket, groups in free.items():
            self.free[bucket] = RankedGroups()
            self.free[bucket].fill(groups)
        return self.ranks

    def _rank(self, rank: Rank) -> Rank:
        if not self._preferences:
            return rank
        group = self.candidates.grouping.get(rank[-1])
        assert group is not None
        return (unmet(self._preferences, group), *rank[1:])


class Candidates:
    """All groups, evaluated for requirements of one shape; `Availability` adds the sizes of tasks.

    A bucket holds the groups of which a gang takes the same number of hosts; see `Evaluation.bucket`.

    Args:
        shape: a requirement without amounts and preferences.
        fleet: the fleet with the groups.
        count: called with the number of evaluations made.

    Attributes:
        known: the evaluations made so far, by group name.
        changes: a log of the names of evaluated groups.
        in_words: name → latest amounts and their evaluation with obstacles, for the groups named in reasons.
        fleet_version: the version of the fleet that the evaluations reflect.
    """

    def __init__(self, shape: Requirement, fleet: Fleet, count: Callable[[int], None] = lambda _: None) -> None:
        self.shape = shape
        self.grouping = fleet.grouping(shape.group_by)
        self.fleet_version = 0
        self.known: dict[str, Evaluation] = {}
        self.changes: ChangeLog[str] = ChangeLog()
        self.in_words: dict[str, tuple[Amounts, Evaluation]] = {}
        self._suitable = SuitableGroups(shape, self.known)
        self._ending: defaultdict[int, set[str]] | None = None  # made when first read
        self._excluded: Counter[int | str] = Counter()
        self._incomparable = 0
        self._closest: list[Distance] | None = None  # made when first read
        self._count = count
        self._cost = 1 + len(shape.constraints) // CONSTRAINTS_PER_EVALUATION
        self._now, self._changes_kept = 0.0, 1000
        self._fleet = fleet
        self._ahead: _Ahead | None = _Ahead(shape, fleet)
        self._rechecks: list[tuple[float, str]] = []  # a heap: when to evaluate a group again, and its name

    def update(self, changed: Collection[Worker], now: float) -> None:
        """Evaluate the groups of changed workers again, and those whose evaluation has expired."""
        self._now, self._changes_kept = now, 4 * len(self.grouping) + 1000
        names = self.grouping.affected_by(changed)
        while self._rechecks and self._rechecks[0][0] <= now:
            names[heapq.heappop(self._rechecks)[1]] = None
        for name in names:
            if name is not None:
                self._evaluate_again(name)

    # -- some groups -----------------------------------------------------------------------------------------------

    def evaluation(self, name: str) -> Evaluation:
        """Return the evaluation of a group."""
        found = self.known.get(name)
        if found is None:
            self.evaluate([name])
            found = self.known[name]
        return found

    def evaluate(self, names: Iterable[str]) -> None:
        """Evaluate the groups of these names that are not evaluated yet."""
        before = len(self.known)
        for name in names:
            if name not in self.known and (group := self.grouping.get(name)) is not None:
                self._note(evaluate(group, self.shape, self._is_held(group), self._now, in_words=False), group)
        self._count((len(self.known) - before) * self._cost)

    def evaluate_better(self, missing: int, worst: Rank | None) -> bool:
        """Evaluate groups that may be better than those that a search has found. Return whether there were any.

        ``missing`` is the number of groups that the search still needs; ``worst`` is the rank of the last group found,
        if the search has enough.
        """
        ahead, names = self._ahead, list[str]()
        if ahead is None or (worst is not None and worst <= ahead.best):
            return False
        while ahead and (ahead.best < worst if worst else len(names) < max(missing, AT_ONCE)):
            names.append(ahead.pop())
        self.evaluate(names)
        self._ahead = ahead if ahead else None
        return True

    def room(self, name: str) -> tuple[Room, bool]:
        """Return the room of a free group, and whether it is mixed; see `RankedGroups`."""
        found, group = self.known[name], self.grouping.get(name)
        assert group is not None
        if found.usable is None and len(group.workers) == self.tasks(found):
            return group.room, False
        return room_of([worker.free for worker in found.usable or group.workers], self.tasks(found))

    def tasks(self, found: Evaluation) -> int:
        """Return the number of hosts that a gang takes of a group."""
        return found.bucket or self.shape.replicas

    # -- all groups ------------------------------------------------------------------------------------------------

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """All groups' evaluations, by name."""
        self.complete()
        return self.known

    @property
    def suitable(self) -> SuitableGroups:
        """The counts of groups that are free or in use."""
        self.complete()
        return self._suitable

    @property
    def ending(self) -> dict[int, set[str]]:
        """Bucket → names of groups with workers that ended attempts still hold."""
        self.complete()
        if self._ending is None:
            self._ending = defaultdict(set)
            for name, found in self.known.items():
                self._note_ending(name, found)
        return self._ending

    @property
    def excluded(self) -> Counter[int | str]:
        """Workers that each constraint (by position) or taint (by name) excludes; see `Evaluation.excluded`."""
        self.complete()
        return self._excluded

    @property
    def incomparable(self) -> int:
        """The number of groups on which a constraint can't be evaluated."""
        self.complete()
        return self._incomparable

    @property
    def closest(self) -> list[Distance]:
        """The groups that are not free for any amounts but may become free, the closest to being free first."""
        self.complete()
        if self._closest is None:
            self._closest = sorted(_distance(name, found) for name, found in self.known.items() if found.obstacle)
        return self._closest

    def contents(self) -> tuple[object, ...]:
        """Return the content of all evaluations, for comparisons in tests."""
        self.complete()
        ending = {bucket: names for bucket, names in self.ending.items() if names}
        counts = +self._excluded, self._incomparable, +self._suitable.buckets
        return self.known, self.closest, ending, *counts

    # -- helpers ---------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Evaluate all groups that are not evaluated yet."""
        if self._ahead is not None:
            names, self._ahead = self._ahead.names(), None
            self.evaluate(names)

    def _evaluate_again(self, name: str) -> None:
        before, group = self.known.get(name), self.grouping.get(name)
        if before is not None:
            if before.rejected is not None and before.rejected is group and before.recheck_at is None:
                return  # only its occupants have changed
            self._remove(name, before)
        if group is not None:
            self._note(evaluate(group, self.shape, self._is_held(group), self._now, in_words=False), group)

    def _is_held(self, group: Group) -> bool:
        if group.is_slice or group.shape is not None:
            return bool(self._fleet.held_on(group.name))
        return self.shape.chips and any(self._fleet.holder_of(worker) is not None for worker in group.workers)

    def _note(self, found: Evaluation, group: Group) -> None:
        """Store an evaluation, and update the counts."""
        self.known[group.name] = found
        self.changes.note(group.name, self._changes_kept)
        if found.later:
            self._suitable.add(group.name, found)
            self._note_ending(group.name, found)
        for what, count in found.excluded:
            self._excluded[what] += count
        self._incomparable += found.is_incomparable
        if self._closest is not None and found.obstacle:
            insort(self._closest, _distance(group.name, found))
        if found.recheck_at is not None:
            heapq.heappush(self._rechecks, (found.recheck_at, group.name))

    def _note_ending(self, name: str, found: Evaluation) -> None:
        if self._ending is not None and found.eligible:
            group = self.grouping.get(name)
            assert group is not None
            if _is_ending(group.workers):
                self._ending[found.bucket].add(name)

    def _remove(self, name: str, found: Evaluation) -> None:
        if self._closest is not None and found.obstacle:
            del self._closest[bisect_left(self._closest, _distance(name, found))]
        self._suitable.remove(name, found)
        if self._ending is not None:
            self._ending[found.bucket].discard(name)
        for what, count in found.excluded:
            self._excluded[what] -= count
        self._incomparable -= found.is_incomparable
        self.in_words.pop(name, None)
        self.changes.note(name, self._changes_kept)
        del self.known[name]


def _distance(name: str, found: Evaluation) -> Distance:
    return found.hosts_missing, found.shortfall, name


def _is_ending(workers: Sequence[Worker]) -> bool:
    for worker in workers:  # noqa: SIM110 — faster than any() with a generator
        if worker.ending:
            return True
    return False


def cost_of_ranks(groups: int) -> int:
    """Return the approximate cost of ranking groups by preferences, in evaluations."""
    return groups // RANKS_PER_EVALUATION + 10
