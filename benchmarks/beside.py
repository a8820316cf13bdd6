"""What open sessions cost launches and dispatches: each kind by itself, all at once, and what the machine alone costs.

    python benchmarks/beside.py                # 50 shells, 20 forwarded ports, 10 searches; ten minutes, eight cores
    python benchmarks/beside.py --together     # the same, but everything shares all cores
    python benchmarks/beside.py --small        # a fifth of them, fewer samples; three minutes, two cores
    python benchmarks/beside.py --rounds 2     # all of it twice, in turn

One cluster of real Ray nodes has three slices. A job holds one, and all sessions are beside its four tasks. Launches
use the second. The third is for jobs that a pool only reports of (`fake_cluster.py`): the Controller does all its work
for them, and nobody else does any. Each shell is idle, each port carries a connection that is used once a second, and
each search begins again a second after its end.

In a cluster each host has its own cores. So the held slice and the people's processes have one half of the machine's
cores, and everything else has the other half. With ``--together`` they share all of them. Two rows have no session of
iris_ray: as many greps as searches, over the same files in the same rhythm, and a program that keeps every core of
the held slice busy. What those cost is the machine's.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else the machine does goes before the Controller

import argparse
import asyncio
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fake_cluster import FakePool
from figures import percentile, spent
from iris_ray import IrisClient, ResourceSpec, get_job_info, run_on_pod, tpu_device
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.logs.client import host_logs
from iris_ray.logs.search import LogSearch
from iris_ray.sessions.client import TaskSession, locate
from iris_ray.sessions.core import CommandLine, Size
from iris_ray.sessions.port_forward import PortForward
from iris_ray.testing import SimulatedCluster

HELD, HOSTS, LAUNCHED, REPORTED = "v4-32", 4, "v4-16", "v4-8"
LINES, PATTERN = 200_000, "step 7777[0-9]:"
SETTLE_S = 3.0
"""Before each launch: what the launch before has left has ended before that."""
STORMS = 3
OPEN, STILL_OPEN = "all sessions are open\n", "all sessions are still open\n"
"""What the process that keeps them says."""
AT_ONCE = 5
"""So many sessions are opened at a time. Each is a process that imports Ray."""


@dataclass(frozen=True)
class Sessions:
    """So much is open."""

    shells: int = 0
    ports: int = 0
    searches: int = 0


@dataclass(frozen=True)
class Scale:
    all: Sessions
    launches: int
    gangs: int
    storm: int
    idle_s: float


FULL = Scale(Sessions(shells=50, ports=20, searches=10), launches=6, gangs=150, storm=100, idle_s=6.0)
SMALL = Scale(Sessions(shells=10, ports=4, searches=2), launches=2, gangs=30, storm=30, idle_s=4.0)


# -- what is open ------------------------------------------------------------------------------------------------------


def echoes() -> None:
    """The tasks beside which the sessions are: a long log, and a server that echoes."""
    from socketserver import StreamRequestHandler, ThreadingTCPServer

    class Echo(StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(line)

    me = get_job_info()
    assert me is not None
    print(
        "\n".join(
            f"step {number}: loss {1 / (number + 1):.6f}, and what else a program says" for number in range(LINES)
        )
    )
    ThreadingTCPServer.allow_reuse_address = True
    with ThreadingTCPServer(("127.0.0.1", port_of(me.task_index)), Echo) as server:
        server.serve_forever()


def port_of(task_index: int) -> int:
    """A port of the machine on which all simulated hosts are."""
    return 18_700 + task_index


async def keep_open(job_id: str, wanted: Sessions) -> None:
    """Open all sessions, say so, and keep them until stdin ends; in a process of its own."""
    controller = ControllerConnection()
    loop = asyncio.get_running_loop()
    ends = asyncio.Event()
    loop.add_reader(0, ends.set)
    ready = [asyncio.Event() for _ in range(wanted.shells + wanted.ports + wanted.searches)]
    left = iter(ready)
    work = [
        *(shell(controller, job_id, number % HOSTS, next(left)) for number in range(wanted.shells)),
        *(forward(controller, job_id, number % HOSTS, next(left)) for number in range(wanted.ports)),
        *(search(controller, job_id, next(left)) for _ in range(wanted.searches)),
    ]
    running: list[asyncio.Task[None]] = []
    for first in range(0, len(work), AT_ONCE):
        running += [asyncio.ensure_future(one) for one in work[first : first + AT_ONCE]]
        for is_open in ready[first : first + AT_ONCE]:
            opened = asyncio.ensure_future(is_open.wait())
            await asyncio.wait([opened, *running], return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                await asyncio.gather(*(one for one in running if one.done()))  # it tells why it has ended
                sys.exit("a session has ended")
            await opened
    print(OPEN, end="", flush=True)
    await asyncio.wait([asyncio.ensure_future(ends.wait()), *running], return_when=asyncio.FIRST_COMPLETED)
    if not any(one.done() for one in running):
        print(STILL_OPEN, end="", flush=True)
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def shell(controller: ControllerConnection, job_id: str, task: int, ready: asyncio.Event) -> None:
    place = await asyncio.to_thread(locate, controller, job_id, task)
    async with TaskSession(controller, place) as session:
        channel = await session.run(CommandLine(("bash", "--norc"), Size(24, 80), True, "xterm"))
        async for _ in channel.pieces():  # its prompt
            ready.set()


async def forward(controller: ControllerConnection, job_id: str, task: int, ready: asyncio.Event) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    forwarding = asyncio.ensure_future(PortForward(controller, job_id, task, port_of(task), lines.put_nowait).run(0))
    said = await lines.get()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(said.split()[0].rpartition(":")[2]))
    try:
        while not forwarding.done():
            writer.write(b"hello\n")
            assert await reader.readline() == b"hello\n"
            ready.set()
            await asyncio.sleep(1.0)
    finally:
        writer.close()
        forwarding.cancel()


async def search(controller: ControllerConnection, job_id: str, ready: asyncio.Event) -> None:
    with host_logs(controller) as logs:
        while True:
            found = await asyncio.to_thread(logs.search, job_id, range(HOSTS), None, LogSearch(PATTERN))
            if notes := {one.note for one in found if one.note is not None}:
                sys.exit(f"a search has not seen all: {notes}")
            assert sum(one.found.matches for one in found if one.found is not None) == 10 * HOSTS
            ready.set()
            await asyncio.sleep(1.0)


@dataclass(frozen=True)
class Surroundings:
    """The cluster and the held job beside which everything happens.

    Attributes:
        cores: of the held slice and the people's processes.
    """

    cluster: SimulatedCluster
    job_id: str
    cores: set[int]

    @contextmanager
    def open(self, wanted: Sessions) -> Iterator[None]:
        """Keep sessions open within."""
        counts = f"{wanted.shells},{wanted.ports},{wanted.searches}"
        words = [sys.executable, __file__, f"--open={self.job_id}", f"--sessions={counts}"]
        with self._started(words, env={**os.environ, "RAY_ADDRESS": self.cluster.address}) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if OPEN not in process.stdout:  # this reads on, past warnings of Ray
                sys.exit("the sessions could not be opened")
            yield
            process.stdin.close()
            assert STILL_OPEN in process.stdout, "some have ended before the end of the measurement"

    @contextmanager
    def greps(self, count: int) -> Iterator[None]:
        """Have so many greps of the system search the logs of the held job, each again a second after its end."""
        files = [str(path) for host in range(HOSTS) for path in self._logs(host)]
        loop = 'while sleep 1; do grep -c "$0" "$@"; done & ' * count + "read end; kill $(jobs -p)"
        with self._started(["bash", "-c", loop, PATTERN, *files]):
            yield

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep every core of the held slice busy."""
        loop = "while :; do :; done & " * len(self.cores) + "read end; kill $(jobs -p)"
        with self._started(["bash", "-c", loop]):
            yield

    def _logs(self, host: int) -> list[Path]:
        (slice_name,) = (name for name in self.cluster.slice_names if name.startswith(HELD))
        found = [
            path for path in self.cluster.host_dir(slice_name, host).rglob(f"*{self.job_id}*/**/*") if path.is_file()
        ]
        assert sum(path.stat().st_size for path in found) > LINES * 40, found
        return found

    @contextmanager
    def _started(self, words: list[str], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """Run a program on the cores of the held slice, until it reads the end of its input."""
        cores = ",".join(map(str, sorted(self.cores)))
        with subprocess.Popen(
            ["taskset", "-c", cores, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        ) as process:
            assert process.stdin is not None
            try:
                yield process
            finally:
                process.stdin.close()
                process.wait()


# -- what is measured --------------------------------------------------------------------------------------------------


def empty() -> None:
    """The user's function."""


@dataclass
class Found:
    """What was measured in one situation."""

    launches: list[float] = field(default_factory=list)
    dispatches: list[float] = field(default_factory=list)
    storms: list[float] = field(default_factory=list)
    storm_cpu: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)


class Measured:
    """The Controller of a cluster, and a pool that only reports."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        controller = ray.get_actor(CONTROLLER_NAME, NAMESPACE)
        self._controller = psutil.Process(ray.get(controller.about.remote())["pid"])
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        kind = ray.remote(FakePool).options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=here)
        self._pool: Any = kind.remote(controller, "reports")

    def measure(self, found: Found) -> None:
        """Add to what was found in a situation."""
        scale = self._scale
        for _ in range(scale.launches):
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            run_on_pod(empty, LAUNCHED, keep_warm=600)
            found.launches.append(1000 * (time.perf_counter() - start))
        time.sleep(SETTLE_S)
        idle = spent(self._controller, lambda: time.sleep(scale.idle_s))
        found.idle.append(100 * idle.cpu_s / idle.wall_s)
        timings = ray.get(self._pool.one_by_one.remote(REPORTED, scale.gangs))
        found.dispatches += [1000 * timing.dispatched for timing in timings]
        for _ in range(STORMS):
            storm = spent(self._controller, lambda: ray.get(self._pool.storm.remote([REPORTED] * scale.storm)))
            found.storms.append(scale.storm / storm.wall_s)
            found.storm_cpu.append(1000 * storm.cpu_s / scale.storm)


def show(measured: dict[str, Found]) -> None:
    figures: dict[str, Callable[[Found], float]] = {
        "launch, ms": lambda found: median(found.launches),
        "submit → order, ms": lambda found: median(found.dispatches),
        "99th in 100": lambda found: percentile(found.dispatches, 0.99),
        "storm, jobs/s": lambda found: median(found.storms),
        "Controller's CPU for each, ms": lambda found: median(found.storm_cpu),
        "at rest, % of a core": lambda found: median(found.idle),
    }
    print(f"| Beside the job | {' | '.join(figures)} |\n|---|{'---:|' * len(figures)}")
    for what, found in measured.items():
        print(f"| {what} | {' | '.join(f'{of(found):.1f}' for of in figures.values())} |", flush=True)


def situations(scale: Scale, around: Surroundings) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    every, one = scale.all, Sessions()
    return {
        "nothing": nullcontext,
        f"{every.shells} shells": lambda: around.open(replace(one, shells=every.shells)),
        f"{every.ports} ports": lambda: around.open(replace(one, ports=every.ports)),
        f"{every.searches} searches": lambda: around.open(replace(one, searches=every.searches)),
        "all of these": lambda: around.open(every),
        f"{every.searches} greps of the system": lambda: around.greps(every.searches),
        "busy cores": around.busy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a fifth of the sessions, fewer samples")
    parser.add_argument("--together", action="store_true", help="everything shares all cores of the machine")
    parser.add_argument("--rounds", type=int, default=1, help="so often each situation is measured, in turn")
    parser.add_argument("--only", default="", help="nothing, and the situations that have this word")
    parser.add_argument("--open", metavar="JOB", help=argparse.SUPPRESS)
    parser.add_argument("--sessions", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
        asyncio.run(keep_open(options.open, Sessions(*map(int, options.sessions.split(",")))))
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    scale, cores = SMALL if options.small else FULL, sorted(os.sched_getaffinity(0))
    half = 0 if options.together else len(cores) // 2
    os.sched_setaffinity(0, cores[:half] or cores)
    with SimulatedCluster({LAUNCHED: 1, REPORTED: 1}, quiet=True) as cluster:
        theirs = set(cores[half:])
        cluster.add_slice(HELD, under=["taskset", "-c", ",".join(map(str, theirs))])
        job = IrisClient().submit(echoes, "held", resources=ResourceSpec(device=tpu_device(HELD)), detached=True)
        run_on_pod(empty, LAUNCHED, keep_warm=600)
        subject, around = Measured(scale), Surroundings(cluster, job.job_id, theirs)
        subject.measure(Found())  # what only happens once
        measured: dict[str, Found] = defaultdict(Found)
        for _ in range(options.rounds):
            for what, surroundings in situations(scale, around).items():
                if options.only in what or what == "nothing":
                    with surroundings():
                        subject.measure(measured[what])
            subject.measure(measured["nothing"])  # before and after all else
        show(measured)
        job.cancel()


if __name__ == "__main__":
    main()
