"""Ray's own autoscaler, unmodified, without a Ray cluster: it asks a real API server, and a GCS on paper.

A program, since Ray reads the API server's address when its module is imported:
``python -m tests.support.rays_autoscaler NAME NAMESPACE DEMAND ROUNDS``. DEMAND is JSON: ``[[{"TPU": 4}, ...], ...]``,
a gang of bundles each. Every pod that runs is a Ray node, and workers have been idle for long.
"""

import json
import logging
import sys
import time
from typing import Any

from ray.autoscaler._private.kuberay.autoscaling_config import AutoscalingConfigProducer
from ray.autoscaler.v2.autoscaler import Autoscaler
from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.autoscaler.v2.instance_manager.config import KubeRayConfigReader
from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeState, NodeStatus

IDLE_MS = 10_000_000


class PaperGcs:
    """The GCS as the autoscaler sees it."""

    address = "127.0.0.1:6379"

    def __init__(self, gangs: list[list[dict[str, float]]]) -> None:
        self.gangs = gangs
        self.pods: list[dict[str, Any]] = []
        self.drained: set[str] = set()

    def get_cluster_resource_state(self) -> bytes:
        reply = GetClusterResourceStateReply()
        state = reply.cluster_resource_state
        for gang in self.gangs:
            selector = state.pending_gang_resource_requests.add().bundle_selectors.add()
            for bundle in gang:
                selector.resource_requests.add().resources_bundle.update(bundle)
        for pod in self.pods:
            group = pod["metadata"]["labels"]["ray.io/group"]
            is_head, node_id = group == "headgroup", pod["metadata"]["uid"].encode()
            alive = NodeStatus.RUNNING if is_head else NodeStatus.IDLE
            node = NodeState(
                node_id=node_id,
                instance_id=pod["metadata"]["name"],
                ray_node_type_name=group,
                idle_duration_ms=0 if is_head else IDLE_MS,
                status=NodeStatus.DEAD if node_id.hex() in self.drained else alive,
            )
            node.total_resources.update({"node:__internal_head__": 1.0} if is_head else {"CPU": 100.0, "TPU": 4.0})
            node.available_resources.update(node.total_resources)
            state.node_states.append(node)
        return reply.SerializeToString()

    def drain_node(self, node_id: str, *_args: object, **_options: object) -> tuple[bool, str]:
        self.drained.add(node_id)
        return True, ""

    def get_all_job_info(self, **_options: object) -> dict[str, Any]:
        return {}


def main(name: str, namespace: str, demand: str, rounds: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    producer = AutoscalingConfigProducer(name, namespace)
    gcs = PaperGcs(json.loads(demand))
    autoscaler = Autoscaler("session", KubeRayConfigReader(producer), gcs, AutoscalerEventLogger(logging.getLogger()))
    for _ in range(int(rounds)):
        pods = producer.kubernetes_api_client.get(f"pods?labelSelector=ray.io/cluster={name}")["items"]
        gcs.pods = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        assert autoscaler.update_autoscaling_state() is not None
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
