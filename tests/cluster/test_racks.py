"""Gangs on hosts without TPU that share a rack, on real Ray nodes."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from iris_ray import CoschedulingConfig, IrisClient, ResourceSpec
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace
from tests.support.waiting import wait_until

RACKS = {"a": {"host-0", "host-1"}, "b": {"host-2", "host-3"}}


@pytest.fixture
def racks(no_shared_cluster: None) -> Iterator[SimulatedCluster]:
    """Two racks of two hosts each, one labelled as Ray's users do and one as our operators do."""
    with SimulatedCluster(quiet=True) as cluster:
        cluster.add_hosts(2, labels={"rack": "a"})
        cluster.add_hosts(2, labels={"iris/rack": "b"})
        yield cluster


@pytest.mark.long
def test_gang_stays_on_one_rack_after_losing_a_host(racks: SimulatedCluster, trace: Trace) -> None:
    finish = trace.directory / "finish"

    def work(_facts: dict[str, Any]) -> str:
        while not finish.exists():
            time.sleep(0.02)
        return os.path.basename(os.environ["IRIS_RAY_HOST_DIR"])

    client, need = IrisClient(), ResourceSpec(cpu=1, replicas=2)
    job = client.submit(
        trace.gang(work), resources=need, coscheduling=CoschedulingConfig("rack"), max_retries_preemption=1
    )
    trace.wait_for_tasks(2)
    (first,) = {task.group for task in client.list_tasks(job)}
    lost = client.task_status(job, 1).node_id
    (victim,) = (name for names in RACKS.values() for name in names if racks.node_id(name, 0) == lost)
    racks.kill_host(victim, 0)
    trace.wait_for_tasks(2, attempt=2)
    (second,) = {task.group for task in client.list_tasks(job)}
    assert {first, second} == {"a", "b"}
    trace.finish()
    assert set(job.results(60)) == RACKS[str(second)]
    status = job.status()
    assert (status.failures, status.preemptions) == (0, 1)
    both = client.submit(time.time, resources=need, coscheduling=CoschedulingConfig("rack", 2))
    wait_until(lambda: f"{first}: has 1 host, the job needs 2" in client.explain(both))
    assert both.cancel()
