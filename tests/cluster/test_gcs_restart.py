"""Ray's GCS dies, on a cluster whose GCS keeps everything on disk: what runs goes on, what waits gets its turn."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from iris_ray import run_on_pod, run_on_pod_ray
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.model.lifecycle import JobState
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, controller_pid, result_of
from tests.support.waiting import wait_until


def test_gang_runs_and_ends_without_gcs(cluster: SimulatedCluster, trace: Trace) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    job_id = trace.wait_for_tasks(4)[0]["job"]
    before, controller = controller_pid(), ray.get_actor(CONTROLLER_NAME, NAMESPACE)

    def has_heard_of_it() -> bool:
        statuses = ray.get(controller.list_jobs.remote(), timeout=20)
        return next(status.state for status in statuses if status.job_id == job_id) is JobState.SUCCEEDED

    cluster.kill_gcs()
    try:
        trace.finish()
        assert [task["index"] for task in result_of(job)] == [0, 1, 2, 3]
        wait_until(has_heard_of_it, 20)
    finally:
        cluster.restart_gcs()
    assert controller_pid() == before
    assert len(trace.starts()) == 4


@pytest.mark.long
def test_job_submitted_without_gcs_runs_when_it_returns(cluster: SimulatedCluster, trace: Trace) -> None:
    trace.finish()
    assert run_on_pod(lambda: 1, "v4-16") == [1, 1]  # now there is a Controller, and a pool of this process
    cluster.kill_gcs()
    try:
        job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=1)
        assert not ray.wait([job], timeout=3)[0]
    finally:
        cluster.restart_gcs()
    assert len(result_of(job)) == 2
    assert len(trace.starts()) == 2


@pytest.mark.proof
def test_controller_dying_without_gcs_comes_back_with_it(cluster: SimulatedCluster, trace: Trace) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    trace.wait_for_tasks(4)
    pid = controller_pid()
    cluster.kill_gcs()
    try:
        os.kill(pid, signal.SIGKILL)
    finally:
        cluster.restart_gcs()
    wait_until(lambda: controller_pid() != pid)
    trace.finish()
    assert len(result_of(job)) == 4
    assert len(trace.starts()) == 4


@pytest.mark.proof
def test_host_lost_without_gcs_restarts_gang(cluster: SimulatedCluster, trace: Trace) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    (start, *_) = trace.wait_for_tasks(4)
    cluster.kill_gcs()
    try:
        cluster.kill_host(str(start["slice"]), 1)
    finally:
        cluster.restart_gcs()
    trace.wait_for_tasks(4, attempt=2, timeout_s=90)
    trace.finish()
    assert len(result_of(job)) == 4


@pytest.mark.long
def test_cluster_that_waits_for_its_head_outlives_minutes_without_gcs(
    no_shared_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the file for GKE has it, where a volume takes minutes to move; without the variable Ray waits 60 s."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    with SimulatedCluster({"v4-16": 1}, connect=False, persistent=True, quiet=True) as running:
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, running.address, str(tmp_path)], text=True)
        try:
            wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2, 120)
            running.kill_gcs()
            time.sleep(90)  # longer than Ray waits by default
            running.restart_gcs()
            (tmp_path / "finish").touch()
            assert driver.wait(120) == 0
        finally:
            driver.kill()
    assert len(list(tmp_path.glob("started-*"))) == 2, "no second attempt"


DRIVER = """
import sys, time
from pathlib import Path
import ray
from iris_ray import get_job_info, run_on_pod

directory = Path(sys.argv[2])

def work():
    me = get_job_info()
    (directory / f"started-{me.attempt}-{me.task_index}").touch()
    while not (directory / "finish").exists():
        time.sleep(0.1)
    return me.attempt

ray.init(address=sys.argv[1])
assert run_on_pod(work, "v4-16", keep_warm=0) == [1, 1]
"""
