"""The Ray node of this machine, as the command line of its raylet shows it.

A pod that ends can't wait until Ray is imported, so this does not use Ray.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from iris_ray.actors.host.announced_end import in_rays_directory
from iris_ray.errors import InvalidRequestError, UnknownNameError
from iris_ray.settings import HOST_DIR

_RAYLET = "raylet"
_FOR_JOBS = ("CPU", "GPU", "TPU")


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A Ray node of this machine.

    Attributes:
        node_id: Ray's node id.
        gcs_address: HOST:PORT of its cluster's GCS.
        directory: iris_ray's directory there; None if it belongs to another user.
        takes_jobs: whether it has CPUs, GPUs or chips for tasks.
    """

    node_id: str
    gcs_address: str
    directory: Path | None
    takes_jobs: bool


def this_node(address: str, environ: Mapping[str, str]) -> LocalNode:
    """Return the Ray node that runs on this machine.

    If there are several, as those of a simulated cluster, the address of the cluster and the directory tell them apart.

    Args:
        address: HOST:PORT of the cluster's head, as far as it is known.
        environ: may name iris_ray's directory on the host.

    Raises:
        UnknownNameError: no Ray node runs here, or none that takes jobs.
        InvalidRequestError: several do.
    """
    nodes = list(local_nodes())
    if not nodes:
        raise UnknownNameError("no Ray node runs on this machine; name a slice or host: iris-ray host ls shows them")
    for is_meant in (
        lambda node: node.gcs_address == address,
        lambda node: node.directory is not None and node.directory == HOST_DIR.read(environ),
    ):
        nodes = list(filter(is_meant, nodes)) or nodes
    if len(nodes) > 1:
        raise InvalidRequestError(
            f"{len(nodes)} Ray nodes run on this machine: {', '.join(node.node_id[:12] for node in nodes)}; name one of"
            " them, or a slice: iris-ray host ls shows them"
        )
    if not nodes[0].takes_jobs:
        raise UnknownNameError("no job can run on this machine; name a slice or host: iris-ray host ls shows them")
    return nodes[0]


def local_nodes() -> Iterator[LocalNode]:
    """Yield the Ray nodes that run on this machine, as the command lines of their raylets show them."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if os.path.basename(command[0]) != _RAYLET:
            continue
        flags = dict(part[2:].split("=", 1) for part in command if part.startswith("--") and "=" in part)
        if "node_id" in flags and "gcs-address" in flags:
            names, amounts = (flags.get("static_resource_list", "").split(",")[start::2] for start in (0, 1))
            has = {name for name, amount in zip(names, amounts, strict=False) if float(amount)}
            directory = _directory(process, flags.get("temp_dir", ""))
            yield LocalNode(flags["node_id"], flags["gcs-address"], directory, not has.isdisjoint(_FOR_JOBS))


def _directory(raylet: psutil.Process, temp_dir: str) -> Path | None:
    try:
        return HOST_DIR.read(raylet.environ()) or in_rays_directory(temp_dir, raylet.uids().real)
    except (psutil.Error, OSError):
        return None
