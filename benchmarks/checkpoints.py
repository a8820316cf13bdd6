"""How long a step stops for a save, and how long a restore takes: the hosts' memory beside Orbax, in one run.

    python benchmarks/checkpoints.py [--megabytes 200] [--saves 7] [--restores 5]      # needs orbax-checkpoint

Four processes of JAX on CPU stand for two slices of two hosts; each has a directory in memory and a file service of its
own, as a `TPUHostActor` gives it. Orbax writes to one directory on disk. The state is random numbers, since Orbax
compresses. ``data-parallel``: both slices have all of it. ``sharded``: each process has a quarter, and a copy of one
more. Orbax and the memory take turns. Of each save and restore the slowest process counts; the table has medians.

- save: from the call until it returns, with the state computed before. Then all wait until the step is there.
- restore, own host: by a new attempt on the same hosts. Orbax's files have been dropped from the page cache before.
- restore, peer: of the slice whose hosts are new, so that it fetches everything from the other slice.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SLICES, HOSTS = 2, 2
JOB, TOKEN = "benchmark", "token"
KINDS = ("data-parallel", "sharded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="of the whole state")
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--restores", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.megabytes} MB{'':22}{'memory':>10}{'Orbax':>10}{'ratio':>8}")
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
            for what, (ours, theirs) in measure(kind, args, Path(folder)).items():
                print(f"{kind:15}{what:18}{ours:8.3f} s{theirs:8.3f} s{ours / theirs:8.2f}", flush=True)


def measure(kind: str, args: argparse.Namespace, folder: Path) -> dict[str, tuple[float, float]]:
    """Return the medians of each measurement, in seconds: of the memory, and of Orbax."""
    from iris_ray.actors.host.directories import LocalDirectories
    from iris_ray.checkpoint.host import FileService

    hosts = [LocalDirectories(folder / str(host), Path("/dev/shm")) for host in range(SLICES * HOSTS)]
    services = [FileService("127.0.0.1", host) for host in hosts]
    addresses = tuple(service.address for service in services)

    def run(attempt: int) -> dict[str, tuple[float, float]]:
        port = free_port()
        children = [
            subprocess.Popen(
                [sys.executable, __file__, "--as-task"],
                env=task_environment(index, attempt, port, str(host.take(JOB, TOKEN)), addresses)
                | {"BENCHMARK": json.dumps([kind, args.megabytes, args.saves, args.restores, str(folder / "orbax")])},
                stdout=subprocess.PIPE,
                text=True,
            )
            for index, host in enumerate(hosts)
        ]
        texts = [child.communicate()[0] for child in children]
        if any(child.returncode for child in children):
            raise SystemExit("a process failed; its error is above")
        of_processes = [json.loads(text.splitlines()[-1]) for text in texts]
        return {what: (slowest(of_processes, what, 0), slowest(of_processes, what, 1)) for what in of_processes[0]}

    try:
        found = run(attempt=1)
        found |= {f"{what}, own host": seconds for what, seconds in run(attempt=2).items()}
        for host in hosts[HOSTS:]:
            forget(host)
        found |= {f"{what}, peer": seconds for what, seconds in run(attempt=3).items()}
    finally:
        for service in services:
            service.stop()
        for host in hosts:
            forget(host)
    return found


def forget(host: Any) -> None:
    for job in host.jobs():
        shutil.rmtree(job.path)
        with contextlib.suppress(OSError):  # not empty
            job.path.parent.rmdir()


def slowest(of_processes: list[dict[str, list[list[float]]]], what: str, which: int) -> float:
    """The median of what the slowest process took each time."""
    turns = zip(*(times[what][which] for times in of_processes), strict=True)
    median: float = statistics.median([max(turn) for turn in turns])
    return median


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def task_environment(index: int, attempt: int, port: int, local_dir: str, services: tuple[str, ...]) -> dict[str, str]:
    from iris_ray.model.job_info import JobInfo

    me = JobInfo(
        job_id=JOB,
        task_id=f"{JOB}/task-{index}",
        task_index=index,
        num_tasks=SLICES * HOSTS,
        attempt=attempt,
        slice_id=index // HOSTS,
        num_slices=SLICES,
        slice_name=f"slice-{index // HOSTS}",
        worker_id=index % HOSTS,
        coordinator_address=f"127.0.0.1:{port}",
        local_dir=local_dir,
        file_services=services,
    )
    return os.environ | me.to_env() | {"JAX_PLATFORMS": "cpu"}


# -- in a task ---------------------------------------------------------------------------------------------------------


def task() -> None:
    """Save in the first attempt, restore in the others; print the seconds of each."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    import iris_ray.jax
    from iris_ray import get_job_info
    from iris_ray.checkpoint import MemoryCheckpointer

    kind, megabytes, saves, restores, directory = json.loads(os.environ["BENCHMARK"])
    iris_ray.jax.initialize()
    me = get_job_info()
    assert me is not None
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(SLICES, HOSTS), ("slice", "host"))
    over = NamedSharding(mesh, PartitionSpec(("slice", "host") if kind == "sharded" else "host"))  # type: ignore[no-untyped-call]
    leaves = 20
    shape = (megabytes * 2**20 // 4 // leaves // 1024 // 4 * 4, 1024)

    def state(step: int) -> dict[str, Any]:
        def numbers(leaf: int, index: Any) -> Any:
            seed = [step, leaf, index[0].start or 0]
            return np.random.default_rng(seed).random((len(range(shape[0])[index[0]]), shape[1]), np.float32)

        return {
            f"leaf-{leaf}": jax.make_array_from_callback(shape, over, functools.partial(numbers, leaf))
            for leaf in range(leaves)
        }

    def timed(name: str, function: Any) -> tuple[float, Any]:
        multihost_utils.sync_global_devices(name)
        began = time.perf_counter()
        result = jax.block_until_ready(function())  # type: ignore[no-untyped-call]
        return time.perf_counter() - began, result

    def require_same(found: Any, step: int) -> None:
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state(step)), strict=True):
            for mine, theirs in zip(one.addressable_shards, other.addressable_shards, strict=True):
                assert (np.asarray(mine.data) == np.asarray(theirs.data)).all()

    blank = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),  # type: ignore[no-untyped-call]
        state(0),
    )
    times: dict[str, list[list[float]]] = {}
    with (
        MemoryCheckpointer() as memory,
        ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True)) as orbax,
    ):
        if me.attempt == 1:
            assert memory.restore(blank) is None
            ours, theirs = [], []
            for step in range(1, saves + 3):
                now = jax.block_until_ready(state(step))  # type: ignore[no-untyped-call]
                ours.append(timed(f"memory {step}", functools.partial(memory.save, step, now))[0])
                memory.wait()
                save = functools.partial(orbax.save, step, args=ocp.args.StandardSave(now))
                theirs.append(timed(f"orbax {step}", save)[0])
                orbax.wait_until_finished()
            times["save"] = [ours[2:], theirs[2:]]  # the first two touch fresh memory
        else:
            ours, theirs = [], []
            for turn in range(restores):
                seconds, (step, found) = timed(f"memory {turn}", lambda: memory.restore(blank))
                ours.append(seconds)
                require_same(found, step)
                del found
                drop_from_page_cache(Path(directory))
                step = orbax.latest_step()
                restore = functools.partial(orbax.restore, step, args=ocp.args.StandardRestore(blank))
                seconds, found = timed(f"orbax {turn}", restore)
                theirs.append(seconds)
                require_same(found, step)
                del found
            times["restore"] = [ours, theirs]
    print(json.dumps(times))


def drop_from_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    task() if sys.argv[1:] == ["--as-task"] else main()
