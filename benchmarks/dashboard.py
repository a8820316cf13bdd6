"""What the dashboard costs on 5,008 hosts with 20 open pages, and how soon a page shows what has changed.

    python benchmarks/dashboard.py            # about two minutes
    python benchmarks/dashboard.py --quick    # a tenth of the fleet, few samples; about 40 seconds

The Controller is real, and so is the dashboard, in a process of its own; the fleet and the pools are made up, by
`benchmarks/fake_cluster.py`. Meanwhile jobs come and go on a fleet of which half is busy. The pages are readers of the
changes, in this process: a browser's own work is not counted.
"""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_worker_niceness", "0")

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import ray
from ray.actor import ActorHandle

from fake_cluster import FakeNodes, FakePool, Timing
from figures import cpu_s, percentile, row, spread
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.controller.controller import Controller

TYPE = "v4-128"


@dataclass(frozen=True)
class Scale:
    slices: int
    pages: int
    seconds: float
    samples: int


FULL = Scale(slices=313, pages=20, seconds=20.0, samples=200)
QUICK = Scale(slices=32, pages=20, seconds=5.0, samples=40)


@dataclass
class Page:
    """An open page.

    Attributes:
        closed: slice → when this page heard that it is closed; by `time.perf_counter`.
        load_s: how long it took to get everything.
        size: of everything, in bytes as they travel.
    """

    closed: dict[str, float] = field(default_factory=dict)
    load_s: float = 0.0
    size: int = 0

    async def read(self, session: aiohttp.ClientSession, url: str, ready: asyncio.Event) -> None:
        start = time.perf_counter()
        async with session.get(f"{url}/api/snapshot") as answer:
            data = await answer.read()
            self.load_s, self.size = time.perf_counter() - start, int(answer.headers["Content-Length"])
            version = json.loads(data)["version"]
        async with session.get(f"{url}/api/changes?since={version}") as answer:
            ready.set()
            async for line in answer.content:
                if line.startswith(b"data: "):
                    now = time.perf_counter()
                    for one in json.loads(line[6:])["put"].get("slices", {}).values():
                        if one["state"] == "closed":
                            self.closed.setdefault(one["name"], now)


@contextmanager
def dashboard(address: str) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "iris_ray", "cluster", "dashboard", "--port", "0", "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
            yield url, psutil.Process(process.pid)
        finally:
            process.kill()


def controller_process(controller: ActorHandle) -> psutil.Process:
    return psutil.Process(ray.get(controller.about.remote())["pid"])


def dispatches(pool: ActorHandle, samples: int) -> list[float]:
    timings: list[Timing] = ray.get(pool.one_by_one.remote(TYPE, samples))
    return [1000 * timing.dispatched for timing in timings]


@dataclass
class Measured:
    """What was measured while pages were open.

    Attributes:
        pages: the pages.
        dispatched: from the submission of a job to its order, in ms.
        cores: what each process needs of a core.
        shown: from an order of an operator until the last page has heard of it, in ms.
    """

    pages: list[Page]
    dispatched: list[float]
    cores: list[float]
    shown: list[float]


async def close_some(controller: ActorHandle, scale: Scale, pages: list[Page]) -> list[float]:
    """Taint free slices, one by one; how long each took until all pages had heard of it, in ms."""
    shown = []
    for number in range(scale.slices - 10, scale.slices):
        name = f"{TYPE}-slice-{number}"
        start = time.perf_counter()
        await asyncio.to_thread(ray.get, controller.taint.remote(name, "closed", "to be measured", "olga"))
        while not all(name in page.closed for page in pages):
            await asyncio.sleep(0.005)
        shown.append(1000 * (max(page.closed[name] for page in pages) - start))
    return shown


async def table(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url) as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def with_pages(
    url: str, scale: Scale, controller: ActorHandle, pool: ActorHandle, served: psutil.Process
) -> Measured:
    """Open the pages, and have jobs come and go."""
    processes = [served, controller_process(controller)]
    pages = [Page() for _ in range(scale.pages)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 24) as session:
        while len(await table(session, f"{url}/api/slices")) < scale.slices:
            await asyncio.sleep(0.1)
        readers = []
        for page in pages:
            ready = asyncio.Event()
            readers.append(asyncio.create_task(page.read(session, url, ready)))
            await ready.wait()
        await asyncio.sleep(2.0)
        before, start = list(map(cpu_s, processes)), time.perf_counter()
        latencies = await asyncio.to_thread(dispatches, pool, scale.samples)
        await asyncio.sleep(max(0.0, scale.seconds - (time.perf_counter() - start)))
        spent = [cpu_s(process) - cpu for process, cpu in zip(processes, before, strict=True)]
        took = time.perf_counter() - start
        shown = await close_some(controller, scale, pages)
        for reader in readers:
            reader.cancel()
    return Measured(pages, latencies, [one / took for one in spent], shown)


def main(scale: Scale) -> None:
    context = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    address = context.address_info["gcs_address"]
    controller = (
        ray.remote(Controller)
        .options(name=CONTROLLER_NAME, namespace=NAMESPACE, num_cpus=0, max_concurrency=10_000)
        .remote(FakeNodes({TYPE: scale.slices}))
    )
    pool = ray.remote(FakePool).options(num_cpus=0, max_concurrency=10_000).remote(controller, "ann")
    ray.get(pool.start.remote([TYPE] * (scale.slices // 2)))
    process = controller_process(controller)
    cpu, start = cpu_s(process), time.perf_counter()
    alone = dispatches(pool, scale.samples)
    time.sleep(max(0.0, scale.seconds - (time.perf_counter() - start)))
    without = (cpu_s(process) - cpu) / (time.perf_counter() - start)
    with dashboard(address) as (url, served):
        measured = asyncio.run(with_pages(url, scale, controller, pool, served))
    print(f"\n{16 * scale.slices:,} hosts, {scale.pages} open pages, jobs that come and go\n")
    print("| what | measured | goal |\n|---|---:|---|")
    row("the dashboard's process, of one core", f"{measured.cores[0]:.1%}", "≤ 5 %")
    row("the Controller's process, of one core", f"{measured.cores[1]:.1%}")
    row("the same jobs without a dashboard", f"{without:.1%}")
    row("dispatch without a dashboard, ms", f"{spread(alone, '.1f')}, p99 {percentile(alone, 0.99):.1f}")
    row(
        "dispatch with pages, ms",
        f"{spread(measured.dispatched, '.1f')}, p99 {percentile(measured.dispatched, 0.99):.1f}",
    )
    row("from an operator's order to all pages, ms", spread(measured.shown, ".0f"), "≤ 1,000")
    row("a page gets everything, ms", spread([1000 * page.load_s for page in measured.pages], ".0f"), "≤ 1,000")
    row("which is, kB", f"{measured.pages[0].size / 1000:.0f}")
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    main(QUICK if parser.parse_args().quick else FULL)
