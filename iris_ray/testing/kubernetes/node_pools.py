"""GKE's node pools."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodePool:
    """A node pool, as ``gcloud container node-pools create`` makes it.

    A pool whose topology needs several hosts is one slice: it has none of its nodes, or all.

    Attributes:
        name: unique in the world.
        accelerator: value of ``cloud.google.com/gke-tpu-accelerator``, such as ``tpu-v6e-slice``; empty without TPU.
        topology: value of ``cloud.google.com/gke-tpu-topology``, such as ``4x4``.
        chips_per_node: as the machine type has it: 4 for ``ct6e-standard-4t``.
        max_nodes: at most so many nodes; for a slice, its number of hosts.
        spot: whether its nodes are spot VMs, with their label.
        cpus, memory_gib: what pods may request of a node.
        taints: further taints, as ``{"key": …, "value": …, "effect": "NoSchedule"}``; GKE's own are there anyway.
        provision_s: how long a new node takes until it is ready.
        idle_s: an empty node goes after so many seconds.
        preemption_grace_s: the time that the pods of a preempted node have; 15 s unless the pool says otherwise.
    """

    name: str
    accelerator: str = ""
    topology: str = ""
    chips_per_node: int = 0
    max_nodes: int = 1
    spot: bool = False
    cpus: float = 180
    memory_gib: float = 720
    taints: tuple[Mapping[str, str], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    provision_s: float = 0.0
    idle_s: float = 600.0
    preemption_grace_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is there, or on its way."""

    name: str
    pool: str
    ready: bool
