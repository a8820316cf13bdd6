"""What happens to a gang when hosts and slices are lost: another slice, the right budget, the right results."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from iris_ray import get_job_info, run_on_pod_ray
from iris_ray.actors.pool.attempt import AT_ONCE_S
from iris_ray.errors import PreemptedTooManyTimesError
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, alive, job_view
from tests.support.proofs import in_long
from tests.support.waiting import wait_until


@pytest.mark.parametrize("worker_id", [1, *in_long(0)])
def test_lost_host_costs_slice_and_one_preemption(cluster: SimulatedCluster, trace: Trace, worker_id: int) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_failure=0, max_retries_preemption=3)
    first = trace.wait_for_tasks(2)
    cluster.kill_host(first[0]["slice"], worker_id)
    second = trace.wait_for_tasks(2, attempt=2)
    assert second[0]["slice"] != first[0]["slice"]
    assert second[0]["coordinator"] != first[0]["coordinator"]
    assert not alive(first[1 - worker_id]["pid"]), "the survivor was stopped before the gang started again"
    trace.finish()
    assert [r["attempt"] for r in ray.get(ref)] == [2, 2]
    view = job_view(first[0]["job"])
    assert (view.state.name, view.failures, view.preemptions) == ("SUCCEEDED", 0, 1)


@pytest.mark.long
def test_lost_slice_of_two_is_replaced_and_other_stays(cluster: SimulatedCluster, trace: Trace) -> None:
    directory = str(trace.directory)

    def leaves_a_file(facts: dict[str, Any]) -> list[str]:
        me = get_job_info()
        assert me is not None
        local = Path(me.local_dir)
        found = sorted(path.name for path in local.iterdir())
        (local / f"of attempt {me.attempt}").touch()
        (Path(directory) / f"wrote-{me.attempt}-{me.task_index}").touch()
        while me.attempt == 1:
            time.sleep(0.05)
        return [me.slice_name, *found]

    ref = run_on_pod_ray.remote(trace.gang(leaves_a_file), "v4-16", num_slices=2, max_retries_failure=0)
    first = trace.wait_for_tasks(4)
    wait_until(lambda: len([*trace.directory.glob("wrote-1-*")]) == 4)
    cluster.preempt_slice(first[2]["slice"])
    results = ray.get(ref)
    assert [found for name, *found in results if name == first[0]["slice"]] == [["of attempt 1"]] * 2
    assert [found for name, *found in results if name != first[0]["slice"]] == [[]] * 2
    assert first[2]["slice"] not in {name for name, *_ in results}
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)
    hosts = [cluster.host_dir(name, i) for name in {name for name, *_ in results} for i in (0, 1)]
    wait_until(lambda: not any([*host.glob("jobs/*")] for host in hosts))  # the job is over


@pytest.mark.proof
def test_survivors_of_lost_slice_zero_keep_their_indices(no_shared_cluster: None, trace: Trace) -> None:
    directory = trace.directory

    def until_finished(facts: dict[str, Any]) -> tuple[int, int | None, str, list[str]]:
        me = get_job_info()
        assert me is not None
        found = [path.name for path in Path(me.local_dir).iterdir()]
        (Path(me.local_dir) / f"of task {me.task_index}").touch()
        (directory / f"wrote-{me.attempt}-{me.task_index}").touch()
        while not (directory / "finish").exists():
            time.sleep(0.02)
        return me.task_index, me.previous_task_index, me.slice_name, found

    with SimulatedCluster({"v4-8": 3}, quiet=True) as cluster:
        ref = run_on_pod_ray.remote(trace.gang(until_finished), "v4-8", num_slices=3, max_retries_failure=0)
        first = trace.wait_for_tasks(3)
        wait_until(lambda: len([*directory.glob("wrote-1-*")]) == 3)
        cluster.kill_host(first[0]["slice"], 0)
        new = cluster.add_slice("v4-8")
        second = trace.wait_for_tasks(3, attempt=2)
        trace.finish()
        assert ray.get(ref) == [
            (0, None, new, []),
            (1, 1, first[1]["slice"], ["of task 1"]),
            (2, 2, first[2]["slice"], ["of task 2"]),
        ]
    assert [start["slice_id"] for start in second] == [0, 1, 2]


@pytest.mark.proof
def test_host_whose_watcher_dies_counts_as_lost(cluster: SimulatedCluster, trace: Trace) -> None:
    """Then no process reads the task's output: its next line fails, which is no fault of the task."""
    directory = trace.directory

    def chatter(start: dict[str, Any]) -> int:
        while not (directory / "finish").exists():
            print("a line", flush=True)
            time.sleep(0.02)
        return start["attempt"]

    ref = run_on_pod_ray.remote(trace.gang(chatter), "v4-16", max_retries_failure=0, max_retries_preemption=3)
    first = trace.wait_for_tasks(2)
    time.sleep(2 * AT_ONCE_S)  # else it counts as broken before
    (watcher,) = [
        pid
        for pid in cluster.host_pids(first[1]["slice"], 1)
        if psutil.Process(pid).cmdline()[0].startswith("ray::TPUHostActor")
    ]
    os.kill(watcher, signal.SIGKILL)
    assert not any(start["beside"] for start in trace.wait_for_tasks(2, attempt=2))
    trace.finish()
    assert ray.get(ref) == [2, 2]
    view = job_view(first[0]["job"])
    assert (view.state.name, view.failures, view.preemptions) == ("SUCCEEDED", 0, 1)
    assert "host 1 is gone" in (view.error or "")
    assert len(trace.starts()) == 4


@pytest.mark.long
def test_frozen_host_is_noticed_and_replaced(cluster: SimulatedCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_failure=0)
    first = trace.wait_for_tasks(2)
    cluster.freeze_host(first[0]["slice"], 1)
    second = trace.wait_for_tasks(2, attempt=2)
    assert second[0]["slice"] != first[0]["slice"]
    trace.finish()
    ray.get(ref)
    assert job_view(first[0]["job"]).preemptions == 1


@pytest.mark.proof
def test_exception_after_announced_preemption_costs_no_failure(cluster: SimulatedCluster, trace: Trace) -> None:
    """Even if the user's code raises because of it, before the host is gone."""
    ref = run_on_pod_ray.remote(trace.gang_that_raises_when_told(), "v4-16", max_retries_failure=0)
    first = trace.wait_for_tasks(2)
    preemption = cluster.preempt_slice(first[0]["slice"], notice_s=6)
    time.sleep(2)
    trace.tell()
    second = trace.wait_for_tasks(2, attempt=2)
    assert second[0]["slice"] != first[0]["slice"]
    trace.finish()
    assert ray.get(ref) == [second[0]["slice"]] * 2
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)
    preemption.wait()


def test_exhausted_preemption_budget_raises_runtime_error(cluster: SimulatedCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_preemption=0)
    first = trace.wait_for_tasks(2)
    cluster.preempt_slice(first[0]["slice"])
    with pytest.raises(RuntimeError, match="preempted too many times") as caught:
        ray.get(ref)
    error: Any = caught.value
    assert isinstance(error.cause, PreemptedTooManyTimesError)
