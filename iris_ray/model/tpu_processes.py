"""Several processes on each host of a slice: the variables by which libtpu and JAX tell them apart.

A host of TPU7x has two NUMA nodes and two network cards, so Google recommends two processes a host there. Sources:

- libtpu's variables: JAX's own tests start several processes on a host with them (``jax/_src/test_multiprocess.py``),
  and torch_xla does so on several hosts (``torch_xla/_internal/tpu.py``).
- GKE's webhook for Ray, 1.3.1, numbers the containers of a pod in the same order, by ``TPU_WORKER_ID``.

libtpu locks no chips in a process whose ``TPU_CHIPS_PER_PROCESS_BOUNDS`` are not those of a whole host (0.0.52).
"""

from collections.abc import Mapping
from dataclasses import dataclass

CHIPS_PER_HOST = 4
"""Only hosts of four chips are shared by processes."""

_SPLITS: Mapping[int, tuple[tuple[int, int], tuple[int, int]]] = {
    1: ((1, 1), (2, 2)),
    2: ((2, 1), (1, 2)),
    4: ((2, 2), (1, 1)),
}
"""Processes a host → how they share its square of 2x2 chips: the processes in x and y, and the chips of each."""

PROCESS_COUNTS = tuple(_SPLITS)
"""How many processes a host may have."""

DECIDED_BY_US = (
    *("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS", "CLOUD_TPU_TASK_ID", "TPU_WORKER_ID"),
    *("TPU_VISIBLE_DEVICES", "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
)
"""Variables of a host or a user that say something else than these processes, or the same by an older name."""


@dataclass(frozen=True, slots=True)
class TpuProcess:
    """One of several processes on a host of a slice.

    Args:
        addresses: ``ip:port`` of every process of the slice, by host and then by process of the host.
        index: this one's number among them.
        per_host: how many a host has.
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
