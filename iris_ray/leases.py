"""What attempts hold of the hosts until it is confirmed that no process of theirs is left."""

from collections import Counter
from collections.abc import Iterator, Mapping

from iris_ray.fleet import Fleet
from iris_ray.jobs import Job, Lease, LeaseKey
from iris_ray.workers import index_of


class Leases:
    """All leases, and how much each user has of all. What they say is put down in the fleet, too.

    Attributes:
        usage: what each user's gangs hold, by Ray's resource names.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.usage: dict[str, Counter[str]] = {}
        self._fleet = fleet
        self._of: dict[str, dict[LeaseKey, Lease]] = {}  # job id → (position of its gang, attempt) → what it holds

    def of(self, job_id: str) -> Mapping[LeaseKey, Lease]:
        """Those of a job, by the position of the gang and the attempt."""
        return self._of.get(job_id, {})

    def __iter__(self) -> Iterator[tuple[str, LeaseKey]]:
        return ((job_id, key) for job_id, leases in self._of.items() for key in leases)

    def add(self, job: Job, key: LeaseKey, lease: Lease) -> None:
        """An attempt holds this from now on."""
        self._of.setdefault(job.spec.job_id, {})[key] = lease
        usage = self.usage.setdefault(job.spec.user, Counter())
        for worker_id, task_id, demand in lease:
            self._fleet.occupy(worker_id, (task_id, key[1]), demand)
            usage.update(demand)

    def end(self, job: Job, key: LeaseKey) -> bool:
        """All that an attempt holds is free; whether it held anything."""
        leases = self._of.get(job.spec.job_id, {})
        lease = leases.pop(key, None)
        if lease is None:
            return False
        if not leases:
            del self._of[job.spec.job_id]
        for worker_id, task_id, demand in lease:
            self._fleet.vacate(worker_id, (task_id, key[1]))
            self._give_back(job.spec.user, demand)
        return True

    def let_go(self, job: Job, worker_id: str, task_id: str, attempt: int) -> None:
        """What a task held of a lost worker is gone with it."""
        leases, key = self._of[job.spec.job_id], (job.position_of(index_of(task_id)), attempt)
        self._give_back(job.spec.user, next(demand for place, _, demand in leases[key] if place == worker_id))
        leases[key] = tuple(held for held in leases[key] if held[0] != worker_id)

    def mark_ending(self, job: Job, key: LeaseKey) -> None:
        """The attempt is over: what it holds will be free in a moment."""
        for worker_id, task_id, _ in self.of(job.spec.job_id).get(key, ()):
            self._fleet.mark_ending(worker_id, (task_id, key[1]))

    def _give_back(self, user: str, demand: Mapping[str, float]) -> None:
        usage = self.usage.get(user, Counter())  # whose tasks ask for nothing has none
        usage.subtract(demand)
        if not any(amount > 1e-9 for amount in usage.values()):
            self.usage.pop(user, None)  # and with it what fractions have left behind

    def all_of(self) -> Mapping[str, Mapping[LeaseKey, Lease]]:
        """By job id."""
        return self._of
