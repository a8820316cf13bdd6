"""The Controller's process dies: nobody who runs notices, nothing that waits is lost, no budget is forgotten."""

import os
import signal
import time
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from iris_ray import run_on_pod, run_on_pod_ray
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.wire.shared_names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.wire.status import JobStatus
from iris_ray.errors import DeposedError
from iris_ray.model.lifecycle import JobState
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Crowd, CrowdOfTasks, Trace, alive, controller_pid, the_controller, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster")]


def kill_controller() -> None:
    """End its process with SIGKILL, and wait until it is gone; Ray starts another."""
    pid = controller_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))


def test_running_gang_does_not_notice(trace: Trace) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    trace.wait_for_tasks(4)
    kill_controller()
    trace.finish()
    assert [task["index"] for task in ray.get(job, timeout=60)] == [0, 1, 2, 3]
    assert len(trace.starts()) == 4


def test_waiting_job_keeps_its_place_and_gets_its_turn(trace: Trace, tmp_path: Path) -> None:
    """It was acknowledged, so it is not lost, and it is started once."""
    later = Trace(tmp_path / "later")
    later.directory.mkdir()
    later.finish()
    first = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=3)
    trace.wait_for_tasks(6)
    second = run_on_pod_ray.remote(later.gang(), "v4-16", num_slices=3)
    time.sleep(0.5)
    kill_controller()
    trace.finish()
    assert len(ray.get(first, timeout=60)) == 6
    assert len(ray.get(second, timeout=60)) == 6
    assert len(later.starts()) == 6


def test_budget_is_not_forgotten(trace: Trace) -> None:
    """A restarted controller forgot all budgets (defect 9)."""

    def fail(start: dict[str, object]) -> None:
        time.sleep(0.5)
        raise ValueError(f"attempt {start['attempt']}")

    job = run_on_pod_ray.remote(trace.gang(fail), "v4-16", max_retries_failure=2)
    for attempt in (1, 2):
        trace.wait_for_tasks(2, attempt)
        kill_controller()
    with pytest.raises(ValueError, match="attempt 3"):
        ray.get(job, timeout=60)
    assert {start["attempt"] for start in trace.starts()} == {1, 2, 3}


def test_warm_slices_are_still_known_as_ours() -> None:
    assert run_on_pod(lambda: 1, "v4-16", num_slices=3, keep_warm=600) == [1] * 6
    kill_controller()
    assert run_on_pod(lambda: 2, "v4-16", num_slices=3) == [2] * 6


def test_host_lost_while_no_controller_is_there_restarts_the_gang(trace: Trace, cluster: SimulatedCluster) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    (start, *_) = trace.wait_for_tasks(4)
    os.kill(controller_pid(), signal.SIGKILL)
    cluster.kill_host(str(start["slice"]), 1)
    try:
        trace.wait_for_tasks(4, attempt=2, timeout_s=90)
        trace.finish()
        assert len(ray.get(job, timeout=60)) == 4
    finally:
        cluster.add_slice("v4-16")


def test_controller_killed_twenty_times_in_a_busy_minute_costs_nobody_anything(tmp_path: Path) -> None:
    """Every job ends with the right result and the right counts."""
    crowd = Crowd(tmp_path)
    for _ in range(20):
        crowd.fill_up()
        time.sleep(crowd.chance.uniform(0.5, 4.0))
        kill_controller()
        crowd.check_ended()
    crowd.check_all()


def test_controller_killed_ten_times_under_independent_tasks_costs_none_of_them_anything(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    """Each task runs as often as its attempts say, and is charged for its own failures alone."""
    for _ in range(2):
        cluster.add_slice("v4-8")
    crowd = CrowdOfTasks(tmp_path)
    for _ in range(10):
        crowd.fill_up()
        time.sleep(crowd.chance.uniform(0.5, 4.0))
        kill_controller()
        crowd.check_ended()
    crowd.check_all()


def test_replaced_controller_is_not_obeyed_any_more(trace: Trace) -> None:
    """Stop one, start another, thaw the first: only one is obeyed."""
    job = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    first = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)

    def live() -> list[JobStatus]:
        return [status for status in the_controller().list_jobs() if not status.state.finished]

    wait_until(lambda: len(live()) == 1)  # of earlier tests it may still have to hear that their jobs are over
    pid = controller_pid()
    os.kill(pid, signal.SIGSTOP)
    second = ray.remote(Controller).options(num_cpus=0, max_concurrency=100).remote()
    try:
        (status,) = [status for status in ray.get(second.list_jobs.remote()) if not status.state.finished]
        assert status.state is JobState.RUNNING
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(RayTaskError, match="was replaced"):  # it acknowledges nothing
            ray.get(first.cancel.remote(status.job_id, "an old Controller's wish"), timeout=30)
        assert refuses(first)
        trace.finish()
        assert len(ray.get(job, timeout=60)) == 2
    finally:
        ray.kill(second)
        os.kill(pid, signal.SIGKILL)  # frozen or not; the next one goes on from the records


def refuses(controller: ActorHandle) -> bool:
    try:
        ray.get(controller.list_jobs.remote(), timeout=30)
    except RayTaskError as error:
        return isinstance(error.cause, DeposedError)
    return False
