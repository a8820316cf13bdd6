"""Functions and results of 200 MB: by Ray's object store, once for each node, and not through the Controller."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.exceptions import RayTaskError

from iris_ray import IrisClient, ResourceSpec, run_on_pod
from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import controller_pid

LARGE = 200_000_000


def digest_of(payload: bytes) -> Callable[[], tuple[int, str]]:
    """A function that closes over the payload."""

    def task() -> tuple[int, str]:
        return len(payload), hashlib.sha256(payload).hexdigest()

    return task


def put_into_stores() -> int:
    """Bytes that all object stores of the cluster have been given so far, copies from other nodes included."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.cumulative_created_bytes)


@pytest.mark.long
def test_large_function_travels_once_per_node_past_controller(cluster: SimulatedCluster) -> None:
    assert run_on_pod(lambda: 1, "v4-16", num_slices=2, keep_warm=600) == [1] * 4
    payload = bytes(range(256)) * (LARGE // 256)
    expected = len(payload), hashlib.sha256(payload).hexdigest()
    before, memory = put_into_stores(), controller_peak()
    assert run_on_pod(digest_of(payload), "v4-16", num_slices=2, keep_warm=600) == [expected] * 4
    nodes = 1 + 4  # the driver's and the hosts
    assert (put_into_stores() - before) / len(payload) == pytest.approx(nodes, rel=0.02)
    assert controller_peak() - memory < len(payload) / 2
    assert max(map(len, ClusterStore().items("log/").values())) < 100_000


@pytest.mark.long
def test_detached_jobs_large_function_outlives_driver(cluster: SimulatedCluster) -> None:
    payload = b"x" * LARGE
    client = IrisClient()
    job = client.submit(digest_of(payload), resources=ResourceSpec(cpu=1, replicas=2), detached=True)
    assert job.results() == [(len(payload), hashlib.sha256(payload).hexdigest())] * 2


def test_users_exception_of_200_kb_arrives_as_itself(cluster: SimulatedCluster) -> None:
    details = "bad batch", 200_000 * "x"

    def fail() -> None:
        raise ValueError(*details)

    with pytest.raises(ValueError, match="bad batch") as told:
        run_on_pod(fail, "v4-16", max_retries_failure=0, keep_warm=600)
    assert isinstance(told.value, RayTaskError)  # as Ray has it: of both classes
    assert told.value.cause.args == details


@pytest.mark.proof
def test_results_of_200_mb_arrive(cluster: SimulatedCluster) -> None:
    run_on_pod(lambda: 1, "v4-16", keep_warm=600)
    before = put_into_stores()
    results = run_on_pod(lambda: (os.environ["IRIS_ATTEMPT"], b"r" * LARGE), "v4-16", keep_warm=600)
    assert results == [("1", b"r" * LARGE)] * 2
    copies = ["on the task's node", "on the pool's node", "in the list of results"]
    assert (put_into_stores() - before) / LARGE == pytest.approx(2 * len(copies), rel=0.02)


def controller_peak() -> int:
    """The most memory that the Controller's process has ever had, in bytes."""
    status = Path(f"/proc/{controller_pid()}/status").read_text()
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kilobytes) * 1024
