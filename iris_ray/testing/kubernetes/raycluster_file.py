"""Reads a RayCluster, fills in its defaults, and refuses what KubeRay 1.7 or the TPU webhook refuses.

Sources: apis/ray/v1/raycluster_types.go (defaults, enumerations), controllers/ray/utils/validation.go and
pkg/features/features.go (gates) in ray-operator/ of KubeRay 1.7.0; validateRayCluster in the TPU webhook's main.go.
A real KubeRay refuses by an event, InvalidRayClusterSpec, and does nothing more.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from iris_ray.errors import InvalidClusterFileError
from iris_ray.testing.kubernetes.objects import TOPOLOGY_LABEL, TPU_RESOURCE, Manifest, amount, requests

API_VERSION: Final = "ray.io/v1"
EMBEDDED_STORAGE: Final = "GCSFaultToleranceEmbeddedStorage"
ON_BY_DEFAULT: Final = frozenset({"RayMultiHostIndexing"})
"""Feature gates that are on in KubeRay 1.7 and matter here."""

_GROUP_DEFAULTS: Final = {"replicas": 0, "minReplicas": 0, "maxReplicas": 2**31 - 1, "numOfHosts": 1}
_GATED_FIELDS: Final = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # a DNS-1035 label
_LONGEST_NAME: Final = 53  # MaxRayClusterNameLength
_RAY_WITH_TOKENS: Final = (2, 52)

Path_ = tuple[str | int, ...]
"""The way to a field: ``("spec", "workerGroupSpecs", 0, "numOfHosts")``."""


class RefusedSpec(Exception):
    """A RayCluster that KubeRay or the webhook refuses, the reason, and the field."""

    def __init__(self, reason: str, *path: str | int) -> None:
        super().__init__(reason)
        self.path: Path_ = path


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The contents of a file: one RayCluster, with its defaults, and other objects, such as roles and claims."""

    raycluster: Manifest
    others: tuple[Manifest, ...] = ()


def read_cluster_file(source: str | Path | Mapping[str, Any], feature_gates: Collection[str]) -> ClusterFile:
    """Read a RayCluster and check it.

    Args:
        source: the path of a YAML file, or what such a file holds.
        feature_gates: alpha features of KubeRay that are switched on.

    Raises:
        InvalidClusterFileError: the file can't be read, is no RayCluster, or is refused. The message has the line.
    """
    name = "the RayCluster"
    nodes: list[yaml.Node] = []
    if isinstance(source, Mapping):
        documents: list[Any] = [source]
    else:
        name = str(source)
        try:
            nodes = list(yaml.compose_all(Path(source).read_text(), yaml.SafeLoader))
            documents = list(yaml.safe_load_all(Path(source).read_text()))
        except OSError as error:
            raise InvalidClusterFileError(f"{name} can't be read: {error.strerror}.") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InvalidClusterFileError(f"{name} is not valid YAML: {error}") from error
    kinds = [document.get("kind") if isinstance(document, Mapping) else None for document in documents]
    if kinds.count("RayCluster") != 1:
        found = ", ".join(
            f"{kind or 'no kind'} in line {_line(node)}" for kind, node in zip(kinds, nodes, strict=False)
        )
        raise InvalidClusterFileError(
            f"{name} must hold one object of kind RayCluster, and holds {kinds.count('RayCluster')}"
            f"{f' ({found})' if found else ''}. RayJob and RayService are not emulated; give the file of a RayCluster."
        )
    index = kinds.index("RayCluster")
    raycluster = with_defaults(documents[index])
    try:
        check_raycluster(raycluster, feature_gates)
        check_slices(raycluster)
    except RefusedSpec as refusal:
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in refusal.path).lstrip(".")
        line = f", line {_line(_find(nodes[index], refusal.path))}" if nodes else ""
        raise InvalidClusterFileError(f"{name}{line}{f', {where}' if where else ''}: {refusal}") from None
    others = [dict(document) for document in documents if document and document is not documents[index]]
    return ClusterFile(raycluster, tuple(others))


def _line(node: yaml.Node | None) -> int:
    return node.start_mark.line + 1 if node is not None else 1


def _find(node: yaml.Node, path: Path_) -> yaml.Node:
    """Return the node at a path, or the nearest above it that the file has; for a field, its key's node."""
    for step in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == step), None)
            if pair is None:
                return node
            node = pair[1] if step != path[-1] else pair[0]
    return node


def with_defaults(raycluster: Mapping[str, Any]) -> Manifest:
    """Return the object as the API server stores it: with the defaults of KubeRay's CRD."""
    spec = raycluster.get("spec")
    filled = {**raycluster, "metadata": dict(raycluster.get("metadata") or {})}
    if isinstance(spec, Mapping) and isinstance(spec.get("workerGroupSpecs"), list):
        groups = [
            {**_GROUP_DEFAULTS, **group} if isinstance(group, Mapping) else group for group in spec["workerGroupSpecs"]
        ]
        filled["spec"] = {**spec, "workerGroupSpecs": groups}
    return filled


def check_raycluster(raycluster: Manifest, feature_gates: Collection[str]) -> None:
    """Raise `RefusedSpec` for what KubeRay refuses."""
    version = raycluster.get("apiVersion")
    if version != API_VERSION:
        raise RefusedSpec(f"the API version is {version!r}; KubeRay 1.7 has {API_VERSION}. Change it.", "apiVersion")
    name = raycluster["metadata"].get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise RefusedSpec(
            f"a RayCluster can't be called {name!r}: it takes up to {_LONGEST_NAME} small letters, digits and hyphens,"
            " and begins with a letter.",
            "metadata",
            "name",
        )
    spec = raycluster.get("spec")
    if not isinstance(spec, Mapping):
        raise RefusedSpec("spec is missing.", "spec")
    check_groups(raycluster)
    groups = spec.get("workerGroupSpecs") or []
    names = [group["groupName"] for group in groups]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RefusedSpec(f"two groups are called {twice}.", "spec", "workerGroupSpecs", names.index(twice))
    _check_features(spec, feature_gates)
    autoscaler = spec.get("autoscalerOptions") or {}
    if spec.get("enableInTreeAutoscaling") and autoscaler.get("version") == "v2":
        ways: list[Path_] = [("headGroupSpec",), *(("workerGroupSpecs", index) for index in range(len(groups)))]
        for way, part in zip(ways, [spec["headGroupSpec"], *groups], strict=True):
            if part["template"]["spec"].get("restartPolicy", "Never") != "Never":
                where = ("spec", *way, "template", "spec", "restartPolicy")
                raise RefusedSpec("with autoscaler v2 the restartPolicy is Never, or unset.", *where)
    elif any(group.get("idleTimeoutSeconds") is not None for group in groups):
        raise RefusedSpec("a group's idleTimeoutSeconds needs autoscalerOptions.version: v2.", "spec")


def check_groups(raycluster: Manifest) -> None:
    """Raise `RefusedSpec` for groups that the API server itself refuses: a part is missing, or not of its type."""
    spec = raycluster["spec"]
    _check_pod_template(spec.get("headGroupSpec"), "spec", "headGroupSpec")
    for index, group in enumerate(spec.get("workerGroupSpecs") or []):
        _check_group(group, "spec", "workerGroupSpecs", index)


def _check_pod_template(group: Any, *path: str | int) -> None:
    if not isinstance(group, Mapping):
        raise RefusedSpec("it is missing, or not an object.", *path)
    containers = ((group.get("template") or {}).get("spec") or {}).get("containers")
    if not containers:
        raise RefusedSpec("its pod template needs a container; the first one runs Ray.", *path, "template")
    for index, container in enumerate(containers):
        for part in ("limits", "requests"):
            for name, quantity in ((container.get("resources") or {}).get(part) or {}).items():
                where = (*path, "template", "spec", "containers", index, "resources", part, name)
                try:
                    amount(quantity)
                except ValueError as error:
                    raise RefusedSpec(f"{error}.", *where) from None
    parameters, resources = group.get("rayStartParams") or {}, group.get("resources")
    if resources and {"num-cpus", "num-gpus", "memory", "resources"} & set(parameters):
        raise RefusedSpec("resources stand in rayStartParams and in resources; keep one of them.", *path, "resources")
    if "labels" in parameters:
        raise RefusedSpec("labels belong into the group's own field labels.", *path, "rayStartParams", "labels")


def _check_group(group: Any, *path: str | int) -> None:
    _check_pod_template(group, *path)
    if not isinstance(group.get("groupName"), str):
        raise RefusedSpec("a worker group needs a groupName.", *path)
    for name in _GROUP_DEFAULTS:
        if not isinstance(group[name], int) or isinstance(group[name], bool) or group[name] < (name == "numOfHosts"):
            least = int(name == "numOfHosts")
            raise RefusedSpec(f"it is a number from {least} on, not {group[name]!r}.", *path, name)
    if group["minReplicas"] > group["maxReplicas"]:
        raise RefusedSpec(f"{group['minReplicas']} is more than maxReplicas.", *path, "minReplicas")


def _check_features(spec: Mapping[str, Any], feature_gates: Collection[str]) -> None:
    for name, gate in _GATED_FIELDS.items():
        if spec.get(name) is not None and gate not in feature_gates:
            raise RefusedSpec(_gate_is_off(gate), "spec", name)
    storage = spec.get("gcsFaultToleranceOptions") or {}
    if storage.get("backend") == "rocksdb" and EMBEDDED_STORAGE not in feature_gates:
        raise RefusedSpec(_gate_is_off(EMBEDDED_STORAGE), "spec", "gcsFaultToleranceOptions", "backend")
    strategy = (spec.get("upgradeStrategy") or {}).get("type")
    if strategy not in (None, "Recreate", "None"):
        raise RefusedSpec(f"it is Recreate or None, not {strategy!r}.", "spec", "upgradeStrategy", "type")
    if (spec.get("authOptions") or {}).get("mode") == "token":
        found = re.match(r"(\d+)\.(\d+)", str(spec.get("rayVersion", "")))
        if found is None or (int(found[1]), int(found[2])) < _RAY_WITH_TOKENS:
            raise RefusedSpec("tokens need a rayVersion from 2.52.0 on.", "spec", "authOptions", "mode")


def _gate_is_off(gate: str) -> str:
    return (
        f"KubeRay refuses this without its alpha feature gate {gate}, which GKE's managed add-on does not offer."
        f" Leave it out, or install KubeRay yourself with that gate; here, name it in feature_gates."
    )


def check_slices(raycluster: Manifest) -> None:
    """Raise `RefusedSpec` for a group whose pods don't fill the slices of its topology, as the webhook refuses it."""
    for index, group in enumerate(raycluster["spec"].get("workerGroupSpecs") or []):
        pod_spec, path = group["template"]["spec"], ("spec", "workerGroupSpecs", index)
        chips = int(requests(pod_spec).get(TPU_RESOURCE, 0))
        if not chips:
            continue
        topology = (pod_spec.get("nodeSelector") or {}).get(TOPOLOGY_LABEL)
        if topology is None:
            raise RefusedSpec(f"a group with chips needs the node selector {TOPOLOGY_LABEL}.", *path, "template")
        hosts, given = hosts_of_topology(topology, chips), group["numOfHosts"]
        if hosts != given:
            raise RefusedSpec(
                f"the TPU webhook refuses this group: topology {topology} with {chips} chips a pod has {hosts} hosts,"
                f" and numOfHosts is {given} (1 if the file names none). Write numOfHosts: {hosts}.",
                *path,
                "numOfHosts",
            )


def hosts_of_topology(topology: str, chips_per_host: int) -> int:
    """Return how many hosts a slice has: ``4x4`` with 4 chips a host has 4. Raises RefusedSpec for no topology."""
    sides = topology.split("x")
    if not all(side.isdigit() for side in sides):
        raise RefusedSpec(f"{topology!r} is not a topology, such as 4x4.")
    chips = 1
    for side in sides:
        chips *= int(side)
    return max(chips // chips_per_host, 1)
