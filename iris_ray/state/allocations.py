"""What attempts hold of the hosts until it is confirmed that no process of theirs is left."""

from collections import Counter
from collections.abc import Iterator, Mapping

from iris_ray.model.ids import AttemptId
from iris_ray.model.jobs import Allocation, Job
from iris_ray.state.fleet import Fleet


class Allocations:
    """All allocations, and how much each user has of all. What they say is put down in the fleet, too.

    Attributes:
        usage: what each user's gangs hold, by Ray's resource names.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.usage: dict[str, Counter[str]] = {}
        self._fleet = fleet
        self._of: dict[str, dict[AttemptId, Allocation]] = {}  # by job id

    def of(self, job_id: str) -> Mapping[AttemptId, Allocation]:
        """Return what a job's attempts hold."""
        return self._of.get(job_id, {})

    def __iter__(self) -> Iterator[AttemptId]:
        return (attempt for allocations in self._of.values() for attempt in allocations)

    def of_owner(self, jobs: Mapping[str, Job], owner: str) -> list[AttemptId]:
        """Return the attempts of one owner's jobs."""
        return [attempt for attempt in self if jobs[attempt.job_id].spec.owner == owner]

    def add(self, job: Job, attempt: AttemptId, allocation: Allocation) -> None:
        """An attempt holds this from now on."""
        self._of.setdefault(job.spec.job_id, {})[attempt] = allocation
        usage = self.usage.setdefault(job.spec.user, Counter())
        for node_id, task_id, demand in allocation:
            self._fleet.occupy(node_id, (task_id, attempt), demand)
            usage.update(demand)

    def end(self, job: Job, attempt: AttemptId) -> bool:
        """All that an attempt holds is free; whether it held anything."""
        allocations = self._of.get(job.spec.job_id, {})
        allocation = allocations.pop(attempt, None)
        if allocation is None:
            return False
        if not allocations:
            del self._of[job.spec.job_id]
        for node_id, task_id, demand in allocation:
            self._fleet.vacate(node_id, (task_id, attempt))
            self._give_back(job.spec.user, demand)
        return True

    def let_go(self, job: Job, node_id: str, attempt: AttemptId) -> None:
        """What an attempt held of a lost worker is gone with it."""
        allocations = self._of[job.spec.job_id]
        self._give_back(job.spec.user, next(demand for place, _, demand in allocations[attempt] if place == node_id))
        allocations[attempt] = tuple(held for held in allocations[attempt] if held[0] != node_id)

    def mark_ending(self, attempt: AttemptId) -> None:
        """The attempt is over: what it holds will be free in a moment."""
        for node_id, task_id, _ in self.of(attempt.job_id).get(attempt, ()):
            self._fleet.mark_ending(node_id, (task_id, attempt))

    def _give_back(self, user: str, demand: Mapping[str, float]) -> None:
        usage = self.usage.get(user, Counter())  # whose tasks ask for nothing has none
        usage.subtract(demand)
        if not any(amount > 1e-9 for amount in usage.values()):
            self.usage.pop(user, None)  # and with it what fractions have left behind

    def all_of(self) -> Mapping[str, Mapping[AttemptId, Allocation]]:
        """By job id."""
        return self._of
