"""Ray's memory monitor on a node with little memory: whom it kills, and what that is called."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from iris_ray import release, run_on_pod
from iris_ray.errors import TaskOutOfMemoryError
from tests.support.clusters import Clusters
from tests.support.proofs import in_long
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.proof, pytest.mark.usefixtures("no_shared_cluster", "small_host")]

CGROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 3 << 30
ADDRESS = "127.0.0.2"
RESOURCES = '{"TPU": 4, "accelerator_type:TPU-V4": 1, "small": 1, "TPU-v4-8-head": 1}'
LABELS = ",".join(
    f"ray.io/{key}={value}"
    for key, value in {
        "accelerator-type": "TPU-V4",
        "tpu-slice-name": "small",
        "tpu-worker-id": "0",
        "tpu-topology": "2x2x1",
        "tpu-pod-type": "v4-8",
    }.items()
)
START = f"""
mount --make-rprivate /
echo $$ > "$1/cgroup.procs"
mount --bind "$1" {CGROUPS}
exec "$2" -m ray.scripts.scripts start --address "$3" --node-ip-address {ADDRESS} --num-cpus 4 --block \
    --object-store-memory 100000000 --resources '{RESOURCES}' --labels '{LABELS}'
"""
"""Starts a node that takes the limit of its cgroup for the memory of its machine, as in a container."""


@pytest.fixture(scope="module")
def small_host(clusters: Clusters) -> Iterator[None]:
    """A slice of one host that has 3 GB, of which Ray lets half be used."""
    cgroup = CGROUPS / f"iris-ray-test-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"the test needs a memory cgroup of version 1: {error}")
    clusters.give_back_and_end()
    own = tempfile.TemporaryDirectory(prefix="ray")  # in Ray's own, `ray start` tells later drivers of this cluster
    context = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=own.name)
    command = ["unshare", "--mount", "sh", "-c", START, "sh", str(cgroup), sys.executable]
    command.append(context.address_info["address"])
    monitor = {"RAY_memory_monitor_refresh_ms": "250", "RAY_memory_usage_threshold": "0.5"}
    with subprocess.Popen(command, env=os.environ | monitor, start_new_session=True) as node:
        try:
            wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 60)
            yield
            release()
        finally:
            ray.shutdown()
            node.terminate()
            end_all(cgroup)
            own.cleanup()


def end_all(cgroup: Path) -> None:
    def is_empty() -> bool:
        for pid in (cgroup / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            cgroup.rmdir()
        return not cgroup.exists()

    wait_until(is_empty, 30)


def use_up_memory() -> None:
    pieces = []
    while True:
        pieces.append(bytearray(os.urandom(1 << 20) * 100))
        time.sleep(0.05)


def start_a_child_that_does() -> None:
    code = (
        "import os, time\nx = []\nwhile len(x) < 20: x.append(bytearray(os.urandom(1 << 20) * 100)); time.sleep(0.05)"
    )
    subprocess.run([sys.executable, "-c", code + "\ntime.sleep(600)"])


@pytest.mark.parametrize(
    ("function", "start"),
    [
        (use_up_memory, "fork"),
        (start_a_child_that_does, "fork"),
        *in_long((use_up_memory, "actor"), (start_a_child_that_does, "actor")),
    ],
)
def test_task_exhausting_memory_is_told_and_loses_no_host(function: object, start: str) -> None:
    """If a child of an actor has the memory, Ray kills all its own workers there, those of iris_ray included."""
    said = "nearly used up: .*, of which the task had" if start == "fork" else r"by Ray, because|: Ray killed"
    with pytest.raises(TaskOutOfMemoryError, match=said):
        run_on_pod(function, "v4-8", max_retries_failure=0, max_retries_preemption=0, start=start)
