"""Simulated hosts, with TPU or without, as Ray, libtpu and user code see them; checks of the cluster's arguments."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import Seconds, Whole, require
from iris_ray.model.topology import TPUConfig, default_topology, get_tpu_config
from iris_ray.settings import HOST_DIR, TEST_METADATA_HOST
from iris_ray.testing.machine import Machine
from iris_ray.testing.metadata_server import HostMetadata

_SUBDIRECTORIES = ("dev", "lock", "logs", "tmp")

# Variables that describe the driver's machine must not describe the simulated hosts.
_NOT_INHERITED = (
    *("MEGASCALE_", "TPU_", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "RAY_OVERRIDE_"),
    *(HOST_DIR.name, TEST_METADATA_HOST),
)


@dataclass(frozen=True, slots=True)
class TPUHost:
    """One simulated TPU VM.

    Attributes:
        slice_name: name of its slice.
        worker_id: its number within the slice, from 0 (TPU's worker id).
        config: the type of the slice.
        node_id: hex id of its Ray node.
        address: its IP address.
    """

    slice_name: str
    worker_id: int
    config: TPUConfig
    node_id: str
    address: str
    directory: Path

    @property
    def name(self) -> str:
        """The host's name in messages and file names, such as ``v4-32-0-w3``."""
        return f"{self.slice_name}-w{self.worker_id}"

    @property
    def gpus(self) -> int:
        """The number of GPUs that it pretends to have."""
        return 0

    @property
    def chips(self) -> int:
        """The number of its TPU chips."""
        return self.config.chips_per_vm

    def resources(self) -> dict[str, float]:
        """Return the custom resources that a raylet on a TPU VM detects by itself."""
        resources = {
            "TPU": float(self.config.chips_per_vm),
            f"accelerator_type:{self._accelerator}": 1.0,
            self.slice_name: 1.0,
        }
        if self.worker_id == 0:
            resources[f"TPU-{self.config.name}-head"] = 1.0
        return resources

    def labels(self) -> dict[str, str]:
        """Return the node labels that a raylet on a TPU VM sets by itself."""
        return {
            "ray.io/accelerator-type": self._accelerator,
            "ray.io/tpu-slice-name": self.slice_name,
            "ray.io/tpu-worker-id": str(self.worker_id),
            "ray.io/tpu-topology": default_topology(self.config),
            "ray.io/tpu-pod-type": self.config.name,
        }

    def metadata(self, addresses: Sequence[str]) -> dict[str, str]:
        """Return the metadata of a TPU VM, by key. Arguments as for `environment`."""
        tpu_env = {
            "ACCELERATOR_TYPE": self.config.accelerator_type,
            "NODE_ID": self.slice_name,
            "TOPOLOGY": default_topology(self.config),
            "WORKER_ID": str(self.worker_id),
        }
        return {
            "project/project-id": "simulated",
            "instance/zone": "projects/1/zones/simulated-a",
            "instance/attributes/accelerator-type": self.config.accelerator_type,
            "instance/attributes/agent-worker-number": str(self.worker_id),
            "instance/attributes/instance-id": self.slice_name,
            "instance/attributes/tpu-env": "".join(f"{name}: '{value}'\n" for name, value in tpu_env.items()),
            "instance/attributes/worker-network-endpoints": ",".join(addresses),
        }

    def environment(self, addresses: Sequence[str]) -> dict[str, str]:
        """Return the whole environment of the host's processes.

        Args:
            addresses: IP addresses of all hosts of the slice, by worker id.
        """
        return {
            **_host_environment(self.directory),
            "TPU_NAME": self.slice_name,
            "TPU_WORKER_ID": str(self.worker_id),
            "TPU_WORKER_HOSTNAMES": ",".join(addresses),
            "TPU_ACCELERATOR_TYPE": self.config.accelerator_type,
            "TPU_TOPOLOGY": default_topology(self.config),
            "TPU_SKIP_MDS_QUERY": "true",  # libtpu needs nothing from Google's metadata server
        }

    def make_directory(self) -> None:
        """Create the private directory, with an empty file for every chip in ``dev/``."""
        _make_subdirectories(self.directory)
        for chip in range(self.config.chips_per_vm):
            (self.directory / "dev" / f"accel{chip}").touch()

    @property
    def _accelerator(self) -> str:
        return f"TPU-{self.config.generation.upper()}"


@dataclass(frozen=True, slots=True, eq=False)
class PlainHost:
    """One simulated machine without TPU.

    Attributes:
        name: unique in the cluster; also the name of the slice whose only host it is.
        node_id: hex id of its Ray node.
        address: its IP address.
        gpus: the number of GPUs that it pretends to have.
        node_labels: labels of its Ray node.
    """

    name: str
    node_id: str
    address: str
    directory: Path
    gpus: int
    node_labels: Mapping[str, str]

    @property
    def chips(self) -> int:
        return 0

    @property
    def slice_name(self) -> str:
        return self.name

    @property
    def worker_id(self) -> int:
        return 0

    def resources(self) -> dict[str, float]:
        """Return no custom resources."""
        return {}

    def labels(self) -> dict[str, str]:
        """Return the node labels."""
        return dict(self.node_labels)

    def metadata(self, _addresses: Sequence[str]) -> dict[str, str]:
        """Return the metadata of a plain VM, by key."""
        return {"project/project-id": "simulated", "instance/zone": "projects/1/zones/simulated-a"}

    def environment(self, _addresses: Sequence[str]) -> dict[str, str]:
        """Return the whole environment of the host's processes."""
        return _host_environment(self.directory)

    def make_directory(self) -> None:
        """Create the private directory."""
        _make_subdirectories(self.directory)


@dataclass(frozen=True, slots=True, eq=False)
class PodHost:
    """A pod of an emulated Kubernetes that runs a Ray node.

    Attributes:
        name: the pod's.
        slice_name: of the slice that its variables name; without chips its own name.
        worker_id: its number within the slice.
        node_id: hex id of its Ray node.
        address: its IP address.
        chips: the TPU chips that it is given.
        variables: of its Ray container, without `OF_THIS_MACHINE`.
        ray_start_params: options of ``ray start``, without dashes.
    """

    name: str
    slice_name: str
    worker_id: int
    node_id: str
    address: str
    directory: Path
    chips: int
    variables: Mapping[str, str]
    ray_start_params: Mapping[str, str]

    def metadata(self, _addresses: Sequence[str]) -> dict[str, str]:
        """Return the metadata of a node of GKE, by key."""
        return {"project/project-id": "simulated", "instance/zone": "projects/1/zones/simulated-a"}

    def environment(self, _addresses: Sequence[str]) -> dict[str, str]:
        """Return the whole environment of the host's processes."""
        return {**_host_environment(self.directory), **self.variables}

    def make_directory(self) -> None:
        """Create the private directory, with an empty file for every chip in ``dev/``."""
        _make_subdirectories(self.directory)
        for chip in range(self.chips):
            (self.directory / "dev" / f"accel{chip}").touch()


OF_THIS_MACHINE = frozenset({"PATH", "JAX_PLATFORMS", "TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"})
"""Variables that a pod can't set here: where programs are, that there is no TPU, and the way to log in."""

Host = TPUHost | PlainHost | PodHost


@dataclass(frozen=True, slots=True)
class RunningHost:
    """A host, its processes, and its metadata server."""

    host: Host
    machine: Machine
    metadata: HostMetadata


def _host_environment(directory: Path) -> dict[str, str]:
    return {
        # There is no TPU: JAX would look for one first, and report that on every host. A user's own choice wins.
        "JAX_PLATFORMS": "cpu",
        **machine_environment(),
        "TMPDIR": str(directory / "tmp"),
        HOST_DIR.name: str(directory),
    }


def _make_subdirectories(directory: Path) -> None:
    for name in _SUBDIRECTORIES:
        (directory / name).mkdir(parents=True)


def machine_environment() -> dict[str, str]:
    """Return this process's environment without the variables that describe its machine and cluster.

    ``python`` on the simulated machines is this process's interpreter, even if no virtual environment is active.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    kept["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), kept.get("PATH", os.defpath)])
    return kept


# -- arguments of `SimulatedCluster`: each check raises `InvalidRequestError` ------------------------------------------

NoticeChannel = Literal["both", "ray", "metadata"]
"""Where a preemption is announced: as a drain of Ray's nodes, by the hosts' metadata servers, or both."""

LONGEST_S = 365 * 24 * 3600.0
"""The kernel's and Ray's own times overflow at some point; a year is enough."""


def checked_slices(slices: Mapping[str, int] | None) -> list[tuple[TPUConfig, int]]:
    """Return each TPU type with the number of its slices."""
    if slices is None:
        return []
    if not isinstance(slices, Mapping):
        raise InvalidRequestError(
            f'slices maps TPU types to the number of their slices, as in {{"v4-32": 2}}; it can\'t be {slices!r}.'
        )
    return [
        (get_tpu_config(name), checked_count(f"The number of {name} slices", number, least=0))
        for name, number in slices.items()
    ]


def checked_count(what: str, number: Any, *, least: int) -> int:
    require(what, number, Whole(least))
    return int(number)


def checked_notice(notice_s: object) -> float:
    """Return the notice in seconds; None is 0."""
    return 0.0 if notice_s is None else checked_seconds("notice_s", notice_s)


def checked_seconds(what: str, seconds: Any) -> float:
    require(what, seconds, Seconds(most=LONGEST_S))
    return float(seconds)


def require_channel(heard_by: str) -> None:
    if heard_by not in get_args(NoticeChannel):
        raise InvalidRequestError(f"heard_by is one of {get_args(NoticeChannel)}, not {heard_by!r}.")
