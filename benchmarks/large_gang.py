"""What a gang of many hosts costs the pool and its SliceActors: launch, watch, notice, one failure, one end.

    python benchmarks/large_gang.py                     # 1,024 hosts, as 1, 16 and 64 slices; about five minutes
    python benchmarks/large_gang.py --slices 16         # one of them
    python benchmarks/versions.py CHECKOUT large_gang.py --slices 16    # in turn with another version of iris_ray

All of it is real but the hosts: this process is the pool, with the attempt of a real job, and each SliceActor is a Ray
actor. One further Ray actor stands for the TPUHostActors and task processes of all hosts: it answers at once. So the
CPU time of the pool and of the SliceActors is what they would take on a cluster. It is read from the kernel. The times
by the clock are not: all that the hosts answer comes from one process. *Launch* begins once a process waits on each
host, which is *start of processes*.
"""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # as in a simulated cluster; Ray would leave a token in the home
os.environ.setdefault("RAY_worker_niceness", "0")

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.pool.attempt import Attempt
from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.launch import launch_plan
from iris_ray.actors.pool.services import Pool, pool_parts
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import (
    AttemptOrder,
    HostPlace,
    HostReady,
    ProcessSpec,
    ProcessStart,
    Progress,
    RunRequest,
    TaskLaunch,
)
from iris_ray.actors.protocol.version import versions_here
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.outcomes import EndKind, HostEvidence, TaskEnd

HOSTS = 1024
WATCH_S = 20.0
PORTS = 20_000, 20_001, 20_002, 20_003


class MadeUpHosts:
    """Stands for the TPUHostActors and the task processes of all hosts. Tasks run until they are told to end."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._pids = 0
        self._begin()

    def _begin(self) -> None:
        self._watches: set[str] = set()
        self._started = 0
        self._returns = asyncio.Event()
        self._crashes = asyncio.Event()
        self._saves = asyncio.Event()

    # -- asked by the benchmark -----------------------------------------------------------------------------------

    async def calls(self) -> int:
        """Return how many calls have come since the last look."""
        total, self._calls = self._calls.total(), Counter()
        return total

    async def all_started(self, count: int) -> None:
        while self._started < count:
            await asyncio.sleep(0.001)

    async def let(self, what: str) -> None:
        """Have all tasks return or save, or one of them crash."""
        {"return": self._returns, "crash": self._crashes, "save": self._saves}[what].set()

    async def anew(self) -> None:
        self._begin()

    # -- a host ---------------------------------------------------------------------------------------------------

    async def versions(self) -> dict[str, Any]:
        return versions_here()

    async def healthy(self) -> bool:
        self._calls["healthy"] += 1
        return True

    async def watch_peers(
        self, place: str, watch: str, peers: Mapping[int, tuple[ActorHandle, str]], silence_s: float
    ) -> None:
        self._calls["watch_peers"] += 1
        self._watches.add(watch)

    async def silent_peers(self, place: str, watch: str) -> tuple[dict[int, str], dict[int, str]] | None:
        self._calls["silent_peers"] += 1
        return ({}, {}) if watch in self._watches else None

    async def start_process(self, start: ProcessStart) -> HostReady:
        self._calls["start_process"] += 1
        self._pids += 1
        return HostReady(self._pids, PORTS, "10.0.0.1:20004")

    async def run(self, pid: int, launch: TaskLaunch) -> TaskEnd:
        self._calls["run"] += 1
        self._started += 1
        ends = {self._returns: TaskEnd(EndKind.RETURNED, time.time(), b"a small result", exit_code=0)}
        if launch.info.task_index == launch.info.num_tasks // 2:
            ends[self._crashes] = TaskEnd(EndKind.CRASHED, time.time(), error="was killed by SIGKILL")
        waits = {asyncio.ensure_future(event.wait()): end for event, end in ends.items()}
        done, late = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in late:
            wait.cancel()
        return waits[done.pop()]

    async def stop(self, pid: int, reason: str | None, exit_grace: float = 0.0) -> TaskEnd:
        self._calls["stop"] += 1
        return TaskEnd(EndKind.STOPPED, time.time(), error=reason or "it had returned")

    async def notify(self, pid: int, notice: Notice, sent_at: float) -> bool:
        self._calls["notify"] += 1
        await self._saves.wait()
        return True

    async def meet_gang(self, pid: int, attempt: AttemptId, peers: Sequence[tuple[ActorHandle, str]]) -> None:
        self._calls["meet_gang"] += 1

    async def hear_notice(self, attempt: AttemptId, notice: Notice, sent_at: float) -> None:
        self._calls["hear_notice"] += 1

    async def progress(self, pid: int) -> Progress:
        self._calls["progress"] += 1
        return Progress(None, None)


class Slices:
    """The slices of the gang, as an attempt sees those that its pool holds."""

    def __init__(self, places: Sequence[Sequence[HostPlace]], hosts: ActorHandle) -> None:
        slice_actor = ray.remote(SliceActor).options(num_cpus=0, max_concurrency=100)
        self._hosts = hosts
        self.actors = {
            hosts_of[0].slice_name: slice_actor.remote(hosts_of[0].slice_name, [hosts] * len(hosts_of))
            for hosts_of in places
        }
        self._count = len(places[0])
        self._generation = 0

    async def start_processes(self) -> None:
        """Have a process wait on every host."""
        self._generation += 1
        start = SliceActor.start_processes
        what = self._generation, ProcessSpec(), (), frozenset[int](), "group", 300.0
        calls = (self.actor(name).ask_within(300.0, start, *what) for name in self.actors)
        assert not any(isinstance(reply, Unreachable) for reply in await asyncio.gather(*calls))

    def actor(self, name: str) -> Actor[SliceActor]:
        return Actor(self.actors[name], f"slice {name}")

    def host_actors(self, name: str) -> list[Actor[Any]]:
        return [Actor(self._hosts, f"{name} host {i}") for i in range(self._count)]

    async def ask_hosts(self, name: str, timeout_s: float) -> dict[int, Unreachable | None]:
        """All hosts answer, though the machine may be too busy for their SliceActor to say so in time."""
        return dict.fromkeys(range(self._count))

    def __contains__(self, name: str) -> bool:
        return name in self.actors

    def take_processes(self, names: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(names, self._generation)

    async def end_tasks(self, name: str, hosts: object) -> None: ...


class NoController:
    """A Controller that has heard nothing about any host."""

    async def ask_once(self, question: object, *args: object) -> dict[str, HostEvidence]:
        return {}


class Meter:
    """CPU time of this process, the pool, and of the SliceActors; and the calls that the hosts get."""

    def __init__(self, slices: Slices, hosts: ActorHandle) -> None:
        pid_of = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in slices.actors.values()]
        self._slice_actors = [psutil.Process(pid) for pid in ray.get(pid_of)]
        print(f"\nA SliceActor's pid, for a profiler: {self._slice_actors[0].pid}", flush=True)
        self._hosts = hosts

    async def measure(self, what: str, hosts: int, step: Awaitable[Any]) -> Any:
        """Await one step, and print what it has cost."""
        await self._hosts.calls.remote()
        pool, actors, began = self._cpu(psutil.Process()), self._cpu(*self._slice_actors), time.monotonic()
        result = await step
        took = time.monotonic() - began
        pool, actors = self._cpu(psutil.Process()) - pool, self._cpu(*self._slice_actors) - actors
        calls = await self._hosts.calls.remote()
        print(
            f"  {what:<24}{took:8.2f} s {1000 * pool / hosts:9.3f} {1000 * actors / hosts:9.3f}"
            f" {100 * pool / took:8.1f} {100 * actors / took:8.1f} {calls / took:9.0f}",
            flush=True,
        )
        return result

    def _cpu(self, *processes: psutil.Process) -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def placed(slices: int) -> tuple[tuple[HostPlace, ...], ...]:
    per_slice = HOSTS // slices
    return tuple(
        tuple(HostPlace(f"node-{s}-{i}", f"10.{s}.{i // 256}.{i % 256}", f"slice-{s}", i) for i in range(per_slice))
        for s in range(slices)
    )


async def bench(slices: int) -> None:
    hosts = ray.remote(MadeUpHosts).options(num_cpus=0, max_concurrency=10 * HOSTS).remote()
    places = placed(slices)
    held = Slices(places, hosts)
    await held.start_processes()  # the connections are there from now on
    meter = Meter(held, hosts)
    print(f"\n{HOSTS:,} hosts, {slices} slices      time   ms of CPU per host     % of a core       calls/s")
    print("                                        pool  SliceActors    pool  SliceActors  to hosts")
    gang = CoschedulingConfig(num_groups=slices)
    spec = JobSpec(
        job_id="gang",
        owner="pool",
        name="gang",
        device=f"v5p-{8 * HOSTS // slices}",
        replicas=HOSTS // slices,
        coscheduling=gang,
    )
    request = RunRequest(spec, b"f" * 2000, {"NAME": "value"}, ProcessSpec(), 60.0)

    async def start(number: int) -> tuple[Attempt, "asyncio.Task[Any]"]:
        order = AttemptOrder(AttemptId("gang", number), places, {"TPU": 4.0}, 1, 1)
        attempt = Attempt(held, NoController(), pool_parts(Pool(NoController()), ()), request, order)  # type: ignore[arg-type]
        place = AttemptPlace(order)
        running = asyncio.ensure_future(
            attempt.run(launch_plan(request, place, {place.names[0]: [PORTS]}), lambda: None, lambda: None)
        )
        await hosts.all_started.remote(HOSTS)
        return attempt, running

    for number, end in enumerate(("return", "crash", "save"), 1):
        await hosts.anew.remote()
        await meter.measure("start of processes", HOSTS, held.start_processes())
        attempt, running = await meter.measure("launch", HOSTS, start(number))
        if end == "return":
            await asyncio.sleep(3.0)  # until the hosts know each other
            await meter.measure("watch", HOSTS, asyncio.sleep(WATCH_S))
        await hosts.let.remote(end)
        if end == "save":
            attempt.notify(Notice(NoticeKind.PREEMPTION, "maintenance", time.time() + 60.0))
        what = {"return": "all return", "crash": "one crashes", "save": "notice, all save"}[end]
        verdict = (await meter.measure(what, HOSTS, running)).verdict
        assert verdict.succeeded == (end == "return"), verdict.result
        if end == "return":
            await meter.measure("end of all processes", HOSTS, attempt.shutdown.stop_all(None))
    for actor in (hosts, *held.actors.values()):
        ray.kill(actor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, nargs="*", default=[1, 16, 64], help="into how many slices")
    given = parser.parse_args()
    ray.init("local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    for slices in given.slices:
        asyncio.run(bench(slices))


if __name__ == "__main__":
    main()
