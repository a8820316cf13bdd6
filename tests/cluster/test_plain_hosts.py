"""An ordinary Ray node that says it is a TPU host: no variable of ours, no directory of its own, nothing simulated."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from iris_ray import IrisClient, ResourceSpec, preemption_notice, release, run_on_pod, run_on_pod_ray
from iris_ray.errors import TaskCrashedError
from tests.support.clusters import Clusters
from tests.support.command_line import command_line
from tests.support.processes import alive
from tests.support.proofs import in_long, in_proofs
from tests.support.waiting import wait_until

INJECTED = {"TPU_VISIBLE_CHIPS": "0,1,2,3", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_HOST_BOUNDS": "1,1,1"}
"""What GKE's device plugin says in a pod about its chips."""

pytestmark = pytest.mark.usefixtures("no_shared_cluster", "plain_host")


@pytest.fixture(scope="module")
def plain_host(clusters: Clusters) -> Iterator[None]:
    """A slice of one host, as a raylet on a TPU VM describes it."""
    clusters.give_back_and_end()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IRIS_RAY_HOST_DIR", "JAX_PLATFORMS"):
            patch.delenv(name, raising=False)
        for name, value in INJECTED.items():
            patch.setenv(name, value)
        ray.init(
            "local",
            num_cpus=4,
            resources={"TPU": 4.0, "accelerator_type:TPU-V4": 1.0, "plain": 1.0, "TPU-v4-8-head": 1.0},
            labels={
                "ray.io/accelerator-type": "TPU-V4",
                "ray.io/tpu-slice-name": "plain",
                "ray.io/tpu-worker-id": "0",
                "ray.io/tpu-topology": "2x2x1",
                "ray.io/tpu-pod-type": "v4-8",
            },
            include_dashboard=False,
            log_to_driver=False,
        )
        yield
        release()
        ray.shutdown()


@pytest.mark.proof
def test_users_tmpdir_does_not_separate_task_from_host(tmp_path: Path) -> None:
    function = ray.remote(runtime_env={"env_vars": {"TMPDIR": str(tmp_path)}})(lambda: os._exit(3))
    with pytest.raises(TaskCrashedError, match="code 3"):
        run_on_pod(function, "v4-8", max_retries_failure=0)


def test_task_knows_device_plugins_word_about_pod_chips() -> None:
    assert run_on_pod(lambda: {name: os.environ.get(name) for name in INJECTED}, "v4-8") == [INJECTED]


def test_task_without_chips_keeps_off_tpu_hosts_chips() -> None:
    with IrisClient() as client:
        job = client.submit(lambda: os.environ.get("JAX_PLATFORMS"), resources=ResourceSpec(cpu=1))
        assert job.results() == ["cpu"]


DRIVER = """
import subprocess, sys, time
from pathlib import Path
import ray
from iris_ray import IrisClient, ResourceSpec, run_on_pod

def start_daemons(path=sys.argv[2]):
    named = subprocess.run(["sh", "-c", "setsid sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, text=True).stdout
    unnamed = "setsid env -i sleep 600 >&- & echo $!; exec >&-; sleep 3"
    seen = subprocess.Popen(["sh", "-c", unnamed], stdout=subprocess.PIPE, text=True)
    pids = [named, seen.stdout.read()]
    seen.wait()
    Path(path).write_text(" ".join(pids))
    time.sleep(600)

ray.init(sys.argv[1], log_to_driver=False)
if sys.argv[3] == "chips":
    run_on_pod(start_daemons, "v4-8")
IrisClient().submit(start_daemons, resources=ResourceSpec(cpu=1)).results()
"""


@pytest.mark.parametrize("on", [*in_proofs("chips"), *in_long("a shared host")])
def test_tasks_daemons_end_after_killed_driver(tmp_path: Path, on: str) -> None:
    """One carries the task's token. One has an empty environment, and was seen as a descendant of the task."""
    pids = tmp_path / "pids"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, ray.get_runtime_context().gcs_address, str(pids), on])
    try:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 60)
        daemons = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not any(map(alive, daemons)), 30)


@pytest.mark.long
def test_head_on_tpu_host_gives_notice_too(tmp_path: Path) -> None:
    """The last test here: its cluster takes no more tasks. Ray refuses to drain a node as idle that is in use."""
    running, noticed = tmp_path / "running", tmp_path / "noticed"

    def waits_for_notice(paths: tuple[str, str] = (str(running), str(noticed))) -> None:
        Path(paths[0]).touch()
        while (notice := preemption_notice()) is None:
            time.sleep(0.05)
        Path(paths[1]).write_text(notice.kind.value)

    run = run_on_pod_ray.remote(waits_for_notice, "v4-8", max_retries_failure=0)
    wait_until(running.exists, 60)
    context = ray.get_runtime_context()

    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", context.gcs_address]
    command += ["--node-id", context.get_node_id(), "--reason", "DRAIN_NODE_REASON_IDLE_TERMINATION"]
    refused = subprocess.run([*command, "--reason-message", "kernel update"], capture_output=True, text=True)
    assert "no longer idle" in refused.stderr
    assert not noticed.exists()
    told = subprocess.run(
        command_line("--address", context.gcs_address, "host", "give-notice", "here", "--in", "30s"),
        capture_output=True,
        text=True,
    )
    assert noticed.read_text() == "preemption"
    assert (told.returncode, told.stdout.splitlines()[-1]) == (0, "all tasks have left"), told.stdout + told.stderr
    ray.get(run)
