"""The resources, labels and object store of a node."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

OBJECT_STORE_BYTES = 256 * 2**20  # of each node; memory is only taken as objects fill it
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class HostSpec:
    """One simulated host, as its raylet describes it.

    Attributes:
        node_id: hex id.
        cpus: logical CPUs.
        gpus: GPUs that it pretends to have.
        resources: custom resources, ``TPU`` among them.
        directory: the host's private directory.
        socket_prefix: the beginning of the paths of its Unix sockets; short, as the kernel allows 107 bytes.
    """

    node_id: str
    cpus: int
    gpus: int
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    directory: Path
    socket_prefix: str
    address: str


class ResolvedSpec(ResourceAndLabelSpec):  # type: ignore[misc]
    """Resources that are final: Ray's own detection would ask this machine, and Google's metadata server."""

    def __init__(self, cpus: int, gpus: int, resources: dict[str, float], labels: dict[str, str]):
        super().__init__(cpus, gpus, psutil.virtual_memory().total // 2, OBJECT_STORE_BYTES, resources, labels)

    def resolved(self) -> bool:
        return True


def new_node_id() -> str:
    """Return a hex node id that no other node has."""
    return str(ray.NodeID.from_random().hex())


def plasma_directory(fallback: Path) -> str:
    """Return where to map an object store's memory: shared memory, or ``fallback`` if that is too small, as in many
    containers."""
    if _SHARED_MEMORY.is_dir() and psutil.disk_usage(str(_SHARED_MEMORY)).free >= OBJECT_STORE_BYTES:
        return str(_SHARED_MEMORY)
    return str(fallback)
