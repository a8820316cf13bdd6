"""GPUs are a resource like others, on real Ray nodes that believe to have some."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import Constraint, ConstraintOp, CoschedulingConfig, IrisClient, ResourceSpec, SlotClient, SlotHosts
from iris_ray.errors import InvalidSlotError, TaskCrashedError
from iris_ray.slots import DeviceKind
from iris_ray.testing import SimulatedCluster
from tests.conftest import shared
from tests.support.clusters import Clusters, Shape
from tests.support.command_line import iris, iris_json
from tests.support.gangs import Trace
from tests.support.waiting import wait_until

GB = 10**9
ONE = ResourceSpec(gpu=1, replicas=2)
ON_A_GPU_HOST = (Constraint("gpus", ConstraintOp.EXISTS),)


@pytest.fixture(scope="module")
def gpu_cluster(clusters: Clusters) -> Iterator[SimulatedCluster]:
    """A host with two GPUs, beside the head, which has none."""

    @contextmanager
    def start() -> Iterator[SimulatedCluster]:
        with SimulatedCluster(quiet=True) as running:
            running.add_hosts(1, gpus=2, labels={"gpus": "yes", "rack": "a"})
            yield running

    yield from shared(clusters, Shape("GPUs", start, slices=0))


def visible(directory: Path) -> Any:
    """A function that returns which GPUs its task sees, once all may return."""

    def see(_facts: dict[str, Any]) -> str | None:
        while not (directory / "finish").exists():
            time.sleep(0.02)
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    return see


@pytest.mark.long
def test_tasks_on_one_host_have_different_gpus(gpu_cluster: SimulatedCluster, trace: Trace) -> None:
    client = IrisClient()
    two = client.submit(trace.gang(visible(trace.directory)), resources=ONE)
    trace.wait_for_tasks(2)
    third = client.submit(os.getpid, resources=ResourceSpec(gpu=1))
    wait_until(lambda: f"in use by {two.job_id}" in client.explain(third))
    (host,) = (worker for worker in client.list_workers() if worker.resources.get("GPU"))
    assert (host.resources["GPU"], host.free["GPU"]) == (2.0, 0.0)
    table = iris(gpu_cluster, "host", "ls", "--hosts").stdout
    assert "0/2 free" in table
    none = client.submit(
        lambda: os.environ.get("CUDA_VISIBLE_DEVICES"), resources=ResourceSpec(cpu=1), constraints=ON_A_GPU_HOST
    )
    assert none.results(60) == [""]
    trace.finish()
    assert sorted(two.results(60)) == ["0", "1"]
    assert len(third.results(60)) == 1


def test_job_asking_for_too_many_gpus_is_told_so(gpu_cluster: SimulatedCluster) -> None:
    client = IrisClient()
    job = client.submit(os.getpid, resources=ResourceSpec(gpu=3))
    address = next(worker.address for worker in client.list_workers() if worker.resources.get("GPU"))
    said = wait_until(lambda: (s := client.explain(job)).startswith("waiting") and s)
    assert said.startswith("waiting for 1 host with 3 GPU a task (any); 0 free; ")
    assert "has 2 GPU, a task needs 3" in said
    assert f"host {address}: " in said
    assert job.cancel()


@pytest.mark.proof
def test_crashed_task_gets_its_gpus_again(gpu_cluster: SimulatedCluster) -> None:
    @ray.remote(num_gpus=2)
    def crash_once() -> str | None:
        from iris_ray import get_job_info

        me = get_job_info()
        assert me is not None
        if me.attempt == 1:
            os._exit(3)
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    client = IrisClient()
    assert client.submit(crash_once, max_retries_failure=1).results(60) == ["0,1"]
    with pytest.raises(TaskCrashedError, match="code 3"):
        client.submit(lambda: os._exit(3), resources=ONE).results(60)


def test_rack_gang_has_gpus_of_its_hosts(gpu_cluster: SimulatedCluster) -> None:
    gpu_cluster.add_hosts(1, gpus=2, labels={"rack": "a"})
    need = ResourceSpec(gpu=2, replicas=2)
    job = IrisClient().submit(
        lambda: (os.environ["IRIS_RAY_HOST_DIR"], os.environ.get("CUDA_VISIBLE_DEVICES")),
        resources=need,
        coscheduling=CoschedulingConfig("rack"),
    )
    results = job.results(60)
    assert len({directory for directory, _ in results}) == 2
    assert [visible_there for _, visible_there in results] == ["0,1", "0,1"]


@pytest.mark.proof
def test_slots_use_gpus_as_large_as_driver_says(no_shared_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Path(__file__).parents[1] / "support" / "nvml"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")]))
    memory = [{"total": 80 * GB, "reserved": GB, "used": 3 * GB}, {"total": 40 * GB, "reserved": 0, "used": 0}]
    monkeypatch.setenv("IRIS_TEST_NVML", json.dumps(memory))
    with SimulatedCluster(quiet=True) as cluster:
        cluster.add_hosts(1, gpus=2)
        with SlotClient([SlotHosts(kind=DeviceKind.GPU, devices=2)], name="slots") as client:
            client.register(Share, memory={1: 39 * GB}, kind=DeviceKind.GPU)
            assert client.submit("Share", None).result(60) == ("0", str(39 * GB), "0.4936")
            (runner,) = iris_json(cluster, "slots", "runners")
            assert (runner["memory"], runner["in_use"]) == ([79 * GB, 40 * GB], [3 * GB, 0])
            client.evict(client.status().slots[0].slot_id)
            client.register(Share, "uneven", memory={2: (20 * GB, 60 * GB)}, kind=DeviceKind.GPU)
            assert client.submit("uneven", None).result(60) == ("1,0", f"{20 * GB},{60 * GB}", "0.5000")
            client.register(Share, "too large", memory={2: (60 * GB, 50 * GB)}, kind=DeviceKind.GPU)
            with pytest.raises(
                InvalidSlotError, match=r"needs 60,000,000,000 \+ 50,000,000,000 bytes on 2 gpu devices"
            ):
                client.submit("too large", None).result(60)
        with SlotClient([SlotHosts(kind=DeviceKind.GPU, devices=2, memory=[40 * GB, 30 * GB])]) as client:
            client.register(Share, memory={1: 20 * GB}, kind=DeviceKind.GPU)
            assert client.submit("Share", None).result(60) == ("0", str(20 * GB), "0.2531")


class Share:
    def __call__(self, _: None) -> tuple[str | None, ...]:
        return tuple(
            os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "IRIS_SLOT_MEMORY", "IRIS_SLOT_MEMORY_SHARE")
        )
