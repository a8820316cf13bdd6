"""The emulated TPU webhook gives the values that the webhook's own tests expect.

Carried over from webhook_main_test.go of github.com/ai-on-gke/kuberay-tpu-webhook, tag v1.3.1: Test_GetReplicaIndex,
Test_GetNextWorkerID, Test_GetNumTPUHostsFromTopology, Test_GenDNSHostnames, Test_InjectAffinity, Test_MutatePod,
Test_CheckWorkersMatchTopology, Test_getSliceToTPUHosts, Test_GetTPUProcessAddresses, Test_MutatePod_V7x.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from iris_ray.testing.kubernetes.raycluster_file import RefusedSpec, check_slices, hosts_of_topology
from iris_ray.testing.kubernetes.tpu_webhook import (
    WebhookRefusal,
    admit,
    headless_service,
    next_host,
    next_replica,
    process_addresses,
)

V4 = "tpu-v4-podslice"
KUBERAY_LABELS = {"ray.io/worker-group-replica-index": "0", "ray.io/replica-host-index": "0"}
FOUR = [0, 1, 2, 3]


def worker(
    *, cluster: str = "test-cluster", accelerator: str = V4, topology: str = "2x2x1", chips: str | None = "4"
) -> dict[str, Any]:
    resources = {"limits": {"google.com/tpu": chips}, "requests": {"google.com/tpu": chips}} if chips else {}
    labels = {"ray.io/is-ray-node": "yes", "ray.io/cluster": cluster, "ray.io/group": "test-group"}
    selector = {"cloud.google.com/gke-tpu-accelerator": accelerator, "cloud.google.com/gke-tpu-topology": topology}
    containers = [{"name": "ray-worker", "resources": resources, "env": []}]
    metadata = {"name": "tpu-pod", "namespace": "test-namespace", "labels": labels}
    return {"metadata": metadata, "spec": {"containers": containers, "nodeSelector": selector}}


def intercepted(count: int, hosts: int, **options: Any) -> list[dict[str, Any]]:
    """Pods that the webhook has numbered itself."""
    pods = [worker(**options) for _ in range(count)]
    for number, pod in enumerate(pods):
        pod["metadata"]["labels"]["replicaIndex"] = f"test-group-{number // hosts}"
        pod["spec"]["containers"][0]["env"] = [{"name": "TPU_WORKER_ID", "value": str(number % hosts)}]
    return pods


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def hostnames(replica: int, hosts: int = 4) -> str:
    return ",".join(f"test-group-{replica}-{host}.test-cluster-headless" for host in range(hosts))


@pytest.mark.parametrize(
    ("taken", "hosts", "expected"),
    [
        ({}, 1, 0),
        ({0: []}, 1, 0),
        ({0: [0]}, 1, 1),
        ({0: [0, 1, 2], 1: FOUR}, 4, 0),
        ({0: FOUR}, 4, 1),
        ({0: FOUR, 1: FOUR, 2: FOUR}, 4, 3),
    ],
)
def test_next_replica_is_the_one_that_their_test_expects(
    taken: dict[int, list[int]], hosts: int, expected: int
) -> None:
    assert next_replica(taken, hosts) == expected


@pytest.mark.parametrize(("taken", "expected"), [([], 0), ([3, 0, 1], 2), ([0, 1, 2], 3)])
def test_next_host_is_the_one_that_their_test_expects(taken: list[int], expected: int) -> None:
    assert next_host(taken) == expected


def test_doubled_host_is_refused_as_in_their_test() -> None:
    with pytest.raises(WebhookRefusal, match="Identical TPU_WORKER_ID assigned to multiple TPU workers in slice"):
        next_host([0, 1, 1])


@pytest.mark.parametrize(
    ("topology", "chips", "hosts"),
    [("2x2x1", 4, 1), ("2x2x4", 4, 4), ("2x4", 4, 2), ("2x4", 8, 1), ("4x4", 4, 4)],
)
def test_hosts_of_a_topology_are_those_of_their_test(topology: str, chips: int, hosts: int) -> None:
    assert hosts_of_topology(topology, chips) == hosts


@pytest.mark.parametrize(
    ("raycluster", "service"),
    [
        ("test-raycluster", "test-raycluster-headless"),
        ("extremely-long-raycluster-name-to-be-truncated", "mely-long-raycluster-name-to-be-truncated-headless"),
    ],
)
def test_headless_service_has_the_name_of_their_test(raycluster: str, service: str) -> None:
    assert headless_service(raycluster) == service


@pytest.mark.parametrize(
    ("hosts", "topology", "chips", "fits"),
    [
        (1, "", "4", False),
        (1, "2x2x2", "4", False),
        (2, "2x2x1", "4", False),
        (1, "2x2x1", "4", True),
        (4, "2x2x4", "4", True),
        (1, "2x4", "8", True),
        (2, "2x4", "4", True),
        (1, "", None, True),
    ],
)
def test_group_is_admitted_if_its_hosts_fill_the_topology(
    hosts: int, topology: str, chips: str | None, fits: bool
) -> None:
    template = worker(topology=topology, chips=chips)
    if not topology:
        del template["spec"]["nodeSelector"]
    group = {"groupName": "test-group", "numOfHosts": hosts, "template": template}
    cluster = {"spec": {"workerGroupSpecs": [group]}}
    if fits:
        check_slices(cluster)
        return
    with pytest.raises(RefusedSpec):
        check_slices(cluster)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (worker(cluster=""), "Ray Pod created by KubeRay missing RayCluster label"),
        (worker(topology=""), "Ray Pod created by KubeRay missing TPU topology nodeSelector"),
        ({**worker(), "spec": {"containers": []}}, "Container path not specified"),
    ],
)
def test_incomplete_pod_is_refused_in_their_words(pod: dict[str, Any], words: str) -> None:
    with pytest.raises(WebhookRefusal, match=words):
        admit(pod, [], "1.3.1")


def test_pod_without_chips_is_not_changed() -> None:
    pod = worker(chips=None)
    admit(pod, [], "1.3.1")
    assert pod == worker(chips=None)


@pytest.mark.parametrize(
    ("topology", "hosts", "existing", "replica", "host"),
    [
        ("2x2x1", 1, 0, 0, 0),
        ("2x2x4", 4, 0, 0, 0),
        ("2x2x4", 4, 3, 0, 3),
        ("2x2x4", 4, 4, 1, 0),
        ("2x2x4", 4, 5, 1, 1),
    ],
)
def test_pod_gets_the_numbers_and_names_of_their_test(
    topology: str, hosts: int, existing: int, replica: int, host: int
) -> None:
    pod = worker(topology=topology)
    admit(pod, intercepted(existing, hosts, topology=topology), "1.3.1")
    found = variables(pod["spec"]["containers"][0])
    assert (found["TPU_WORKER_ID"], found["TPU_NAME"]) == (str(host), f"test-group-{replica}")
    assert pod["metadata"]["labels"]["replicaIndex"] == f"test-group-{replica}"
    assert found["TPU_DEVICE_PLUGIN_ADDR"] == "$(TPU_DEVICE_PLUGIN_HOST_IP):2112"
    assert "TPU_DEVICE_PLUGIN_HOST_IP" in found
    if hosts > 1:
        assert pod["spec"]["hostname"] == f"test-group-{replica}-{host}"
        assert pod["spec"]["subdomain"] == "test-cluster-headless"
        assert found["TPU_WORKER_HOSTNAMES"] == hostnames(replica)
        assert pod["spec"]["affinity"]["podAffinity"]
    else:
        assert not {"TPU_WORKER_HOSTNAMES", "MEGASCALE_PORT"} & found.keys()
        assert "affinity" not in pod["spec"]


def test_hosts_are_counted_per_replica_as_in_their_test() -> None:
    pod = worker(topology="2x2x2", chips="4")
    existing = intercepted(128, 64, topology="2x2x2")
    admit(pod, existing, "1.3.1")
    assert pod["metadata"]["labels"]["replicaIndex"] == "test-group-2"


def test_multislice_pod_with_labels_of_kuberay_gets_megascale_variables() -> None:
    pod = worker(topology="2x2x4")
    pod["metadata"]["labels"] |= KUBERAY_LABELS
    pod["spec"]["containers"][0]["env"] = [{"name": "MEGASCALE_NUM_SLICES", "value": "2"}]
    admit(pod, [], "1.3.1")
    found = variables(pod["spec"]["containers"][0])
    assert found["MEGASCALE_SLICE_ID"] == "0"
    assert found["MEGASCALE_COORDINATOR_ADDRESS"] == "test-group-0-0.test-cluster-headless"
    assert found["MEGASCALE_PORT"] == "8081"
    assert "replicaIndex" not in pod["metadata"]["labels"]


@pytest.mark.parametrize(
    ("version", "key", "value"),
    [
        ("1.3.1", "replicaIndex", "test-group-0"),
        ("1.3.5", "ray.io/worker-group-replica-name", "test-group-xh3hf"),
    ],
)
def test_affinity_looks_at_the_label_of_the_version(version: str, key: str, value: str) -> None:
    pod = worker(topology="2x2x4")
    pod["metadata"]["labels"] |= {**KUBERAY_LABELS, "ray.io/worker-group-replica-name": "test-group-xh3hf"}
    admit(pod, [], version)
    kinds = pod["spec"]["affinity"]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    together, apart = kinds["podAffinity"][required], kinds["podAntiAffinity"][required]
    cluster = {"key": "ray.io/cluster", "operator": "In", "values": ["test-cluster"]}
    other_cluster = {"key": "ray.io/cluster", "operator": "NotIn", "values": ["test-cluster"]}
    assert [term["labelSelector"]["matchExpressions"] for term in together] == [
        [{"key": key, "operator": "In", "values": [value]}, cluster]
    ]
    assert [term["labelSelector"]["matchExpressions"] for term in apart] == [
        [{"key": key, "operator": "NotIn", "values": [value]}, cluster],
        [other_cluster, {"key": key, "operator": "Exists"}],
    ]
    assert {term["topologyKey"] for term in together + apart} == {"cloud.google.com/gke-nodepool"}


@pytest.mark.parametrize(
    ("replica", "hosts", "expected"),
    [
        (0, 1, "test-group-0-0.test-cluster-headless:8471,test-group-0-0.test-cluster-headless:8472"),
        (
            1,
            2,
            "test-group-1-0.test-cluster-headless:8471,test-group-1-0.test-cluster-headless:8472,"
            "test-group-1-1.test-cluster-headless:8471,test-group-1-1.test-cluster-headless:8472",
        ),
    ],
)
def test_process_addresses_are_those_of_their_test(replica: int, hosts: int, expected: str) -> None:
    assert ",".join(process_addresses(hostnames(replica, hosts).split(","), 2)) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"TPU_PROCESS_PORT": "8472"}),
        (
            {"TPU_PROCESS_PORT": "9999", "TPU_PROCESS_ADDRESSES": "custom-mesh:9999"},
            {"TPU_PROCESS_PORT": "9999", "TPU_PROCESS_ADDRESSES": "custom-mesh:9999"},
        ),
        (
            {"MEGASCALE_NUM_SLICES": "2"},
            {
                "TPU_PROCESS_PORT": "8472",
                "MEGASCALE_PORT": "8082",
                "MEGASCALE_COORDINATOR_ADDRESS": "test-group-0-0.test-cluster-headless:8081",
            },
        ),
    ],
)
def test_second_container_of_v7x_gets_the_values_of_their_test(given: dict[str, str], expected: dict[str, str]) -> None:
    pod = worker(accelerator="tpu7x-standard-4t", topology="2x2x2", chips="2")
    first = pod["spec"]["containers"][0]
    first["env"] = [{"name": name, "value": value} for name, value in given.items()]
    pod["spec"]["containers"].append({**first, "name": "ray-worker-2", "env": list(first["env"])})
    admit(pod, [], "1.3.1")
    found = variables(pod["spec"]["containers"][1])
    assert (found["TPU_WORKER_ID"], found["TPU_NAME"]) == ("1", "test-group-0")
    assert {name: found[name] for name in expected} == expected
    if not given:
        assert found["TPU_PROCESS_ADDRESSES"].startswith("test-group-0-0.")
