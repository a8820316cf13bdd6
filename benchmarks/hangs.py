"""How often the process that holds up its gang is named: real JAX collectives over processes of this machine.

    python benchmarks/hangs.py --trials 100

Four processes make steps with an all-reduce over all of them. Again and again one of them, chosen by chance, is stopped
by SIGSTOP, gets slow, or enters an endless loop, at a random point of its step. Once no process has called
``heartbeat`` for `STALL_S`, they are looked at as the hosts of a gang do, and the finding is compared with the truth.
Then the fault ends, and the same processes go on. No Ray is used.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from iris_ray.actors.host.task_watch import TaskProgress
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.hangs.blame import StallFinding, find_culprit
from iris_ray.hangs.host import look_at
from iris_ray.model.outcomes import TaskKey

PROCESSES = 4
STALL_S = 1.5
"""A gang whose steps take tens of milliseconds hangs if it makes none for so long."""
GOES_ON_S = 60.0
FAULTS = ("stopped", "slow", "endless loop")

# -- a process of the gang ---------------------------------------------------------------------------------------------


def work(index: int, processes: int, coordinator: str, directory: Path) -> None:
    """Make steps for ever. A file tells this process to get slow, or to loop, as long as the file exists."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    jax.distributed.initialize(coordinator_address=coordinator, num_processes=processes, process_id=index)
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import iris_ray

    mesh = jax.make_mesh((processes,), ("all",))
    spread = NamedSharding(mesh, PartitionSpec("all"))  # type: ignore[no-untyped-call]
    whole = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    batch = jax.make_array_from_callback((processes, 256), spread, lambda at: np.ones((processes, 256), "f")[at])
    weights = jax.device_put(np.ones((256, 256), "f") / 256, whole)

    @jax.jit
    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(weights)
        return weights - 1e-6 * gradient, loss

    chance, number = random.Random(index), 0
    while True:
        iris_ray.heartbeat(number)
        if chance.random() < 0.5:
            misbehave(directory / f"{index}.fault")
        weights, loss = step(weights, batch)
        if chance.random() < 0.5:
            misbehave(directory / f"{index}.fault")
        float(loss)
        misbehave(directory / f"{index}.fault")
        number += 1


def misbehave(order: Path) -> None:
    """Do what the file says."""
    try:
        fault = order.read_text()
    except FileNotFoundError:
        return
    if fault == "endless loop":
        loop(order)
    elif fault == "slow":
        load_slowly(order)


def loop(order: Path) -> None:
    count = 0
    while count % 1000 or order.exists():
        count += 1


def load_slowly(order: Path) -> None:
    """Take seconds for what takes none elsewhere, such as a read from a disk that dies."""
    for _ in range(40):
        if order.exists():
            time.sleep(0.1)


# -- the gang, as its hosts and its pool see it ------------------------------------------------------------------------


@dataclass
class Gang:
    """Processes that make steps together."""

    processes: list[subprocess.Popen[bytes]]
    directory: Path

    @staticmethod
    def start(directory: Path, count: int) -> "Gang":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        started = []
        for index in range(count):
            env = os.environ | {TaskFiles.VARIABLE: str(directory / str(index)), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--worker", str(index), str(count), coordinator, str(directory)]
            with open(directory / f"{index}.log", "wb") as log:
                started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return Gang(started, directory)

    def __post_init__(self) -> None:
        self.progress = [TaskProgress(TaskFiles(str(self.directory / str(i)))) for i in range(len(self.processes))]

    def steps(self) -> dict[TaskKey, int]:
        read = {TaskKey(0, i): one.read().step for i, one in enumerate(self.progress)}
        return {key: step for key, step in read.items() if step is not None}

    def silence(self) -> float:
        ages = [age for one in self.progress if (age := one.read().age) is not None]
        return min(ages, default=0.0)

    def goes_on(self) -> bool:
        """Wait until every process has made three further steps."""
        first, end = self.steps(), time.monotonic() + GOES_ON_S
        while time.monotonic() < end:
            now = self.steps()
            if len(now) == len(self.processes) and all(now[key] >= first.get(key, 0) + 3 for key in now):
                return True
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.05)
        return False

    def begin(self, fault: str, index: int) -> None:
        if fault == "stopped":
            os.kill(self.processes[index].pid, signal.SIGSTOP)
        else:
            (self.directory / f"{index}.fault").write_text(fault)

    def end(self, index: int) -> None:
        (self.directory / f"{index}.fault").unlink(missing_ok=True)
        os.kill(self.processes[index].pid, signal.SIGCONT)

    def compare(self) -> StallFinding:
        steps = self.steps()
        with ThreadPoolExecutor(len(self.processes)) as hosts:
            found = hosts.map(look_at, [process.pid for process in self.processes])
            looks = {TaskKey(0, i): look for i, look in enumerate(found)}
        return find_culprit(looks, steps, lambda key: str(key.host_index))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        index, count, coordinator, directory = options.worker
        work(int(index), int(count), coordinator, Path(directory))
        return
    outcomes, took = trials(options.trials, options.processes, options.seed)
    for fault in FAULTS:
        counts = {how: outcomes[fault, how] for how in ("right", "not clear", "wrong")}
        print(f"{fault:>14}: " + ", ".join(f"{count} {how}" for how, count in counts.items()))
    right = sum(count for (_, how), count in outcomes.items() if how == "right")
    print(f"{right} of {options.trials} right; a look took {statistics.median(took):.2f} s, at most {max(took):.2f} s")


def trials(count: int, processes: int, seed: int) -> tuple[Counter[tuple[str, str]], list[float]]:
    """Return how often each fault was found, and how long the comparisons took."""
    chance, outcomes, took = random.Random(seed), Counter[tuple[str, str]](), list[float]()
    with tempfile.TemporaryDirectory(prefix="iris_ray-hangs-") as directory:
        gang, gangs = None, 0
        try:
            for trial in range(count):
                if gang is None or not gang.goes_on():
                    if gang is not None:
                        gang.kill()
                    gangs += 1
                    gang = _new_gang(Path(directory) / str(gangs), processes)
                fault, index = FAULTS[trial % len(FAULTS)], chance.randrange(processes)
                time.sleep(chance.uniform(0.0, 0.3))
                gang.begin(fault, index)
                while gang.silence() < STALL_S:
                    time.sleep(0.05)
                began = time.monotonic()
                found = gang.compare()
                took.append(time.monotonic() - began)
                gang.end(index)
                named = None if found.culprit is None else found.culprit.host_index
                how = "right" if named == index else "not clear" if named is None else "wrong"
                outcomes[fault, how] += 1
                print(f"{trial:3} {fault:>14} in {index}: {how}: {named}: {found.why}", flush=True)
        finally:
            if gang is not None:
                gang.kill()
    return outcomes, took


def _new_gang(directory: Path, processes: int) -> Gang:
    directory.mkdir()
    gang = Gang.start(directory, processes)
    if not gang.goes_on():
        gang.kill()
        raise SystemExit("the gang makes no steps: " + (directory / "0.log").read_text(errors="replace")[-2000:])
    return gang


if __name__ == "__main__":
    main()
