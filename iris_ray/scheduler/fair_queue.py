"""Who goes first in the queue, its time limits, and whose turn it is for a search that is bounded.

1. By priority band: PRODUCTION, INTERACTIVE, BATCH. Within a band:
    a. Gangs that have just lost their hosts and return, by age (`Urgency.RETURNING`).
    b. All others, by fair share (`Urgency.NONE`).
2. Spares, room to grow and jobs that yield, after every job of every band, in the same order.

Fair share: the next job is that of the user with the smallest share of the cluster. A share is what the user holds, and
has held in the past hours. Age, the order of submission, decides between users with equal shares and between jobs of
one user. It never overrides a share.
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from iris_ray.model.job_spec import SparePurpose
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import TaskUnschedulableEvent
from iris_ray.state.user_limits import PastUsage

Usage = Mapping[str, Mapping[str, float]]
"""What each user's gangs hold, by Ray's resource names."""

PRODUCTION_BOUND_S = 10.0
"""For so many seconds other jobs may pass a waiting gang of PRODUCTION: else small jobs of lower bands keep it out."""
HOPES_FOR_MORE_S = 30.0
"""For so many seconds in the queue, a gang that can use more groups waits for groups that are about to be free."""
AWAITS_ITS_OWN_S = 10.0
"""For so many seconds after an attempt, its gang waits for slices that it had, while their last processes end."""


class Urgency(IntEnum):
    """The classes of jobs within a band, in the order in which they go."""

    RETURNING = 0
    NONE = 1


def comes_last(job: Job) -> bool:
    """Return whether a job's owner can do without its hosts: a spare, room to grow, or a job that yields."""
    spare_for = job.spec.spare_for
    return job.yields or (spare_for is not None and spare_for.purpose is not SparePurpose.REPLACEMENT)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Tells which time limits have passed.

    Attributes:
        now: seconds on the clock of the events.
        backfill_bound_s: for how many seconds jobs that came later may pass a waiting gang; see `bound_s`.
    """

    now: float
    backfill_bound_s: float

    def seconds_paused(self, gang: Gang) -> float:
        """Return for how many more seconds the gang is not tried after a failed launch; at most 0 if it is tried."""
        return gang.not_before - self.now

    def bound_s(self, band: PriorityBand) -> float:
        """Return for how many seconds others may pass a waiting gang of a band: of PRODUCTION, but a moment."""
        return min(self.backfill_bound_s, PRODUCTION_BOUND_S if band is PriorityBand.PRODUCTION else math.inf)

    def is_starving(self, job: Job, gang: Gang) -> bool:
        """Return whether a gang of the job has waited longer than the bound of its band."""
        return self.now - gang.waiting_since > self.bound_s(job.spec.priority)

    def hopes_for_more(self, gang: Gang) -> bool:
        """Return whether the gang has come into the queue, or its pause has ended, only a moment ago."""
        return self.now <= max(gang.waiting_since, gang.not_before) + HOPES_FOR_MORE_S

    def awaits_its_own(self, gang: Gang) -> bool:
        """Return whether the gang's last attempt has ended, or its pause, only a moment ago."""
        return self.now <= max(gang.waiting_since, gang.not_before) + AWAITS_ITS_OWN_S

    def is_returning(self, job: Job) -> bool:
        """Return whether a waiting gang of the job ran a moment ago. It comes first: a lost host costs no turn."""
        if job.spec.coscheduling is None or job.yields:
            return False
        return any(self.now < job.gangs[position].returning_until for position in job.pending)

    def in_turn(self, job: Job) -> Iterator[int]:
        """Return the positions of the job's gangs to place in a plan, in turn.

        If some gangs return, they come first. The others wait for the next plan: the turn is not theirs.
        """
        if len(job.gangs) == 1 or not self.is_returning(job):
            return iter(job.pending)
        returning = [i for i in job.pending if job.gangs[i].not_before <= self.now < job.gangs[i].returning_until]
        return iter(returning or list(job.pending))

    def timed_out(self, job: Job) -> TaskUnschedulableEvent | None:
        """Return the event that ends a job of which nothing ran within its ``scheduling_timeout``, or None."""
        timeout = job.spec.scheduling_timeout
        if timeout is None or job.started or self.now - job.submitted_at <= timeout:
            return None
        why = f"it did not get to run within its scheduling_timeout of {timeout:g} s"
        first = job.gangs[next(iter(job.pending))].tasks[0]
        return TaskUnschedulableEvent(job.spec.job_id, first.index, why)


class FairQueue:
    """One pass over the pending jobs, in the order in which they are placed.

    A user's share is the largest part that the user holds of any resource of the cluster (dominant resource fairness,
    Ghodsi et al., NSDI 2011). An hour of holding a resource in the past counts as much as holding it now, and less and
    less as time goes by; see `PastUsage`. The resources that the pass itself hands out count.

    Args:
        pending: the jobs, in any order.
        usage: what each user holds already.
        past: what each user has held; None: past use does not count.
        totals: what the cluster has of each resource.
        deadlines: tells which jobs are urgent.

    Attributes:
        is_alone: whether no other user's jobs wait in the class of the latest job, so that it comes again while it gets
            what it asks for.
    """

    def __init__(
        self,
        pending: Iterable[Job],
        usage: Usage,
        past: PastUsage | None,
        totals: Mapping[str, float],
        deadlines: Deadlines,
    ) -> None:
        self._pending = sorted(pending, key=lambda job: (job.spec.priority, job.number))
        self._totals = totals
        self._deadlines = deadlines
        self._counted: dict[str, dict[str, float]] = {}  # user → what counts of each resource
        self._shares: dict[str, float] = {}
        for user in {job.spec.user for job in self._pending}:
            self._counted[user] = {} if past is None else past.hours(user, deadlines.now)
            self._count(user, usage.get(user, {}))
        self._again = False
        self.is_alone = False

    def __iter__(self) -> Iterator[Job]:
        classes: defaultdict[tuple[bool, int, Urgency], list[Job]] = defaultdict(list)
        for job in self._pending:
            urgency = Urgency.RETURNING if self._deadlines.is_returning(job) else Urgency.NONE
            classes[comes_last(job), job.spec.priority, urgency].append(job)
        for (_, _, urgency), jobs in sorted(classes.items()):
            if urgency is Urgency.RETURNING:
                self.is_alone = False
                for job in jobs:
                    self._again = True
                    while self._again:  # several gangs of it may return
                        self._again = False
                        yield job
            else:
                yield from self._by_share(jobs)

    def granted(self, job: Job, resources: Mapping[str, float]) -> None:
        """Count what the latest job was given. The job comes again at its user's next turn."""
        self._count(job.spec.user, resources)
        self._again = True

    def _by_share(self, pending: Iterable[Job]) -> Iterator[Job]:
        """Yield jobs of one class: that of the user with the smallest share first, the oldest of each user first."""
        by_user: defaultdict[str, deque[Job]] = defaultdict(deque)
        for job in pending:
            by_user[job.spec.user].append(job)
        turns = [(self._shares[user], jobs[0].number, user) for user, jobs in by_user.items()]
        heapq.heapify(turns)
        while turns:
            _, _, user = turns[0]
            jobs = by_user[user]
            self._again = False
            self.is_alone = len(turns) == 1
            yield jobs[0]
            if not self._again:
                jobs.popleft()
            if jobs:
                heapq.heapreplace(turns, (self._shares[user], jobs[0].number, user))
            else:
                heapq.heappop(turns)

    def _count(self, user: str, resources: Mapping[str, float]) -> None:
        counted, totals = self._counted[user], self._totals
        for resource, amount in resources.items():
            counted[resource] = counted.get(resource, 0.0) + amount
        self._shares[user] = max([amount / totals[r] for r, amount in counted.items() if totals.get(r)], default=0.0)


class SearchFairness:
    """Gives every kind of jobs its search, though one plan makes a bounded number of searches.

    Plans pass over a kind of jobs for which a search has found nothing, until one of them has had time for all other
    kinds. So the first kinds in the queue do not use up the searches of every plan.
    """

    def __init__(self) -> None:
        self._searched: set[Hashable] = set()

    def passes_over(self, kind: Hashable) -> bool:
        """Return whether a search for a kind has found nothing, and other kinds have yet to get theirs."""
        return kind in self._searched

    def end_plan(self, in_vain: Collection[Hashable], had_time: bool) -> None:
        """Note for which kinds a plan has searched in vain, and whether it had time for all kinds that were due."""
        if had_time:
            self._searched.clear()
        else:
            self._searched.update(in_vain)
