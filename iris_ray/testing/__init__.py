"""Try code against TPU slices that are not there: ``SimulatedCluster``."""

from iris_ray.testing.cluster import SimulatedCluster
from iris_ray.testing.preemption import Preemption

__all__ = ["Preemption", "SimulatedCluster"]
