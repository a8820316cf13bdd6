"""What it costs that each job of a long queue asks for something else."""

import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import psutil

from iris_ray.model.job_spec import JobSpec
from iris_ray.scheduler import Scheduler
from scheduling_costs.cycles import NOW
from scheduling_costs.worlds import HOST, bare, cpu_job, gang, submit


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


CROWDS = (
    Crowd("CPU jobs, 1 amount", partial(cpu_jobs_of, 1)),
    Crowd("CPU jobs, 200 amounts", partial(cpu_jobs_of, 200)),
    Crowd("CPU jobs, 5,000 amounts", partial(cpu_jobs_of, 5000)),
    Crowd("gangs of 16, 1 amount", partial(gangs_of, 1)),
    Crowd("gangs of 16, 2,000 amounts", partial(gangs_of, 2000)),
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
