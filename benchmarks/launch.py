"""How long a launch takes, side by side with what Ray needs for the bare minimum.

    python benchmarks/launch.py            # everything; about 8 minutes on 2 cores
    python benchmarks/launch.py warm       # or: row, cold, recovery

Every figure is a ratio of two things measured in turn in one run, because machines are noisy. Two simulated slices of
four hosts each.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray import get_job_info, release, run_on_pod, run_on_pod_ray
from iris_ray.testing import SimulatedCluster

TPU_TYPE, SLICES, HOSTS = "v4-32", 2, 4
SETTLE_S = 6.0
"""Before each warm sample: standbys are ready again well before that, and the machine is quiet."""
STANDBYS_S = 20.0
"""Until three standbys wait on each of two hosts."""


def empty() -> None:
    """The user's function."""


def lasts_one_second() -> float:
    """Return when it has begun; seconds since the epoch."""
    began = time.time()
    time.sleep(1.0)
    return began


class Answering:
    """The least that Ray can do on a host: answer a call."""

    def call(self) -> None: ...


Bare = ray.remote(num_cpus=0)(Answering)


class BareSlice:
    """Stands for a SliceActor: calls its hosts."""

    def __init__(self, hosts: list[Any]) -> None:
        self._hosts = hosts

    async def run(self) -> None:
        await asyncio.gather(*(host.call.remote() for host in self._hosts))


class BareController:
    """Stands for the Controller: gives an order to the pool that submits a job, and answers."""

    async def submit(self, pool: Any) -> None:
        pool.assign.remote()


class BarePool:
    """Stands for the SlicePoolManager: submits the job, and on the order has all slices run."""

    def __init__(self, controller: Any, slices: list[Any]) -> None:
        self._controller, self._slices, self._ordered = controller, slices, asyncio.Event()

    async def assign(self) -> None:
        self._ordered.set()

    async def run(self) -> None:
        await self._controller.submit.remote(ray.get_runtime_context().current_actor)
        await self._ordered.wait()
        self._ordered.clear()
        await asyncio.gather(*(one.run.remote() for one in self._slices))


@ray.remote(num_cpus=0, max_calls=1, max_retries=0)
def pinned_task() -> None:
    """What a launcher without standbys does on each host: a task in a fresh worker."""


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def tpu_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("TPU")]


def on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def summary(samples: list[float]) -> str:
    low, middle, high = (1000 * f(samples) for f in (min, statistics.median, max))
    return f"median {middle:8.1f} ms   ({low:.1f} to {high:.1f})"


def bare_pool(actors: list[Any], nodes: list[str]) -> Any:
    """Return bare actors through which a call takes the way of a launch, on the same hosts: what Ray needs for that."""

    def start(kind: type, *args: Any, **options: Any) -> Any:
        return ray.remote(kind).options(num_cpus=0, **options).remote(*args)

    slices = [start(BareSlice, actors[i : i + HOSTS], scheduling_strategy=on(nodes[i])) for i in (0, HOSTS)]
    return start(BarePool, start(BareController), slices)


def warm(samples: int) -> None:
    """A warm run_on_pod of an empty function, against bare actors and against pinned tasks."""
    with SimulatedCluster({TPU_TYPE: SLICES}):
        nodes = tpu_nodes()
        actors = [Bare.options(scheduling_strategy=on(node)).remote() for node in nodes]
        ray.get([actor.call.remote() for actor in actors])
        pool = bare_pool(actors, nodes)
        ray.get(pool.run.remote())
        run_on_pod(empty, TPU_TYPE, num_slices=SLICES, keep_warm=600)

        def launch() -> float:
            return seconds(lambda: run_on_pod(empty, TPU_TYPE, num_slices=SLICES, keep_warm=600))

        def pinned_tasks(**options: Any) -> float:
            time.sleep(SETTLE_S)
            tasks = [pinned_task.options(scheduling_strategy=on(node), **options) for node in nodes]
            return seconds(lambda: ray.get([task.remote() for task in tasks]))

        ours, bare, same_way = [], [], []
        for _ in range(samples):
            time.sleep(SETTLE_S)
            bare.append(seconds(lambda: ray.get([actor.call.remote() for actor in actors])))
            same_way.append(seconds(lambda: ray.get(pool.run.remote())))
            time.sleep(SETTLE_S)
            ours.append(launch())
        back_to_back = [launch() for _ in range(max(3, samples // 3))]
        release()
        pinned = [pinned_tasks() for _ in range(samples)]
        # As launchers without standbys do it: coordinator and port, new for every launch, in the runtime environment.
        ports = [{"env_vars": {"MEGASCALE_PORT": str(20_000 + i)}} for i in range(max(3, samples // 3))]
        with_env = [pinned_tasks(runtime_env=env) for env in ports]
    print(f"warm run_on_pod, {SLICES} × {HOSTS} hosts   {summary(ours)}")
    print(f"bare fan-out of one call per host  {summary(bare)}")
    print(f"bare actors on the way of a launch {summary(same_way)}")
    print(f"pinned max_calls=1 tasks           {summary(pinned)}")
    print(f"… with variables of the launch     {summary(with_env)}")
    print(f"back to back, waiting for standbys {summary(back_to_back)}")
    middle = statistics.median(ours)
    print(f"run_on_pod / bare fan-out    {middle / statistics.median(bare):.2f}   (to reach: at most 4)")
    print(f"run_on_pod / bare actors on its way {middle / statistics.median(same_way):.2f}")
    print(f"pinned tasks / run_on_pod    {statistics.median(pinned) / middle:.1f}   (to reach: at least 50)")
    print(f"… with variables             {statistics.median(with_env) / middle:.1f}")


def row(samples: int) -> None:
    """Three runs of a second in a row, on as many hosts as this machine has cores, with three standbys on each."""
    with SimulatedCluster({"v4-16": 1}):
        run_on_pod(empty, "v4-16", keep_warm=600, standbys=3)
        delays = [one_second_runs(3) for _ in range(samples)]
    for number, of_run in enumerate(zip(*delays, strict=True), 1):
        print(f"run {number} of three, of a second each  {summary(list(of_run))}   (to reach: at most 500)")


def one_second_runs(count: int) -> list[float]:
    """Return after how many seconds the last task of each of some runs in a row has started."""
    time.sleep(STANDBYS_S)
    delays = []
    for _ in range(count):
        called = time.time()
        starts = run_on_pod(lasts_one_second, "v4-16", keep_warm=600, standbys=3)
        delays.append(max(starts) - called)
    return delays


def in_new_driver(address: str, what: str) -> float:
    """Run one measurement in a driver of its own; seconds."""
    command = [sys.executable, __file__, f"--driver={what}", f"--address={address}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


def driver(what: str, address: str) -> None:
    """The body of a fresh driver."""
    ray.init(address=address, log_to_driver=False)
    if what == "run_on_pod":
        took = seconds(lambda: run_on_pod(empty, TPU_TYPE, num_slices=SLICES))
    else:
        # As many processes as run_on_pod starts: the pool here, and on the hosts two slice actors, a host actor and a
        # task process each.
        places = [ray.get_runtime_context().get_node_id(), *tpu_nodes(), *tpu_nodes(), *tpu_nodes()[:SLICES]]
        kinds = [Bare.options(scheduling_strategy=on(place)) for place in places]
        took = seconds(lambda: ray.get([actor.call.remote() for actor in [kind.remote() for kind in kinds]]))
    print(json.dumps({"seconds": took}))


def cold(samples: int) -> None:
    """The first run_on_pod of a driver, against the start of as many Ray actors."""
    with SimulatedCluster({TPU_TYPE: SLICES}) as cluster:
        in_new_driver(cluster.address, "run_on_pod")  # the cluster's Controller is there from now on
        ours, actors = [], []
        for _ in range(samples):
            actors.append(in_new_driver(cluster.address, "actors"))
            time.sleep(2)
            ours.append(in_new_driver(cluster.address, "run_on_pod"))
            time.sleep(2)
    processes = 1 + SLICES + 2 * SLICES * HOSTS
    print(f"cold run_on_pod, {SLICES} × {HOSTS} hosts        {summary(ours)}")
    print(f"Ray starts {processes} actors at once          {summary(actors)}")
    ratio = statistics.median(a / b for a, b in zip(ours, actors, strict=True))
    print(f"run_on_pod / actors          {ratio:.2f}   (to reach: at most 1.2)")


def sleeper(directory: str) -> Callable[[], None]:
    """A function that notes when and where it starts, and runs until it is told to return."""

    def run() -> None:
        info = get_job_info()
        assert info is not None
        note = Path(directory) / f"{info.attempt}-{info.task_index}"
        note.write_text(json.dumps({"started": time.time(), "slice": info.slice_name}))
        while not (Path(directory) / "return").exists():
            time.sleep(0.05)

    return run


def recovery(samples: int) -> None:
    """From the loss of a slice to the first line of user code on all hosts of the next attempt."""
    free: list[float] = []
    warm_slice: list[float] = []
    launches: list[float] = []
    detection: list[float] = []
    for spare_is_warm in (False, True):
        for _ in range(samples):
            with SimulatedCluster({TPU_TYPE: 2}, quiet=True) as cluster, tempfile.TemporaryDirectory() as directory:
                if spare_is_warm:
                    run_on_pod(empty, TPU_TYPE, num_slices=2, keep_warm=600)
                    time.sleep(SETTLE_S)
                else:
                    run_on_pod(empty, "v4-32", keep_warm=0)  # the Controller and nothing else is left
                started = time.time()
                ref = run_on_pod_ray.remote(sleeper(directory), TPU_TYPE, keep_warm=600)
                first = wait_for(directory, 1)
                if not spare_is_warm:
                    launches.append(last_start(first) - started)
                time.sleep(SETTLE_S)
                killed = time.time()
                cluster.preempt_slice(first[0]["slice"])
                noticed = wait_until(lambda: not_alive() >= HOSTS)
                second = wait_for(directory, 2)
                detection.append(noticed - killed)
                (warm_slice if spare_is_warm else free).append(last_start(second) - noticed)
                (Path(directory) / "return").touch()
                ray.get(ref)
    print(f"Ray marks the hosts dead after     {summary(detection)}")
    print(f"cold launch of one slice           {summary(launches)}")
    print(f"restart on a free slice            {summary(free)}")
    print(f"restart on a warm slice            {summary(warm_slice)}")
    ratio = statistics.median(free) / statistics.median(launches)
    print(f"free slice / cold launch     {ratio:.2f}   (to reach: at most 1.2)")
    print(f"warm slice                   {statistics.median(warm_slice):.2f} s (to reach: at most 1 s)")


def not_alive() -> int:
    return sum(not node["Alive"] for node in ray.nodes())


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
    deadline = time.time() + timeout_s
    while not condition():
        if time.time() > deadline:
            raise TimeoutError
        time.sleep(0.02)
    return time.time()


def wait_for(directory: str, attempt: int) -> list[dict[str, Any]]:
    """When and where each host's user code started in this attempt; seconds since the epoch."""

    def starts() -> list[Path]:
        return list(Path(directory).glob(f"{attempt}-*"))

    wait_until(lambda: len(starts()) == HOSTS)
    time.sleep(0.1)
    return [json.loads(path.read_text()) for path in starts()]


def last_start(starts: list[dict[str, Any]]) -> float:
    return max(start["started"] for start in starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "warm", "row", "cold", "recovery"], default="all")
    parser.add_argument("--samples", type=int, help="default: 10 warm, 5 rows, 3 cold, 3 recoveries")
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.driver:
        driver(args.driver, args.address)
        return
    if args.what in ("all", "warm"):
        warm(args.samples or 10)
    if args.what in ("all", "row"):
        row(args.samples or 5)
    if args.what in ("all", "cold"):
        cold(args.samples or 3)
    if args.what in ("all", "recovery"):
        recovery(args.samples or 3)


if __name__ == "__main__":
    main()
