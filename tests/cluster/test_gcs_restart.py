"""Ray's GCS dies, on a cluster whose GCS keeps everything on disk: what runs goes on, what waits gets its turn."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from iris_ray import release, run_on_pod, run_on_pod_ray
from iris_ray.actors.wire.shared_names import CONTROLLER_NAME, NAMESPACE
from iris_ray.model.lifecycle import JobState
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Crowd, Trace, controller_pid, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with SimulatedCluster({"v4-16": 3}, persistent=True, quiet=True) as running:
        yield running
        release()


def test_gang_runs_and_ends_while_no_gcs_is_there_and_the_controller_goes_on_answering(
    cluster: SimulatedCluster, trace: Trace
) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    trace.wait_for_tasks(4)
    before, controller = controller_pid(), ray.get_actor(CONTROLLER_NAME, NAMESPACE)

    def has_heard_of_it() -> bool:
        (status,) = ray.get(controller.list_jobs.remote(), timeout=20)
        return status.state is JobState.SUCCEEDED

    cluster.kill_gcs()
    try:
        trace.finish()
        assert [task["index"] for task in ray.get(job, timeout=45)] == [0, 1, 2, 3]
        wait_until(has_heard_of_it, 20)
    finally:
        cluster.restart_gcs()
    assert controller_pid() == before
    assert len(trace.starts()) == 4


def test_job_submitted_while_no_gcs_is_there_runs_when_it_is_back(cluster: SimulatedCluster, trace: Trace) -> None:
    trace.finish()
    cluster.kill_gcs()
    try:
        job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=3)
        assert not ray.wait([job], timeout=3)[0]
    finally:
        cluster.restart_gcs()
    assert len(ray.get(job, timeout=60)) == 6
    assert len(trace.starts()) == 6


def test_gcs_killed_twenty_times_in_a_busy_minute_costs_nobody_anything(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    """Every job ends with the right result and the right counts.

    With every new GCS Ray begins anew with all actors that have not started yet: kills that come faster than processes
    start would only heap up processes for nobody. So the slices are warm before the first one, and some task starts
    between two.
    """
    assert run_on_pod(lambda: 1, "v4-16", num_slices=3, keep_warm=600) == [1] * 6
    crowd = Crowd(tmp_path)
    for _ in range(20):
        crowd.keep_busy_until_a_task_starts()
        time.sleep(crowd.chance.uniform(0.0, 3.0))
        cluster.restart_gcs()  # kills it first
        controller_pid()
    crowd.check_all()


def test_controller_that_dies_while_no_gcs_is_there_comes_back_with_it(cluster: SimulatedCluster, trace: Trace) -> None:
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
    assert len(ray.get(job, timeout=60)) == 4
    assert len(trace.starts()) == 4


def test_host_lost_while_no_gcs_is_there_restarts_the_gang(cluster: SimulatedCluster, trace: Trace) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    (start, *_) = trace.wait_for_tasks(4)
    cluster.kill_gcs()
    try:
        cluster.kill_host(str(start["slice"]), 1)
    finally:
        cluster.restart_gcs()
    trace.wait_for_tasks(4, attempt=2, timeout_s=90)
    trace.finish()
    assert len(ray.get(job, timeout=60)) == 4
