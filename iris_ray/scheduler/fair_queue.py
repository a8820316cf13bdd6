"""Who goes first in the queue.

1. Gangs that have just lost their hosts and return (`Urgency.RETURNING`), by band, then by age.
2. The others by priority band: PRODUCTION, INTERACTIVE, BATCH. Within a band:
    a. Gangs of several groups that have waited longer than the backfill bound, by age (`Urgency.BY_AGE`).
    b. Gangs of one group with several hosts that have waited as long, by fair share (`Urgency.BY_SHARE`).
    c. All others, by fair share (`Urgency.NONE`).

Fair share: the next job is that of the user who holds the smallest share of the cluster. Age, the order of submission,
decides between users with equal shares and between jobs of one user.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum

from iris_ray.model.jobs import Job
from iris_ray.scheduler.deadlines import Deadlines

Usage = Mapping[str, Mapping[str, float]]
"""What each user's gangs hold, by Ray's resource names."""


class Urgency(IntEnum):
    """The classes of jobs within a band, the first to go first. RETURNING goes before all bands."""

    RETURNING = -1
    BY_AGE = 0
    BY_SHARE = 1
    NONE = 2


def urgency_of(job: Job, deadlines: Deadlines) -> Urgency:
    """Return the class that a job is in.

    Gangs of several hosts become urgent because the hosts that they need may never be free at once by themselves while
    other jobs use some of them.
    """
    if deadlines.is_returning(job):
        return Urgency.RETURNING
    coscheduling = job.spec.coscheduling
    if coscheduling is None or not deadlines.is_starving(job.gang):
        return Urgency.NONE
    if coscheduling.num_groups[0] > 1:
        return Urgency.BY_AGE
    return Urgency.BY_SHARE if job.spec.replicas > 1 else Urgency.NONE


class FairQueue:
    """One pass over the pending jobs, in the order in which they are placed.

    A user's share is the largest part that the user holds of any resource of the cluster (dominant resource fairness,
    Ghodsi et al., NSDI 2011). What the pass itself hands out counts.

    Args:
        pending: the jobs, in any order.
        usage: what each user holds already.
        totals: what the cluster has of each resource.
        deadlines: tells which jobs are urgent.
    """

    def __init__(self, pending: Iterable[Job], usage: Usage, totals: Mapping[str, float], deadlines: Deadlines) -> None:
        self._pending = sorted(pending, key=lambda job: (job.spec.priority, job.number))
        self._usage = {user: dict(held) for user, held in usage.items()}
        self._totals = totals
        self._shares = {user: self._share(held) for user, held in usage.items()}
        self._deadlines = deadlines
        self._again = False

    def __iter__(self) -> Iterator[Job]:
        classes: defaultdict[tuple[bool, int, Urgency], list[Job]] = defaultdict(list)
        for job in self._pending:
            urgency = urgency_of(job, self._deadlines)
            classes[urgency is not Urgency.RETURNING, job.spec.priority, urgency].append(job)
        for (_, _, urgency), jobs in sorted(classes.items()):
            if urgency <= Urgency.BY_AGE:
                for job in jobs:
                    yield from self._until_done(job)
            else:
                yield from self._by_share(jobs)

    def granted(self, job: Job, resources: Mapping[str, float]) -> None:
        """Record what the latest job was given. The job comes again when it is its user's turn."""
        user = job.spec.user
        held = self._usage.setdefault(user, {})
        for resource, amount in resources.items():
            held[resource] = held.get(resource, 0.0) + amount
        self._shares[user] = self._share(held)
        self._again = True

    def _until_done(self, job: Job) -> Iterator[Job]:
        """Yield a job again and again, until it is given nothing."""
        self._again = True
        while self._again:
            self._again = False
            yield job

    def _by_share(self, pending: Iterable[Job]) -> Iterator[Job]:
        """Yield jobs of one class: that of the user with the smallest share first, the oldest of each user first."""
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
