"""What people see of a job that runs on real Ray nodes: its words, its stacks, its profile, where its time went."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from iris_ray import get_job_info, heartbeat, report_status, run_on_pod_ray, unproductive
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris, iris_json
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.proof]

STEPS_S = 0.2


def training(directory: Path) -> Callable[[], int]:
    def trains_here() -> int:
        me = get_job_info()
        assert me is not None
        with unproductive("checkpoint_restore"):
            time.sleep(1.0)
        step = 0
        while not (directory / "finish").exists():
            heartbeat(step)
            report_status(f"task {me.task_index} at {step}")
            began = time.monotonic()
            while time.monotonic() < began + STEPS_S:
                pass
            if step == 20 and me.attempt == 1 and me.task_index == 1:
                raise SystemExit(3)
            step += 1
        return step

    return trains_here


@pytest.mark.long
def test_job_insight_shows_activity_and_goodput(cluster: SimulatedCluster, tmp_path: Path) -> None:
    results = run_on_pod_ray.remote(training(tmp_path), "v4-16", max_retries_failure=1, keep_warm=0)
    try:
        job = look_at(cluster, tmp_path)
    finally:
        (tmp_path / "finish").touch()
        done = ray.get(results, timeout=60)
    tells_what_became_of_it(cluster, job, done[0])


def look_at(cluster: SimulatedCluster, tmp_path: Path) -> str:
    """Look at the second attempt of the job while it runs; returns its id."""
    wait_until(find_controller, 60)
    controller = ControllerConnection()
    wait_until(
        lambda: any(
            job.attempt == 2 and (job.step or 0) > 20 for job in controller.ask_all(ControllerInterface.list_jobs)
        ),
        120,
    )
    (job,) = (
        job.job_id
        for job in controller.ask_all(ControllerInterface.list_jobs)
        if job.attempt == 2 and not job.state.finished
    )
    assert "task 0 at " in iris_json(cluster, "job", "status", job)["status"]
    stacks = iris(cluster, "job", "stacks", job).stdout
    assert "trains_here" in stacks
    picture = tmp_path / "profile.txt"
    iris(cluster, "job", "profile", job, "1", "--seconds", "2", "--format", "raw", "-o", str(picture))
    assert "trains_here" in picture.read_text()
    return job


def tells_what_became_of_it(cluster: SimulatedCluster, job: str, steps: int) -> None:
    found = iris_json(cluster, "job", "goodput", job)
    assert found["attempts"] == 2
    seconds = found["seconds"]
    # A second for each attempt. The first one's is not known if its host was too busy to answer at the end.
    restored = seconds["unproductive_checkpoint_restore_time"]
    assert restored == pytest.approx(2.0, abs=0.5) or restored == pytest.approx(1.0, abs=0.2)
    assert seconds["productive"] == pytest.approx(STEPS_S * steps, rel=0.3)
    assert seconds["wasted_progress_from_disruption"] == pytest.approx(STEPS_S * 20, rel=0.3)
    assert seconds["infrastructure_recovery_from_disruption"] > 0.0
    told = [event["what"] for event in iris_json(cluster, "job", "events", job)]
    assert any("charged as a failure" in what and "worker 1" in what for what in told)
