"""The objects of an emulated Kubernetes: their names, versions, labels and events, and the amounts in them."""

import random
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

Manifest = dict[str, Any]
"""An object as the API server answers it."""

PODS, NODES, EVENTS, RAYCLUSTERS = "pods", "nodes", "events", "rayclusters"
SECRETS, CLAIMS = "secrets", "persistentvolumeclaims"

TPU_RESOURCE: Final = "google.com/tpu"
NODE_POOL_LABEL: Final = "cloud.google.com/gke-nodepool"
ACCELERATOR_LABEL: Final = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY_LABEL: Final = "cloud.google.com/gke-tpu-topology"
SPOT_LABEL: Final = "cloud.google.com/gke-spot"
CLUSTER_LABEL: Final = "ray.io/cluster"
GROUP_LABEL: Final = "ray.io/group"

_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"  # apimachinery's util/rand: no vowels, no look-alikes
_MULTIPLES: Final = {
    **{"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1)},
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
_QUANTITY: Final = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)([a-zA-Z]*)")
_MOST_EVENTS: Final = 10_000


class ObjectStore:
    """All objects of one cluster, as etcd has them. Callers hold `lock` while they read or change one.

    Attributes:
        now: the time of the cluster's clock, in seconds since the epoch.
        version: the newest resourceVersion.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.lock = threading.RLock()
        self.now = 0.0
        self.version = 1
        self.events: list[Manifest] = []
        self._random = random.Random(0)
        self._objects: dict[str, dict[str, Manifest]] = {}

    def add(self, kind: str, manifest: Manifest) -> Manifest:
        """Store a new object: with a name if it has only ``generateName``, a uid, a time and a version."""
        metadata = manifest["metadata"]
        if not metadata.get("name"):
            metadata["name"] = metadata["generateName"] + self.suffix()
        metadata["uid"] = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        metadata["creationTimestamp"] = self.timestamp()
        self.put(kind, manifest)
        return manifest

    def put(self, kind: str, manifest: Manifest) -> None:
        """Store an object in place of the one with its name, or say that it has changed."""
        self.version += 1
        manifest["metadata"]["resourceVersion"] = str(self.version)
        self._objects.setdefault(kind, {})[manifest["metadata"]["name"]] = manifest

    def get(self, kind: str, name: str) -> Manifest | None:
        return self._objects.get(kind, {}).get(name)

    def raycluster(self, name: str) -> Manifest:
        """Return the RayCluster. Nobody can delete it."""
        return self._objects[RAYCLUSTERS][name]

    def all(self, kind: str) -> list[Manifest]:
        """Return the objects of a kind, oldest first."""
        return self.events.copy() if kind == EVENTS else list(self._objects.get(kind, {}).values())

    def remove(self, kind: str, name: str) -> None:
        if self._objects.get(kind, {}).pop(name, None) is not None:
            self.version += 1

    def record_event(self, about: Manifest, reason: str, message: str, source: str, *, warning: bool = False) -> None:
        """Record an event; if the object's newest one says the same, count that once more."""
        metadata, at = about["metadata"], self.timestamp()
        for event in reversed(self.events):
            if event["involvedObject"]["uid"] == metadata["uid"] and event["reason"] == reason:
                if event["message"] == message:
                    event.update(count=event["count"] + 1, lastTimestamp=at)
                    return
                break
        self.version += 1
        involved = {
            "kind": about["kind"],
            "namespace": self.namespace,
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        self.events.append(
            {
                "metadata": {
                    "name": f"{metadata['name']}.{self.version:016x}",
                    "namespace": self.namespace,
                    "resourceVersion": str(self.version),
                },
                "involvedObject": involved,
                "type": "Warning" if warning else "Normal",
                "reason": reason,
                "message": message,
                "source": {"component": source},
                "count": 1,
                "firstTimestamp": at,
                "lastTimestamp": at,
            }
        )
        del self.events[:-_MOST_EVENTS]

    def suffix(self) -> str:
        """Return five letters as Kubernetes appends them to a ``generateName``."""
        return "".join(self._random.choices(_SUFFIX_LETTERS, k=5))

    def timestamp(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.now))


def amount(quantity: object) -> Decimal:
    """Return a quantity such as ``500m``, ``4`` or ``10Gi`` as a number; raises ValueError if it is none."""
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None or found[2] not in _MULTIPLES:
        raise ValueError(f"{str(quantity)!r} is not a quantity of Kubernetes, such as 500m, 4 or 10Gi")
    return Decimal(found[1]) * _MULTIPLES[found[2]]


def requests(pod_spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the resources that a pod's containers request together; a limit without a request counts as one."""
    total: dict[str, Decimal] = {}
    for container in pod_spec["containers"]:
        resources = container.get("resources") or {}
        for name, quantity in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] = total.get(name, Decimal(0)) + amount(quantity)
    return total


def requirement_holds(labels: Mapping[str, str], key: str, operator: str, values: Iterable[str] = ()) -> bool:
    """Say whether labels match one expression of a selector. NotIn also holds where there is no such label."""
    match operator:
        case "In":
            return labels.get(key) in set(values)
        case "NotIn":
            return labels.get(key) not in set(values)
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case "Gt" | "Lt":
            (bound,), found = values, labels.get(key, "")
            return found.isdigit() and (int(found) > int(bound) if operator == "Gt" else int(found) < int(bound))
    raise ValueError(f"{operator!r} is not an operator of a selector")


def selector_matches(selector: str, fields: Mapping[str, str]) -> bool:
    """Say whether labels or fields match a selector such as ``ray.io/cluster=tpus,ray.io/group!=x,replicaIndex``."""
    for part in filter(None, selector.split(",")):
        key, operator, value = part.partition("=")
        if not operator:
            name = key.removeprefix("!")
            if (name in fields) == key.startswith("!"):
                return False
        elif key.endswith("!"):
            if fields.get(key[:-1]) == value:
                return False
        elif fields.get(key) != value.removeprefix("="):
            return False
    return True


def condition(manifest: Manifest, kind: str, status: bool, reason: str, message: str, at: str) -> bool:
    """Set a condition in an object's status; say whether that changed anything."""
    conditions: list[Manifest] = manifest.setdefault("status", {}).setdefault("conditions", [])
    known = next((found for found in conditions if found["type"] == kind), None)
    new = {"type": kind, "status": str(status), "reason": reason, "message": message}
    if known is None:
        conditions.append({**new, "lastTransitionTime": at})
        return True
    if known["status"] != str(status):
        known["lastTransitionTime"] = at
    changed = any(known.get(name) != value for name, value in new.items())
    known.update(new)
    return changed


def has_ended(pod: Manifest) -> bool:
    """Say whether a pod is in a phase that it can't leave."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def is_ready(manifest: Manifest) -> bool:
    """Say whether a pod or a node is ready."""
    return any(found["type"] == "Ready" and found["status"] == "True" for found in manifest["status"]["conditions"])


def answers(node: Manifest) -> bool:
    """Say whether a node's kubelet is there: the node is not lost, though it may be shutting down."""
    return all(found["status"] != "Unknown" for found in node["status"]["conditions"])
