"""Ways in which an attempt can end, on real Ray nodes: what each is called, and which budget it costs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from iris_ray import IrisClient, ResourceSpec, release, run_on_pod, run_on_pod_ray
from iris_ray.actors.pool.attempt import AT_ONCE_S
from iris_ray.client.caller_pool import pool_of_this_process
from iris_ray.errors import TaskCrashedError
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, actor_pid, alive, job_view, pool_pid, result_of, slice_of_this_task
from tests.support.proofs import in_long, in_proofs
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("cluster")


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def use_up_memory() -> None:
    raise MemoryError("no more")


def hang() -> None:
    time.sleep(1000)


ENDS = {
    "SIGSEGV": (segfault, TaskCrashedError, "SIGSEGV|ended without a word"),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), TaskCrashedError, "SIGKILL|ended without a word"),
    "out of memory": (use_up_memory, MemoryError, "no more"),
    "hang": (hang, TaskCrashedError, "no task has made progress for .* slice 0 .* worker 1 holds the others up"),
}


@pytest.mark.parametrize("how", [*in_proofs("SIGKILL"), *in_long("SIGSEGV", "out of memory", "hang")])
def test_failure_by_the_jobs_own_doing_costs_a_failure(cluster: SimulatedCluster, trace: Trace, how: str) -> None:
    end, kind, words = ENDS[how]

    def work(facts: dict[str, Any]) -> int:
        import iris_ray

        iris_ray.heartbeat(facts["attempt"])
        if facts["index"] == 1 and facts["attempt"] == 1:
            end()
        if how == "hang" and facts["attempt"] == 1:
            iris_ray.heartbeat(facts["attempt"] + 1)
            time.sleep(1000)
        return facts["attempt"]

    stall_timeout = 6.0 if how == "hang" else None  # a busy machine takes seconds from a start to a heartbeat
    options: dict[str, Any] = {"max_retries_preemption": 0, "stall_timeout": stall_timeout}
    ref = run_on_pod_ray.remote(trace.gang(work), "v4-16", max_retries_failure=1, **options)
    assert ray.get(ref) == [2, 2]
    view = job_view(trace.starts()[0]["job"])
    assert (view.failures, view.preemptions) == (1, 0)
    with pytest.raises(kind, match=words):
        run_on_pod(once(work, trace), "v4-16", max_retries_failure=0, **options)


def once(work: Callable[[dict[str, Any]], Any], trace: Trace) -> Callable[[], Any]:
    """The same in its first attempt, without the trace."""

    def run() -> Any:
        import iris_ray

        info = iris_ray.get_job_info()
        assert info is not None
        return work({"index": info.task_index, "attempt": info.attempt})

    return run


@pytest.mark.parametrize(
    ("kind", "worker_id", "tpu_type"),
    [*in_proofs(("TPUHostActor", 1, "v4-16")), *in_long(("SliceActor", 0, "v4-32"))],
)
def test_death_of_our_process_costs_a_preemption(
    cluster: SimulatedCluster, trace: Trace, kind: str, worker_id: int, tpu_type: str
) -> None:
    """The next attempt could begin at once, on a slice that is warm."""
    hosts = get_tpu_config(tpu_type).vm_count
    for _ in range(0 if tpu_type == "v4-16" else 2):
        cluster.add_slice(tpu_type)
    release()
    run_on_pod(lambda: None, tpu_type, num_slices=2, keep_warm=600)
    directory = trace.directory

    def leaves_a_daemon(facts: dict[str, Any]) -> list[int]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = [pid for path in directory.glob("daemon-*") if alive(pid := int(path.read_text()))]
        if facts["attempt"] == 1:
            daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            (directory / f"daemon-{facts['index']}").write_text(str(daemon.pid))
            time.sleep(1000)
        return facts["beside"] + left

    options: dict[str, Any] = {"max_retries_failure": 0, "max_retries_preemption": 1}
    ref = run_on_pod_ray.remote(trace.gang(leaves_a_daemon), tpu_type, **options)
    first = trace.wait_for_tasks(hosts)
    wait_until(lambda: len([*directory.glob("daemon-*")]) == hosts)
    time.sleep(2 * AT_ONCE_S)  # else it counts as broken before
    os.kill(actor_pid(cluster, first[0]["slice"], worker_id, kind), signal.SIGKILL)
    assert result_of(ref) == [[]] * (hosts)
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions, view.attempt) == (0, 1, 2)


@pytest.mark.long
def test_tasks_sharing_host_end_with_our_process_before_retry(trace: Trace) -> None:
    (trace.directory / "other").mkdir()
    other = Trace(trace.directory / "other")

    def waits_once(facts: dict[str, Any]) -> list[int]:
        if facts["attempt"] == 1:
            time.sleep(1000)
        return facts["beside"]

    client = IrisClient()
    need = ResourceSpec(cpu=0.1, replicas=1)
    beside = client.submit(other.gang(waits_once), resources=need, max_retries_failure=0, max_retries_preemption=1)
    other.wait_for_tasks(1)
    job = client.submit(trace.gang(waits_once), resources=need, max_retries_failure=0, max_retries_preemption=1)
    first = trace.wait_for_tasks(1)
    time.sleep(2 * AT_ONCE_S)  # else it counts as broken before
    os.kill(watcher_of(first[0]["pid"]), signal.SIGKILL)
    assert job.result(timeout=60) == beside.result(timeout=60) == [[]]


def watcher_of(pid: int) -> int:
    """The TPUHostActor that reads what a task prints."""
    pipe = os.readlink(f"/proc/{pid}/fd/1")
    readers = [p for p in psutil.process_iter() if p.name().startswith("ray::TPUHostAct")]
    (found,) = [p.pid for p in readers if any(os.readlink(fd) == pipe for fd in Path(f"/proc/{p.pid}/fd").iterdir())]
    return found


@pytest.mark.long
def test_broken_idle_warm_slice_costs_no_retry(cluster: SimulatedCluster, trace: Trace) -> None:
    release()  # nothing else is warm
    (warm, _) = run_on_pod(slice_of_this_task, "v4-16", keep_warm=600)
    time.sleep(1.0)  # until its task is tidied up after
    os.kill(actor_pid(cluster, warm, 1, "TPUHostActor"), signal.SIGKILL)
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_failure=0, max_retries_preemption=0)
    # The first attempt tries the slice that was warm, unless its pool has seen by then that it is broken.
    started = wait_until(lambda: next((s for n in (1, 2) if len(s := trace.starts(n)) == 2), None))
    trace.finish()
    assert ray.get(ref) == started
    assert job_view(started[0]["job"]).preemptions == 0
    release()  # the gang may have run elsewhere, and the slice still be warm


@pytest.mark.long
def test_death_of_pool_costs_a_preemption_unnoticed_by_caller(trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2, max_retries_failure=0, max_retries_preemption=1)
    first = trace.wait_for_tasks(4)
    wait_until(lambda: job_view(first[0]["job"]).state.name == "RUNNING")
    time.sleep(0.5)  # until its pool has said that it runs
    os.kill(pool_pid(), signal.SIGKILL)
    # An order may come to the new process before the run is repeated there, and goes back uncharged.
    second = wait_until(lambda: next((s for n in (2, 3, 4) if len(s := trace.starts(n)) == 4), None))
    wait_until(
        lambda: not any(alive(task["pid"]) for task in first), 10
    )  # no process is left that could end them earlier
    trace.finish()
    assert ray.get(ref) == second
    view = job_view(first[0]["job"])
    assert (view.state.name, view.failures, view.preemptions) == ("SUCCEEDED", 0, 1)


@pytest.mark.long
def test_pool_dying_during_launch_or_wait_loses_no_job(trace: Trace, tmp_path: Any) -> None:
    later = Trace(tmp_path / "later")
    later.directory.mkdir()
    first = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    second = run_on_pod_ray.remote(later.gang(), "v4-16", num_slices=2)
    time.sleep(1.5)
    os.kill(pool_pid(), signal.SIGKILL)
    trace.finish()
    later.finish()
    assert len(result_of(first)) == 4
    assert len(result_of(second)) == 4
    release()
    wait_until(lambda: pool_of_this_process._connected() is None, 20)  # its new process was asked when it is idle


@pytest.mark.proof
def test_task_process_killed_from_outside_is_a_crash(trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_failure=1, max_retries_preemption=0)
    first = trace.wait_for_tasks(2)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = trace.wait_for_tasks(2, attempt=2)
    assert not any(task["beside"] for task in second)
    trace.finish()
    ray.get(ref)
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (1, 0)


@pytest.mark.proof
def test_forked_child_neither_hides_nor_outlives_crash(trace: Trace) -> None:
    """It has copies of all the connections that Ray's other processes watch."""
    directory = trace.directory

    def forks(facts: dict[str, Any]) -> int:
        if not (child := os.fork()):
            time.sleep(1000)
        (directory / f"child-{facts['attempt']}-{facts['index']}").write_text(str(child))
        while facts["attempt"] == 1:
            time.sleep(0.1)
        return facts["attempt"]

    ref = run_on_pod_ray.remote(trace.gang(forks), "v4-16", max_retries_failure=1, max_retries_preemption=0)
    first = trace.wait_for_tasks(2)
    child = int(wait_until(lambda: (path := directory / "child-1-1").exists() and path.read_text()))
    os.kill(first[1]["pid"], signal.SIGKILL)
    assert result_of(ref) == [2, 2]
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (1, 0)
    assert not alive(child)
