"""Try code against TPU slices that are not there: real Ray nodes pose as TPU hosts, and Google's servers are emulated.

May import: `model`.
Start with `cluster.py`, which is `SimulatedCluster`.
"""

from iris_ray.testing.cluster import SimulatedCluster
from iris_ray.testing.preemption import Preemption

__all__ = ["Preemption", "SimulatedCluster"]
