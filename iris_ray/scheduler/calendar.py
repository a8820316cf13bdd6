"""When the hosts reserved for a job can be complete, and which jobs may run there until then.

An attempt is expected to run for as long again as it has run so far, until its job's ``max_runtime``, or for a notice
if the job with the reservation may evict it, whichever is shortest. A reservation whose hosts are expected to idle for
too long (`horizon_s`) is not made.

Until a reservation is complete, its hosts are lent to jobs that leave in time:

- by their ``max_runtime``;
- or within a notice: jobs of a lower band, those of BATCH to a job of BATCH, and jobs that yield. The job with the
  reservation evicts them, whatever their minimum runtime, once it can then run.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU, Worker, rounded
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evictions import Evictor, leaves_for, may_evict

HORIZON_S = 3600.0
"""The longest expected time until a reservation is complete, for a job that has not waited longer; seconds."""
SHARE_LENT = 0.5
"""The share of the expected time for which hosts are lent. Most attempts end before their ``max_runtime``."""
LEAST_LOAN_S = 120.0
"""The shortest expected time in seconds for which a host is lent to a job that would be evicted."""


def horizon_s(waited_s: float) -> float:
    """Return the longest expected time in seconds until a reservation is complete, by its job's time in the queue.

    So hosts are not reserved beside a service that is much older than the wait of the job.
    """
    return max(HORIZON_S, waited_s)


class Calendar:
    """Dates the ends of attempts during a plan.

    Args:
        evictor: the attempts that may be evicted, or are about to leave.
        now: seconds on the clock of the events.
    """

    def __init__(self, evictor: Evictor, now: float) -> None:
        self._evictor = evictor
        self._now = now
        self._jobs = evictor.running_jobs
        self._known: dict[tuple[AttemptId, PriorityBand, str, bool, str], float] = {}

    def free_at(self, job: Job, hosts: Iterable[Worker], needed: int | None = None) -> float:
        """Return when as many of these hosts as a job needs, or all, are expected to be free for its tasks; seconds."""
        of_each = sorted(self._host_free_at(job, host) for host in hosts)
        if needed is None:
            needed = len(of_each)
        if len(of_each) < needed:
            return math.inf
        return of_each[needed - 1] if needed else self._now

    def group_free_at(self, job: Job, name: str, available: Availability) -> float:
        """Return when enough hosts of a group are expected to be free for a job's tasks; seconds."""
        return self.free_at(job, available.hosts_soon(name), available.tasks(name))

    def empty_at(self, job: Job, hosts: Iterable[Worker]) -> float:
        """Return when these hosts are expected to be empty, if a job evicts what it may; seconds."""
        ends = (self._leaves_at(job, host, occupant) for host in hosts for occupant in host.occupants)
        return max(ends, default=self._now)

    def chips_empty_at(self, job: Job, hosts: Iterable[Worker], chips: float) -> float:
        """Return when slices with a number of chips are expected to be empty, or all if they have fewer; seconds."""
        of_slice = defaultdict[str, list[Worker]](list)
        for host in hosts:
            of_slice[host.slice_name or ""].append(host)
        empty_at = self._now
        for at, name in sorted((self.empty_at(job, there), name) for name, there in of_slice.items()):
            if chips > 0:
                empty_at = at
            chips -= sum(host.resources.get(TPU, 0.0) for host in of_slice[name])
        return empty_at

    def _host_free_at(self, job: Job, host: Worker) -> float:
        """Return when a host has room for one of a job's tasks; when it is empty, for a group of jobs; seconds."""
        need = job.requirement
        if not host.occupants or (need.has_room(host) and not job.members):
            return self._now
        ends = sorted((self._leaves_at(job, host, occupant), occupant) for occupant in host.occupants)
        if not (job.members or need.chips):
            held = dict(host.held)
            for at, occupant in ends:
                for resource, amount in host.occupants[occupant].items():
                    held[resource] = rounded(held.get(resource, 0.0) - amount)
                if need.fits_beside(host, held):
                    return max(at, self._now)
        return max(ends[-1][0], self._now)

    def may_lend(self, to: Job, job: Job, complete_at: float) -> bool:
        """Return whether a host that is reserved for a job until ``complete_at`` may run another job until then."""
        if to.spec.spare_for is not None or to.members or complete_at <= self._now:
            return False
        if self._ends_at(to) <= self._now + SHARE_LENT * (complete_at - self._now):
            return True
        if complete_at < self._now + LEAST_LOAN_S or not self._evictor.evicts or not may_evict(job):
            return False
        return leaves_for(to, job) and not to.spec.runs_once

    def _leaves_at(self, job: Job, host: Worker, occupant: tuple[str, AttemptId]) -> float:
        """Return when an occupant is expected to leave a host for a job; seconds."""
        if occupant in host.ending:  # confirmed within seconds; what is not in time, `may_become_free` leaves out
            return self._now
        lends_as = job.spec.job_id if job.promise is not None and job.promise.lent else ""
        key = occupant[1], job.spec.priority, job.spec.team, may_evict(job), lends_as
        if key not in self._known:
            self._known[key] = self._attempt_leaves_at(job, occupant[1])
        return self._known[key]

    def _attempt_leaves_at(self, job: Job, attempt: AttemptId) -> float:
        if (running := self._jobs.get(attempt.job_id)) is None:
            return self._now
        ran_s = max(0.0, self._now - running.gangs[attempt.gang].running_since)
        ends_at = min(self._ends_at(running), self._now + ran_s)
        evicted_at = self._evictor.leaves_at(attempt, job)  # may be late, after its minimum runtime or within budgets
        return ends_at if evicted_at is None else min(ends_at, evicted_at)

    def _ends_at(self, job: Job) -> float:
        """Return when a job's ``max_runtime`` is over if it runs from now on; seconds; infinite without one."""
        if job.spec.max_runtime is None:
            return math.inf
        return min(job.ends_at, self._now + job.spec.max_runtime)
