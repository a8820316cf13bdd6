"""The evaluations of all groups for one requirement, sorted and counted. All jobs with that requirement share them."""

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker
from iris_ray.scheduler.evaluation import Evaluation, Rank, Status, evaluate
from iris_ray.state.groups import Group, Grouping


class Candidates:
    """All groups as one requirement sees them.

    A bucket holds the groups of which a gang takes the same number of hosts; see `Evaluation.bucket`.

    Attributes:
        evaluations: by group name.
        free: bucket → ranks of its free groups, best first.
        suitable: bucket → how many groups are free or in use.
        free_soon: bucket → how many groups are about to be free.
        temporarily_unsuitable: bucket → how many groups will suit again without a change of their hosts.
        closest: (hosts missing, shortfall, name) of the groups that are not free, the closest to it first.
        excluded: how many workers each constraint (by position) or taint (by name) excludes.
        fleet_version: the version of the fleet that the evaluations are up to date with.
    """

    def __init__(self, requirement: Requirement, grouping: Grouping, holders: Mapping[str, str]) -> None:
        self.requirement = requirement
        self.grouping = grouping
        self.fleet_version = 0
        self.evaluations: dict[str, Evaluation] = {}
        self.free: defaultdict[int, list[Rank]] = defaultdict(list)
        self.suitable: Counter[int] = Counter()
        self.free_soon: Counter[int] = Counter()
        self.temporarily_unsuitable: Counter[int] = Counter()
        self.closest: list[tuple[int, float, str]] = []
        self.excluded: Counter[int | str] = Counter()
        self._holders = holders
        self._rechecks: list[tuple[float, str]] = []  # a heap: when a group is to be evaluated again, and its name

    def evaluate_all(self, now: float) -> None:
        """Evaluate every group for the first time."""
        need = self.requirement
        for group in self.grouping.groups():
            found = self.evaluations[group.name] = evaluate(group, need, self._is_held(group), now)
            self._add(group.name, found, list.append)
        self.closest.sort()
        for ranks in self.free.values():
            ranks.sort()

    def update(self, changed: Iterable[Worker], now: float) -> None:
        """Evaluate the groups of changed workers again, and those that the passing of time has changed."""
        names = dict.fromkeys(map(self.grouping.name_of, changed))
        while self._rechecks and self._rechecks[0][0] <= now:
            names[heapq.heappop(self._rechecks)[1]] = None
        for name in names:
            if name is not None:
                self._evaluate_again(name, now)

    def contents(self) -> tuple[object, ...]:
        """Return everything that two equal candidates have in common, for comparisons in tests."""
        free = {bucket: ranks for bucket, ranks in self.free.items() if ranks}
        counters = self.suitable, self.free_soon, self.temporarily_unsuitable
        return self.evaluations, free, [+counter for counter in counters], self.closest, +self.excluded

    def _evaluate_again(self, name: str, now: float) -> None:
        before = self.evaluations.pop(name, None)
        if before is not None:
            self._remove(name, before)
        group = self.grouping.get(name)
        if group is not None:
            found = self.evaluations[name] = evaluate(group, self.requirement, self._is_held(group), now)
            self._add(name, found, insort)

    def _is_held(self, group: Group) -> bool:
        if group.is_slice:
            return group.name in self._holders
        if not self.requirement.chips:
            return False
        return any(worker.slice_name in self._holders for worker in group.workers)

    def _add(self, name: str, found: Evaluation, add: Callable[[list[Any], Any], None]) -> None:
        if found.rank is not None:
            add(self.free[found.bucket], found.rank)
        elif found.obstacle:
            add(self.closest, (found.hosts_missing, found.shortfall, name))
        if found.status is not Status.UNSUITABLE:
            self.suitable[found.bucket] += 1
        if found.free_soon:
            self.free_soon[found.bucket] += 1
        if found.temporarily_unsuitable:
            self.temporarily_unsuitable[found.bucket] += 1
        for what, count in found.excluded:
            self.excluded[what] += count
        if found.recheck_at is not None:
            heapq.heappush(self._rechecks, (found.recheck_at, name))

    def _remove(self, name: str, found: Evaluation) -> None:
        if found.rank is not None:
            ranks = self.free[found.bucket]
            del ranks[bisect_left(ranks, found.rank)]
        elif found.obstacle:
            del self.closest[bisect_left(self.closest, (found.hosts_missing, found.shortfall, name))]
        if found.status is not Status.UNSUITABLE:
            self.suitable[found.bucket] -= 1
        self.free_soon[found.bucket] -= found.free_soon
        self.temporarily_unsuitable[found.bucket] -= found.temporarily_unsuitable
        for what, count in found.excluded:
            self.excluded[what] -= count
