"""Simulations for tests: v4-16 slices of two hosts, and jobs on them."""

import itertools
from collections.abc import Iterator
from dataclasses import fields
from random import Random
from typing import Any

from iris_ray.study import SimulatedJob, Simulation
from iris_ray.study.agenda import Timings
from iris_ray.study.history import AttemptHistory
from iris_ray.study.jobs import slice_spec, tasks_spec

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
TIMINGS = Timings(launch=10.0, warm_launch=1.0, failed_launch=30.0, stop=5.0, exit=2.0, reclaim=3.0, keep_warm=60.0)
_OWN = {field.name for field in fields(SimulatedJob)}


def slices(count: int = 1, check_every: int = 1, **options: Any) -> Simulation:
    """A cluster of v4-16 slices."""
    simulation = Simulation(TIMINGS, check_every=check_every, **options)
    simulation.hosts.add_slices("v4-16", count)
    return simulation


def gang(job_id: str, num_slices: int | list[int] = 1, run_s: float = HOUR, **changes: Any) -> SimulatedJob:
    """A gang on v4-16 slices. Changes are of the job where it has such a value, else of its spec."""
    own = {name: changes.pop(name) for name in list(changes) if name in _OWN}
    return SimulatedJob(slice_spec(job_id, "v4-16", num_slices, **changes), run_s, **own)


def tasks(job_id: str, replicas: int = 1, cpus: float = 1.0, run_s: float = HOUR, **changes: Any) -> SimulatedJob:
    """Tasks without TPU; changes as for `gang`."""
    own = {name: changes.pop(name) for name in list(changes) if name in _OWN}
    return SimulatedJob(tasks_spec(job_id, replicas, cpus, **changes), run_s, **own)


def endless(
    user: str, sizes: tuple[int, ...] = (1,), minutes: tuple[int, int] = (60, 60), seed: int = 0, **changes: Any
) -> Iterator[SimulatedJob]:
    """A user's gangs that never end to come.

    Args:
        user: whose.
        sizes: on how many slices, each as often as the others.
        minutes: how long the shortest and the longest run.
        seed: of the choice.
        changes: as for `gang`.
    """
    chance = Random(f"{seed} {user}")
    for number in itertools.count():
        run_s = chance.uniform(*minutes) * MINUTE
        yield gang(f"{user}-{number}", chance.choice(sizes), run_s, user=user, **changes)


def attempts(simulation: Simulation, job_id: str) -> list[AttemptHistory]:
    """All attempts of a job so far."""
    return [attempt for attempt in simulation.history.attempts if attempt.id.job_id == job_id]


def waited(simulation: Simulation, job_id: str) -> float:
    """For how many seconds a job waited for its first hosts, or has waited by now."""
    return simulation.history.jobs[job_id].waited_s(simulation.now)
