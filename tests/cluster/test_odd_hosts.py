"""Hosts that are not as one expects: another clock, a read-only root, a container; and a raylet that dies alone."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from iris_ray import preemption_notice, run_on_pod, run_on_pod_ray
from iris_ray.errors import TaskCrashedError
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, job_view
from tests.support.odd_hosts import CONTAINER, NON_ROOT, READ_ONLY_ROOT, clock_off_by
from tests.support.proofs import in_long
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof


def only_slice(cluster: SimulatedCluster, under: list[str]) -> str:
    """Replace all slices by one whose hosts are under that command."""
    for name in cluster.slice_names:
        cluster.preempt_slice(name)
    return cluster.add_slice("v4-16", under=under)


def starts_a_daemon(seconds: str) -> Callable[[], int]:
    def start() -> int:
        subprocess.run(["sh", "-c", f"setsid sleep {seconds} >&- 2>&- &"], check=True)
        return 7

    return start


def sleepers(seconds: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.long
def test_gang_goes_on_elsewhere_after_a_raylet_was_killed(cluster: SimulatedCluster, trace: Trace) -> None:
    """What it ran goes with it, daemons too."""
    marker = f"{3000 + os.getpid()}"

    def with_a_daemon(facts: dict[str, Any]) -> int:
        starts_a_daemon(marker)()
        while not (trace_dir / "finish").exists():
            time.sleep(0.02)
        return int(facts["attempt"])

    trace_dir: Path = trace.directory
    ref = run_on_pod_ray.remote(trace.gang(with_a_daemon), "v4-16", max_retries_failure=0)
    first = trace.wait_for_tasks(2)
    wait_until(lambda: len(sleepers(marker)) == 2)
    cluster.kill_raylet(first[0]["slice"], 1)
    second = trace.wait_for_tasks(2, attempt=2)
    assert second[0]["slice"] != first[0]["slice"]
    assert not any(start["beside"] for start in second)
    trace.finish()
    assert ray.get(ref) == [2, 2]
    assert job_view(first[0]["job"]).preemptions == 1
    wait_until(lambda: not sleepers(marker), 20)
    wait_until(lambda: not cluster.host_pids(first[0]["slice"], 1, "iris_ray.actors.host.reaper"), 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")
@pytest.mark.parametrize("under", [CONTAINER, READ_ONLY_ROOT, NON_ROOT], ids=["container", "read-only", "not root"])
def test_task_in_confinement_has_its_result_and_leaves_nothing(cluster: SimulatedCluster, under: list[str]) -> None:
    only_slice(cluster, under)
    marker = f"{4000 + os.getpid()}"
    assert run_on_pod(starts_a_daemon(marker), "v4-16", max_retries_failure=0) == [7, 7]
    wait_until(lambda: not sleepers(marker), 20)
    with pytest.raises(TaskCrashedError, match="code 3"):
        run_on_pod(lambda: os._exit(3), "v4-16", max_retries_failure=0)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [3600, *in_long(-3600)])
def test_host_whose_clock_is_an_hour_off_has_its_notice_in_time(
    cluster: SimulatedCluster, trace: Trace, tmp_path: Path, seconds: int
) -> None:
    def waits_for_notice(_facts: dict[str, Any]) -> tuple[float, float]:
        end = time.monotonic() + 30
        while (notice := preemption_notice()) is None and time.monotonic() < end:
            time.sleep(0.05)
        assert notice is not None
        return time.time(), notice.deadline - time.time()

    name = only_slice(cluster, clock_off_by(seconds, tmp_path / "clock"))
    ref = run_on_pod_ray.remote(trace.gang(waits_for_notice), "v4-16", max_retries_failure=0)
    wait_until(lambda: any(len(trace.starts(attempt)) == 2 for attempt in range(1, 9)))
    preemption = cluster.preempt_slice(name, notice_s=20)
    for at, left in ray.get(ref):
        assert abs(at - time.time() - seconds) < 60, "its clock is not off"
        assert 0 < left <= 30
    preemption.cancel()
