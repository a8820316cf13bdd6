"""A cluster on KubeRay as Ray's own autoscaler sees it, without a pod or a Ray node: all but the autoscaler poses.

KubeRay (1.7) makes and removes the pods of whole replicas. Hosts join Ray when a test says so. The autoscaler is Ray's,
version 2, unmodified: its configuration, scheduler, reconciler and KubeRay provider.
"""

import copy
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.autoscaler import Autoscaler
from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay import cloud_provider
from ray.autoscaler.v2.instance_manager.config import KubeRayConfigReader
from ray.core.generated.autoscaler_pb2 import ClusterResourceState, NodeStatus

from iris_ray.capacity.autoscaler import Slices
from iris_ray.capacity.kuberay import REPLICA
from iris_ray.capacity.kubernetes import KubernetesApi
from iris_ray.errors import ProviderError
from iris_ray.model.topology import get_tpu_config
from tests.support.rays_autoscaler import SLICE_LABEL, PaperGcs, add_gang, add_node

GKE = Path(__file__).parents[2] / "examples" / "clusters" / "gke.yaml"


def shipped() -> dict[str, Any]:
    """The RayCluster of the file for GKE."""
    objects: list[dict[str, Any]] = list(yaml.safe_load_all(GKE.read_text()))
    return next(each for each in objects if each["kind"] == "RayCluster")


@dataclass
class Pod:
    """A pod of a worker group; ``joined`` once it is a node of Ray, ``drained`` when that has ended."""

    name: str
    group: str
    replica: str
    index: int
    joined: bool = False
    drained: bool = False
    idle_s: float = 0.0

    @property
    def node_id(self) -> bytes:
        return uuid.uuid5(uuid.NAMESPACE_DNS, self.name).bytes


@dataclass
class KubeRayWorld:
    """The RayCluster of a file, its pods, and the demand that Ray has.

    Attributes:
        cluster: the RayCluster.
        pods: of the worker groups.
        gangs: the bundles of each placement group that waits, and the slices that their selectors exclude.
    """

    cluster: dict[str, Any] = field(default_factory=shipped)
    pods: list[Pod] = field(default_factory=list)
    gangs: list[tuple[Sequence[Mapping[str, float]], frozenset[str]]] = field(default_factory=list)
    patches: int = 0
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.cluster["metadata"] |= {"namespace": "default", "resourceVersion": "0"}

    # -- the API, as Ray's client and ours ask it ------------------------------------------------------------------

    def get(self, path: str) -> dict[str, Any]:
        if path.startswith("rayclusters/"):
            return copy.deepcopy(self.cluster)
        items = [self._head(), *map(self._pod, self.pods)]
        return {"metadata": {"resourceVersion": "1"}, "items": [] if "fieldSelector=metadata.name" in path else items}

    def patch(self, path: str, payload: Sequence[Mapping[str, Any]], *_: object, **__: object) -> dict[str, Any]:
        changed = copy.deepcopy(self.cluster)
        for change in payload:
            *parents, last = change["path"].strip("/").split("/")
            target = changed
            for key in parents:
                target = target[int(key) if isinstance(target, list) else key]
            if change["op"] == "test":
                if target.get(last) != change["value"]:
                    raise ProviderError("the Kubernetes API refuses a patch: 422 the test failed")
            else:
                target[last] = change["value"]
        self.cluster = changed
        self.patches += 1
        self.cluster["metadata"]["resourceVersion"] = str(self.patches)
        return copy.deepcopy(changed)

    def _head(self) -> dict[str, Any]:
        labels = {"ray.io/node-type": "head", "ray.io/group": "headgroup"}
        return {"metadata": {"name": "head", "labels": labels}, "status": _running(True)}

    def _pod(self, pod: Pod) -> dict[str, Any]:
        labels = {"ray.io/node-type": "worker", "ray.io/group": pod.group, REPLICA: pod.replica}
        return {"metadata": {"name": pod.name, "labels": labels}, "status": _running(pod.joined)}

    # -- what KubeRay and the hosts do -----------------------------------------------------------------------------

    def group(self, name: str) -> dict[str, Any]:
        return next(group for group in self.cluster["spec"]["workerGroupSpecs"] if group["groupName"] == name)

    def replicas(self, name: str) -> int:
        return int(self.group(name)["replicas"])

    def make_pods(self) -> None:
        """Do what KubeRay does: remove the replicas of workers to delete, and make the pods of missing ones."""
        for group in self.cluster["spec"]["workerGroupSpecs"]:
            name, hosts = group["groupName"], group.get("numOfHosts", 1)
            doomed = set(group.get("scaleStrategy", {}).get("workersToDelete", ()))
            gone = {pod.replica for pod in self.pods if pod.name in doomed}
            self.pods = [pod for pod in self.pods if pod.replica not in gone]
            there = {pod.replica for pod in self.pods if pod.group == name}
            for _ in range(group["replicas"] - len(there)):
                replica = f"{name}-{next(self._numbers)}"
                self.pods += [Pod(f"{replica}-worker-{i}", name, replica, i) for i in range(hosts)]

    def slices(self) -> Slices:
        """What the Controller knows of slices."""
        found: dict[str, tuple[str, bool]] = {}
        for pod in filter(lambda pod: pod.joined and not pod.drained, self.pods):
            hosts = [other.joined and not other.drained for other in self.pods if other.replica == pod.replica]
            found[pod.replica] = pod.group, all(hosts)
        return found

    def ray_state(self) -> ClusterResourceState:
        state = ClusterResourceState(cluster_session_name="test", cluster_resource_state_version=1)
        add_node(state, b"head" * 7, "head", "headgroup", NodeStatus.RUNNING, {"CPU": 0.0, "node:__internal_head__": 1})
        for pod in filter(lambda pod: pod.joined, self.pods):
            resources = {"CPU": 100.0, "TPU": float(get_tpu_config(pod.group).chips_per_vm)}
            if pod.index == 0:
                resources[f"TPU-{pod.group}-head"] = 1.0
            status = NodeStatus.DEAD if pod.drained else NodeStatus.IDLE if pod.idle_s else NodeStatus.RUNNING
            idle_ms, labels = int(pod.idle_s * 1000), {SLICE_LABEL: pod.replica}
            add_node(state, pod.node_id, pod.name, pod.group, status, resources, idle_ms, labels)
        for bundles, there in self.gangs:
            add_gang(state, bundles, there)
        return state


def _running(is_running: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"running": {}} if is_running else {"waiting": {}}
    return {"phase": "Running" if is_running else "Pending", "containerStatuses": [{"state": state}]}


class OurApi(KubernetesApi):
    """The Controller's client of such a world."""

    def __init__(self, world: KubeRayWorld) -> None:
        super().__init__("https://nowhere", "default", "tpus")
        self._world = world

    def ray_cluster(self) -> dict[str, Any]:
        return self._world.get("rayclusters/tpus")

    def patch_ray_cluster(self, patch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._world.patch("rayclusters/tpus", patch)

    def pods(self, phase: str) -> list[dict[str, Any]]:
        return [pod for pod in self._world.get("pods")["items"] if phase == pod["status"]["phase"]]

    def pod_events(self, reason: str) -> list[dict[str, Any]]:
        return []


class RaysAutoscaler:
    """Ray's autoscaler of such a world.

    Args:
        world: the cluster.
        most_launches: its environment's ``AUTOSCALER_MAX_CONCURRENT_LAUNCHES``.
    """

    def __init__(self, world: KubeRayWorld, most_launches: int = 10) -> None:
        self._world = world
        self._most_launches = most_launches
        gcs = PaperGcs(world.ray_state, self._drain)
        with mock.patch.object(cloud_provider, "KubernetesHttpApiClient", return_value=world):
            reader = KubeRayConfigReader(lambda: _derive_autoscaling_config_from_ray_cr(world.cluster))
            self._autoscaler = Autoscaler(session_name="test", config_reader=reader, gcs_client=gcs)

    def look(self) -> None:
        """Do what it does every five seconds; then KubeRay makes the pods."""
        launches = "ray.autoscaler.v2.instance_manager.config.AUTOSCALER_MAX_CONCURRENT_LAUNCHES"
        with mock.patch(launches, self._most_launches):
            assert self._autoscaler.update_autoscaling_state() is not None, "Ray's autoscaler failed; see the log"
        self._world.make_pods()

    def _drain(self, node_id: str) -> None:
        for pod in self._world.pods:
            pod.drained = pod.drained or pod.node_id.hex() == node_id
