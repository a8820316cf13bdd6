"""Several processes on each host of a slice: the variables by which libtpu and JAX distinguish them.

A TPU7x host has two NUMA nodes and two network cards, so Google recommends two processes per host. Sources:

- libtpu's variables: JAX's own tests use them to start several processes on a host (``jax/_src/test_multiprocess.py``),
  and torch_xla does so on several hosts (``torch_xla/_internal/tpu.py``).
- GKE's webhook for Ray, 1.3.1, numbers the containers of a pod in the same order, by ``TPU_WORKER_ID``.

libtpu (0.0.52) does not lock chips if ``TPU_CHIPS_PER_PROCESS_BOUNDS`` is smaller than a whole host.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CHIPS_PER_HOST = 4
"""Only hosts of four chips can be split between processes."""

_SPLITS: Mapping[int, tuple[tuple[int, int], tuple[int, int]]] = {
    1: ((1, 1), (2, 2)),
    2: ((2, 1), (1, 2)),
    4: ((2, 2), (1, 1)),
}
"""Processes per host → the split of its 2x2 chips: the processes in x and y, and the chips of each in x and y."""

PROCESS_COUNTS = tuple(_SPLITS)
"""The valid numbers of processes per host."""

DECIDED_BY_US = (
    *("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS", "CLOUD_TPU_TASK_ID", "TPU_WORKER_ID"),
    *("TPU_VISIBLE_DEVICES", "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
)
"""Variables that iris_ray sets itself, and their older names; a host's or user's own values would contradict these."""


@dataclass(frozen=True, slots=True)
class TpuProcess:
    """A process that shares a host of a slice with others.

    Args:
        addresses: ``ip:port`` of every process of the slice, ordered by host and by process within the host.
        index: this process's index in ``addresses``.
        per_host: the number of processes per host.
        topology: the slice's shape in chips, such as ``2x2x4``.
    """

    addresses: tuple[str, ...]
    index: int
    per_host: int
    topology: str

    def to_env(self) -> dict[str, str]:
        """Return the variables for the process."""
        local = self.index % self.per_host
        (across, along), (wide, high) = _SPLITS[self.per_host]
        each = CHIPS_PER_HOST // self.per_host
        x, y, z = (*map(int, self.topology.split("x")), 1)[:3]
        return {
            "TPU_PROCESS_ADDRESSES": ",".join(self.addresses),
            "TPU_PROCESS_PORT": self.addresses[self.index].rpartition(":")[2],
            "CLOUD_TPU_TASK_ID": str(self.index),
            "TPU_WORKER_ID": str(self.index),
            "TPU_VISIBLE_CHIPS": ",".join(str(local * each + chip) for chip in range(each)),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": f"{wide},{high},1",
            "TPU_PROCESS_BOUNDS": f"{x // 2 * across},{y // 2 * along},{z}",
        }
