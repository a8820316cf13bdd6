"""In which order pending jobs are looked at: priority band, then fair share between users, then age.

A gang that has just lost its hosts, and runs again as soon as it gets others, comes before all of them."""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum

from iris_ray.model.jobs import Job

Usage = Mapping[str, Mapping[str, float]]
"""What each user's gangs hold, by Ray's resource names."""


class Urgency(IntEnum):
    """Who goes before others: those that return before all, the rest before others of the same band."""

    RETURNING = -1
    BY_AGE = 0
    BY_SHARE = 1
    NONE = 2


class FairQueue:
    """One pass over the pending jobs.

    A user's share is the largest part that the user holds of any resource of the cluster (dominant resource fairness,
    Ghodsi et al., NSDI 2011). What is handed out during the pass counts.

    Args:
        pending: the jobs, in any order.
        usage: what each user holds already.
        totals: what the cluster has of each resource.
        urgency: which jobs go before others of their band.
    """

    def __init__(
        self, pending: Iterable[Job], usage: Usage, totals: Mapping[str, float], urgency: Callable[[Job], Urgency]
    ) -> None:
        self._pending = sorted(pending, key=lambda job: (job.spec.priority, job.number))
        self._usage = {user: dict(held) for user, held in usage.items()}
        self._totals = totals
        self._shares = {user: self._share(held) for user, held in usage.items()}
        self._urgency = urgency
        self._again = False

    def __iter__(self) -> Iterator[Job]:
        turns: defaultdict[tuple[bool, int, Urgency], list[Job]] = defaultdict(list)
        for job in self._pending:
            urgency = self._urgency(job)
            turns[urgency is not Urgency.RETURNING, job.spec.priority, urgency].append(job)
        for (_, _, urgency), jobs in sorted(turns.items()):
            if urgency <= Urgency.BY_AGE:
                for job in jobs:
                    yield from self._until_done(job)
            else:
                yield from self._fairly(jobs)

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

    def _fairly(self, pending: Iterable[Job]) -> Iterator[Job]:
        by_user: defaultdict[str, deque[Job]] = defaultdict(deque)
        for job in pending:
            by_user[job.spec.user].append(job)
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
