"""Networks that fail: a host is cut off from the head, from its peers, from both, one way, or has little bandwidth."""

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from iris_ray import run_on_pod, run_on_pod_ray
from iris_ray.actors.calls.liveness import HOST_UNASKED_S
from iris_ray.errors import InvalidRequestError
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, alive, job_view
from tests.support.proofs import in_long
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.proof, pytest.mark.skipif(os.geteuid() != 0, reason="only root may make networks")]


@pytest.fixture
def wired(no_shared_cluster: None) -> Iterator[SimulatedCluster]:
    with SimulatedCluster({"v4-16": 2}, networks=True, quiet=True) as cluster:
        yield cluster


def links() -> str:
    """The interfaces and namespaces of this machine."""
    return "".join(subprocess.run(["ip", w], capture_output=True, text=True).stdout for w in ("link", "netns"))


def cut_off_a_host_of_a_gang(cluster: SimulatedCluster, trace: Trace, worker_id: int, **how: Any) -> int:
    """Return the pid of that host's task, once the gang has its results from other hosts."""
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_failure=0)
    first = trace.wait_for_tasks(2)
    cluster.cut_off(first[0]["slice"], worker_id, **how)
    second = trace.wait_for_tasks(2, attempt=2)
    assert second[0]["slice"] != first[0]["slice"]
    trace.finish()
    assert [end["attempt"] for end in ray.get(ref)] == [2, 2]
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)
    return int(first[worker_id]["pid"])


@pytest.mark.long
@pytest.mark.parametrize("how", [{"from_head": False}, *in_long({"direction": "out"}, {"direction": "in"})], ids=str)
def test_gang_goes_on_elsewhere_after_host_was_cut_off(
    wired: SimulatedCluster, trace: Trace, how: dict[str, Any]
) -> None:
    cut_off_a_host_of_a_gang(wired, trace, 1, **how)


@pytest.mark.long
@pytest.mark.parametrize(("worker_id", "how"), [(0, {"from_hosts": False}), (1, {})], ids=str)
def test_cut_off_host_ends_its_task_by_itself(
    wired: SimulatedCluster, trace: Trace, worker_id: int, how: dict[str, Any]
) -> None:
    """Else it would go on beside the next attempt for as long as the network is broken."""
    pid = cut_off_a_host_of_a_gang(wired, trace, worker_id, **how)
    assert alive(pid), "nobody can tell it"
    wait_until(lambda: not alive(pid), HOST_UNASKED_S + 60.0)


def test_briefly_cut_off_host_goes_on(wired: SimulatedCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_preemption=0)
    first = trace.wait_for_tasks(2)
    wired.cut_off(first[0]["slice"], 1)
    wired.reconnect(first[0]["slice"], 1)
    trace.finish()
    assert [end["attempt"] for end in ray.get(ref)] == [1, 1]


def test_gang_on_slow_network_has_its_results(wired: SimulatedCluster) -> None:
    """A megabit a second: what the runtime itself sends is little. The limit ends when it is lifted."""

    def limited() -> list[bool]:
        pids = [wired.host_pids(name, i)[0] for name, i in hosts]
        looks = [["nsenter", f"--net=/proc/{pid}/ns/net", "tc", "qdisc", "show"] for pid in pids]
        return ["tbf" in subprocess.run(look, capture_output=True, text=True, check=True).stdout for look in looks]

    hosts = [(name, i) for name in wired.slice_names for i in wired.worker_ids(name)]
    for name, i in hosts:
        wired.slow_down(name, i, 1_000_000)
    assert all(limited())
    assert run_on_pod(lambda: 3, "v4-16") == [3, 3]
    for name, i in hosts:
        wired.slow_down(name, i, None)
    assert not any(limited())


def test_networks_exist_only_on_request_and_end_with_cluster(no_shared_cluster: None) -> None:
    with SimulatedCluster({"v4-8": 1}, networks=True, quiet=True) as cluster:
        assert f"iris{os.getpid()}" in links()
        with pytest.raises(InvalidRequestError, match="direction is one of"):
            cluster.cut_off("v4-8-0", 0, direction="sideways")  # type: ignore[arg-type]
    assert f"iris{os.getpid()}" not in links()
    with (
        SimulatedCluster({"v4-8": 1}, quiet=True) as cluster,
        pytest.raises(InvalidRequestError, match="networks=True"),
    ):
        cluster.cut_off("v4-8-0", 0)
