"""Which running gangs may have to give their hosts to a higher band, and what their end costs.

A victim is of a lower band than the job that waits, and has run for the minimum time of its band. Sets of victims are
compared by these, in this order: how many victims they have of INTERACTIVE, then of BATCH; how much they lose, in
seconds of hosts since their attempts began; how many spares they have. Spares count for nothing else, since nothing
runs there; nor do jobs that yield.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand

GRACE_S = 30.0
LEAST_RUN_S = {PriorityBand.INTERACTIVE: 600.0, PriorityBand.BATCH: 120.0}

Cost = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EvictionRules:
    """When gangs give way to higher bands.

    Args:
        grace_s: seconds from the notice to the end.
        least_run_s: so many seconds an attempt of a band runs before it may be evicted.
    """

    grace_s: float = GRACE_S
    least_run_s: Mapping[PriorityBand, float] = field(default_factory=lambda: LEAST_RUN_S)


DEFAULT_RULES = EvictionRules()


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, as a plan sees it.

    Args:
        jobs: all jobs by id.
        attempts: those of each band that hold something, in the order in which they got it.
        evicted: those that are about to give their hosts to other jobs.
    """

    jobs: Mapping[str, Job]
    attempts: Mapping[PriorityBand, dict[AttemptId, None]]
    evicted: Collection[AttemptId] = ()

    def leaving(self) -> frozenset[str]:
        """Return the ids of the jobs that give their hosts to nobody in particular, but to those that wait."""
        gangs = ((attempt.job_id, self.jobs[attempt.job_id].gangs[attempt.gang]) for attempt in self.evicted)
        return frozenset(job_id for job_id, gang in gangs if gang.eviction is not None and not gang.eviction.job_id)


class EvictionCosts:
    """What the ends of running attempts cost, while a plan is made.

    Args:
        running: what runs.
        rules: who may be evicted.
        now: seconds on the clock of the events.

    Attributes:
        leaving: the attempts that are about to give their hosts to others, with the job that takes them.
    """

    def __init__(self, running: Running, rules: EvictionRules, now: float) -> None:
        self.leaving: dict[AttemptId, str] = {}
        self._running = running
        self._rules = rules
        self._now = now
        self._costs: dict[AttemptId, tuple[PriorityBand, Cost]] = {}
        for attempt in running.evicted:
            if (eviction := running.jobs[attempt.job_id].gangs[attempt.gang].eviction) is not None:
                self.leaving[attempt] = eviction.job_id

    def of(self, attempt: AttemptId, taker: PriorityBand, patient: bool) -> Cost | None:
        """Return what the end of an attempt costs; None if a gang of this band may not take its hosts.

        Args:
            attempt: which.
            taker: the band of the job that takes them.
            patient: whether those count, too, that have not run for the minimum time.
        """
        if attempt in self.leaving:
            return None
        known = self._costs.get(attempt)
        if known is None:
            known = self._costs[attempt] = self._cost(attempt)
        band, cost = known
        return cost if band > taker and cost and (patient or not cost[0]) else None

    def hosts_of(self, attempt: AttemptId) -> Iterable[str | None]:
        """Return the node ids of an attempt's hosts."""
        return (task.node_id for task in self._running.jobs[attempt.job_id].gangs[attempt.gang].tasks)

    def _cost(self, attempt: AttemptId) -> tuple[PriorityBand, Cost]:
        job = self._running.jobs[attempt.job_id]
        gang, band = job.gangs[attempt.gang], job.spec.priority
        if not gang.placed or gang.attempt != attempt.number:
            return band, ()  # it ends already
        if job.yields or job.spec.spare_for is not None:
            return band, _cost(band, victims=0, lost=0.0, spares=1)
        ran = self._now - gang.running_since
        protected_s = max(0.0, self._rules.least_run_s.get(band, math.inf) - ran)
        if protected_s == math.inf:
            return band, ()
        return band, _cost(band, victims=1, lost=max(0.0, ran) * len(gang.tasks), spares=0, protected_s=protected_s)


def _cost(band: PriorityBand, victims: int, lost: float, spares: int, protected_s: float = 0.0) -> Cost:
    """Return a cost: seconds until it may be evicted; victims by band, the highest first; seconds of hosts; spares."""
    by_band = (float(victims * (band is other)) for other in PriorityBand if other > PriorityBand.PRODUCTION)
    return (protected_s, *by_band, lost, float(spares))
