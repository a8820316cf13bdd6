"""What the Controller costs: a storm of tasks, dispatch and report latency, its journal, and its recovery.

    python benchmarks/controller.py            # everything; about two minutes on 2 cores
    python benchmarks/controller.py --quick    # a tenth of the fleet, few samples; about 20 seconds
    python benchmarks/controller.py --without-history    # the same without the history, to compare

All of it is real but the hosts: the Controller is a Ray actor with its journal in Ray's key-value store, and hears of
jobs from other Ray actors as in production. Ray's node table is made up (640 slices, 10,176 hosts), and so is what a
pool does with an order: it reports RUNNING, then SUCCEEDED, then the confirmed end, each as soon as the report before
it is answered. Pools and Controller share the machine, so the figures of the clock depend on its cores; those in CPU
time are the Controller's own.
"""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # as in a simulated cluster; Ray would leave a token in the home
os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else the machine does goes before the Controller

import argparse
import asyncio
import contextlib
import pickle
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from fake_cluster import FakeNodes, FakePool, Timing, hosts_of, spec
from figures import cpu_s, quantiles, row, spent, spread
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.node_table import registration
from iris_ray.actors.protocol.status import PAGE, JobStatus
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.scheduler import Scheduler
from iris_ray.state import ControllerState
from iris_ray.state.events import AttemptEndConfirmedEvent, JobCancelledEvent, JobSubmittedEvent, WorkerRegisteredEvent

LARGE, SMALL = "v4-128", "v4-64"
SMALL_SLICES = 8
POOLS = 2
TRANSITIONS = 3  # PENDING → ASSIGNED → RUNNING → SUCCEEDED


@dataclass(frozen=True)
class Scale:
    slices: int
    storms: int
    queued: int
    samples: int
    kills: int
    idle_s: float

    @property
    def fleet(self) -> dict[str, int]:
        """How many slices there are of each type."""
        return {LARGE: self.slices - SMALL_SLICES, SMALL: SMALL_SLICES}

    @property
    def gangs(self) -> list[str]:
        """The types of the gangs that fill the fleet."""
        return [tpu_type for tpu_type, count in self.fleet.items() for _ in range(count)]


FULL = Scale(slices=640, storms=5, queued=1000, samples=300, kills=5, idle_s=10.0)
QUICK = Scale(slices=64, storms=2, queued=100, samples=40, kills=1, idle_s=2.0)


# -- the Controller from outside ---------------------------------------------------------------------------------------


class Subject:
    """The Controller that is measured."""

    def __init__(self, scale: Scale, history: Path | None) -> None:
        self.scale = scale
        self.actor = (
            ray.remote(Controller)
            .options(num_cpus=0, max_concurrency=10_000, max_restarts=-1)
            .remote(FakeNodes(scale.fleet), directory=lambda: history)
        )
        kind = ray.remote(FakePool).options(num_cpus=0, max_concurrency=10_000)
        self.pools = [kind.remote(self.actor, f"user-{number}") for number in range(POOLS)]

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(ray.get(self.actor.about.remote())["pid"])

    def on_all_pools(self, method: str, *args: Any) -> list[Any]:
        """The arguments that are lists are dealt out."""
        calls = []
        for number, pool in enumerate(self.pools):
            own = [arg[number::POOLS] if isinstance(arg, list) else arg for arg in args]
            calls.append(getattr(pool, method).remote(*own))
        return ray.get(calls)

    def jobs(self, state: JobState) -> int:
        return sum(job.state is state for job in self.all_jobs())

    def all_jobs(self) -> list[JobStatus]:
        """Page by page."""
        page: list[JobStatus] = asked_until_answered(self.actor.list_jobs)
        jobs = list(page)
        while len(page) == PAGE:
            page = asked_until_answered(self.actor.list_jobs, jobs[-1].number)
            jobs += page
        return jobs


# -- measurements ------------------------------------------------------------------------------------------------------


def measure_storms(subject: Subject) -> None:
    scale, process = subject.scale, subject.process
    gangs = scale.gangs
    tasks = sum(map(hosts_of, gangs))
    idle = spent(process, lambda: time.sleep(scale.idle_s))
    row(f"nothing happens at {tasks:,} hosts: share of a core", f"{idle.cpu_s / idle.wall_s:.0%}")
    storms = [spent(process, lambda: subject.on_all_pools("storm", gangs)) for _ in range(scale.storms)]
    done = TRANSITIONS * tasks
    row(
        f"{tasks:,} tasks in {len(gangs)} gangs: task transitions per second",
        spread([done / storm.wall_s for storm in storms], ",.0f"),
        "≥ 5,000",
    )
    row("… per second of the Controller's CPU time", spread([done / storm.cpu_s for storm in storms], ",.0f"))
    row("… from the first submission to the last confirmed end, s", spread([s.wall_s for s in storms], ".2f"))
    row("… the Controller's CPU time, s", spread([storm.cpu_s for storm in storms], ".2f"))
    row("… its resident memory afterwards, MB", f"{process.memory_info().rss / 1e6:.0f}", "< 500")


def measure_latency(subject: Subject, queued: int) -> None:
    """One gang after the other, on slices that are free all the time."""
    samples, process = subject.scale.samples, subject.process
    timings: list[Timing] = []
    work = spent(process, lambda: timings.extend(ray.get(subject.pools[0].one_by_one.remote(SMALL, samples))))
    dispatched = [1000 * timing.dispatched for timing in timings]
    reported = [1000 * report for timing in timings for report in timing.reports]
    goal = "p50 < 20" if queued else ""
    row(f"{queued:,} jobs queued: submit → order at the pool, ms", quantiles(dispatched), goal)
    row("… report → visible (answered), ms", quantiles(reported))
    row("… the Controller's CPU time per gang, all else included, ms", f"{1000 * work.cpu_s / samples:.1f}")


def measure_recovery(subject: Subject) -> None:
    """The Controller is killed while every host runs a task."""
    scale, tasks = subject.scale, sum(map(hosts_of, subject.scale.gangs))
    total, rays, ours, cpu = [], [], [], []
    for _ in range(scale.kills):
        time.sleep(2.0)
        killed = end(subject.process)
        jobs = subject.all_jobs()
        answered = time.time()
        running = [job for job in jobs if job.state is JobState.RUNNING]
        assert sum(sum(job.tasks.values()) for job in running) == tasks, f"{len(running)} jobs run"
        cpu.append(cpu_s(subject.process))
        started = ray.get(subject.actor.about.remote())["started_at"]
        total.append(answered - killed)
        rays.append(started - killed)
        ours.append(answered - started)
    row(f"SIGKILL at {tasks:,} live tasks → list_jobs() has all RUNNING, s", spread(total, ".2f"), "< 3")
    row("… of a bare Ray actor → it answers a call, s", spread(recoveries_of_bare_actor(scale.kills), ".2f"))
    row("… until Ray has made the new Controller object, s", spread(rays, ".2f"))
    row("… from then until it is asked, knows hosts, jobs and pools again, and answers, s", spread(ours, ".2f"))
    row("… the new process's CPU time so far, imports included, s", spread(cpu, ".2f"))


class Bare:
    """The least that Ray can bring back."""

    async def pid(self) -> int:
        return os.getpid()


def recoveries_of_bare_actor(kills: int) -> list[float]:
    actor = ray.remote(Bare).options(num_cpus=0, max_concurrency=10_000, max_restarts=-1).remote()
    took = []
    for _ in range(kills):
        process = psutil.Process(ray.get(actor.pid.remote()))
        time.sleep(2.0)
        killed = end(process)
        asked_until_answered(actor.pid)
        took.append(time.time() - killed)
    ray.kill(actor)
    return took


def end(process: psutil.Process) -> float:
    """SIGKILL; returns when it is gone, with the time of the signal."""
    killed = time.time()
    os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
    return killed


def asked_until_answered(method: Any, *args: Any) -> Any:
    while True:
        try:
            return ray.get(method.remote(*args))
        except RayError:
            time.sleep(0.01)


def measure_journal(fleet: dict[str, int], slices: int, rounds: int) -> None:
    """Measure what it costs to record a gang's assignment, in this process, in a journal that is dropped afterwards."""
    state, journal, table = ControllerState(), Journal(), FakeNodes(fleet)()
    journal.begin()  # from now on the Controller that was measured before acknowledges nothing
    for node in table.nodes:
        worker = registration(node, table, ours=0.0)
        assert isinstance(worker, WorkerRegisteredEvent)
        state.handle_event(worker)
    sizes, pickling, writing = [], [], []
    scheduler = Scheduler()
    loop = asyncio.new_event_loop()
    for number in range(rounds):
        job = pickle.loads(pickle.dumps(spec(LARGE, "a pool", f"user-{number % 7}", slices)))
        state.handle_event(JobSubmittedEvent(job, 1.0))
        (assignment,) = scheduler.find_assignments(state.pending(), state.fleet, state.usage, 1.0).assignments
        state.handle_event(assignment)
        record = state.record(job.job_id)
        assert record is not None
        cpu = time.process_time()
        sizes.append(len(record.to_bytes()))
        pickling.append(1000 * (time.process_time() - cpu))
        start = time.perf_counter()
        loop.run_until_complete(journal.write(state))
        writing.append(1000 * (time.perf_counter() - start))
        state.handle_event(JobCancelledEvent(job.job_id, "measured"))
        state.handle_event(AttemptEndConfirmedEvent(AttemptId(job.job_id, 1)))
        state.unrecorded.clear()
    loop.close()
    tasks = slices * hosts_of(LARGE)
    row(
        f"journal, one committed gang of {tasks} tasks: bytes; ms; of them CPU time for the record, ms",
        f"{statistics.median(sizes):,.0f}; {statistics.median(writing):.2f}; {statistics.median(pickling):.2f}",
    )


def measure(scale: Scale, history: Path | None) -> None:
    subject = Subject(scale, history)
    ray.get(subject.actor.ping.remote())
    print(f"The Controller is process {subject.process.pid}.\n")
    row("What", "Measured", "To reach")
    print("|---|---:|---:|")
    measure_storms(subject)
    measure_latency(subject, 0)
    subject.on_all_pools("start", [LARGE] * scale.fleet[LARGE])
    subject.on_all_pools("queue", LARGE, scale.queued // POOLS)
    assert subject.jobs(JobState.PENDING) == scale.queued
    measure_latency(subject, scale.queued)
    subject.on_all_pools("cancel_queued")
    subject.on_all_pools("start", [SMALL] * scale.fleet[SMALL])
    measure_recovery(subject)
    subject.on_all_pools("finish")
    assert not subject.jobs(JobState.RUNNING)
    row("… resident memory in the end, MB", f"{subject.process.memory_info().rss / 1e6:.0f}", "< 500")
    for slices in (1, 16):
        measure_journal(scale.fleet, slices, min(100, scale.samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the fleet, few samples")
    parser.add_argument("--without-history", action="store_true", help="the Controller writes no history")
    options = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as history:
            measure(QUICK if options.quick else FULL, None if options.without_history else Path(history))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
