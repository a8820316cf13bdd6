"""Which resources of hosts each attempt holds, until it is confirmed that none of its processes is left."""

from collections import Counter
from collections.abc import Iterator, Mapping

from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import PriorityBand
from iris_ray.model.jobs import Allocation, Job
from iris_ray.state.fleet import Fleet
from iris_ray.state.past_usage import PastUsage
from iris_ray.state.user_limits import UserLimits


class Allocations:
    """All allocations, and each user's total. The fleet is kept in step with them.

    Attributes:
        usage: amounts that each user's gangs hold, by Ray's resource names.
        past: what they have held in the past hours.
        by_band: the attempts of each band, in the order in which they got hosts.
    """

    def __init__(self, fleet: Fleet, limits: UserLimits) -> None:
        self.usage: dict[str, Counter[str]] = {}
        self.past = PastUsage(self.usage)
        self._fleet = fleet
        self.by_band: dict[PriorityBand, dict[AttemptId, None]] = {band: {} for band in PriorityBand}
        self._limits = limits
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
        """Record what an attempt holds from now on."""
        self._of.setdefault(job.spec.job_id, {})[attempt] = allocation
        self.past.settle(job.spec.user)
        self.by_band[job.spec.priority][attempt] = None
        usage = self.usage.setdefault(job.spec.user, Counter())
        for node_id, task_id, demand in allocation:
            self._fleet.occupy(node_id, (task_id, attempt), demand)
            usage.update(demand)
        self._limits.took(job.spec, (demand for _, _, demand in allocation))

    def end(self, job: Job, attempt: AttemptId) -> bool:
        """Free all that an attempt holds. Return whether it held anything."""
        allocations = self._of.get(job.spec.job_id, {})
        allocation = allocations.pop(attempt, None)
        if allocation is None:
            return False
        del self.by_band[job.spec.priority][attempt]
        if not allocations:
            del self._of[job.spec.job_id]
        for node_id, task_id, demand in allocation:
            self._fleet.vacate(node_id, (task_id, attempt))
            self._give_back(job.spec.user, demand)
        self._limits.gave_back(job.spec, (demand for _, _, demand in allocation), holds_more=bool(allocations))
        return True

    def let_go(self, job: Job, node_id: str, attempt: AttemptId) -> None:
        """Remove what an attempt held of a lost worker."""
        allocations = self._of[job.spec.job_id]
        lost = next(demand for place, _, demand in allocations[attempt] if place == node_id)
        self._give_back(job.spec.user, lost)
        self._limits.gave_back(job.spec, [lost], holds_more=True)  # until the attempt's end is confirmed
        allocations[attempt] = tuple(held for held in allocations[attempt] if held[0] != node_id)

    def mark_ending(self, attempt: AttemptId) -> None:
        """Mark what an attempt holds as free soon: the attempt is over, its end not yet confirmed."""
        for node_id, task_id, _ in self.of(attempt.job_id).get(attempt, ()):
            self._fleet.mark_ending(node_id, (task_id, attempt))

    def _give_back(self, user: str, demand: Mapping[str, float]) -> None:
        self.past.settle(user)
        usage = self.usage.get(user, Counter())  # none if the user's tasks ask for nothing
        usage.subtract(demand)
        if not any(amount > 1e-9 for amount in usage.values()):
            self.usage.pop(user, None)  # drops rounding errors of fractions, too

    def all_of(self) -> Mapping[str, Mapping[AttemptId, Allocation]]:
        """Return what attempts hold, by job id."""
        return self._of
