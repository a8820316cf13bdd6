"""When the hosts reserved for a job can be complete, and which jobs may run there until then.

An attempt leaves a host when its job's ``max_runtime`` is over, or within a notice if it may be evicted. It is expected
to run for as long again as it has run so far, if nothing ends it earlier. A reservation that would not be
complete within `HORIZON_S` is not made, since its hosts would idle for nobody.

Until a reservation is complete, its hosts are lent to jobs that surely leave in time:

- by their ``max_runtime``;
- or within a notice: jobs of a lower band, those of BATCH to a job of BATCH, and jobs that yield. The job with the
  reservation evicts them, whatever their minimum runtime, once it can then run.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import UNCONFIRMED_S, Worker, rounded
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evictions import Evictor, leaves_for, may_evict
from iris_ray.state.runtime_limits import ends_at

HORIZON_S = 3600.0
"""The longest expected time in seconds until a reservation is complete."""
LEAST_LOAN_S = 120.0
"""The shortest expected time in seconds for which a host is lent to a job that would be evicted."""


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
        self._known: dict[tuple[AttemptId, PriorityBand, str, bool, str], Dates] = {}

    def free_at(self, job: Job, hosts: Iterable[Worker], needed: int | None = None) -> "Dates":
        """Return when as many of these hosts as a job needs, or all, are free for its tasks."""
        of_each = [self._host_free_at(job, host) for host in hosts]
        if needed is None:
            needed = len(of_each)
        if len(of_each) < needed:
            return Dates(math.inf, math.inf)
        return Dates(*(sorted(dates)[needed - 1] if needed else self._now for dates in zip(*of_each, strict=True)))

    def group_free_at(self, job: Job, name: str, available: Availability) -> "Dates":
        """Return when enough hosts of a group are free for a job's tasks."""
        found = available.candidates.evaluations[name]
        hosts = (host for host in found.eligible or found.later if not available.avoids(host))
        return self.free_at(job, hosts, available.tasks(name))

    def _host_free_at(self, job: Job, host: Worker) -> "Dates":
        """Return when a host has room for one of a job's tasks; when it is empty, for a group of jobs."""
        need = job.requirement
        if not host.occupants or (need.has_room(host) and not job.members):
            return Dates(self._now, self._now)
        ends = {occupant: self._leaves_at(job, host, occupant) for occupant in host.occupants}
        if job.members or need.chips:
            return latest(ends.values(), self._now)
        held = dict(host.held)
        gone: list[Dates] = []
        for occupant in sorted(ends, key=lambda one: ends[one]):
            gone.append(ends[occupant])
            for resource, amount in host.occupants[occupant].items():
                held[resource] = rounded(held.get(resource, 0.0) - amount)
            if need.fits_beside(host, held):
                break
        return latest(gone, self._now)

    def may_lend(self, to: Job, job: Job, complete_by: float) -> bool:
        """Return whether a host that is reserved for a job until ``complete_by`` may run another job until then."""
        if to.spec.spare_for is not None or to.members or complete_by <= self._now:
            return False
        if self._ends_at(to) <= complete_by:
            return True
        if complete_by < self._now + LEAST_LOAN_S or not may_evict(job):
            return False
        return leaves_for(to, job) and not to.spec.runs_once

    def _leaves_at(self, job: Job, host: Worker, occupant: tuple[str, AttemptId]) -> "Dates":
        """Return when an occupant leaves a host for a job."""
        if (since := host.ending.get(occupant)) is not None:
            return Dates(since + UNCONFIRMED_S, since + UNCONFIRMED_S)
        return self._attempt_leaves_at(job, occupant[1])

    def _attempt_leaves_at(self, job: Job, attempt: AttemptId) -> "Dates":
        lends_as = job.spec.job_id if job.promise is not None and job.promise.lent else ""
        key = attempt, job.spec.priority, job.spec.team, may_evict(job), lends_as
        if key not in self._known:
            self._known[key] = self._date(job, attempt)
        return self._known[key]

    def _date(self, job: Job, attempt: AttemptId) -> "Dates":
        if (at := self._evictor.leaves_at(attempt, job)) is not None:
            return Dates(at, at)
        running = self._jobs.get(attempt.job_id)
        if running is None:
            return Dates(self._now, self._now)
        began, limit = running.gangs[attempt.gang].running_since, self._ends_at(running)
        expected = min(limit, self._now + max(0.0, self._now - began))
        return Dates(expected, expected if limit == math.inf else limit)

    def _ends_at(self, job: Job) -> float:
        """Return when a job's ``max_runtime`` is over if it runs from now on; seconds; infinite without one."""
        if job.spec.max_runtime is None:
            return math.inf
        return min(ends_at(job), self._now + job.spec.max_runtime)


class Dates(NamedTuple):
    """When hosts are free for a job, in seconds.

    Attributes:
        expected: when they are expected to be free.
        by: when they are free at the latest, or are expected to be if nothing bounds an attempt.
    """

    expected: float
    by: float


def latest(dates: Iterable[Dates], now: float) -> Dates:
    """Return the latest of some dates, and at least ``now``."""
    found = [Dates(now, now), *dates]
    return Dates(max(one.expected for one in found), max(one.by for one in found))
