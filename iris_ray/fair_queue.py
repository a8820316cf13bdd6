"""In which order pending jobs are looked at: priority band, then fair share between users, then age."""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from iris_ray.jobs import Job

Usage = Mapping[str, Mapping[str, float]]
"""What each user's gangs hold, by Ray's resource names."""


class FairQueue:
    """One pass over the pending jobs.

    A user's share is the largest part that the user holds of any resource of the cluster (dominant resource fairness,
    Ghodsi et al., NSDI 2011). What is handed out during the pass counts.

    Args:
        pending: the jobs, in any order.
        usage: what each user holds already.
        totals: what the cluster has of each resource.
        urgent: jobs that go before all others of their band, the oldest first.
    """

    def __init__(
        self, pending: Iterable[Job], usage: Usage, totals: Mapping[str, float], urgent: Callable[[Job], bool]
    ) -> None:
        self._pending = sorted(pending, key=lambda job: (job.spec.priority, job.number))
        self._usage = {user: dict(held) for user, held in usage.items()}
        self._totals = totals
        self._shares = {user: self._share(held) for user, held in usage.items()}
        self._urgent = urgent
        self._again = False

    def __iter__(self) -> Iterator[Job]:
        bands: defaultdict[int, list[Job]] = defaultdict(list)
        for job in self._pending:
            bands[job.spec.priority].append(job)
        for jobs in bands.values():
            urgent = [job for job in jobs if self._urgent(job)]
            for job in urgent:
                yield from self._until_done(job)
            by_user: defaultdict[str, deque[Job]] = defaultdict(deque)
            already = {job.number for job in urgent}
            for job in jobs:
                if job.number not in already:
                    by_user[job.spec.user].append(job)
            yield from self._fairly(by_user)

    def granted(self, job: Job, resources: Mapping[str, float]) -> None:
        """The job that came last got something; it comes again when it is its user's turn."""
        user = job.spec.user
        held = self._usage.setdefault(user, {})
        for resource, amount in resources.items():
            held[resource] = held.get(resource, 0.0) + amount
        self._shares[user] = self._share(held)
        self._again = True

    def _until_done(self, job: Job) -> Iterator[Job]:
        self._again = True
        while self._again:
            self._again = False
            yield job

    def _fairly(self, by_user: Mapping[str, deque[Job]]) -> Iterator[Job]:
        turns = [(self._shares.get(user, 0.0), jobs[0].number, user) for user, jobs in by_user.items()]
        heapq.heapify(turns)
        while turns:
            _, _, user = heapq.heappop(turns)
            jobs = by_user[user]
            self._again = False
            yield jobs[0]
            if not self._again:
                jobs.popleft()
            if jobs:
                heapq.heappush(turns, (self._shares.get(user, 0.0), jobs[0].number, user))

    def _share(self, held: Mapping[str, float]) -> float:
        totals = self._totals
        return max([amount / totals[r] for r, amount in held.items() if totals.get(r)], default=0.0)
