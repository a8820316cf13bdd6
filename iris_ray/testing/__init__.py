"""Run code on TPU slices without TPUs: real Ray nodes pose as TPU hosts, and emulators stand in for Google's servers.

May import: `model`, `terminal`, `errors`, `processes`.
Start with `cluster.py`, the public `SimulatedCluster`: it starts a `HeadMachine` and, by `HostStarter`, the hosts, and
takes them away. Each node is a `Machine`, whose processes a supervisor owns (`process_supervisor.py`).
"""

from iris_ray.testing.cluster import SimulatedCluster
from iris_ray.testing.faults import Preemption
from iris_ray.testing.metadata_server import HostMetadata, MetadataFault, MetadataValue

__all__ = ["HostMetadata", "MetadataFault", "MetadataValue", "Preemption", "SimulatedCluster"]
