"""What Google's TPU webhook for KubeRay does to pods when they are created.

Source: main.go (mutatePod) of github.com/ai-on-gke/kuberay-tpu-webhook, tags v1.3.1 and v1.3.2. They differ in one
point. 1.3.1 has each pod of a slice want to be where pods with its label ``replicaIndex`` are, and does not set that
label on pods that KubeRay has numbered. So with KubeRay 1.6 or newer no pod of a slice of several hosts finds a node.
1.3.2 takes KubeRay's own label instead. The values of its tests are in tests/unit/testing/kubernetes.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from iris_ray.testing.kubernetes.objects import (
    ACCELERATOR_LABEL,
    CLUSTER_LABEL,
    GROUP_LABEL,
    NODE_POOL_LABEL,
    TOPOLOGY_LABEL,
    TPU_RESOURCE,
    Manifest,
    requests,
)
from iris_ray.testing.kubernetes.raycluster_file import hosts_of_topology

BROKEN_AFFINITY: Final = ("1.3.0", "1.3.1")
"""Versions that look for ``replicaIndex`` on all pods."""

REPLICA_NAME_LABEL: Final = "ray.io/worker-group-replica-name"
REPLICA_INDEX_LABEL: Final = "ray.io/worker-group-replica-index"
HOST_INDEX_LABEL: Final = "ray.io/replica-host-index"
OWN_INDEX_LABEL: Final = "replicaIndex"
"""The webhook's own label: ``v6e-8-2``."""

_PROCESS_PORT: Final = 8471
_MEGASCALE_PORT: Final = 8081
_LONGEST_SERVICE: Final = 50


class WebhookRefusal(Exception):
    """The webhook does not admit a pod."""


def admit(pod: Manifest, existing: Iterable[Manifest], version: str) -> None:
    """Change a new pod as the webhook does.

    Args:
        pod: The pod; changed in place.
        existing: All pods of its namespace.
        version: Of the webhook, such as ``"1.3.1"``.

    Raises:
        WebhookRefusal: It has no label or selector that the webhook needs, or its slice's numbers are in disorder.
    """
    containers = pod["spec"]["containers"]
    if not containers:
        raise WebhookRefusal("Container path not specified")
    with_chips = [container for container in containers if _chips(container)]
    if not with_chips:
        return
    labels = pod["metadata"]["labels"]
    cluster, group = labels.get(CLUSTER_LABEL), labels.get(GROUP_LABEL)
    if not cluster:
        raise WebhookRefusal("Ray Pod created by KubeRay missing RayCluster label")
    if not group:
        raise WebhookRefusal("Ray Pod created by KubeRay missing Group label")
    selector = pod["spec"].get("nodeSelector") or {}
    topology = selector.get(TOPOLOGY_LABEL)
    if not topology:
        raise WebhookRefusal("Ray Pod created by KubeRay missing TPU topology nodeSelector")
    hosts = hosts_of_topology(topology, int(requests(pod["spec"])[TPU_RESOURCE]))
    if REPLICA_INDEX_LABEL in labels and HOST_INDEX_LABEL in labels:
        replica, host = int(labels[REPLICA_INDEX_LABEL]), int(labels[HOST_INDEX_LABEL])
    else:  # KubeRay numbers the hosts of slices of several hosts only
        taken = _hosts_by_replica(existing, cluster, group)
        replica = next_replica(taken, hosts)
        host = next_host(taken.get(replica, []))
        labels[OWN_INDEX_LABEL] = f"{group}-{replica}"
    service = headless_service(cluster)
    if hosts > 1:
        pod["spec"].update(hostname=f"{group}-{replica}-{host}", subdomain=service)
        pod["spec"]["affinity"] = _affinity(labels, group, replica, version)
    is_v7x = selector.get(ACCELERATOR_LABEL, "").startswith("tpu7x")
    for index, container in enumerate(with_chips):
        set_already = {variable["name"]: variable.get("value", "") for variable in container.get("env") or []}
        port = index if is_v7x else 0
        wanted = {}
        if "MEGASCALE_NUM_SLICES" in set_already:
            wanted["MEGASCALE_SLICE_ID"] = str(replica)
            coordinator = f"{group}-0-0.{service}"
            wanted["MEGASCALE_COORDINATOR_ADDRESS"] = f"{coordinator}:{_MEGASCALE_PORT}" if is_v7x else coordinator
            wanted["MEGASCALE_PORT"] = str(_MEGASCALE_PORT + port)
        if hosts > 1:
            names = [f"{group}-{replica}-{number}.{service}" for number in range(hosts)]
            if set_already.get("TPU_WORKER_HOSTNAMES") == "localhost":
                del set_already["TPU_WORKER_HOSTNAMES"]
            wanted["TPU_WORKER_HOSTNAMES"] = ",".join(names)
            if is_v7x:
                if "localhost" in set_already.get("TPU_PROCESS_ADDRESSES", ""):
                    del set_already["TPU_PROCESS_ADDRESSES"]
                wanted["TPU_PROCESS_ADDRESSES"] = ",".join(process_addresses(names, len(with_chips)))
                wanted["TPU_PROCESS_PORT"] = str(_PROCESS_PORT + index)
        worker = host * len(with_chips) + index if is_v7x else host
        if set_already.get("TPU_WORKER_ID") == str(index) != str(worker):
            del set_already["TPU_WORKER_ID"]  # the default of a single host
        wanted["TPU_WORKER_ID"] = str(worker)
        wanted["TPU_NAME"] = f"{group}-{replica}"
        environment = container.setdefault("env", [])
        environment += [{"name": name, "value": text} for name, text in wanted.items() if not set_already.get(name)]
        if "TPU_DEVICE_PLUGIN_HOST_IP" not in set_already:
            source = {"fieldRef": {"fieldPath": "status.hostIP"}}
            environment.append({"name": "TPU_DEVICE_PLUGIN_HOST_IP", "valueFrom": source})
        if not set_already.get("TPU_DEVICE_PLUGIN_ADDR"):
            environment.append({"name": "TPU_DEVICE_PLUGIN_ADDR", "value": "$(TPU_DEVICE_PLUGIN_HOST_IP):2112"})


def next_replica(taken: dict[int, list[int]], hosts: int) -> int:
    """Return the lowest replica that lacks a host; without one, the number of replicas, even if that is taken."""
    lacking = [replica for replica, found in taken.items() if len(found) < hosts]
    return min(lacking, default=len(taken))


def next_host(taken: Sequence[int]) -> int:
    """Return the lowest free number of a host within its slice."""
    if len(set(taken)) < len(taken):
        raise WebhookRefusal("Identical TPU_WORKER_ID assigned to multiple TPU workers in slice")
    return next(number for number in range(len(taken) + 1) if number not in taken)


def process_addresses(names: Sequence[str], processes: int) -> list[str]:
    """Return TPU_PROCESS_ADDRESSES of a v7x slice: each host's name with the port of each of its containers."""
    return [f"{name}:{_PROCESS_PORT + number}" for name in names for number in range(processes)]


def headless_service(cluster: str) -> str:
    """Return the name of the cluster's headless service; a long one loses its beginning (CheckName in util.go)."""
    name = f"{cluster}-headless"[-_LONGEST_SERVICE:]
    return name if name[0].isalpha() else "r" + name[1:]


def _chips(container: Manifest) -> int:
    return int(requests({"containers": [container]}).get(TPU_RESOURCE, 0))


def _hosts_by_replica(existing: Iterable[Manifest], cluster: str, group: str) -> dict[int, list[int]]:
    taken: dict[int, list[int]] = {}
    for pod in existing:
        labels = pod["metadata"]["labels"]
        if labels.get(CLUSTER_LABEL) != cluster or labels.get(GROUP_LABEL) != group:
            continue
        if "deletionTimestamp" in pod["metadata"] or not labels.get(OWN_INDEX_LABEL):
            continue
        with_chips = [container for container in pod["spec"]["containers"] if _chips(container)]
        ids = [
            int(variable["value"])
            for variable in (with_chips[0].get("env") or [] if with_chips else [])
            if variable["name"] == "TPU_WORKER_ID"
        ]
        if not ids:
            raise WebhookRefusal("existing TPU worker missing TPU_WORKER_ID")
        replica = int(labels[OWN_INDEX_LABEL].rpartition("-")[2])
        taken.setdefault(replica, []).append(ids[0] // len(with_chips))
    return taken


def _affinity(labels: dict[str, str], group: str, replica: int, version: str) -> dict[str, Any]:
    """Return what keeps a slice's pods together on one node pool, and other pods of Ray away from it."""
    key, value = OWN_INDEX_LABEL, f"{group}-{replica}"
    if version not in BROKEN_AFFINITY and REPLICA_NAME_LABEL in labels and HOST_INDEX_LABEL in labels:
        key, value = REPLICA_NAME_LABEL, labels[REPLICA_NAME_LABEL]

    def term(*expressions: tuple[str, str, list[str]]) -> dict[str, Any]:
        matched = [
            {"key": name, "operator": operator, **({"values": values} if values else {})}
            for name, operator, values in expressions
        ]
        return {"labelSelector": {"matchExpressions": matched}, "topologyKey": NODE_POOL_LABEL}

    cluster = labels[CLUSTER_LABEL]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    others = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}
    apart = [
        term((key, "NotIn", [value]), (CLUSTER_LABEL, "In", [cluster])),
        {
            **term((CLUSTER_LABEL, "NotIn", [cluster]), (key, "Exists", [])),
            "namespaceSelector": {"matchExpressions": [others]},
        },
    ]
    return {
        "podAffinity": {required: [term((key, "In", [value]), (CLUSTER_LABEL, "In", [cluster]))]},
        "podAntiAffinity": {required: apart},
    }
