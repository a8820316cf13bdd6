"""GKE in a box: Kubernetes' API over HTTPS, and behind it KubeRay, the TPU webhook and node pools.

Ray's own autoscaler drives it, unmodified. A `PodRunner` runs the pods.
Start with `world.py`, the public `KubernetesWorld`.
"""

from iris_ray.testing.kubernetes.node_pools import Node, NodePool
from iris_ray.testing.kubernetes.pods import Container, Pod, PodRunner, PodState
from iris_ray.testing.kubernetes.world import KubernetesWorld

__all__ = ["Container", "KubernetesWorld", "Node", "NodePool", "Pod", "PodRunner", "PodState"]
