"""The measurements of `launch.py`, one in each process of this script. It uses public names of iris_ray only.

The functions that tasks run travel by value, as those of a user's script do, because this file is the script.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from bare_actors import BareActors, call_new_actors, on, pinned_task, tpu_nodes
from iris_ray import (
    Constraint,
    ConstraintOp,
    IrisClient,
    ResourceSpec,
    get_job_info,
    release,
    run_on_pod,
    run_on_pod_ray,
)
from iris_ray.testing import SimulatedCluster

SLICES, SMALL, LARGE = 2, "v4-16", "v4-32"
HOSTS_OF = {SMALL: 2, LARGE: 4}
SETTLE_S = 6.0
"""Until whatever a run leaves has ended. An older version also has its next processes ready well before that."""
LATER_S = 60.0
MANY = 200
"""Tasks that are started at once on one host."""
PROCESSES = 1, 4, 8

Figures = dict[str, list[float]]
"""Samples by the name of a figure, which has its unit."""


def empty() -> None:
    """The user's function."""


def now() -> float:
    """A user's function that says when it runs."""
    return time.time()


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def ms(action: Callable[[], object]) -> float:
    return 1000 * seconds(action)


# -- warm launches -----------------------------------------------------------------------------------------------------


def warm(samples: int) -> Figures:
    """A warm run_on_pod of an empty function, against bare actors and against pinned tasks."""
    found: Figures = defaultdict(list)
    with SimulatedCluster({LARGE: SLICES}, quiet=True):
        nodes = tpu_nodes()
        actors = BareActors(nodes, HOSTS_OF[LARGE])
        run_on_pod(empty, LARGE, num_slices=SLICES, keep_warm=600)

        def pinned_tasks(**options: Any) -> float:
            time.sleep(SETTLE_S)
            tasks = [pinned_task.options(scheduling_strategy=on(node), **options) for node in nodes]
            return ms(lambda: ray.get([task.remote() for task in tasks]))

        for _ in range(samples):
            time.sleep(SETTLE_S)
            found["bare fan-out of one call per host, ms"].append(ms(actors.fan_out))
            found["bare actors on the way of a launch, ms"].append(ms(actors.take_the_way))
            time.sleep(SETTLE_S)
            launch = ms(lambda: run_on_pod(empty, LARGE, num_slices=SLICES, keep_warm=600))
            found["warm launch, ms"].append(launch)
        release()
        for number in range(max(3, samples // 3)):
            found["bare tasks with max_calls=1, ms"].append(pinned_tasks())
            # As such launchers do it: coordinator and port, new for every launch, in the runtime environment.
            environment = {"env_vars": {"MEGASCALE_PORT": str(20_000 + number)}}
            found["… with variables of the launch, ms"].append(pinned_tasks(runtime_env=environment))
    return found


def row(samples: int) -> Figures:
    """Runs of an empty function, each as soon as the one before has returned."""
    with SimulatedCluster({SMALL: SLICES}, quiet=True):
        run_on_pod(empty, SMALL, num_slices=SLICES, keep_warm=600)
        time.sleep(SETTLE_S)
        runs = [ms(lambda: run_on_pod(empty, SMALL, num_slices=SLICES, keep_warm=600)) for _ in range(samples + 1)]
    return {"the first run of a row, ms": runs[:1], "the next runs, back to back, ms": runs[1:]}


# -- cold launches -----------------------------------------------------------------------------------------------------


def in_new_driver(address: str, what: str) -> float:
    """Run one measurement in a driver of its own; seconds."""
    command = [sys.executable, __file__, "driver", f"--driver={what}", f"--address={address}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


def driver(what: str, address: str) -> None:
    """The body of a fresh driver."""
    ray.init(address=address, log_to_driver=False)
    if what == "run_on_pod":
        took = seconds(lambda: run_on_pod(empty, SMALL, num_slices=SLICES))
    else:  # as many as a run has: the pool here, and an actor for each host and each slice
        places = [ray.get_runtime_context().get_node_id(), *tpu_nodes(), *tpu_nodes()[:SLICES]]
        took = seconds(lambda: call_new_actors(places))
    print(json.dumps({"seconds": took}))


def cold(samples: int) -> Figures:
    """The first run_on_pod of a driver, with and without a Controller, against the start of as many Ray actors."""
    found: Figures = defaultdict(list)
    for _ in range(samples):
        with SimulatedCluster({SMALL: SLICES}, quiet=True) as cluster:
            found["the first run on a fresh cluster, s"].append(in_new_driver(cluster.address, "run_on_pod"))
            time.sleep(2)
            found["the first run of a later driver, s"].append(in_new_driver(cluster.address, "run_on_pod"))
            time.sleep(2)
            found["as many new actors at once, s"].append(in_new_driver(cluster.address, "actors"))
    return found


# -- restarts ----------------------------------------------------------------------------------------------------------


def sleeper(directory: str) -> Callable[[], None]:
    """A function that notes when and where it starts, and runs until it is told to return."""

    def run() -> None:
        info = get_job_info()
        assert info is not None
        note = {"started": time.time(), "slice": info.slice_name, "pid": os.getpid()}
        path = Path(directory) / f"{info.attempt}-{info.task_index}"
        path.with_suffix(".new").write_text(json.dumps(note))
        path.with_suffix(".new").rename(path)
        while not (Path(directory) / "return").exists():
            time.sleep(0.05)

    return run


class Starts:
    """The notes of the tasks of a `sleeper`.

    Args:
        tasks: how many tasks the gang has.
    """

    def __init__(self, directory: str, tasks: int) -> None:
        self._directory, self._tasks = Path(directory), tasks

    def after(self, attempt: int) -> tuple[int, list[dict[str, Any]]]:
        """Wait for the first later attempt that has started everywhere. Return its number, and its notes by task."""
        paths: dict[int, list[Path]] = {}

        def started() -> bool:
            paths.clear()
            for path in self._directory.glob("*-?"):
                paths.setdefault(int(path.name.split("-")[0]), []).append(path)
            return any(number > attempt and len(found) == self._tasks for number, found in paths.items())

        wait_until(started)
        number = min(n for n, found in paths.items() if n > attempt and len(found) == self._tasks)
        return number, [json.loads(path.read_text()) for path in sorted(paths[number])]

    def end(self) -> None:
        (self._directory / "return").touch()


def last_start(notes: list[dict[str, Any]]) -> float:
    return max(note["started"] for note in notes)


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> float:
    deadline = time.time() + timeout_s
    while not condition():
        if time.time() > deadline:
            raise TimeoutError
        time.sleep(0.005)
    return time.time()


def fault(samples: int) -> Figures:
    """From the end of one task's process to the first line of user code on all hosts of the next attempt."""
    found: Figures = defaultdict(list)
    tasks = SLICES * HOSTS_OF[SMALL]
    with SimulatedCluster({SMALL: SLICES}, quiet=True), tempfile.TemporaryDirectory() as directory:
        ref = run_on_pod_ray.remote(sleeper(directory), SMALL, num_slices=SLICES, max_retries_failure=1000)
        starts = Starts(directory, tasks)
        attempt, notes = starts.after(0)
        for number in range(samples):
            for later_s in (1.0, LATER_S):
                time.sleep(max(0.0, last_start(notes) + later_s - time.time()))
                killed = time.time()
                # On another host each time: after three failures on one host alone, the user's jobs avoid it.
                os.kill(notes[number % tasks]["pid"], 9)
                attempt, notes = starts.after(attempt)
                found[f"a fault {later_s:g} s after the start, ms"].append(1000 * (last_start(notes) - killed))
        starts.end()
        ray.get(ref)
    return found


def recovery(samples: int) -> Figures:
    """From the loss of a slice to the first line of user code on all hosts of the next attempt."""
    found: Figures = defaultdict(list)
    for spare_is_warm in (False, True):
        for _ in range(samples):
            with SimulatedCluster({LARGE: 2}, quiet=True) as cluster, tempfile.TemporaryDirectory() as directory:
                if spare_is_warm:
                    run_on_pod(empty, LARGE, num_slices=2, keep_warm=600)
                    time.sleep(SETTLE_S)
                else:
                    run_on_pod(empty, LARGE, keep_warm=0)  # the Controller and nothing else is left
                started = time.time()
                ref = run_on_pod_ray.remote(sleeper(directory), LARGE, keep_warm=600)
                starts = Starts(directory, HOSTS_OF[LARGE])
                attempt, first = starts.after(0)
                if not spare_is_warm:
                    found["cold launch of one slice, s"].append(last_start(first) - started)
                time.sleep(SETTLE_S)
                killed = time.time()
                cluster.preempt_slice(first[0]["slice"])
                noticed = wait_until(lambda: sum(not node["Alive"] for node in ray.nodes()) >= HOSTS_OF[LARGE])
                _, second = starts.after(attempt)
                found["Ray marks the hosts dead after, s"].append(noticed - killed)
                what = "restart on a warm slice, s" if spare_is_warm else "restart on a free slice, s"
                found[what].append(last_start(second) - noticed)
                starts.end()
                ray.get(ref)
    return found


# -- one host ----------------------------------------------------------------------------------------------------------


def jobs(samples: int) -> Figures:
    """Tasks without chips on one host that has CPUs for all of them, as many jobs and as one job."""
    found: Figures = defaultdict(list)
    small = 0.01
    with SimulatedCluster({}, quiet=True):
        client = IrisClient()
        client.submit(now, resources=ResourceSpec(cpu=small)).result()  # the Controller and the pool start once
        for _ in range(samples):
            time.sleep(SETTLE_S)
            began = time.time()
            handles = [client.submit(now, resources=ResourceSpec(cpu=small)) for _ in range(MANY)]
            found[f"{MANY} jobs of one task: started per second"].append(
                MANY / (max(start for handle in handles for start in handle.results()) - began)
            )
            time.sleep(SETTLE_S)
            began = time.time()
            starts = client.submit(now, resources=ResourceSpec(cpu=small, replicas=MANY)).results()
            found[f"one job of {MANY} tasks: started per second"].append(MANY / (max(starts) - began))
    return found


def memory(samples: int) -> Figures:
    """The proportional shares of all processes on a host."""
    found: Figures = defaultdict(list)
    with SimulatedCluster({SMALL: 1}, cpus_per_host=2 * max(PROCESSES), quiet=True) as cluster:
        (plain,) = cluster.add_hosts(1, labels={"rack": "a"})
        (held,) = cluster.slice_names

        def more_than(before: float, name: str, worker: int) -> float:
            time.sleep(SETTLE_S)
            return megabytes(cluster.host_pids(name, worker)) - before

        time.sleep(SETTLE_S)
        before = megabytes(cluster.host_pids(held, 1))
        before_plain = megabytes(cluster.host_pids(plain, 0))
        preloads = [[], ["jax"]] if importlib.util.find_spec("jax") else [[]]
        for _ in range(samples):
            for preload in preloads:
                run_on_pod(empty, SMALL, keep_warm=600, preload=preload)
                what = f"a held, idle host{' with JAX in preload' if preload else ''}, MB"
                found[what].append(more_than(before, held, 1))
                release()
            for count in PROCESSES:
                with running_tasks(count):
                    found[f"a host with {count} idle tasks, MB"].append(more_than(before_plain, plain, 0))
    return found


@contextlib.contextmanager
def running_tasks(count: int) -> Iterator[None]:
    """Have tasks without chips run on the host of a rack."""
    with tempfile.TemporaryDirectory() as directory:
        on_rack = [Constraint("rack", ConstraintOp.EQ, "a")]
        resources = ResourceSpec(cpu=1, replicas=count)
        job = IrisClient().submit(sleeper(directory), resources=resources, constraints=on_rack)
        starts = Starts(directory, count)
        starts.after(0)
        yield
        starts.end()
        job.results()


def megabytes(pids: list[int]) -> float:
    """Return the proportional shares of these processes in MB. They change while they are read."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total / 1e6


# -- script ------------------------------------------------------------------------------------------------------------

MEASUREMENTS: dict[str, tuple[Callable[[int], Figures], int]] = {
    "warm": (warm, 10),
    "row": (row, 100),
    "cold": (cold, 3),
    "fault": (fault, 3),
    "jobs": (jobs, 3),
    "memory": (memory, 1),
    "recovery": (recovery, 3),
}
"""By name, with the default number of samples."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=[*MEASUREMENTS, "driver"])
    parser.add_argument("--samples", type=int)
    parser.add_argument("--into", type=Path, help="a file for the figures")
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "driver":
        driver(given.driver, given.address)
        return
    measure, samples = MEASUREMENTS[given.what]
    given.into.write_text(json.dumps(measure(given.samples or samples)))


if __name__ == "__main__":
    main()
