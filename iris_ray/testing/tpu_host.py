"""Simulated hosts, with TPU or without, as Ray, libtpu and user code see them."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from iris_ray.model.checks import Seconds, require
from iris_ray.model.topology import TPUConfig, default_topology
from iris_ray.settings import HOST_DIR, TEST_METADATA_HOST
from iris_ray.testing.machine import Machine
from iris_ray.testing.metadata_server import HostMetadata

OF_THIS_MACHINE: Final = frozenset({"PATH", "JAX_PLATFORMS", "TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"})
"""Variables that a pod can't set here: where programs are, that there is no TPU, and the way to log in."""

_SUBDIRECTORIES = ("dev", "lock", "logs", "tmp")

# Variables that describe the driver's machine must not describe the simulated hosts.
_NOT_INHERITED = (
    *("MEGASCALE_", "TPU_", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "RAY_OVERRIDE_"),
    *(HOST_DIR.name, TEST_METADATA_HOST),
)
_OF_EVERY_VM = {"project/project-id": "simulated", "instance/zone": "projects/1/zones/simulated-a"}


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """One simulated machine.

    Attributes:
        name: its name in messages and file names, such as ``v4-32-0-w3``; unique in the cluster.
        slice_name: the name of its slice; a machine without TPU is a slice of its own.
        worker_id: its number within the slice, from 0.
        node_id: the hex id of its Ray node.
        address: its IP address.
        directory: its private directory.
        chips, gpus: the numbers of its TPU chips, and of the GPUs that it pretends to have.
        resources, labels: the custom resources and the labels of its Ray node.
        variables: environment variables of its processes.
        metadata: the metadata of its VM, by key.
        ray_start_params: the options of ``ray start``, without dashes, by which Ray itself detects the resources and
            labels of a pod. None: they are those above.
    """

    name: str
    slice_name: str
    worker_id: int
    node_id: str
    address: str
    directory: Path
    chips: int = 0
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=lambda: _OF_EVERY_VM)
    ray_start_params: Mapping[str, str] | None = None

    def environment(self) -> dict[str, str]:
        """Return the whole environment of its processes."""
        # There is no TPU: JAX would look for one first, and report that on every host. A user's own choice wins.
        own = {"TMPDIR": str(self.directory / "tmp"), HOST_DIR.name: str(self.directory)}
        return {"JAX_PLATFORMS": "cpu", **machine_environment(), **own, **self.variables}

    def make_directory(self) -> None:
        """Create its private directory, with an empty file for every chip in ``dev/``."""
        for name in _SUBDIRECTORIES:
            (self.directory / name).mkdir(parents=True)
        for chip in range(self.chips):
            (self.directory / "dev" / f"accel{chip}").touch()


def tpu_host(
    slice_name: str, worker_id: int, config: TPUConfig, node_id: str, addresses: Sequence[str], directory: Path
) -> Host:
    """Return a simulated TPU VM, described as a raylet on a real one detects it.

    Args:
        slice_name: the name of its slice.
        worker_id: its number within the slice, from 0.
        config: the type of the slice.
        node_id: the hex id of its Ray node.
        addresses: the IP addresses of all hosts of the slice, by worker id.
        directory: its private directory.
    """
    topology, accelerator = default_topology(config), f"TPU-{config.generation.upper()}"
    resources = {"TPU": float(config.chips_per_vm), f"accelerator_type:{accelerator}": 1.0, slice_name: 1.0}
    if worker_id == 0:
        resources[f"TPU-{config.name}-head"] = 1.0
    tpu_env = {
        "ACCELERATOR_TYPE": config.accelerator_type,
        "NODE_ID": slice_name,
        "TOPOLOGY": topology,
        "WORKER_ID": str(worker_id),
    }
    return Host(
        name=f"{slice_name}-w{worker_id}",
        slice_name=slice_name,
        worker_id=worker_id,
        node_id=node_id,
        address=addresses[worker_id],
        directory=directory,
        chips=config.chips_per_vm,
        resources=resources,
        labels={
            "ray.io/accelerator-type": accelerator,
            "ray.io/tpu-slice-name": slice_name,
            "ray.io/tpu-worker-id": str(worker_id),
            "ray.io/tpu-topology": topology,
            "ray.io/tpu-pod-type": config.name,
        },
        variables={
            "TPU_NAME": slice_name,
            "TPU_WORKER_ID": str(worker_id),
            "TPU_WORKER_HOSTNAMES": ",".join(addresses),
            "TPU_ACCELERATOR_TYPE": config.accelerator_type,
            "TPU_TOPOLOGY": topology,
            "TPU_LOG_DIR": str(directory / "tpu_logs"),  # not where this machine's own programs keep theirs
            "TPU_SKIP_MDS_QUERY": "true",  # libtpu needs nothing from Google's metadata server
        },
        metadata={
            **_OF_EVERY_VM,
            "instance/attributes/accelerator-type": config.accelerator_type,
            "instance/attributes/agent-worker-number": str(worker_id),
            "instance/attributes/instance-id": slice_name,
            "instance/attributes/tpu-env": "".join(f"{name}: '{value}'\n" for name, value in tpu_env.items()),
            "instance/attributes/worker-network-endpoints": ",".join(addresses),
        },
    )


@dataclass(frozen=True, slots=True)
class RunningHost:
    """A host, its processes, and its metadata server."""

    host: Host
    machine: Machine
    metadata: HostMetadata


def machine_environment() -> dict[str, str]:
    """Return this process's environment without the variables that describe its machine and cluster.

    ``python`` on the simulated machines is this process's interpreter, even if no virtual environment is active.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    kept["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), kept.get("PATH", os.defpath)])
    return kept


LONGEST_S = 365 * 24 * 3600.0
"""The kernel's and Ray's own times overflow at some point; a year is enough."""


def checked_seconds(what: str, seconds: Any) -> float:
    """Return a time in seconds; raises InvalidRequestError if it is not one."""
    require(what, seconds, Seconds(most=LONGEST_S))
    return float(seconds)
