"""The Controller's process dies: what runs goes on, what waits is not lost, and the retries used up are remembered."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from iris_ray import run_on_pod, run_on_pod_ray
from iris_ray.actors.calls.controller_client import get_or_start_controller
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.errors import DeposedError, NotPermittedError
from iris_ray.model.lifecycle import JobState
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, all_jobs, controller_pid, kill_controller, pool_pid, result_of, the_controller
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.long
def test_running_gang_goes_on_during_controller_restart(trace: Trace) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    trace.wait_for_tasks(4)
    kill_controller()
    trace.finish()
    assert [task["index"] for task in result_of(job)] == [0, 1, 2, 3]
    assert len(trace.starts()) == 4


@pytest.mark.long
def test_waiting_job_keeps_place_during_controller_restart(trace: Trace, tmp_path: Path) -> None:
    """It was acknowledged, so it is not lost, and it is started once."""
    later = Trace(tmp_path / "later")
    later.directory.mkdir()
    later.finish()
    first = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=3)
    trace.wait_for_tasks(6)
    second = run_on_pod_ray.remote(later.gang(), "v4-16")
    time.sleep(0.5)
    kill_controller()
    trace.finish()
    assert len(result_of(first)) == 6
    assert len(result_of(second)) == 2
    assert len(later.starts()) == 2


@pytest.mark.long
def test_restarted_controller_knows_warm_slice_holders() -> None:
    assert run_on_pod(lambda: 1, "v4-16", num_slices=3, keep_warm=600) == [1] * 6
    kill_controller()
    assert run_on_pod(lambda: 2, "v4-16", num_slices=3) == [2] * 6


@pytest.mark.long
def test_host_lost_without_controller_restarts_gang(trace: Trace, cluster: SimulatedCluster) -> None:
    job = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    (start, *_) = trace.wait_for_tasks(4)
    os.kill(controller_pid(), signal.SIGKILL)
    cluster.kill_host(str(start["slice"]), 1)
    trace.wait_for_tasks(4, attempt=2, timeout_s=90)
    trace.finish()
    assert len(result_of(job)) == 4


def test_setting_holds_at_once_and_under_the_next_controller() -> None:
    asyncio.run(get_or_start_controller())
    the_controller().ask(ControllerInterface.set_settings, {"operators": "olga"}, False, "bob")
    for kill in (kill_controller, lambda: None):
        assert the_controller().ask(ControllerInterface.list_settings)["operators"].user == "bob"
        with pytest.raises(NotPermittedError, match="operators are: olga"):
            the_controller().ask(ControllerInterface.set_settings, {"operators": None}, False, "bob")
        kill()
    the_controller().ask(ControllerInterface.set_settings, {"operators": None}, False, "olga")


@pytest.mark.long
def test_pool_keeps_no_connection_of_controllers_that_are_gone() -> None:
    def descriptors_after(kills: int) -> int:
        for _ in range(kills):
            kill_controller()
            run_on_pod(lambda: 1, "v4-16", num_slices=3, keep_warm=600)  # connected with every host from the beginning
        return psutil.Process(pool_pid()).num_fds()

    run_on_pod(lambda: 1, "v4-16", num_slices=3, keep_warm=600)
    before = descriptors_after(2)
    assert descriptors_after(6) < before + 4


@pytest.mark.proof
def test_replaced_controller_is_no_longer_obeyed(trace: Trace) -> None:
    """Stop one, start another, thaw the first: only one is obeyed."""
    job = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    first = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)

    def live() -> list[JobStatus]:
        return [status for status in all_jobs() if not status.state.finished]

    wait_until(lambda: len(live()) == 1)  # of earlier tests it may still have to hear that their jobs are over
    pid = controller_pid()
    os.kill(pid, signal.SIGSTOP)
    second = ray.remote(Controller).options(num_cpus=0, max_concurrency=100).remote()
    try:
        (status,) = [status for status in ray.get(second.list_jobs.remote()) if not status.state.finished]
        assert status.state is JobState.RUNNING
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(RayTaskError, match="was replaced"):  # it acknowledges nothing
            ray.get(first.cancel.remote(status.job_id, "an old Controller's wish", "ann"), timeout=30)
        assert refuses(first)
        trace.finish()
        assert len(result_of(job)) == 2
    finally:
        ray.kill(second)
        os.kill(pid, signal.SIGKILL)  # frozen or not; the next one goes on from the records


def refuses(controller: ActorHandle) -> bool:
    try:
        ray.get(controller.list_jobs.remote(), timeout=30)
    except RayTaskError as error:
        return isinstance(error.cause, DeposedError)
    return False
