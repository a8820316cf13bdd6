"""Spreads a job's tasks over hosts, so that the loss of a host affects few of them."""

from collections import Counter

from iris_ray.model.jobs import Job
from iris_ray.scheduler.availability import Availability, buckets_for
from iris_ray.state.fleet import Fleet


class Spreading:
    """Chooses hosts for the independent tasks of a job during a plan.

    Each task goes to the first host with less than its share, among the free hosts that are as good as the best one.
    The share is the number of the job's tasks divided by the number of hosts, rounded down, but at least one. Once
    every such host has its share, the share grows by 1, then 2, 4 and so on. Tasks therefore have a host each as long
    as possible, a host gets its share at once, and the numbers of tasks on equal hosts differ by one at most.
    """

    def __init__(self, job: Job, fleet: Fleet) -> None:
        self._job = job
        self._workers = fleet.workers
        self._share = max(1, job.size // max(1, len(fleet.workers)))
        self._placed = Counter[str]()  # by this plan
        self._names: list[str] = []
        self._next = 0
        self._least = self._share

    def host(self, best: str, available: Availability) -> str:
        """Return the node id of the host for the next task, given the best free host."""
        if not self._names and self.room_in_share(best) > 0:
            return best  # the usual case, since hosts with their share are full
        if (name := self._first(available)) is None:
            (bucket,) = buckets_for(self._job, available)
            job_id = self._job.spec.job_id
            used = sum(job_id in worker.tasks_of for worker in self._workers.values())  # these may have their share
            self._names = available.best_alike(bucket, self._job.size + used)
            self._next, self._share = 0, self._least
            while all(self.room_in_share(name) <= 0 for name in self._names):
                self._share = self._least + max(1, 2 * (self._share - self._least))
            name = self._first(available)
        return name or best

    def begin_anew(self) -> None:
        """Consider all hosts again, because some may have become free."""
        self._names, self._next, self._share = [], 0, self._least

    def took(self, node_id: str, tasks: int = 1) -> None:
        """Record that a host gets more tasks."""
        self._placed[node_id] += tasks

    def room_in_share(self, node_id: str) -> int:
        """Return the number of tasks that a host lacks to its share."""
        return self._share - self._workers[node_id].tasks_of[self._job.spec.job_id] - self._placed[node_id]

    def _first(self, available: Availability) -> str | None:
        while self._next < len(self._names):
            name = self._names[self._next]
            if self.room_in_share(name) > 0 and available.is_free(name):
                return name
            self._next += 1
        return None
