"""SimulatedCluster: what its hosts look like to Ray and to user code, and what can happen to them."""

import os
import subprocess
import sys
import textwrap
import time
from typing import Any

import psutil
import pytest
import ray
import requests
from ray._private.utils import read_ray_address

from iris_ray import release
from iris_ray.actors.calls.ray_internals import temp_dir
from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError
from iris_ray.testing import SimulatedCluster
from tests.support.clusters import actors_left
from tests.support.waiting import wait_until

SLICE = "v4-16"  # two hosts


@pytest.fixture
def doomed(cluster: SimulatedCluster) -> str:
    """A slice to be mistreated, on which nothing runs."""
    release()
    wait_until(lambda: not actors_left(cluster))
    return cluster.slice_names[-1]


class Inhabitant:
    """Lives on a host and tells about it."""

    def __init__(self) -> None:
        # A child that has left its process group, and has no environment to be recognised by.
        self._child = subprocess.Popen(["setsid", "sleep", "1000"], env={"PATH": os.environ["PATH"]})

    def look(self) -> dict[str, Any]:
        return {
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "pids": [os.getpid(), self._child.pid],
            "address": ray.util.get_node_ip_address(),
        }


def inhabit(slice_name: str, worker_id: int) -> Any:
    # A pinch of a resource matters: Ray has a random node start an actor that asks for none, possibly one that is dead
    # and not yet known to be, and the actor dies with it.
    labels = {"ray.io/tpu-slice-name": slice_name, "ray.io/tpu-worker-id": str(worker_id)}
    return ray.remote(num_cpus=0)(Inhabitant).options(label_selector=labels, resources={slice_name: 0.001}).remote()


def metadata_of(look: dict[str, Any]) -> dict[str, str]:
    """What the metadata server of an inhabitant's host says."""
    server = f"http://{look['env']['IRIS_RAY_TEST_METADATA_HOST']}/computeMetadata/v1"
    keys = ("instance/preempted", "instance/attributes/agent-worker-number", "instance/attributes/instance-id")
    flavor = {"Metadata-Flavor": "Google"}
    return {key: requests.get(f"{server}/{key}", headers=flavor, timeout=10).text for key in keys}


def is_alive(cluster: SimulatedCluster, slice_name: str, worker_id: int) -> bool:
    node_id = cluster.node_id(slice_name, worker_id)
    (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
    return bool(node["Alive"])


def test_nodes_look_like_a_slice(cluster: SimulatedCluster) -> None:
    name = cluster.slice_names[0]
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    for worker_id in (0, 1):
        node = nodes[cluster.node_id(name, worker_id)]
        tpu_labels = {key: value for key, value in node["Labels"].items() if key.startswith("ray.io/tpu-")}
        assert tpu_labels == {
            "ray.io/tpu-slice-name": name,
            "ray.io/tpu-worker-id": str(worker_id),
            "ray.io/tpu-pod-type": SLICE,
            "ray.io/tpu-topology": "2x2x2",
        }
        assert node["Resources"]["TPU"] == 4
        assert node["Resources"][name] == 1
        assert node["Resources"].get(f"TPU-{SLICE}-head", 0) == (worker_id == 0)
    assert len({node["NodeManagerAddress"] for node in nodes.values()}) == len(nodes)


def test_driver_is_on_the_head_which_has_no_tpu(cluster: SimulatedCluster) -> None:
    (mine,) = (node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id())
    assert "TPU" not in mine["Resources"]
    assert not any(label.startswith("ray.io/tpu") for label in mine["Labels"])


def test_host_environment_is_its_own(cluster: SimulatedCluster) -> None:
    name = cluster.slice_names[0]
    seen = ray.get([inhabit(name, worker_id).look.remote() for worker_id in (0, 1)])
    for worker_id, look in enumerate(seen):
        env = look["env"]
        assert env["TPU_NAME"] == name
        assert env["TPU_WORKER_ID"] == str(worker_id)
        assert env["TPU_ACCELERATOR_TYPE"] == SLICE
        assert env["TPU_TOPOLOGY"] == "2x2x2"
        assert env["TPU_WORKER_HOSTNAMES"] == ",".join(other["address"] for other in seen)
        directory = cluster.host_dir(name, worker_id)
        assert env["IRIS_RAY_HOST_DIR"] == str(directory) == look["cwd"]
        assert env["TMPDIR"] == str(directory / "tmp")
        assert sorted(path.name for path in (directory / "dev").iterdir()) == [f"accel{i}" for i in range(4)]
        assert (directory / "lock").is_dir()
        assert env["IRIS_RAY_TEST_METADATA_HOST"].startswith(f"{look['address']}:")
        assert not {"GCE_METADATA_HOST", "GCE_METADATA_IP"} & env.keys() - os.environ.keys()
        assert metadata_of(look) == {
            "instance/preempted": "FALSE",
            "instance/attributes/agent-worker-number": str(worker_id),
            "instance/attributes/instance-id": name,
        }
    assert len({look["env"]["IRIS_RAY_HOST_DIR"] for look in seen}) == 2


@pytest.mark.proof
def test_runtime_env_reaches_workers_on_host_and_head(cluster: SimulatedCluster) -> None:
    name = cluster.slice_names[0]
    read = ray.remote(num_cpus=0, runtime_env={"env_vars": {"COLOUR": "green"}})(lambda: os.environ["COLOUR"])
    on_host = read.options(resources={name: 0.001}).remote()
    on_head = read.options(resources={"node:__internal_head__": 0.001}).remote()
    assert ray.get([on_host, on_head]) == ["green", "green"]


def test_kill_host_takes_everything_on_it_and_nothing_else(cluster: SimulatedCluster, doomed: str) -> None:
    victim, neighbour = inhabit(doomed, 0), inhabit(doomed, 1)
    pids = ray.get(victim.look.remote())["pids"]
    ray.get(neighbour.look.remote())
    assert set(pids) <= set(cluster.host_pids(doomed, 0))
    cluster.kill_host(doomed, 0)
    assert cluster.host_pids(doomed, 0) == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert cluster.worker_ids(doomed) == [1]
    assert doomed in cluster.slice_names
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.look.remote())
    wait_until(lambda: not is_alive(cluster, doomed, 0), 8)  # Ray's own settings take 13 s
    assert is_alive(cluster, doomed, 1)
    ray.get(neighbour.look.remote())
    cluster.kill_host(doomed, 0)  # a second time is harmless


@pytest.mark.long
def test_freeze_host_for_long_is_found_dead(cluster: SimulatedCluster, doomed: str) -> None:
    cluster.freeze_host(doomed, 1)
    assert {psutil.Process(pid).status() for pid in cluster.host_pids(doomed, 1)} == {psutil.STATUS_STOPPED}
    wait_until(lambda: not is_alive(cluster, doomed, 1))
    assert cluster.worker_ids(doomed) == [0, 1]
    cluster.thaw_host(doomed, 1)
    wait_until(lambda: cluster.worker_ids(doomed) == [0])  # its raylet learns that it has been given up


def test_freeze_host_briefly_is_survived(cluster: SimulatedCluster, doomed: str) -> None:
    inhabitant = inhabit(doomed, 0)
    ray.get(inhabitant.look.remote())
    cluster.freeze_host(doomed, 0)
    pending = inhabitant.look.remote()
    assert ray.wait([pending], timeout=0.5) == ([], [pending])
    cluster.thaw_host(doomed, 0)
    ray.get(pending)


def test_preempt_slice_with_notice_drains_then_dies(cluster: SimulatedCluster, doomed: str) -> None:
    from ray._private.state import state  # as Ray Train does

    # An idle node that is drained ends by itself at once: have somebody there.
    inhabitants = [inhabit(doomed, worker_id) for worker_id in (0, 1)]
    looks = ray.get([inhabitant.look.remote() for inhabitant in inhabitants])
    node_ids = {cluster.node_id(doomed, worker_id) for worker_id in (0, 1)}
    began = time.time()
    preemption = cluster.preempt_slice(doomed, notice_s=3)
    wait_until(lambda: node_ids <= state.get_draining_nodes().keys(), 2.5)
    deadline_s = state.get_draining_nodes()[cluster.node_id(doomed, 0)] / 1000
    assert deadline_s == pytest.approx(began + 3, abs=1.0)
    assert not preemption.done
    assert [metadata_of(look)["instance/preempted"] for look in looks] == ["TRUE", "TRUE"]
    ray.get([inhabitant.look.remote() for inhabitant in inhabitants])  # work goes on until then
    assert preemption.wait(30)
    assert time.time() - began >= 3
    assert doomed not in cluster.slice_names
    wait_until(lambda: not any(is_alive(cluster, doomed, worker_id) for worker_id in (0, 1)))


def test_preempt_slice_notice_is_heard_where_it_should(cluster: SimulatedCluster, doomed: str) -> None:
    from ray._private.state import state

    look = ray.get(inhabit(doomed, 0).look.remote())
    cluster.preempt_slice(doomed, notice_s=1000, heard_by="metadata")
    assert metadata_of(look)["instance/preempted"] == "TRUE"
    assert cluster.node_id(doomed, 0) not in state.get_draining_nodes()
    other = cluster.add_slice("v4-8")
    cluster.preempt_slice(other, notice_s=1000, heard_by="ray")
    wait_until(lambda: other not in cluster.slice_names)  # nothing runs there
    assert (
        requests.get(
            f"http://{cluster.metadata(other, 0).address}/computeMetadata/v1/instance/preempted",
            headers={"Metadata-Flavor": "Google"},
            timeout=10,
        ).text
        == "FALSE"
    )


def test_preempt_idle_slice_goes_before_deadline(cluster: SimulatedCluster, doomed: str) -> None:
    preemption = cluster.preempt_slice(doomed, notice_s=1000)
    wait_until(lambda: doomed not in cluster.slice_names)
    assert not preemption.done


def test_preempt_slice_without_notice_kills_at_once(cluster: SimulatedCluster, doomed: str) -> None:
    preemption = cluster.preempt_slice(doomed, 0)
    assert preemption.done
    assert cluster.worker_ids(doomed) == []
    assert doomed not in cluster.slice_names
    assert cluster.add_slice("v4-8") not in (doomed, f"{SLICE}-0")


def test_unknown_names_are_refused_with_known_ones(cluster: SimulatedCluster) -> None:
    name = cluster.slice_names[0]
    with pytest.raises(InvalidRequestError, match=name):
        cluster.kill_host("v4-16", 0)
    for worker_id in (2, -1, True, "0"):
        with pytest.raises(InvalidRequestError, match="0, 1"):
            cluster.freeze_host(name, worker_id)  # type: ignore[arg-type]
    for notice_s in (-1, float("nan"), float("inf"), True, "30"):
        with pytest.raises(InvalidRequestError, match="notice_s"):
            cluster.preempt_slice(name, notice_s)  # type: ignore[arg-type]
    for starts_in_s in (-1, True, None):
        with pytest.raises(InvalidRequestError, match="starts_in_s"):
            cluster.announce_maintenance(name, 0, starts_in_s)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="heard_by"):
        cluster.preempt_slice(name, 30, heard_by="no host")  # type: ignore[arg-type]
    with pytest.raises(UnknownTPUTypeError):
        cluster.add_slice("v4-9")
    assert cluster.worker_ids(name) == [0, 1]


def test_second_cluster_in_the_process_is_refused(cluster: SimulatedCluster) -> None:
    with pytest.raises(InvalidRequestError, match="simulated cluster already"):
        SimulatedCluster().start()
    assert ray.is_initialized()


@pytest.mark.proof
def test_other_process_connects_to_the_head(cluster: SimulatedCluster) -> None:
    script = f"""
        import ray
        ray.init({cluster.address!r}, log_to_driver=False)
        print(ray.get_runtime_context().get_node_id(), ray.get(ray.remote(lambda: 42).remote()))
    """
    head = ray.get_runtime_context().get_node_id()
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, text=True, capture_output=True, timeout=60
    ).stdout
    assert f"{head} 42" in output.splitlines()


def test_jobs_of_rays_job_api_find_this_one_among_clusters_of_this_machine(cluster: SimulatedCluster) -> None:
    """Ray tells a job where its cluster is; without this file it takes any cluster of the machine."""
    assert read_ray_address(temp_dir()) == cluster.address
