"""Many small jobs without chips, side by side with as many bare Ray tasks that each get a process of their own.

    python benchmarks/cpu_jobs.py                # 30 jobs and 30 tasks, twice each; about three minutes on 2 cores
    python benchmarks/cpu_jobs.py --jobs 300

Each job has one task that returns at once. Beside the time by the clock stands the CPU time of every process of the
cluster, and the most memory that those had which ran tasks or watched them: on a machine with few cores a job costs
what its processes cost to start.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import psutil
import ray

from iris_ray import IrisClient, ResourceSpec
from iris_ray.testing import SimulatedCluster

CPUS = 4
"""So many tasks run at a time."""
LOOK_S = 0.25


class Cost(NamedTuple):
    """What a batch has cost.

    Attributes:
        seconds: by the clock.
        cpu_s: CPU time.
        mib: the most memory that Ray's workers had together, in MiB (proportional shares), beyond what they had before.
    """

    seconds: float
    cpu_s: float
    mib: float


def empty() -> None:
    """The user's function."""


bare_task = ray.remote(num_cpus=1, max_calls=1, max_retries=0)(empty)


def bare(count: int) -> None:
    ray.get([bare_task.remote() for _ in range(count)])


def jobs(count: int) -> None:
    client = IrisClient()
    handles = [client.submit(empty, resources=ResourceSpec(cpu=1, replicas=1)) for _ in range(count)]
    for handle in handles:
        handle.result()


def one_job(count: int) -> None:
    IrisClient().submit(empty, resources=ResourceSpec(cpu=1, replicas=count)).results()


def workers_mib() -> float:
    """Return the memory of all of Ray's worker processes on this machine."""
    total = 0
    for process in psutil.process_iter(["name"]):
        if (process.info["name"] or "").startswith("ray::"):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
    return total / 2**20


def machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.system


def cost(batch: Callable[[int], None], count: int) -> Cost:
    """Return what it costs to run a batch; nothing else may run on the machine."""
    before, most, over = workers_mib(), [0.0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            most.append(workers_mib())

    looking = threading.Thread(target=look)
    looking.start()
    start, cpu_s = time.perf_counter(), machine_cpu_s()
    batch(count)
    seconds = time.perf_counter() - start
    cpu_s = machine_cpu_s() - cpu_s
    over.set()
    looking.join()
    return Cost(seconds, cpu_s, max(most) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    batches: list[tuple[str, Callable[[int], None]]] = [
        ("bare tasks", bare),
        ("jobs of one task", jobs),
        ("one job of as many tasks", one_job),
    ]
    found: dict[str, list[Cost]] = {name: [] for name, _ in batches}
    with SimulatedCluster({}, cpus_per_host=CPUS, quiet=True):
        jobs(1)  # the Controller and the pool start once
        for _ in range(args.rounds):
            for name, batch in batches:
                found[name].append(cost(batch, args.jobs))
                time.sleep(5)  # what ends after the results
    base = Cost(*(statistics.median(column) for column in zip(*found["bare tasks"], strict=True)))
    for name, costs in found.items():
        middle = Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))
        print(
            f"{args.jobs} {name:26} {middle.seconds:6.1f} s, {middle.cpu_s:6.1f} s CPU, {middle.mib:6.0f} MiB; to bare:"
            f" {middle.seconds / base.seconds:.2f}, {middle.cpu_s / base.cpu_s:.2f}, {middle.mib / base.mib:.2f}"
        )


if __name__ == "__main__":
    main()
