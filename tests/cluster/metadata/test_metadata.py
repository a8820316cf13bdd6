"""Advance word that a host is going to go, on real nodes: who hears it, and what it changes."""

import os
import signal
import time
from typing import Any

import pytest
import ray

from iris_ray import run_on_pod_ray
from iris_ray.errors import PreemptedTooManyTimesError
from iris_ray.model.outcomes import HostEvidence
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, alive, all_jobs, all_workers, ask_as_a_pool, controller_pid, job_view, result_of
from tests.support.waiting import wait_until

PREEMPTED = "the metadata server of the host says that it is being preempted"


def evidence(cluster: SimulatedCluster, slice_name: str, worker_id: int) -> HostEvidence:
    """What the Controller knows about a host."""
    node_id = cluster.node_id(slice_name, worker_id)
    return ask_as_a_pool(lambda controller: controller.evidence.remote([node_id]))[node_id]


def wait_for_notice(cluster: SimulatedCluster, slice_name: str, worker_id: int) -> str:
    return wait_until(lambda: evidence(cluster, slice_name, worker_id).draining, 20)


@pytest.mark.proof
def test_exception_after_metadata_preemption_costs_no_failure(cluster: SimulatedCluster, trace: Trace) -> None:
    """Even if the user's code raises because of it, before the hosts are gone; and they get nothing new."""
    ref = run_on_pod_ray.remote(trace.gang_that_raises_when_told(), "v4-16", max_retries_failure=0)
    doomed = trace.wait_for_tasks(2)[0]["slice"]
    cluster.preempt_slice(doomed, notice_s=1000, heard_by="metadata")
    assert [wait_for_notice(cluster, doomed, worker_id) for worker_id in (0, 1)] == [PREEMPTED] * 2
    trace.tell()
    other = trace.wait_for_tasks(2, attempt=2)[0]["slice"]
    assert other != doomed
    trace.finish()
    assert ray.get(ref) == [other] * 2
    view = job_view(trace.starts()[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)

    hosts = [worker for worker in all_workers() if worker.slice_name == doomed]
    assert [host.unavailable for host in hosts] == [PREEMPTED] * 2, "given back, it is looked at anew"
    cluster.preempt_slice(doomed)
    wait_until(lambda: evidence(cluster, doomed, 0).lost)
    assert evidence(cluster, doomed, 0).draining == PREEMPTED


@pytest.mark.proof
def test_slice_lost_after_metadata_announcement_is_preempted(cluster: SimulatedCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_preemption=0)
    doomed = trace.wait_for_tasks(2)[0]["slice"]
    preemption = cluster.preempt_slice(doomed, notice_s=4, heard_by="metadata")
    with pytest.raises(RuntimeError, match=PREEMPTED) as caught:
        result_of(ref)
    assert preemption.done, "a notice alone ends nothing"
    error: Any = caught.value
    assert isinstance(error.cause, PreemptedTooManyTimesError)


@pytest.mark.long
def test_next_controller_knows_announced_maintenance(cluster: SimulatedCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16")
    name = trace.wait_for_tasks(2)[0]["slice"]
    cluster.announce_maintenance(name, 1, starts_in_s=500)
    assert "announces maintenance (UNSCHEDULED)" in wait_for_notice(cluster, name, 1)
    assert evidence(cluster, name, 0).draining is None
    pid = controller_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))
    assert "announces maintenance (UNSCHEDULED)" in wait_for_notice(cluster, name, 1)
    trace.finish()
    assert [task["attempt"] for task in result_of(ref)] == [1, 1]
    cluster.preempt_slice(name)


@pytest.mark.long
def test_host_with_cancelled_maintenance_takes_gangs_again(cluster: SimulatedCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16")
    first = trace.wait_for_tasks(2)[0]
    name, replacement = first["slice"], first["job"] + "/replacement-1"
    cluster.announce_maintenance(name, 1, starts_in_s=500)
    wait_for_notice(cluster, name, 1)
    assert "announces maintenance" in (unavailable(name)[1] or "")
    assert replacement in jobs()
    cluster.call_off_maintenance(name, 1)
    wait_until(lambda: evidence(cluster, name, 1).draining is None, 40)
    assert unavailable(name) == [None, None]
    assert replacement not in jobs()
    pid = controller_pid()
    os.kill(pid, signal.SIGKILL)  # its successor is not told
    wait_until(lambda: not alive(pid))
    trace.finish()
    assert [task["attempt"] for task in result_of(ref)] == [1, 1], "a task that does not save runs on"
    everywhere = run_on_pod_ray.remote(lambda: os.environ["TPU_NAME"], "v4-16", num_slices=len(cluster.slice_names))
    assert name in result_of(everywhere)
    assert unavailable(name) == [None, None]


@pytest.mark.long
def test_cancellation_is_heard_after_gang_moved_away(cluster: SimulatedCluster, trace: Trace) -> None:
    """Its pool has given the slice back, and listens no more."""
    directory = trace.directory

    def save_when_told(facts: dict[str, Any]) -> str:
        import iris_ray

        while not (directory / "finish").exists():
            if notice := iris_ray.preemption_notice():
                notice.saved()
            time.sleep(0.02)
        return facts["slice"]

    ref = run_on_pod_ray.remote(trace.gang(save_when_told), "v4-16")
    name = trace.wait_for_tasks(2)[0]["slice"]
    cluster.announce_maintenance(name, 1, starts_in_s=500)
    trace.wait_for_tasks(2, attempt=2, timeout_s=60)
    assert "announces maintenance" in (unavailable(name)[1] or "")
    cluster.call_off_maintenance(name, 1)
    wait_until(lambda: unavailable(name) == [None, None], 60)
    trace.finish()
    assert name not in result_of(ref)


def unavailable(slice_name: str) -> list[str | None]:
    """Why the hosts of a slice take nothing new, by number."""
    return [worker.unavailable for worker in all_workers() if worker.slice_name == slice_name]


def jobs() -> set[str]:
    return {job.job_id for job in all_jobs()}
