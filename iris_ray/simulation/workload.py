"""Jobs that come at random, from seeded generators."""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from iris_ray.model.job_spec import JobSpec, PriorityBand
from iris_ray.simulation.jobs import SimulatedJob, slice_spec, tasks_spec

Arrival = tuple[float, SimulatedJob]
"""When a job is submitted, in seconds, and the job."""

_T = TypeVar("_T")
_P90 = 1.2815515655446004
"""The 90th percentile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Run times with a lognormal distribution, which fits those of most clusters.

    Args:
        median_s: half of them are shorter; seconds.
        p90_s: nine of ten are shorter; the median for run times that are all equal.
    """

    median_s: float
    p90_s: float

    def draw(self, chance: Random) -> float:
        """Return one of them, in seconds."""
        return self.median_s * math.exp(math.log(self.p90_s / self.median_s) / _P90 * chance.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStream:
    """Jobs of one kind, which come independently of each other (a Poisson process).

    Args:
        name: begins the jobs' ids.
        per_day: how many come in a day, on average.
        run: how long they run.
        users: whose they are, and how often in relation to the others.
        band: their priority band.
        tpu_type: the slices that they run on; None: hosts without TPU.
        num_slices: the slice counts of the jobs, each a tuple of the counts that would do, and how often in relation
            to the others.
        replicas: how many tasks they have on hosts without TPU.
        cpus: of each such task.
        save_every_s: how often they save their state; infinite: never.
        heeds_notices: whether they save and move when they are told.
    """

    name: str
    per_day: float
    run: RunTimes
    users: tuple[tuple[str, float], ...]
    band: PriorityBand = PriorityBand.INTERACTIVE
    tpu_type: str | None = None
    num_slices: tuple[tuple[tuple[int, ...], float], ...] = (((1,), 1.0),)
    replicas: int = 1
    cpus: float = 1.0
    save_every_s: float = math.inf
    heeds_notices: bool = True

    def arrivals(self, chance: Random, until: float) -> Iterator[Arrival]:
        """Yield the jobs that come until then, in the order of time."""
        now = 0.0
        for number in itertools.count():
            now += chance.expovariate(self.per_day / 86_400.0)
            if now > until:
                return
            yield now, self.job(f"{self.name}-{number}", chance)

    def job(self, job_id: str, chance: Random) -> SimulatedJob:
        """Return one job."""
        spec = self._spec(job_id, chance)
        return SimulatedJob(spec, self.run.draw(chance), self.save_every_s, self.heeds_notices)

    def _spec(self, job_id: str, chance: Random) -> JobSpec:
        user = _pick(self.users, chance)
        if self.tpu_type is None:
            return tasks_spec(job_id, self.replicas, self.cpus, user=user, priority=self.band)
        counts = _pick(self.num_slices, chance)
        return slice_spec(job_id, self.tpu_type, counts, user=user, priority=self.band)


def merged(streams: Iterable[Iterable[Arrival]]) -> Iterator[Arrival]:
    """Yield the arrivals of several streams in the order of time."""
    return heapq.merge(*streams, key=lambda arrival: arrival[0])


def _pick(weighted: Sequence[tuple[_T, float]], chance: Random) -> _T:
    if len(weighted) == 1:
        return weighted[0][0]
    ((item, _),) = chance.choices(weighted, [weight for _, weight in weighted])
    return item
