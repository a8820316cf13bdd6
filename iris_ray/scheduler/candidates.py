"""What the scheduler remembers between plans: how every group evaluates for each shape of requirements.

A plan changes none of it, and `CandidateCache.check` compares it with fresh evaluations. So it decides what a plan
costs, and not what a plan says.

Requirements of one shape differ in amounts only, and share one evaluation of the fleet (`Candidates`). When a plan
first reads a shape, the groups that have changed since the last plan are evaluated again, and no others.
`EvaluationLimits` says which shapes a plan reads, so that jobs with odd requirements hold up nobody else.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker
from iris_ray.scheduler.evaluation import Evaluation, Rank, evaluate
from iris_ray.scheduler.ranked_groups import RankedGroups, Room, SuitableGroups, room_of
from iris_ray.state.fleet import Fleet
from iris_ray.state.groups import Group, Grouping

EVALUATIONS_KEPT = 2_000_000
"""How many evaluations of groups are kept, of the shapes that were read last. It bounds the Controller's memory."""
EVALUATIONS_PER_GANG = 100
"""To evaluate so many groups is about the work of placing a gang. A plan that may place so many gangs ends once it has
made so many evaluations for shapes that no earlier job had, and the next plan goes on."""
USERS_PART = 4
"""One user's waiting jobs get the n-th part of the evaluations that are kept. Else one user with many odd requirements
would keep the jobs of all others from being looked at."""
EVALUATIONS_IN_TURN = 20_000
"""If not all evaluations can be kept, a plan makes about so many for shapes that take turns, and at least one shape's.
So the turns cost about a plan of 200 gangs."""

Distance = tuple[int, float, str]
"""Sorts groups that are not free, the closest to it first: hosts missing, what they lack, name."""

Amounts = tuple[tuple[str, float], ...]
"""What one task needs of its worker; see `Requirement.resources`."""


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
        self._holders = holders
        self._rechecks: list[tuple[float, str]] = []  # a heap: when a group is to be evaluated again, and its name

    def evaluate_all(self, now: float) -> None:
        """Evaluate every group for the first time."""
        free: defaultdict[int, list[tuple[Rank, Room, bool]]] = defaultdict(list)
        for group in self.grouping.groups():
            found = evaluate(group, self.shape, self._is_held(group), now)
            self._note(found, group)
            if found.rank is not None:
                free[found.bucket].append((found.rank, *self._room(found, group)))
            elif found.obstacle:
                self.closest.append((found.hosts_missing, found.shortfall, group.name))
        self.closest.sort()
        for bucket, groups in free.items():
            self.free[bucket] = RankedGroups()
            self.free[bucket].fill(groups)

    def update(self, changed: Iterable[Worker], now: float) -> None:
        """Evaluate the groups of changed workers again, and those that time has changed."""
        names = dict.fromkeys(map(self.grouping.name_of, changed))
        while self._rechecks and self._rechecks[0][0] <= now:
            names[heapq.heappop(self._rechecks)[1]] = None
        for name in names:
            if name is not None:
                self._evaluate_again(name, now)

    def tasks(self, found: Evaluation) -> int:
        """Return how many hosts a gang takes of a group."""
        return found.bucket or self.shape.replicas

    def contents(self) -> tuple[object, ...]:
        """Return everything that two equal candidates have in common, for comparisons in tests."""
        free = {bucket: groups.contents() for bucket, groups in self.free.items() if len(groups)}
        ending = {bucket: names for bucket, names in self.ending.items() if names}
        return self.evaluations, free, self.closest, ending, +self.excluded, +self.suitable.buckets

    def _evaluate_again(self, name: str, now: float) -> None:
        before, group = self.evaluations.get(name), self.grouping.get(name)
        if before is not None:
            if before.rejected is not None and before.rejected is group and before.recheck_at is None:
                return  # only what tasks use of it has changed
            self._remove(name, before)
        if group is not None:
            found = evaluate(group, self.shape, self._is_held(group), now)
            self._note(found, group)
            if found.rank is not None:
                free = self.free.setdefault(found.bucket, RankedGroups())
                free.add(found.rank, *self._room(found, group))
            elif found.obstacle:
                insort(self.closest, (found.hosts_missing, found.shortfall, name))

    def _is_held(self, group: Group) -> bool:
        if group.is_slice:
            return group.name in self._holders
        if not self.shape.chips:
            return False
        return any(worker.slice_name in self._holders for worker in group.workers)

    def _room(self, found: Evaluation, group: Group) -> tuple[Room, bool]:
        if found.usable is None and len(group.workers) == self.tasks(found):
            return group.room[0], False
        return room_of([worker.free for worker in found.usable or group.workers], self.tasks(found))

    def _note(self, found: Evaluation, group: Group) -> None:
        """Remember an evaluation, and count what it says."""
        self.evaluations[group.name] = found
        if found.later:
            self.suitable.add(group.name, found)
            if found.eligible and _is_ending(group.workers):
                self.ending[found.bucket].add(group.name)
        if found.excluded:
            for what, count in found.excluded:
                self.excluded[what] += count
        if found.recheck_at is not None:
            heapq.heappush(self._rechecks, (found.recheck_at, group.name))

    def _remove(self, name: str, found: Evaluation) -> None:
        if found.rank is not None:
            self.free[found.bucket].remove(found.rank)
        elif found.obstacle:
            del self.closest[bisect_left(self.closest, (found.hosts_missing, found.shortfall, name))]
        self.suitable.remove(name, found)
        self.ending[found.bucket].discard(name)
        for what, count in found.excluded:
            self.excluded[what] -= count
        self.in_words.pop(name, None)
        del self.evaluations[name]


class CandidateCache:
    """The candidates of each shape of requirements, for one fleet at a time.

    Attributes:
        evaluated: how many evaluations of groups were made for new shapes so far.
    """

    def __init__(self) -> None:
        self.evaluated = 0
        self._fleet: Fleet | None = None
        self._candidates: OrderedDict[Requirement, Candidates] = OrderedDict()

    def candidates(self, fleet: Fleet, shape: Requirement, now: float) -> Candidates:
        """Return the candidates of a shape, up to date with the fleet."""
        if fleet is not self._fleet:
            self._fleet = fleet
            self._candidates.clear()
        found = self._candidates.get(shape)
        if found is not None and not fleet.keeps(shape.group_by, found.grouping):
            found = None
        changed = None if found is None else fleet.changes_since(found.fleet_version)
        if found is None or changed is None:
            found = self._candidates[shape] = _evaluated(fleet, shape, now)
            self.evaluated += len(found.evaluations)
        else:
            self._candidates.move_to_end(shape)
            found.update(changed, now)
        found.fleet_version = fleet.version
        return found

    def trim(self) -> None:
        """Drop the candidates whose groups are not kept up to date.

        Then drop those that were not read for longest, beyond `EVALUATIONS_KEPT`.
        """
        fleet = self._fleet
        for shape, found in list(self._candidates.items()):
            if fleet is None or not fleet.keeps(shape.group_by, found.grouping):
                del self._candidates[shape]
        kept = sum(len(candidates.evaluations) for candidates in self._candidates.values())
        while kept > EVALUATIONS_KEPT and len(self._candidates) > 1:
            _, dropped = self._candidates.popitem(last=False)
            kept -= len(dropped.evaluations)

    def check(self, now: float) -> None:
        """Raise AssertionError if any candidates differ from freshly evaluated ones. For tests."""
        for shape in list(self._candidates):
            assert self._fleet is not None
            have = self.candidates(self._fleet, shape, now)
            want = _evaluated(self._fleet, shape, now)
            assert have.contents() == want.contents(), f"candidates for {shape} are out of date"


class EvaluationLimits:
    """Which jobs a plan looks at: those of the first shapes in the queue whose evaluations fit into the cache.

    If there are more shapes, each plan looks at a few of the others, in turn. The turn goes from user to user. So a
    job is looked at within some plans, how many users ever wait, and whatever they ask for.
    """

    def __init__(self) -> None:
        self._refused: dict[str, dict[Requirement, None]] = {}  # by user; the first is the next to have a turn
        self._due: set[Requirement] = set()  # whose turn it is

    def begin_plan(self, fleet: Fleet) -> None:
        """Start to count the evaluations of a plan."""
        self._fleet = fleet
        self._shapes: set[Requirement] = set()
        self._refused_now: set[Requirement] = set()
        self._by_user: Counter[str] = Counter()
        self._read = sum(map(self._groups, self._due))

    def admit(self, job: Job) -> bool:
        """Return whether the plan looks at a job, and count the evaluations of its shape if the shape is new."""
        shape, user = job.requirement.shape, job.spec.user
        if shape in self._shapes:
            return True
        if shape not in self._due:
            groups, of_user = self._groups(shape), self._by_user[user]
            fits = not self._read or self._read + groups <= EVALUATIONS_KEPT
            if not fits or (of_user and of_user + groups > EVALUATIONS_KEPT // USERS_PART):
                self._refused.setdefault(user, {})[shape] = None
                self._refused_now.add(shape)
                return False
            self._read += groups
            self._by_user[user] += groups
        self._shapes.add(shape)
        return True

    def end_plan(self, complete: bool) -> None:
        """Choose whose turn it is next, once a plan has gone through the whole queue."""
        if not complete:
            return
        still = {user: {s: None for s in shapes if s in self._refused_now} for user, shapes in self._refused.items()}
        self._refused = {user: shapes for user, shapes in still.items() if shapes}
        self._due, left = set(), EVALUATIONS_IN_TURN
        while self._refused and left > 0:
            user, shapes = next(iter(self._refused.items()))
            shape = next(iter(shapes))
            self._due.add(shape)
            left -= self._groups(shape)
            del self._refused[user], shapes[shape]
            if shapes:
                self._refused[user] = shapes

    def _groups(self, shape: Requirement) -> int:
        return len(self._fleet.grouping(shape.group_by))


def _evaluated(fleet: Fleet, shape: Requirement, now: float) -> Candidates:
    found = Candidates(shape, fleet.grouping(shape.group_by), fleet.holders)
    found.evaluate_all(now)
    return found


def _is_ending(workers: Sequence[Worker]) -> bool:
    for worker in workers:  # noqa: SIM110 — faster than any() with a generator
        if worker.ending:
            return True
    return False
