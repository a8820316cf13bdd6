"""Another process holds the chips of a host: nothing runs there, no job is charged, and the process is not killed."""

from typing import Any

import pytest
import ray

from iris_ray import get_job_info, release, run_on_pod, run_on_pod_ray
from iris_ray.testing import SimulatedCluster
from tests.conftest import Terminal
from tests.support.chip_holders import ChipHolder, libtpu_library
from tests.support.gangs import Trace, alive, all_jobs, job_view, result_of
from tests.support.waiting import wait_until


def stranger_on(cluster: SimulatedCluster, slice_name: str) -> ChipHolder:
    """A process that holds the lock of host 1, with the real libtpu if it is installed."""
    real = libtpu_library() is not None
    holder = ChipHolder(cluster.host_dir(slice_name, 1) / "lock", real=real)
    assert holder.said == "holds"
    return holder


def where() -> str:
    me = get_job_info()
    assert me is not None
    return me.slice_name


def waiting_job() -> Any:
    """The job that waits because somebody holds chips, once there is one."""
    waiting = [job for job in all_jobs() if job.waiting and "held by" in str(job.waiting)]
    return waiting[0] if waiting else None


def test_gang_goes_to_another_slice_if_somebody_holds_the_chips_of_the_warm_one(
    cluster: SimulatedCluster, trace: Trace
) -> None:
    first, _ = run_on_pod(where, "v4-16")
    hosts = [cluster.host_dir(first, worker_id) for worker_id in (0, 1)]
    wait_until(lambda: not any([*host.glob("tasks/*.started")] for host in hosts))  # it is over on the hosts as well
    stranger = stranger_on(cluster, first)
    try:
        trace.finish()
        results = run_on_pod(trace.gang(), "v4-16", max_retries_failure=0, max_retries_preemption=0)
        assert [result["attempt"] for result in results] == [2, 2]
        assert first not in {result["slice"] for result in results}
        assert (first, 1) not in {(start["slice"], start["worker_id"]) for start in trace.starts()}
        view = job_view(results[0]["job"])
        assert (view.state.name, view.failures, view.preemptions) == ("SUCCEEDED", 0, 0)
        assert alive(stranger.pid)
    finally:
        stranger.end()


@pytest.mark.long
def test_gang_waits_with_the_reason_and_runs_once_the_holder_is_gone(
    cluster: SimulatedCluster, terminal: Terminal
) -> None:
    """All three slices are wanted; they are started afresh, so that it is the hosts that refuse."""
    terminal.listen()
    release()
    stranger = stranger_on(cluster, cluster.slice_names[1])
    try:
        ref = run_on_pod_ray.remote(where, "v4-16", num_slices=3, max_retries_failure=0, max_retries_preemption=0)
        said = f"its chips are held by pid {stranger.pid} (python"
        # What an earlier test left behind may be in the way for some seconds.
        job = wait_until(lambda: (job := waiting_job()) and said in str(job.waiting) and job)
        # The driver's terminal tells it, too, while it is so: what is over by the time it is asked for is not told.
        wait_until(lambda: any(said in line for line in terminal.lines))
        assert alive(stranger.pid)
        assert ray.wait([ref], timeout=0) == ([], [ref])
    finally:
        stranger.end()
    assert set(result_of(ref)) == set(cluster.slice_names)
    view = job_view(job.job_id)
    assert (view.failures, view.preemptions) == (0, 0)
