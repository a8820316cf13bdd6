"""What the state, its indexes and the last lines of tasks take of memory."""

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil

from iris_ray.logs.controller import LogMemory
from iris_ray.logs.core import LastLines
from iris_ray.state import ControllerState
from iris_ray.state.events import JobSubmittedEvent
from scheduling_costs.cycles import cycle
from scheduling_costs.worlds import SLICE, cpu_job, gang, host


def memory_mb(hosts: int, gangs: int, cpu_jobs: int) -> tuple[float, float]:
    """Return the resident memory in MB of the state and its indexes with all tasks placed, and of the whole process.

    Call it in a fresh process.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    state = ControllerState()
    for number in range(hosts):
        state.handle_event(_received(host(number)))
    specs = [gang(i, f"gang-{i}") for i in range(gangs)] + [cpu_job(i, f"cpu-{i}") for i in range(cpu_jobs)]
    for spec in specs:
        state.handle_event(_received(JobSubmittedEvent(spec, 0.0)))
    del specs
    for assignment in cycle(state).assignments:
        state.handle_event(assignment)
    assert not cycle(state).pending_reasons
    assert sum(len(worker.occupants) for worker in state.workers.values()) == SLICE * gangs + cpu_jobs
    after = process.memory_info().rss
    return (after - before) / 1e6, after / 1e6


def _received(event: Any) -> Any:
    """Return an event as another process would send it: it shares no objects with other events."""
    return pickle.loads(pickle.dumps(event))


def log_memory_b(tasks: int) -> tuple[float, float]:
    """Return the bytes for each task that has printed a line: real ones, and those that are counted."""
    process = psutil.Process()
    memory = LogMemory(most_bytes=1 << 40)
    before = process.memory_info().rss
    for number in range(tasks):
        memory.remember(
            _received(LastLines("train-1a2b3c4d", number, 1, f"{number % 500:056x}", 1000, b"step 9, loss 0.1\n"))
        )
    return (process.memory_info().rss - before) / tasks, memory.held_bytes / tasks


def print_memory() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        real, counted = pool.submit(log_memory_b, 1_000_000).result()
    print(f"Last lines of 1,000,000 tasks, one each, if unbounded: {real:.0f} MB, and {counted:.0f} MB are counted.")
    for gangs, cpu_jobs in ((6250, 0), (3125, 50_000)):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            state, process = pool.submit(memory_mb, 100_000, gangs, cpu_jobs).result()
        what = f"{gangs:,} gangs of 16" + (f" and {cpu_jobs:,} one-task jobs" if cpu_jobs else "")
        print(
            f"Memory with 100,000 hosts and 100,000 tasks ({what}), all placed: {state:,.0f} MB"
            f" ({process:,.0f} MB with the interpreter and all libraries)."
        )
