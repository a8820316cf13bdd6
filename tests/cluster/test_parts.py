"""Gangs on parts of a slice: they run side by side, each as a JAX program of its own, and a loss stops one only."""

import os
import time
from collections.abc import Iterator

import pytest

from iris_ray import IrisClient, get_job_info, run_on_pod, run_on_pod_ray
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace, result_of
from tests.support.jax_gangs import joined
from tests.support.jax_reader import Found, jax_reader
from tests.support.waiting import wait_until

TYPE = "v6e-16"  # four hosts


@pytest.fixture
def parted(no_shared_cluster: None) -> Iterator[SimulatedCluster]:
    with SimulatedCluster({TYPE: 1}, quiet=True) as cluster:
        yield cluster


def test_each_part_is_a_jax_program_and_a_lost_host_stops_one(parted: SimulatedCluster, trace: Trace) -> None:
    (name,) = parted.slice_names
    _two_jax_programs_side_by_side(name)
    _lost_host_stops_its_part_only(parted, name, trace)


def _two_jax_programs_side_by_side(name: str) -> None:
    options = {"topology": "2x4", "num_slices": 2, "failure_domain": "slice", "max_retries_failure": 0}
    found = run_on_pod(joined, TYPE, **options)  # type: ignore[arg-type]
    assert [one["rank"] for one in found] == [(0, 2), (1, 2)] * 2
    assert {one["sum"] for one in found} == {0 + 1}
    places = [(me.slice_name, me.worker_id, me.task_index, me.num_tasks) for me in (one["info"] for one in found)]
    assert places == [(f"{name}:2x4:{i // 2}", i % 2, i, 4) for i in range(4)]
    environments = [one["environ"] for one in found]
    for own in (environments[:2], environments[2:]):
        addresses = own[0]["TPU_WORKER_HOSTNAMES"].split(",")
        assert own[0]["TPU_PROCESS_ADDRESSES"] == ",".join(f"{address}:8471" for address in addresses)
        assert [one["TPU_WORKER_ID"] for one in own] == ["0", "1"]
        assert {one["TPU_PROCESS_BOUNDS"] for one in own} == {"1,2,1"}
        assert not any(name.startswith("MEGASCALE_") for one in own for name in one)
        asked = [one | {"GCE_METADATA_IP": one["IRIS_RAY_TEST_METADATA_HOST"]} for one in own]
        with jax_reader() as as_jax_reads:
            assert as_jax_reads(asked) == [Found("gketpu", f"{addresses[0]}:8482", 2, rank) for rank in range(2)]
    first, second = (set(environments[i]["TPU_WORKER_HOSTNAMES"].split(",")) for i in (0, 2))
    assert not first & second


def _lost_host_stops_its_part_only(cluster: SimulatedCluster, name: str, trace: Trace) -> None:
    """The other gang goes on. The one that lost a host waits, says why, and takes the other part once it is free."""
    finish = trace.directory / "finish"

    def work() -> tuple[int, int]:
        me = get_job_info()
        assert me is not None
        (trace_directory / f"{me.slice_name}-{me.worker_id}-{me.attempt}").touch()
        while not finish.exists():
            time.sleep(0.02)
        return me.attempt, os.getpid()

    trace_directory = trace.directory
    first, second = (run_on_pod_ray.remote(work, TYPE, topology="2x4", max_retries_failure=0) for _ in range(2))
    wait_until(lambda: len(list(trace_directory.glob(f"{name}:2x4:*-1"))) == 4)
    client = IrisClient()
    ids = [run_on_pod_ray.job_id(reference) for reference in (first, second)]
    groups = [client.list_tasks(job_id)[0].group for job_id in ids]
    of_part = dict(zip(groups, (first, second), strict=True))
    assert of_part.keys() == {f"{name}:2x4:0", f"{name}:2x4:1"}
    cluster.kill_host(name, 2)  # of part 0, whose hosts are 0 and 2
    lost, left = of_part[f"{name}:2x4:0"], of_part[f"{name}:2x4:1"]
    wait_until(lambda: f"{name}:2x4:0: has 1 of its 2 hosts" in client.explain(run_on_pod_ray.job_id(lost)))
    finish.touch()
    assert [attempt for attempt, _ in result_of(left)] == [1, 1]
    assert [attempt for attempt, _ in result_of(lost)] == [2, 2]  # on the part that has become free
