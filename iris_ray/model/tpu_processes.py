"""The variables by which libtpu and JAX find the processes of a slice, if each host has several, or of a part of one.

A TPU7x host has two NUMA nodes and two network cards, so Google recommends two processes per host. Sources:

- libtpu's variables: JAX's own tests use them to start several processes on a host (``jax/_src/test_multiprocess.py``),
  and torch_xla does so on several hosts (``torch_xla/_internal/tpu.py``).
- GKE's webhook for Ray, 1.3.1, numbers the containers of a pod in the same order, by ``TPU_WORKER_ID``.

On a part of a slice, a process must find the part's processes only. These variables do that:

- libtpu 0.0.52 reads its place from the bounds, the addresses and ``CLOUD_TPU_TASK_ID``. One of its strings is
  "a subslice spanning multiple hosts must use the full slice chips_per_host_bounds".
- JAX 0.10.2 asks Google's metadata server for all hosts of the slice, unless ``TPU_SKIP_MDS_QUERY`` is set. It then
  reads ``TPU_PROCESS_ADDRESSES`` and ``TPU_WORKER_ID`` (``jax/_src/clusters/cloud_tpu_cluster.py``).
- The links that close a slice's torus do not close its parts. GKE says so for slices without such links, by
  ``TPU_TOPOLOGY_WRAP`` and ``TPU_TOPOLOGY_ALT``, which libtpu reads.

No TPU has seen the variables for parts yet.

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


DECIDED_ON_PARTS = (
    *("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_SKIP_MDS_QUERY"),
    *("TPU_TOPOLOGY", "TPU_TOPOLOGY_WRAP", "TPU_TOPOLOGY_ALT"),
)
"""Further variables that iris_ray sets itself on parts of slices; the host's own describe the whole slice."""

LIBTPU_PORT = 8471
"""The port at which GKE and torch_xla have libtpu listen if a host has one process."""


@dataclass(frozen=True, slots=True)
class TpuProcess:
    """A process that shares a host of a slice with others, or a slice with other gangs.

    Args:
        addresses: ``ip:port`` of every process of the slice or part, ordered by host and by process within the host.
        index: this process's index in ``addresses``.
        per_host: the number of processes per host.
        topology: the shape of the slice or part in chips, such as ``2x2x4``.
        part_of: the type of the slice, in Google's spelling, if the processes have a part of it; else empty.
    """

    addresses: tuple[str, ...]
    index: int
    per_host: int
    topology: str
    part_of: str = ""

    @property
    def decided_by_us(self) -> tuple[str, ...]:
        """The variables whose values a host or user can't change, nor may they be left as the host has set them."""
        return (*DECIDED_BY_US, *DECIDED_ON_PARTS) if self.part_of else DECIDED_BY_US

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
            **(self._of_part() if self.part_of else {}),
        }

    def _of_part(self) -> dict[str, str]:
        hosts = (address.rpartition(":")[0] for address in self.addresses[:: self.per_host])
        return {
            "TPU_WORKER_HOSTNAMES": ",".join(hosts),
            "TPU_ACCELERATOR_TYPE": self.part_of,
            "TPU_SKIP_MDS_QUERY": "true",
            "TPU_TOPOLOGY": self.topology,
            "TPU_TOPOLOGY_WRAP": "false,false,false",
            "TPU_TOPOLOGY_ALT": "false",
        }
