"""Which groups suit a requirement, whether tasks use them now or not."""

from collections.abc import Mapping

from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker
from iris_ray.scheduler.evaluation import Evaluation
from iris_ray.scheduler.ranked_groups import Needs, RankedGroups, fits, room_of


class SuitableGroups:
    """Counts groups by what their workers have in all.

    Args:
        shape: what is asked of workers, without amounts.
        evaluations: of all groups, by name.

    Attributes:
        buckets: those of groups that have been free or in use.
    """

    def __init__(self, shape: Requirement, evaluations: Mapping[str, Evaluation]) -> None:
        self.buckets: set[int] = set()
        self._shape = shape
        self._evaluations = evaluations
        self._groups: dict[tuple[int, bool], RankedGroups] = {}  # (bucket, later) → groups; made when first read

    def count(self, bucket: int, needs: Needs, later: bool = False) -> int:
        """Return how many groups of a bucket would be free if no task used them.

        Args:
            bucket: the bucket.
            needs: what a task needs.
            later: whether to count groups, too, that something is wrong with which passes by itself.
        """
        groups = self._groups.get((bucket, later))
        if groups is None:
            groups = self._groups[bucket, later] = self._made(bucket, later)
        unequal = (name for name in groups.mixed if fits(groups.rooms[name], needs))
        return groups.count(needs) - sum(not self.suits(name, needs, later) for name in unequal)

    def suits(self, name: str, needs: Needs, later: bool = False) -> bool:
        """Return whether a group would be free if no task used it."""
        found = self._evaluations[name]
        members = _members(found, later)
        tasks = found.bucket or self._shape.replicas
        return len(members) >= tasks and sum(fits(worker.resources, needs) for worker in members) >= tasks

    def add(self, name: str, found: Evaluation) -> None:
        """Count a group that was evaluated."""
        if found.eligible:
            self.buckets.add(found.bucket)
        for (bucket, later), groups in self._groups.items():
            if bucket == found.bucket and _members(found, later):
                groups.add((name,), *self._size(found, later))

    def remove(self, name: str, found: Evaluation) -> None:
        """Count a group no more."""
        for (bucket, later), groups in self._groups.items():
            if bucket == found.bucket and _members(found, later):
                groups.remove((name,))

    def _made(self, bucket: int, later: bool) -> RankedGroups:
        groups = RankedGroups()
        found = [
            (name, one) for name, one in self._evaluations.items() if one.bucket == bucket and _members(one, later)
        ]
        groups.fill([((name,), *self._size(one, later)) for name, one in found])
        return groups

    def _size(self, found: Evaluation, later: bool) -> tuple[Mapping[str, float], bool]:
        tasks = found.bucket or self._shape.replicas
        return room_of([worker.resources for worker in _members(found, later)], tasks)


def _members(found: Evaluation, later: bool) -> tuple[Worker, ...]:
    return found.later if later else found.eligible
