"""The head of an emulated GKE loses its node, on a cluster from which this process has no driver."""

import subprocess
import sys
from pathlib import Path

import pytest

from iris_ray.testing import SimulatedCluster
from tests.support.waiting import wait_until

GKE = Path(__file__).parents[3] / "examples" / "clusters" / "gke.yaml"
SUBMIT = """
import sys, time
from pathlib import Path
from iris_ray import IrisClient, ResourceSpec, get_job_info, tpu_device

directory = Path(sys.argv[2])

def work():
    (directory / f"attempt-{get_job_info().attempt}").touch()
    while not (directory / "finish").exists():
        time.sleep(0.1)

with IrisClient.remote(sys.argv[1]) as client:
    print(client.submit(work, resources=ResourceSpec(device=tpu_device("v6e-8")), detached=True).job_id)
"""


@pytest.mark.long
def test_detached_job_survives_loss_of_heads_node(no_shared_cluster: None, tmp_path: Path) -> None:
    """KubeRay makes another head pod with the same volume; Ray's autoscaler there takes the slice for its own."""
    with SimulatedCluster.from_raycluster(GKE, idle_timeout_s=5, quiet=True, connect=False) as box:

        def listed() -> str:
            listing = [sys.executable, "-m", "iris_ray", "ls", "--all", "--address", box.address]
            return subprocess.run(listing, capture_output=True, text=True, timeout=120).stdout

        command = [sys.executable, "-c", SUBMIT, box.address, str(tmp_path)]
        subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        wait_until(lambda: (tmp_path / "attempt-1").exists(), 120)
        wait_until(lambda: "running" in listed(), 60)
        (before,) = box.kubernetes.pods("headgroup")
        box.restart_head()
        (head,) = box.kubernetes.pods("headgroup")
        assert head.name != before.name
        wait_until(lambda: (tmp_path / "attempt-2").exists(), 120)
        (tmp_path / "finish").touch()
        wait_until(lambda: "succeeded" in listed(), 60)
        wait_until(lambda: not box.slice_names, 120)
