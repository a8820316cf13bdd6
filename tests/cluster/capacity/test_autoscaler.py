"""A cluster with Ray's own autoscaler and its fake provider: a job gets the slice that it lacks, without any switch."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_head import LABELS, RESOURCES, free_ports, ray_head

pytestmark = pytest.mark.proof

SCRIPT = """
import contextlib
import ray
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray import get_job_info, run_on_pod_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.errors import IrisError

ray.init()
assert "TPU" not in ray.cluster_resources(), "there is a slice already"
results = run_on_pod_ray.remote(lambda: get_job_info().slice_name, "v4-8", keep_warm=0)
seen = set()
while not ray.wait([results], timeout=0.1)[0]:
    with contextlib.suppress(IrisError):  # there is no Controller yet
        controller = ControllerConnection()
        seen.update(job.explanation for job in controller.ask_all(ControllerInterface.list_jobs))
print(ray.get(results), *sorted(seen), sep="\\n")
"""
FAKE = {
    "RAY_FAKE_CLUSTER": "1",  # the head gets the id by which the provider knows it
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # the provider's nodes outlive the head by that
}
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
CONFIG: dict[str, Any] = {
    "cluster_name": "fake",
    "max_workers": 1,
    "upscaling_speed": 10.0,
    "idle_timeout_minutes": 10,
    "auth": {},
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0},
        "v4-8": {"resources": {"CPU": 4, **RESOURCES}, "labels": LABELS, "node_config": {}, "max_workers": 1},
    },
    "head_node_type": "ray.head.default",
    "file_mounts": {},
    "cluster_synced_files": [],
    **{f"{kind}_commands": [] for kind in COMMANDS},
}
"""A cluster that may have one slice, which is a node of the fake provider."""


@pytest.mark.long
def test_job_gets_slice_from_autoscaler() -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        directory = Path(folder)
        port = free_ports("port")["port"]
        provider = {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}"}
        (directory / "autoscaler.json").write_text(json.dumps(CONFIG | {"provider": provider}))
        option = f"--autoscaling-config={directory}/autoscaler.json"
        with ray_head(directory, None, option, port=port, is_slice=False, **FAKE) as head:
            command = [sys.executable, "-c", SCRIPT]
            environ = {**head.environ, "RAY_ADDRESS": head.address}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "['my-slice']" in done.stdout
    assert "Ray's autoscaler is asked for 1 more" in done.stdout
