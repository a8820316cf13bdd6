"""Ray's own autoscaler, version 2, unmodified, and the GCS on paper that it asks, without a Ray cluster.

As a program it asks a real API server, since Ray reads the server's address when its module is imported:
``python -m tests.support.rays_autoscaler NAME NAMESPACE DEMAND ROUNDS``. DEMAND is JSON: ``[[{"TPU": 4}, ...], ...]``,
a gang of bundles each. Every pod that runs is a Ray node, and workers have been idle for long.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ray.autoscaler._private.kuberay.autoscaling_config import AutoscalingConfigProducer
from ray.autoscaler.v2.autoscaler import Autoscaler
from ray.autoscaler.v2.instance_manager.config import KubeRayConfigReader
from ray.core.generated.autoscaler_pb2 import ClusterResourceState, GetClusterResourceStateReply, NodeStatus

SLICE_LABEL = "ray.io/tpu-slice-name"
IDLE_MS = 10_000_000


class PaperGcs:
    """The GCS as the autoscaler sees it.

    Args:
        state: returns the nodes, and the placement groups that wait.
        drain: is told the id of each node that is to go.
    """

    address = "127.0.0.1:6379"

    def __init__(self, state: Callable[[], ClusterResourceState], drain: Callable[[str], object]) -> None:
        self._state, self._drain = state, drain

    def get_cluster_resource_state(self) -> bytes:
        reply = GetClusterResourceStateReply(cluster_resource_state=self._state())
        return bytes(reply.SerializeToString())

    def drain_node(self, node_id: str, *_: object, **__: object) -> tuple[bool, str]:
        self._drain(node_id)
        return True, ""

    def get_all_job_info(self, **_: object) -> dict[str, Any]:
        return {}


def add_node(
    state: ClusterResourceState,
    node_id: bytes,
    name: str,
    group: str,
    status: int,
    resources: Mapping[str, float],
    idle_ms: int = 0,
    labels: Mapping[str, str] = {},
) -> None:
    """Add a node that uses nothing of its resources."""
    node = state.node_states.add(node_id=node_id, instance_id=name, ray_node_type_name=group, status=status)
    node.idle_duration_ms, node.node_ip_address = idle_ms, name
    for amounts in (node.total_resources, node.available_resources):
        amounts.update(resources)
    node.labels.update(labels)


def add_gang(
    state: ClusterResourceState, bundles: Sequence[Mapping[str, float]], excluded: AbstractSet[str] = frozenset()
) -> None:
    """Add a placement group that waits, and that these slices are not to serve."""
    gang = state.pending_gang_resource_requests.add()
    for bundle in bundles:
        request = gang.requests.add(resources_bundle=bundle)
        if excluded:
            constraint = request.label_selectors.add().label_constraints.add(label_key=SLICE_LABEL)
            constraint.operator = 2  # not in
            constraint.label_values.extend(sorted(excluded))


def main(name: str, namespace: str, demand: str, rounds: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    producer = AutoscalingConfigProducer(name, namespace)
    drained: set[str] = set()

    def state() -> ClusterResourceState:
        found = ClusterResourceState()
        for gang in json.loads(demand):
            add_gang(found, gang)
        for pod in producer.kubernetes_api_client.get(f"pods?labelSelector=ray.io/cluster={name}")["items"]:
            if pod["status"]["phase"] != "Running":
                continue
            group, node_id = pod["metadata"]["labels"]["ray.io/group"], pod["metadata"]["uid"].encode()
            is_head = group == "headgroup"
            alive = NodeStatus.RUNNING if is_head else NodeStatus.IDLE
            status = NodeStatus.DEAD if node_id.hex() in drained else alive
            resources = {"node:__internal_head__": 1.0} if is_head else {"CPU": 100.0, "TPU": 4.0}
            idle_ms = 0 if is_head else IDLE_MS
            add_node(found, node_id, pod["metadata"]["name"], group, status, resources, idle_ms)
        return found

    autoscaler = Autoscaler("session", KubeRayConfigReader(producer), PaperGcs(state, drained.add))
    for _ in range(int(rounds)):
        assert autoscaler.update_autoscaling_state() is not None
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
