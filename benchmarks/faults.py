"""How long a gang is away, by kind of fault, with a spare at hand: until it is noticed, and until all tasks run again.

    python -m benchmarks.faults [--samples 3] [--only "host killed"] [--plot docs/recovery-by-fault.png]

A gang on two simulated slices of two hosts, with a third as its spare. Every task notes the time a hundred times a
second. *Noticed* is the time from the fault to the last note of a task that it did not hit: then its gang is being
stopped. *Restart* is the time from there to the first note of the last task of the next attempt. A notice is answered
at once, so its pause begins when the last task has saved.
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import ray

from iris_ray import run_on_pod_ray
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.client.caller_pool import pool_of_this_process
from iris_ray.testing import SimulatedCluster

TPU_TYPE, NOTE_S = "v4-16", 0.01
SETTLE_S = 2.0
"""From the moment when the gang runs and its spare is ready to the fault."""


def noting(directory: str) -> Callable[[], None]:
    """A function whose every task notes the time until it is told to finish, and saves when it is told to move."""

    def note() -> None:
        import iris_ray

        me = iris_ray.get_job_info()
        assert me is not None
        (Path(directory) / f"pid-{me.attempt}-{me.task_index}").write_text(f"{os.getpid()} {me.slice_name}")
        with (Path(directory) / f"notes-{me.attempt}-{me.task_index}").open("a") as notes:
            while not (Path(directory) / "finish").exists():
                notes.write(f"{time.time():.3f}\n")
                notes.flush()
                time.sleep(NOTE_S)
                if told := iris_ray.preemption_notice():
                    told.saved()

    return note


class Victim(Protocol):
    """A gang that is hit.

    Attributes:
        cluster: where it runs.
        number: how many faults came before.
    """

    cluster: SimulatedCluster
    number: int

    def task(self, index: int) -> tuple[int, str]:
        """Return the process of a task, and its slice."""


class Sample:
    """One gang, one fault.

    Args:
        cluster: where it runs.
        number: which sample of this fault.
        directory: an empty one for its notes.
    """

    def __init__(self, cluster: SimulatedCluster, number: int, directory: Path) -> None:
        self.cluster = cluster
        self.number = number
        self._directory = directory
        self._ref = run_on_pod_ray.remote(noting(str(directory)), TPU_TYPE, num_slices=2, spares=1)
        self._until(lambda: self._runs(1))
        self._until(spare_is_ready)
        time.sleep(SETTLE_S)

    def hit(self, fault: Callable[["Sample"], set[int]]) -> tuple[float, float]:
        """Seconds until it was noticed, and from then until all tasks ran again."""
        at = time.time()
        hit = fault(self)
        self._until(lambda: self._runs(self._latest_attempt()))
        last = max(max(self._notes(1, index)) for index in range(4) if index not in hit)
        back = max(min(self._notes(self._latest_attempt(), index)) for index in range(4))
        (self._directory / "finish").touch()
        ray.get(self._ref)
        return max(0.0, last - at), back - last

    def task(self, index: int) -> tuple[int, str]:
        """The process of a task, and its slice."""
        pid, slice_name = (self._directory / f"pid-1-{index}").read_text().split()
        return int(pid), slice_name

    def _runs(self, attempt: int) -> bool:
        return all(self._notes(attempt, index) for index in range(4))

    def _latest_attempt(self) -> int:
        """The latest attempt of which a task runs, or the second: an attempt may fail to launch before it."""
        return max([2, *(int(path.name.split("-")[1]) for path in self._directory.glob("notes-*-*"))])

    def _notes(self, attempt: int, index: int) -> list[float]:
        path = self._directory / f"notes-{attempt}-{index}"
        return [float(line) for line in path.read_text().splitlines() if len(line) > 13] if path.exists() else []

    def _until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, "nothing happened for two minutes"
            time.sleep(0.02)


NEXT_TASK = itertools.cycle(range(4))
"""The next task to kill: on another host each time, since jobs and spares avoid a host on which three have failed."""


def kill_task(sample: Victim) -> set[int]:
    index = next(NEXT_TASK)
    os.kill(sample.task(index)[0], signal.SIGKILL)
    return {index}


def kill_actor(kind: str, worker: int) -> Callable[[Sample], set[int]]:
    def kill(sample: Sample) -> set[int]:
        (pid,) = sample.cluster.host_pids(sample.task(2)[1], worker, f"ray::{kind}")
        os.kill(pid, signal.SIGKILL)
        return {2 + worker}

    return kill


def kill_pool(sample: Sample) -> set[int]:
    pool = pool_of_this_process._pool
    assert pool is not None
    os.kill(ray.get(pool.handle.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    return set()


def kill_host(sample: Victim) -> set[int]:
    sample.cluster.kill_host(sample.task(3)[1], 1)
    return {3}


def freeze_host(sample: Victim) -> set[int]:
    sample.cluster.freeze_host(sample.task(3)[1], 1)
    return {3}


def take_slice(sample: Victim) -> set[int]:
    sample.cluster.preempt_slice(sample.task(3)[1])
    return {2, 3}


def announce(sample: Victim) -> set[int]:
    sample.cluster.preempt_slice(sample.task(3)[1], notice_s=30)
    return set()


FAULTS: dict[str, Callable[[Sample], set[int]]] = {
    "slice taken, 30 s notice": announce,
    "slice taken without notice": take_slice,
    "host killed": kill_host,
    "host frozen": freeze_host,
    "task process killed": kill_task,
    "TPUHostActor killed": kill_actor("TPUHostActor", 1),
    "SlicePoolManager killed": kill_pool,
}


def spare_is_ready() -> bool:
    controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
    jobs = ray.get(controller.list_jobs.remote())
    return any("/spare-" in job.job_id and job.state.name == "RUNNING" for job in jobs)


def sound_slices(cluster: SimulatedCluster) -> int:
    alive: dict[str, int] = {}
    controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
    for worker in ray.get(controller.list_workers.remote()):
        if worker.slice_name and not worker.unavailable:
            alive[worker.slice_name] = alive.get(worker.slice_name, 0) + 1
    return sum(count == 2 for count in alive.values())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", choices=list(FAULTS), action="append", help="this fault; may be repeated")
    parser.add_argument("--plot", help="where to put a picture (needs matplotlib)")
    given = parser.parse_args(arguments)
    rows: dict[str, tuple[list[float], list[float]]] = {}
    with SimulatedCluster({TPU_TYPE: 3}, quiet=True) as cluster, tempfile.TemporaryDirectory() as directory:
        for name in given.only or FAULTS:
            rows[name] = [], []
            for number in range(given.samples):
                place = Path(directory) / name.replace(" ", "-") / str(number)
                place.mkdir(parents=True)
                noticed, restart = Sample(cluster, number, place).hit(FAULTS[name])
                rows[name][0].append(noticed)
                rows[name][1].append(restart)
                print(f"{name}: noticed after {noticed:.2f} s, restart {restart:.2f} s", flush=True)
                while sound_slices(cluster) < 3:
                    cluster.add_slice(TPU_TYPE)
                    time.sleep(1.0)
    print(f"\n| fault | noticed, s | restart, s |  ({given.samples} samples: median, least to most)\n|---|---|---|")
    for name, (noticed_s, restart_s) in rows.items():
        print(f"| {name} | {spread(noticed_s)} | {spread(restart_s)} |")
    if given.plot:
        draw(rows, given.plot)
    return 0


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def draw(rows: dict[str, tuple[list[float], list[float]]], path: str) -> None:
    import matplotlib.pyplot as plt

    names = list(rows)[::-1]
    noticed = [statistics.median(rows[name][0]) for name in names]
    restart = [statistics.median(rows[name][1]) for name in names]
    _, axes = plt.subplots(figsize=(8, 3.2))
    axes.barh(names, noticed, color="#b0b8c4", label="until it is noticed")
    axes.barh(names, restart, left=noticed, color="#2f6db3", label="until all tasks run again")
    axes.set_xlabel("seconds after the fault, spare at hand")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.savefig(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
