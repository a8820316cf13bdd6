"""What Ray makes of a pod's environment, and which files a cluster of pods can't start from."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from iris_ray.errors import InvalidClusterFileError
from iris_ray.testing import SimulatedCluster
from iris_ray.testing.ray_node.detection import detected, device_plugin_variables

GKE = Path(__file__).parents[3] / "examples" / "clusters" / "gke.yaml"
SELECTOR = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "4x4"}
OPTIONS = {"num-cpus": "100", "memory": "536870912000", "resources": '{"TPU": 4.0}', "labels": "rack=a"}


@pytest.mark.parametrize("worker_id", [0, 3])
def test_ray_sees_a_host_of_a_slice_in_a_pod(worker_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "of-this-machine")
    variables = {"TPU_NAME": "v6e-16-0", "TPU_WORKER_ID": str(worker_id), "RAY_NODE_TYPE_NAME": "v6e-16"}
    found = detected(variables | device_plugin_variables(SELECTOR), OPTIONS, "127.1.2.3", is_head=False)
    head = {"TPU-v6e-16-head": 1} if worker_id == 0 else {}
    slice_name, address = {"v6e-16-0": 1}, {"node:127.1.2.3": 1}
    assert (found.num_cpus, found.num_gpus, found.memory) == (100, 0, 536870912000)
    assert found.resources == {"TPU": 4, "accelerator_type:TPU-V6E": 1, **slice_name, **address, **head}
    assert found.labels == {
        "rack": "a",
        "ray.io/node-group": "v6e-16",
        "ray.io/accelerator-type": "TPU-V6E",
        "ray.io/tpu-slice-name": "v6e-16-0",
        "ray.io/tpu-worker-id": str(worker_id),
        "ray.io/tpu-topology": "4x4",
        "ray.io/tpu-pod-type": "v6e-16",
    }


def test_pod_without_chips_is_no_tpu_host() -> None:
    found = detected({}, {"num-cpus": "0"}, "127.1.2.3", is_head=True)
    assert found.resources == {"node:127.1.2.3": 1, "node:__internal_head__": 1}
    assert device_plugin_variables({}) == {}


@pytest.mark.parametrize(
    ("written", "instead", "refused"),
    [
        ("kind: RayCluster", "kind: RayJob", "RayJob"),
        ("apiVersion: ray.io/v1\n", "apiVersion: ray.io/v1alpha1\n", "v1alpha1"),
        ("      numOfHosts: 4\n", "", "numOfHosts"),
    ],
)
def test_file_that_no_cluster_can_start_from_is_refused(
    written: str, instead: str, refused: str, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(GKE.read_text().replace(written, instead))
    with pytest.raises(InvalidClusterFileError, match=rf"line \d+.*{refused}|{refused}.*line \d+"):
        SimulatedCluster.from_raycluster(file)


def test_slice_whose_pods_are_gone_is_preempted_without_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimulatedCluster.from_raycluster(GKE)
    gone = SimpleNamespace(machine=SimpleNamespace(running=False), host=SimpleNamespace(worker_id=0))
    monkeypatch.setattr(cluster, "_slice", lambda name: [gone])
    assert not hasattr(cluster, "kubernetes"), "asking it for a node would raise"
    assert cluster.preempt_slice("v6e-16-0").wait(10.0)
