"""What a long queue costs: whose jobs each ask for something else, and whose jobs all wait."""

import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import psutil

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import JobSpec
from iris_ray.scheduler import Scheduler
from scheduling_costs.cycles import NOW, steady_s
from scheduling_costs.worlds import HOST, bare, busy_hosts, cpu_job, full, gang, kinds, submit


@dataclass(frozen=True)
class Crowd:
    """10,000 jobs that wait together.

    Args:
        name: what they have in common.
        specs: makes them.
    """

    name: str
    specs: Callable[[], list[JobSpec]]


def cpu_jobs_of(amounts: int) -> list[JobSpec]:
    """10,000 one-task jobs that ask for so many different amounts of CPUs."""
    return [replace(cpu_job(i, f"cpu-{i}"), resources={"CPU": 1.0 + i % amounts / 100}) for i in range(10_000)]


def gangs_of(amounts: int) -> list[JobSpec]:
    """10,000 gangs that ask for so many different amounts of CPUs beside their chips."""
    return [replace(gang(i, f"gang-{i}"), resources=HOST | {"CPU": 1.0 + i % amounts / 100}) for i in range(10_000)]


def gangs_that_prefer(zones: int) -> list[JobSpec]:
    """10,000 gangs that prefer so many different zones."""
    wishes = [Constraint("zone", ConstraintOp.EQ, f"us-{number}") for number in range(zones)]
    return [replace(gang(i, f"gang-{i}"), preferences=(wishes[i % zones],)) for i in range(10_000)]


CROWDS = (
    Crowd("CPU jobs, 1 amount", partial(cpu_jobs_of, 1)),
    Crowd("CPU jobs, 200 amounts", partial(cpu_jobs_of, 200)),
    Crowd("CPU jobs, 5,000 amounts", partial(cpu_jobs_of, 5000)),
    Crowd("gangs of 16, 1 amount", partial(gangs_of, 1)),
    Crowd("gangs of 16, 2,000 amounts", partial(gangs_of, 2000)),
    Crowd("gangs of 16, 200 preferences", partial(gangs_that_prefer, 200)),
)


def first_plan(crowd: Crowd) -> tuple[int, float, float]:
    """Return how many of a crowd's jobs a first plan for 10,000 hosts places, its seconds, and the MB that it takes.

    Call it in a fresh process.
    """
    gc.disable()
    process = psutil.Process()
    state = bare(10_000)
    submit(state, crowd.specs())
    before = process.memory_info().rss
    start = time.process_time()
    placed = len(Scheduler().find_assignments(state.pending(), state.fleet, state.usage, NOW).assignments)
    return placed, time.process_time() - start, (process.memory_info().rss - before) / 1e6


def print_crowds() -> None:
    """What it costs that each job of a long queue asks for something else."""
    print("\n| The first plan of 10,000 jobs on 10,000 hosts | Placed | CPU time, s | Memory, MB |")
    print("|---|---:|---:|---:|")
    for crowd in CROWDS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            placed, spent, size = pool.submit(first_plan, crowd).result()
        print(f"| {crowd.name} | {placed:,} | {spent:.2f} | {size:,.0f} |")


def waiting_gangs(jobs: int) -> list[JobSpec]:
    """Gangs of four shapes."""
    shapes = list(islice(kinds(), 4))
    return [gang(i, f"gang-{i}", shapes[i % 4]) for i in range(jobs)]


def waiting_cpu_jobs(jobs: int) -> list[JobSpec]:
    """Single tasks of two shapes and four amounts, for none of which a busy host has room."""
    shapes, amounts = list(islice(kinds(), 2)), (24.0, 30.0, 60.0, 120.0)
    specs = (cpu_job(i, f"cpu-{i}", shapes[i % 2]) for i in range(jobs))
    return [replace(spec, resources={"CPU": amounts[i // 2 % 4], "memory": 2e9}) for i, spec in enumerate(specs)]


def print_waiting(rounds: int) -> None:
    """What a plan costs, after a small change, in which every job keeps waiting."""
    print("\n| A plan in which all jobs wait, 10,000 hosts, ms | 1,000 jobs | 10,000 jobs |")
    print("|---|---:|---:|")
    for name, world, specs in (
        ("gangs of 4 shapes, all slices in use", full, waiting_gangs),
        ("CPU jobs of 2 shapes and 4 amounts, all hosts in use in part", busy_hosts, waiting_cpu_jobs),
    ):
        cells = []
        for jobs in (1000, 10_000):
            gc.collect()
            state = world(10_000)
            submit(state, specs(jobs))
            cells.append(f"{1000 * steady_s(state, rounds):.1f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
