"""The main paths of iris_ray on ordinary Ray nodes of one machine, for any version of Ray.

    python -m tests.support.main_paths DIRECTORY FILE      # writes what it found to the file, as JSON

It uses nothing of `iris_ray.testing`, which needs the newest Ray.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from iris_ray import IrisClient, ResourceSpec, get_job_info, preemption_notice, release, run_on_pod, run_on_pod_ray
from iris_ray.errors import TaskCrashedError

TPU_TYPE, HOSTS = "v4-16", 2
PATIENCE_S = 90.0


def add_slice(cluster: Cluster, directory: Path, name: str) -> list[Any]:
    """Add nodes that describe themselves as the hosts of a slice, each with a directory of its own."""
    hosts = []
    for index in range(HOSTS):
        own = directory / f"{name}-{index}"
        (own / "dev").mkdir(parents=True, mode=0o700)
        os.environ["IRIS_RAY_HOST_DIR"] = str(own)
        head = {f"TPU-{TPU_TYPE}-head": 1.0} if index == 0 else {}
        hosts.append(
            cluster.add_node(
                num_cpus=4,
                resources={"TPU": 4.0, "accelerator_type:TPU-V4": 1.0, name: 1.0, **head},
                labels={
                    "ray.io/accelerator-type": "TPU-V4",
                    "ray.io/tpu-slice-name": name,
                    "ray.io/tpu-worker-id": str(index),
                    "ray.io/tpu-topology": "2x2x2",
                    "ray.io/tpu-pod-type": TPU_TYPE,
                },
            )
        )
    del os.environ["IRIS_RAY_HOST_DIR"]
    return hosts


def place() -> tuple[str, int]:
    me = get_job_info()
    assert me is not None
    return me.slice_name, me.worker_id


def no_such_batch() -> None:
    raise ValueError("no such batch")


def crash() -> None:
    os._exit(3)


def seven() -> int:
    return 7


def wait_for_fault(marks: str) -> tuple[int, str]:
    """Leave a mark, and run until a notice or the end of the host comes; a second attempt returns at once."""
    me = get_job_info()
    assert me is not None
    if me.attempt == 1:
        Path(f"{marks}.{me.worker_id}").write_text(me.slice_name)
        deadline = time.monotonic() + PATIENCE_S
        while (notice := preemption_notice()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return me.attempt, notice.reason if notice else "nothing has happened"
    return me.attempt, me.slice_name


def started(marks: str) -> str:
    """Wait until all tasks run; return the slice on which they do."""
    files = [Path(f"{marks}.{index}") for index in range(HOSTS)]
    deadline = time.monotonic() + PATIENCE_S
    while not all(file.exists() and file.read_text() for file in files):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{marks} did not start")
        time.sleep(0.1)
    return files[0].read_text()


def error_of(function: Callable[[], object], *kinds: type[BaseException]) -> BaseException:
    try:
        found = function()
    except kinds as error:
        return error
    raise AssertionError(f"no error, but {found!r}")


def order_of_results() -> bool:
    found = run_on_pod(place, TPU_TYPE, num_slices=2)
    names = sorted({name for name, _ in found})
    return found == [(name, index) for name in names for index in range(HOSTS)] and len(names) == 2


def error() -> str:
    found = error_of(lambda: run_on_pod(no_such_batch, TPU_TYPE, max_retries_failure=0), ValueError)
    return f"ValueError: {found.args[0]}"


def crashed() -> str:
    return type(error_of(lambda: run_on_pod(crash, TPU_TYPE, max_retries_failure=0), TaskCrashedError)).__name__


def cancelled(directory: Path) -> str:
    marks = str(directory / "cancelled")
    reference = run_on_pod_ray.remote(functools.partial(wait_for_fault, marks), TPU_TYPE)
    started(marks)
    ray.cancel(reference)
    error_of(lambda: ray.get(reference), ray.exceptions.TaskCancelledError)
    return "TaskCancelledError"


def without_chips() -> list[Any]:
    with IrisClient() as client:
        return client.submit(seven, resources=ResourceSpec(cpu=1)).results()


def lost(cluster: Cluster, directory: Path, slices: dict[str, list[Any]]) -> list[Any]:
    marks = str(directory / "lost")
    reference = run_on_pod_ray.remote(functools.partial(wait_for_fault, marks), TPU_TYPE)
    name = started(marks)
    ours = ray.get_runtime_context().get_node_id()  # on one machine, Ray 2.49 connects a driver to any node
    victim = next(node for node in slices[name] if node.node_id != ours)
    cluster.remove_node(victim, allow_graceful=False)
    attempt, other = ray.get(reference, timeout=PATIENCE_S)[0]
    return [attempt, other != name]


def drained(directory: Path, slices: dict[str, list[Any]]) -> str:
    marks = str(directory / "drained")
    reference = run_on_pod_ray.remote(functools.partial(wait_for_fault, marks), TPU_TYPE)
    node = slices[started(marks)][0].node_id
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node]
    command += ["--address", ray.get_runtime_context().gcs_address]
    command += [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "repair",
        "--deadline-remaining-seconds",
    ]
    subprocess.run([*command, "60"], check=True, stdout=subprocess.DEVNULL)
    reason: str = ray.get(reference, timeout=PATIENCE_S)[0][1]
    return reason.partition(": ")[2]


def command_line() -> dict[str, int]:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "iris_ray", "--address", address]
    return {
        name: subprocess.run([*command, *name.split()], stdout=subprocess.DEVNULL).returncode
        for name in ("ls", "host ls", "doctor")
    }


def main(directory: Path, report: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        slices = {name: add_slice(cluster, directory, name) for name in ("a", "b", "c")}
        ray.init(cluster.address, log_to_driver=False)
        found = {
            "results come in the order of slices and hosts": order_of_results(),
            "an error reaches the caller": error(),
            "a crash is told apart": crashed(),
            "a cancelled reference stops the gang": cancelled(directory),
            "a task without chips": without_chips(),
            "iris-ray": command_line(),
            "a lost host costs one attempt on another slice": lost(cluster, directory, slices),
            "a drained node gives notice": drained(directory, slices),
        }
        release()
        ray.shutdown()
    finally:
        cluster.shutdown()
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
