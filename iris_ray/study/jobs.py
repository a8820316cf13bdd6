"""Simulated jobs, and streams of jobs that come at random, from seeded generators."""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import hosts_of_shape, part_attribute, shape_of_attribute
from iris_ray.model.teams import Teams
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU, TPU_NAME, TPU_TOPOLOGY


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job, and the behaviour of its tasks. All times are in seconds.

    Args:
        run_s: how long each gang runs on the largest number of slices that it can use. On half as many it takes twice
            as long.
        save_every_s: after how much work, in seconds on the largest number of slices, tasks save their state. A gang
            that fails or loses its hosts goes on from there. Infinite: never.
        heeds_notices: whether a gang that is told to move saves its state and moves, if there is time to save.
        save_s: how long it takes to save after a notice.
        fails_after_s: how long each attempt runs before it fails; infinite: none fails.
        crashes: whether it fails by a signal, such as a segmentation fault, instead of an exception.
        launch_fails: whether all its launches fail.
        keep_warm_s: how long its pool keeps idle slices after the job's end.
    """

    spec: JobSpec
    run_s: float
    save_every_s: float = math.inf
    heeds_notices: bool = True
    save_s: float = 10.0
    fails_after_s: float = math.inf
    crashes: bool = False
    launch_fails: bool = False
    keep_warm_s: float = 0.0


def slice_spec(
    job_id: str, tpu_type: str, num_slices: int | Sequence[int] = 1, topology: str | None = None, **changes: Any
) -> JobSpec:
    """Return the spec of a gang on slices, or on parts of them, similar to what `run_on_pod` submits.

    It has a pool of its own, and failures are not retried: ``max_retries_failure`` is 0, not 10. ``topology`` is the
    shape of the parts; ``changes`` are other values of the `JobSpec`.
    """
    config = get_tpu_config(tpu_type)
    group_by = TPU_NAME if topology is None else part_attribute(topology)
    values: dict[str, Any] = {
        "owner": f"pool of {job_id}",
        "device": config.name,
        "replicas": config.vm_count if topology is None else hosts_of_shape(topology),
        "coscheduling": CoschedulingConfig(group_by, num_slices),
        "whole_groups": topology is None,
        "constraints": (Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(config.name)),),
        "resources": {TPU: float(config.chips_per_vm)},
        "max_retries_preemption": 10_000,
    }
    return JobSpec(job_id=job_id, **(values | changes))


def on_whole_slices(spec: JobSpec) -> JobSpec:
    """Return the spec of a job on parts of slices as it would be without parts: with a whole slice for each of them."""
    gang = spec.coscheduling
    if spec.device is None or gang is None or shape_of_attribute(gang.group_by) is None:
        return spec
    hosts = get_tpu_config(spec.device).vm_count
    return replace(spec, replicas=hosts, coscheduling=CoschedulingConfig(num_groups=gang.num_groups), whole_groups=True)


def tasks_spec(job_id: str, replicas: int = 1, cpus: float = 1.0, **changes: Any) -> JobSpec:
    """Return the spec of tasks without TPU that are placed one by one, with a pool of its own."""
    values: dict[str, Any] = {"owner": f"pool of {job_id}", "replicas": replicas, "resources": {"CPU": cpus}}
    return JobSpec(job_id=job_id, **(values | changes))


# -- workload ----------------------------------------------------------------------------------------------------------

Arrival = tuple[float, SimulatedJob]
"""When a job is submitted, in seconds, and the job."""

_T = TypeVar("_T")
_P90 = 1.2815515655446004
"""The 90th percentile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Run times with a lognormal distribution, which fits those of most clusters.

    Args:
        median_s: seconds; half of the run times are shorter.
        p90_s: seconds; nine of ten run times are shorter. Equal to the median if all run times are equal.
    """

    median_s: float
    p90_s: float

    def draw(self, chance: Random) -> float:
        """Return a random run time, in seconds."""
        return self.median_s * math.exp(math.log(self.p90_s / self.median_s) / _P90 * chance.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStream:
    """Jobs of one kind, which come independently of each other (a Poisson process).

    Args:
        name: the prefix of the jobs' ids.
        per_day: how many come in a day, on average.
        run: how long they run.
        users: their users, with weights.
        tpu_type: the type of their slices; None: hosts without TPU.
        num_slices: the slice counts of the jobs, each a tuple of the counts that a job can use, with weights.
        topology: the shape of the parts of slices that the jobs use; None: whole slices.
        replicas: the number of their tasks on hosts without TPU.
        cpus: the CPUs of each such task.
        save_every_s: how often they save their state; infinite: never.
        heeds_notices: whether they save and move when they are told.
        teams: all teams, to which their users belong.
        team: the team that they name; None: that of their user.
    """

    name: str
    per_day: float
    run: RunTimes
    users: tuple[tuple[str, float], ...]
    band: PriorityBand = PriorityBand.INTERACTIVE
    tpu_type: str | None = None
    num_slices: tuple[tuple[tuple[int, ...], float], ...] = (((1,), 1.0),)
    topology: str | None = None
    replicas: int = 1
    cpus: float = 1.0
    save_every_s: float = math.inf
    heeds_notices: bool = True
    teams: Teams = field(default_factory=Teams)
    team: str | None = None

    def arrivals(self, chance: Random, until: float) -> Iterator[Arrival]:
        """Yield the jobs that come until a time, in order."""
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
        about = {"user": user, "team": self.teams.team_for(user, self.team), "priority": self.band}
        if self.tpu_type is None:
            return tasks_spec(job_id, self.replicas, self.cpus, **about)
        return slice_spec(job_id, self.tpu_type, _pick(self.num_slices, chance), self.topology, **about)


def merged(streams: Iterable[Iterable[Arrival]]) -> Iterator[Arrival]:
    """Yield the arrivals of several streams in the order of time."""
    return heapq.merge(*streams, key=lambda arrival: arrival[0])


def _pick(weighted: Sequence[tuple[_T, float]], chance: Random) -> _T:
    if len(weighted) == 1:
        return weighted[0][0]
    ((item, _),) = chance.choices(weighted, [weight for _, weight in weighted])
    return item
