"""The slices of a RayCluster: the groups that make them, their replicas, and the reasons why slices don't come. Pure.

A replica of a worker group is a slice, of ``numOfHosts`` pods. iris_ray raises ``replicas``, as KubeRay lets users do;
Ray's autoscaler takes the pods for its own and gives idle ones back. Placement groups would have it launch hosts one by
one, and it counts badly in whole slices (Ray 2.49 to 2.60, ``autoscaler/v2``):

- its KubeRay provider sets ``replicas`` to hosts ÷ ``numOfHosts``, rounded down, so that the head bundle of one missing
  slice of several hosts launches nothing; that of 2.49 does not divide, and makes a slice for each host;
- it launches at most 10 hosts at a time (``AUTOSCALER_MAX_CONCURRENT_LAUNCHES``), so that a slice of 16 never comes;
- a host that was launched in vain counts as one that comes, for 40 minutes, and completes the next demand in its mind;
- while a slice joins host by host, it takes hosts without ``TPU-<type>-head`` for a reason to launch others.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from iris_ray.errors import UnknownTPUTypeError
from iris_ray.model.topology import TPUConfig, get_tpu_config

ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GENERATIONS = {
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-device": "v5litepod",
    "tpu-v5-lite-podslice": "v5litepod",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "v7x",
}
"""The generation of each value of `ACCELERATOR`: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus."""
CHIPS = "google.com/tpu"
REPLICA = "ray.io/worker-group-replica-name"
"""The label of a pod that says which slice of its group it belongs to, if the group's slices have several pods."""
MESSAGE_LENGTH = 300
NO_SCALE_UP = "NotTriggerScaleUp"
SCALE_UP_EVENTS = "FailedScaleUp", NO_SCALE_UP, "TriggeredScaleUp"
"""Events in which the autoscaler of a Kubernetes cluster says whether it makes a node for a pod, and why not."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """A worker group that makes slices.

    Attributes:
        name: of the group.
        index: its place in the RayCluster.
        tpu_type: the type of its slices.
        replicas: how many slices it is to have; None if the RayCluster does not say.
        most: how many it may have.
        problem: why its pods can't become slices, or None.
        hosts: how many pods a slice has.
        least: how many slices it has at least.
        going: the names of pods that KubeRay is told to delete, gone ones included.
    """

    name: str
    index: int
    tpu_type: str
    replicas: int | None
    most: int
    problem: str | None = None
    hosts: int = 1
    least: int = 0
    going: tuple[str, ...] = ()

    @property
    def wanted(self) -> int:
        return self.replicas or 0


def worker_groups(ray_cluster: Mapping[str, Any]) -> list[WorkerGroup]:
    """Return the groups of a RayCluster whose pods ask for TPU nodes of a type that iris_ray knows.

    The node selector says the type. If it names no accelerator, the name of the group does.
    """
    specs = enumerate(ray_cluster["spec"].get("workerGroupSpecs") or ())
    return [group for index, spec in specs if (group := _worker_group(index, spec)) is not None]


def _worker_group(index: int, spec: Mapping[str, Any]) -> WorkerGroup | None:
    pod = spec["template"]["spec"]
    selector = pod.get("nodeSelector") or {}
    replicas, most, name = spec.get("replicas"), spec.get("maxReplicas"), spec["groupName"]
    chips = _chips(pod)
    if ACCELERATOR in selector:
        config = _tpu_config(selector[ACCELERATOR], selector.get(TOPOLOGY))
    else:
        config = _named(name) if chips else None  # a ComputeClass may say what the nodes are
    if config is None:
        return None
    hosts, problem = spec.get("numOfHosts") or 1, None
    if chips and hosts * chips != config.chip_count:
        problem = (
            f"its numOfHosts is {hosts}, and its pods ask for {chips} chips each: a {config.name} has"
            f" {config.chip_count} chips, which are {config.chip_count // chips} such hosts"
        )
    if spec.get("suspend"):
        problem = "it is suspended"
    going = tuple((spec.get("scaleStrategy") or {}).get("workersToDelete") or ())
    most, least = 2**31 if most is None else most, spec.get("minReplicas") or 0
    return WorkerGroup(name, index, config.name, replicas, most, problem, hosts, least, going)


def _chips(pod: Mapping[str, Any]) -> int:
    resources = pod["containers"][0].get("resources") or {}
    return int((resources.get("limits") or {}).get(CHIPS) or (resources.get("requests") or {}).get(CHIPS) or 0)


def _named(group: str) -> TPUConfig | None:
    try:
        return get_tpu_config(group)
    except UnknownTPUTypeError:
        return None


def _tpu_config(accelerator: str, topology: str | None) -> TPUConfig | None:
    """Return the type of the slices on nodes with these labels, or None if it is none that iris_ray knows."""
    generation = GENERATIONS.get(accelerator)
    sides = (topology or "").split("x")
    if generation is None or not all(side.isdecimal() for side in sides):
        return None
    chips = prod(map(int, sides))
    for cores_per_chip in (1, 2):
        config = _named(f"{generation}-{chips * cores_per_chip}")
        if config is not None and config.chip_count == chips:
            return config
    return None


@dataclass(frozen=True, slots=True)
class Raise:
    """A change of one group's ``replicas`` to ``to``."""

    group: WorkerGroup
    to: int

    @property
    def patch(self) -> list[dict[str, Any]]:
        """The JSON patch, which fails if the group or its ``replicas`` have changed meanwhile."""
        path = f"/spec/workerGroupSpecs/{self.group.index}"
        tests: list[dict[str, Any]] = [{"op": "test", "path": f"{path}/groupName", "value": self.group.name}]
        if self.group.replicas is not None:
            tests.append({"op": "test", "path": f"{path}/replicas", "value": self.group.replicas})
        return [*tests, {"op": "add", "path": f"{path}/replicas", "value": self.to}]


def raises(groups: Iterable[WorkerGroup], there: int, gangs: Sequence[int], settled: int) -> list[Raise]:
    """Return the changes that bring the missing slices of waiting gangs. Replicas without a slice are on their way, and
    count.

    A gang that can't be completed within ``maxReplicas`` gets nothing, and smaller ones behind it are served.

    Args:
        groups: the groups that make slices of the gangs' type.
        there: how many slices of the type there are.
        gangs: how many more slices each gang needs, the first in the queue first.
        settled: how many slices the type should have at the most, for a change of a moment counts for nothing.
    """
    usable = [group for group in groups if group.problem is None]
    left = sum(group.most for group in usable) - there
    coming = max(0, sum(group.wanted for group in usable) - there)
    lacking = min(settled - there, _served(gangs, left)) - coming
    found = []
    for group in usable:
        more = min(lacking, group.most - group.wanted)
        if more > 0:
            found.append(Raise(group, group.wanted + more))
            lacking -= more
    return found


def _served(gangs: Sequence[int], left: int) -> int:
    """Return how many slices the gangs need that ``left`` slices can complete, the first gang first."""
    served = 0
    for gang in gangs:
        if served + gang <= left:
            served += gang
    return served


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Requested slices that no gang needs any more: the names of their pods, by slice.

    ``replicas`` are lowered together with the names of the pods that go, as Ray's autoscaler does it.
    """

    group: WorkerGroup
    slices: tuple[tuple[str, ...], ...]

    def patch(self, version: str) -> list[dict[str, Any]]:
        """Return the JSON patch, which fails if the RayCluster is no longer of the version that was looked at."""
        path = f"/spec/workerGroupSpecs/{self.group.index}"
        pods = [*self.group.going, *(name for names in self.slices for name in names)]
        return [
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": f"{path}/replicas", "value": self.group.wanted - len(self.slices)},
            {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": pods}},
        ]


def withdrawal(group: WorkerGroup, pods: Iterable[Mapping[str, Any]], count: int) -> Withdrawal | None:
    """Return how to withdraw up to ``count`` slices of a group, or None if none can be withdrawn.

    A slice can be withdrawn while all its pods are Pending. Slices without nodes go first.

    Args:
        group: the group.
        pods: the Pending pods of the Ray cluster.
        count: the largest number of slices.
    """
    slices: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for pod in pods:
        meta = pod["metadata"]
        labels = meta.get("labels") or {}
        key = meta["name"] if group.hosts == 1 else labels.get(REPLICA)
        is_going = "deletionTimestamp" in meta or meta["name"] in group.going
        if labels.get("ray.io/group") == group.name and key and not is_going:
            slices[key].append(pod)
    whole = [members for members in slices.values() if len(members) == group.hosts]
    whole.sort(key=lambda members: sum(bool((pod.get("spec") or {}).get("nodeName")) for pod in members))
    names = tuple(tuple(pod["metadata"]["name"] for pod in members) for members in whole)
    found = names[: max(0, min(count, group.wanted - group.least))]
    return Withdrawal(group, found) if found else None


def obstacles(groups: Iterable[WorkerGroup], there: int, gangs: Sequence[int]) -> list[str]:
    """Return why a RayCluster can't have the slices for gangs of a type, in words. Arguments as for `raises`."""
    groups = list(groups)
    if not groups:
        return ["no worker group of the RayCluster makes slices of this type"]
    found = [f"group {group.name} makes none: {group.problem}" for group in groups if group.problem]
    usable = [group for group in groups if group.problem is None]
    most = sum(group.most for group in usable)
    if usable and _served(gangs, most - there) < sum(gangs):
        which = " and ".join(f"{group.most} of group {group.name}" for group in usable)
        found.append(f"there may be no more slices than {which} (maxReplicas)")
    return found


# -- pods --------------------------------------------------------------------------------------------------------------


def pod_troubles(
    pods: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]] = ()
) -> dict[str, tuple[str, ...]]:
    """Return why pods don't run, in words, by worker group; alike pods are told together.

    Args:
        pods: of the Ray cluster.
        events: `SCALE_UP_EVENTS` about pods.
    """
    said = _last_words(events)
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    examples: dict[tuple[str, str], str] = {}
    for pod in pods:
        meta = pod["metadata"]
        status = pod.get("status") or {}
        why = _unscheduled(status, said.get(meta["name"])) or _not_starting(status)
        if why and "deletionTimestamp" not in meta:
            group = (meta.get("labels") or {}).get("ray.io/group", "")
            found[group][why] += 1
            examples.setdefault((group, why), meta["name"])
    return {
        group: tuple(
            f"{f'{count} pods wait, such as ' if count > 1 else 'pod '}{examples[group, why]}: {why}"
            for why, count in reasons.most_common()
        )
        for group, reasons in found.items()
    }


def _unscheduled(status: Mapping[str, Any], said: str | None) -> str | None:
    """Return why a pod has no node, by the autoscaler's last event or by its status; None if it has one."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return said or _words(condition)
    return None


def _not_starting(status: Mapping[str, Any]) -> str | None:
    """Return why a container of a pod does not start; None if it does, or is about to."""
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _words(waiting)
    return None


def _last_words(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the last message of the Kubernetes cluster's autoscaler about each pod.

    After a failure it says NotTriggerScaleUp for a while, which counts only if it has said nothing else.
    """

    def rank(event: Mapping[str, Any]) -> tuple[bool, str]:
        return event.get("reason") != NO_SCALE_UP, str(event.get("lastTimestamp") or event.get("eventTime") or "")

    return {event["involvedObject"]["name"]: _words(event) for event in sorted(events, key=rank)}


def _words(said: Mapping[str, Any]) -> str:
    message = " ".join(str(said.get("message") or "").split())[:MESSAGE_LENGTH]
    return f"{said.get('reason') or 'unknown reason'}{f': {message}' if message else ''}"
