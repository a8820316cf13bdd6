"""Pods on paper for an emulated Kubernetes, and its time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from iris_ray.testing.kubernetes import KubernetesWorld, Pod, PodState
from tests.docs.pages import REPOSITORY

GKE_FILE = REPOSITORY / "examples" / "clusters" / "gke.yaml"
EMBEDDED_STORAGE = "GCSFaultToleranceEmbeddedStorage"
BEGAN = 1_700_000_000.0


@dataclass
class PaperPods:
    """A runner whose pods are ready at once, and that notes what it is told.

    Attributes:
        stop_takes_s: how long a stopped pod needs to end, within its grace.
        log: (verb, name of the pod, grace in seconds) of every call.
    """

    stop_takes_s: float = 0.0
    now: float = BEGAN
    log: list[tuple[str, str, float]] = field(default_factory=list)
    ended: dict[str, dict[str, int]] = field(default_factory=dict)
    _started: list[str] = field(default_factory=list)
    _ends_at: dict[str, float] = field(default_factory=dict)

    def start(self, pod: Pod) -> None:
        self._started.append(pod.uid)
        self.log.append(("start", pod.name, 0.0))

    def stop(self, pod: Pod, grace_s: float) -> None:
        self._ends_at[pod.uid] = min(self._ends_at.get(pod.uid, 1e12), self.now + min(grace_s, self.stop_takes_s))
        self.log.append(("stop", pod.name, grace_s))

    def kill(self, pod: Pod) -> None:
        self._ends_at[pod.uid] = self.now
        self.log.append(("kill", pod.name, 0.0))

    def state(self, pod: Pod) -> PodState:
        names = {container.name for container in pod.containers}
        codes = dict(self.ended.get(pod.name, {}))
        if self._ends_at.get(pod.uid, 1e12) <= self.now:
            codes = dict.fromkeys(names, 143)
        address = f"10.4.0.{self._started.index(pod.uid) + 2}"
        return PodState(address, frozenset(names - codes.keys()), pod.ray_container.name not in codes, codes)

    def verbs(self, verb: str) -> list[str]:
        """Names of the pods that were told so."""
        return [name for told, name, _ in self.log if told == verb]


@dataclass
class PlayedWorld:
    """An emulated Kubernetes in virtual time."""

    world: KubernetesWorld
    runner: PaperPods

    def play(self, seconds: float, step_s: float = 1.0) -> None:
        end = self.runner.now + seconds
        while self.runner.now < end:
            self.runner.now += step_s
            self.world.step(self.runner.now)

    def set_group(self, name: str, **fields: Any) -> None:
        """Change fields of a worker group, as the API would."""
        cluster = self.world.raycluster()
        for group in cluster["spec"]["workerGroupSpecs"]:
            if group["groupName"] == name:
                group.update(fields)
        self.world.apply(cluster)

    def names(self, group: str) -> list[str]:
        return [manifest["metadata"]["name"] for manifest in self.world.pod_manifests(group)]

    def phases(self, group: str) -> list[str]:
        return [manifest["status"]["phase"] for manifest in self.world.pod_manifests(group)]

    def reasons(self, name: str | None = None) -> list[str]:
        return [event["reason"] for event in self.world.events(name)]

    def messages(self, reason: str) -> set[str]:
        return {event["message"] for event in self.world.events() if event["reason"] == reason}


@contextmanager
def played_world(raycluster: Path | Mapping[str, Any] = GKE_FILE, **options: Any) -> Iterator[PlayedWorld]:
    """A world with pods on paper, after its head has come."""
    options.setdefault("feature_gates", [EMBEDDED_STORAGE])
    runner = options.pop("runner", None) or PaperPods()
    with KubernetesWorld(raycluster, runner, **options) as world:
        played = PlayedWorld(world, runner)
        played.play(5)
        yield played


def changed(change: Callable[[Any], object] = lambda spec: None) -> dict[str, Any]:
    """The shipped RayCluster, changed; without the volumes and the other objects of its file."""
    documents = yaml.safe_load_all(GKE_FILE.read_text())
    cluster: dict[str, Any] = next(document for document in documents if document["kind"] == "RayCluster")
    cluster["spec"]["headGroupSpec"]["template"]["spec"].pop("volumes", None)
    change(cluster["spec"])
    return cluster
