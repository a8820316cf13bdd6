"""What open sessions and the history cost launches and dispatches: everything with and without them, in one run.

    python benchmarks/beside.py                # 50 shells, 20 forwarded ports, 10 searches; about eight minutes
    python benchmarks/beside.py --small        # a fifth of them, fewer samples; two to three minutes

One cluster of real Ray nodes has three slices. A job holds one, and all sessions are beside its four tasks. Launches
use the second. The third is for jobs that a pool only reports of (`fake_cluster.py`): the Controller does all its work
for them, and nobody else does any. Each shell is idle, each port carries a connection that is used once a second, and
each search begins again a second after its end. All of it shares the machine's cores with what is measured; what it
costs the Controller is its CPU time.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else the machine does goes before the Controller

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

from fake_cluster import FakePool
from figures import percentile, row, spent
from iris_ray import IrisClient, ResourceSpec, get_job_info, run_on_pod, tpu_device
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.host.output.log_search import LogSearch
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.session import CommandLine, Size
from iris_ray.client.host_logs import host_logs
from iris_ray.client.port_forward import PortForward
from iris_ray.client.task_session import TaskSession, locate
from iris_ray.model.cluster_settings import HISTORY, OFF, ON
from iris_ray.testing import SimulatedCluster

HELD, HOSTS, LAUNCHED, REPORTED = "v4-32", 4, "v4-16", "v4-8"
LINES, PATTERN = 200_000, "step 7777[0-9]:"
SETTLE_S = 6.0
"""Before each launch: standbys are ready again well before that."""
OPEN, STILL_OPEN = "all sessions are open\n", "all sessions are still open\n"
"""What the process that keeps them says."""
AT_ONCE = 5
"""So many sessions are opened at a time. Each is a process that imports Ray."""


@dataclass(frozen=True)
class Scale:
    shells: int
    forwards: int
    searches: int
    launches: int
    gangs: int
    storm: int
    idle_s: float

    def __str__(self) -> str:
        return f"{self.shells} shells, {self.forwards} ports, {self.searches} searches"


FULL = Scale(shells=50, forwards=20, searches=10, launches=8, gangs=200, storm=300, idle_s=20.0)
SMALL = Scale(shells=10, forwards=4, searches=2, launches=3, gangs=50, storm=60, idle_s=10.0)


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


async def keep_open(job_id: str, scale: Scale) -> None:
    """Open all sessions, say so, and keep them until stdin ends; in a process of its own."""
    controller = ControllerConnection()
    loop = asyncio.get_running_loop()
    ends = asyncio.Event()
    loop.add_reader(0, ends.set)
    ready = [asyncio.Event() for _ in range(scale.shells + scale.forwards + scale.searches)]
    left = iter(ready)
    work = [
        *(shell(controller, job_id, number % HOSTS, next(left)) for number in range(scale.shells)),
        *(forward(controller, job_id, number % HOSTS, next(left)) for number in range(scale.forwards)),
        *(search(controller, job_id, next(left)) for _ in range(scale.searches)),
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
            assert sum(one.found.matches for one in found if one.found is not None) == 10 * HOSTS
            ready.set()
            await asyncio.sleep(1.0)


@contextmanager
def sessions(address: str, job_id: str, scale: Scale) -> Iterator[None]:
    """Keep sessions open within."""
    words = [sys.executable, __file__, f"--open={job_id}", *(["--small"] if scale is SMALL else [])]
    environ = {**os.environ, "RAY_ADDRESS": address}
    began = time.monotonic()
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if OPEN not in process.stdout:  # this reads on, past warnings of Ray
                sys.exit("the sessions could not be opened")
            print(f"\n{scale}: open after {time.monotonic() - began:.0f} s\n", flush=True)
            yield
            process.stdin.close()
            assert STILL_OPEN in process.stdout, "some have ended before the end of the measurement"
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
    storm: float = 0.0
    storm_cpu: float = 0.0
    idle: float = 0.0


class Measured:
    """The Controller of a cluster, and a pool that only reports."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        controller = ray.get_actor(CONTROLLER_NAME, NAMESPACE)
        self._controller = psutil.Process(ray.get(controller.about.remote())["pid"])
        kind = ray.remote(FakePool).options(num_cpus=0, max_concurrency=10_000)
        self._pool: Any = kind.remote(controller, "reports")

    def measure(self) -> Found:
        scale, found = self._scale, Found()
        for _ in range(scale.launches):
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            run_on_pod(empty, LAUNCHED, keep_warm=600)
            found.launches.append(1000 * (time.perf_counter() - start))
        time.sleep(SETTLE_S)
        idle = spent(self._controller, lambda: time.sleep(scale.idle_s))
        found.idle = 100 * idle.cpu_s / idle.wall_s
        timings = ray.get(self._pool.one_by_one.remote(REPORTED, scale.gangs))
        found.dispatches = [1000 * timing.dispatched for timing in timings]
        storm = spent(self._controller, lambda: ray.get(self._pool.storm.remote([REPORTED] * scale.storm)))
        found.storm, found.storm_cpu = scale.storm / storm.wall_s, 1000 * storm.cpu_s / scale.storm
        return found


def keep_history(on: bool) -> None:
    texts = {HISTORY.name: ON if on else OFF}
    ControllerConnection().ask(ControllerInterface.set_settings, texts, False, "benchmark")


def show(measured: dict[str, Found]) -> None:
    row("What", " | ".join(measured), "")
    print("|---|" + "---:|" * (len(measured) + 1))
    figures: dict[str, Callable[[Found], float]] = {
        f"warm launch on a {LAUNCHED}, ms: median": lambda found: percentile(found.launches, 0.5),
        "submit → order at the pool, ms: median": lambda found: percentile(found.dispatches, 0.5),
        "… worst of 100": lambda found: percentile(found.dispatches, 0.99),
        "storm of jobs that are only reported of: jobs per second": lambda found: found.storm,
        "… the Controller's CPU time for each, ms": lambda found: found.storm_cpu,
        "nothing is launched: the Controller's share of a core, %": lambda found: found.idle,
    }
    for what, of in figures.items():
        row(what, " | ".join(f"{of(found):.1f}" for found in measured.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a fifth of the sessions, fewer samples")
    parser.add_argument("--open", metavar="JOB", help=argparse.SUPPRESS)
    options = parser.parse_args()
    scale = SMALL if options.small else FULL
    if options.open:
        ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
        asyncio.run(keep_open(options.open, scale))
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    with SimulatedCluster({HELD: 1, LAUNCHED: 1, REPORTED: 1}, quiet=True) as cluster:
        job = IrisClient().submit(echoes, "held", resources=ResourceSpec(device=tpu_device(HELD)), detached=True)
        run_on_pod(empty, LAUNCHED, keep_warm=600)
        measured, subject = dict[str, Found](), Measured(scale)
        subject.measure()  # what only happens once
        measured["quiet"] = subject.measure()
        with sessions(cluster.address, job.job_id, scale):
            measured["open"] = subject.measure()
            keep_history(False)
            measured["open, no history"] = subject.measure()
        time.sleep(SETTLE_S)
        measured["no history"] = subject.measure()
        keep_history(True)
        measured["quiet again"] = subject.measure()
        show(measured)
        job.cancel()


if __name__ == "__main__":
    main()
