"""What attempts hold of the hosts until it is confirmed that no process of theirs is left."""

from collections import Counter
from collections.abc import Iterator, Mapping

from iris_ray.model.jobs import Allocation, AllocationKey, Job
from iris_ray.model.workers import index_of
from iris_ray.state.fleet import Fleet


class Allocations:
    """All allocations, and how much each user has of all. What they say is put down in the fleet, too.

    Attributes:
        usage: what each user's gangs hold, by Ray's resource names.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.usage: dict[str, Counter[str]] = {}
        self._fleet = fleet
        self._of: dict[
            str, dict[AllocationKey, Allocation]
        ] = {}  # job id → (position of its gang, attempt) → what it holds

    def of(self, job_id: str) -> Mapping[AllocationKey, Allocation]:
        """Those of a job, by the position of the gang and the attempt."""
        return self._of.get(job_id, {})

    def __iter__(self) -> Iterator[tuple[str, AllocationKey]]:
        return ((job_id, key) for job_id, allocations in self._of.items() for key in allocations)

    def add(self, job: Job, key: AllocationKey, allocation: Allocation) -> None:
        """An attempt holds this from now on."""
        self._of.setdefault(job.spec.job_id, {})[key] = allocation
        usage = self.usage.setdefault(job.spec.user, Counter())
        for node_id, task_id, demand in allocation:
            self._fleet.occupy(node_id, (task_id, key[1]), demand)
            usage.update(demand)

    def end(self, job: Job, key: AllocationKey) -> bool:
        """All that an attempt holds is free; whether it held anything."""
        allocations = self._of.get(job.spec.job_id, {})
        allocation = allocations.pop(key, None)
        if allocation is None:
            return False
        if not allocations:
            del self._of[job.spec.job_id]
        for node_id, task_id, demand in allocation:
            self._fleet.vacate(node_id, (task_id, key[1]))
            self._give_back(job.spec.user, demand)
        return True

    def let_go(self, job: Job, node_id: str, task_id: str, attempt: int) -> None:
        """What a task held of a lost worker is gone with it."""
        allocations, key = self._of[job.spec.job_id], (job.position_of(index_of(task_id)), attempt)
        self._give_back(job.spec.user, next(demand for place, _, demand in allocations[key] if place == node_id))
        allocations[key] = tuple(held for held in allocations[key] if held[0] != node_id)

    def mark_ending(self, job: Job, key: AllocationKey) -> None:
        """The attempt is over: what it holds will be free in a moment."""
        for node_id, task_id, _ in self.of(job.spec.job_id).get(key, ()):
            self._fleet.mark_ending(node_id, (task_id, key[1]))

    def _give_back(self, user: str, demand: Mapping[str, float]) -> None:
        usage = self.usage.get(user, Counter())  # whose tasks ask for nothing has none
        usage.subtract(demand)
        if not any(amount > 1e-9 for amount in usage.values()):
            self.usage.pop(user, None)  # and with it what fractions have left behind

    def all_of(self) -> Mapping[str, Mapping[AllocationKey, Allocation]]:
        """By job id."""
        return self._of
