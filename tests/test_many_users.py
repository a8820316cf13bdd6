"""Three users' drivers on one cluster at the same time: `run_on_pod` and `submit` mixed, priorities, a SIGKILL."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import IrisClient, JobState
from iris_ray.testing import SimulatedCluster
from tests.gangs import alive, wait_until

pytestmark = pytest.mark.cluster

COMMON = """
    import json, os, pathlib, sys, time
    import ray
    from iris_ray import IrisClient, PriorityBand, ResourceSpec, get_job_info, run_on_pod, tpu_device

    address, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    user = os.environ["IRIS_USER"]

    def until(name):
        def task():
            me = get_job_info()
            (directory / f"{user}-{me.task_index}.pid").write_text(str(os.getpid()))
            while not (directory / name).exists():
                time.sleep(0.05)
            return f"{user} {me.task_index}"
        return task

    def done(results):
        (directory / f"{user}.tmp").write_text(json.dumps(results))
        (directory / f"{user}.tmp").rename(directory / f"{user}.json")
"""

ANN = """
    ray.init(address)
    done(run_on_pod(until("ann may end"), "v4-16", num_slices=2))
"""

BOB = """
    client = IrisClient.remote(address)
    slow = client.submit(until("nobody"), "batch", resources=ResourceSpec(device=tpu_device("v4-16")),
                         priority=PriorityBand.BATCH)
    tasks = client.submit(lambda: get_job_info().task_index, "tasks", resources=ResourceSpec(replicas=3))
    done(tasks.results())
    time.sleep(600)
"""

CARL = """
    client = IrisClient.remote(address)
    job = client.submit(until("carl may end"), "urgent", resources=ResourceSpec(device=tpu_device("v4-16")),
                        priority=PriorityBand.PRODUCTION)
    done(job.results())
"""


def test_three_users_share_a_cluster(tmp_path: Path) -> None:
    """Ann has both slices. Bob's batch job came before Carl's urgent one, and gets a slice after it; Bob is killed."""
    with SimulatedCluster({"v4-16": 2}, cpus_per_host=4, quiet=True) as cluster:
        drivers: dict[str, subprocess.Popen[bytes]] = {}

        def start(user: str, body: str) -> None:
            script = tmp_path / f"{user}.py"
            script.write_text(textwrap.dedent(COMMON) + textwrap.dedent(body))
            root = str(Path(__file__).parents[1])
            drivers[user] = subprocess.Popen(
                [sys.executable, str(script), cluster.address, str(tmp_path)],
                env={**os.environ, "IRIS_USER": user, "PYTHONPATH": root},
            )

        def result(user: str) -> Any:
            path = tmp_path / f"{user}.json"
            return wait_until(lambda: path.exists() and json.loads(path.read_text()), 180)

        client = IrisClient()

        def jobs() -> dict[str, Any]:
            return {f"{job.user} {job.name}": job for job in client.list_jobs()}

        try:
            start("ann", ANN)
            wait_until(lambda: len(list(tmp_path.glob("ann-*.pid"))) == 4, 120)
            start("bob", BOB)
            assert result("bob") == [0, 1, 2]
            start("carl", CARL)
            urgent = wait_until(lambda: (job := jobs().get("carl urgent")) and job.waiting and job, 120)
            assert "in use by" in client.explain(urgent.job_id)
            batch = jobs()["bob batch"]
            assert urgent.job_id in client.explain(batch.job_id)
            (tmp_path / "ann may end").touch()
            assert sorted(result("ann")) == [f"ann {i}" for i in range(4)]
            bobs = [wait_until(lambda i=i: (p := tmp_path / f"bob-{i}.pid").exists() and p.read_text()) for i in (0, 1)]
            assert client.job_status(urgent.job_id).state is JobState.RUNNING
            drivers["bob"].send_signal(signal.SIGKILL)
            wait_until(lambda: client.job_status(batch.job_id).state is JobState.KILLED)
            wait_until(lambda: not any(alive(int(pid)) for pid in bobs))
            (tmp_path / "carl may end").touch()
            assert result("carl") == ["carl 0", "carl 1"]
            wait_until(lambda: ray.available_resources().get("TPU") == 16.0)
        finally:
            for driver in drivers.values():
                driver.kill()
                driver.wait()
