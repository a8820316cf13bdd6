"""Pods of the emulated Kubernetes, and the `PodRunner` that starts and stops them and reports their state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

HEAD_GROUP = "headgroup"
"""The group of a head's pod: RayNodeHeadGroupLabelValue in KubeRay's constant.go."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod, as the kubelet would start it.

    Attributes:
        name: ``ray-head``, ``ray-worker``, ``autoscaler``, … as the file or KubeRay has it.
        image: the image's name; nothing is pulled.
        environment: all variables by name. References to fields and secrets, and ``$(NAME)``, are resolved.
        pre_stop: the command of the preStop hook; empty without one.
        limits: resource limits by name, such as ``{"google.com/tpu": "4", "memory": "500Gi"}``.
        claims: the PersistentVolumeClaim behind each mounted path; the runner keeps what a claim holds across pods.
    """

    name: str
    image: str
    environment: Mapping[str, str] = field(default_factory=dict)
    pre_stop: tuple[str, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    claims: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that is bound to a node. Equal if it is the same pod (by uid), whatever has happened to it since.

    Attributes:
        uid: unique in the world; a name may come again.
        name: also its RAY_CLOUD_INSTANCE_ID.
        group: the worker group, or ``headgroup``.
        labels: with KubeRay's, such as ``ray.io/worker-group-replica-index``.
        node: name of the node that it is bound to.
        node_pool: name of that node's pool: for a TPU type of several hosts, one slice.
        containers: in the pod's order; the first one is Ray's. The head's last one is ``autoscaler``.
        ray_start_params: options of ``ray start``, without dashes, as KubeRay completed them.
        manifest: the whole pod as the API server would answer it; not to be changed.
    """

    uid: str
    name: str = field(compare=False)
    group: str = field(compare=False)
    labels: Mapping[str, str] = field(compare=False)
    node: str = field(compare=False)
    node_pool: str = field(compare=False)
    containers: tuple[Container, ...] = field(compare=False)
    ray_start_params: Mapping[str, str] = field(compare=False)
    manifest: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def is_head(self) -> bool:
        return self.group == HEAD_GROUP

    @property
    def ray_container(self) -> Container:
        """The container that runs Ray: always the first one (RayContainerIndex in KubeRay's constant.go)."""
        return self.containers[0]


@dataclass(frozen=True, slots=True)
class PodState:
    """The state of a pod, as its runner knows it.

    Attributes:
        ip: the pod's IP address; None until it has one.
        running: names of the containers that run now.
        ready: whether the Ray container answers its readiness probe.
        exit_codes: of each container that has ended, by name. A pod has ended when all of its containers have.
    """

    ip: str | None = None
    running: frozenset[str] = frozenset()
    ready: bool = False
    exit_codes: Mapping[str, int] = field(default_factory=dict)


class PodRunner(Protocol):
    """Runs pods for a `KubernetesWorld`, as kubelets do. The world calls it from one thread at a time.

    Each method returns at once, and none calls the world: it holds its lock.
    """

    def start(self, pod: Pod) -> None:
        """Start the containers of a pod, which has just been bound to a node."""

    def stop(self, pod: Pod, grace_s: float) -> None:
        """Run the preStop hook, then SIGTERM, and SIGKILL when ``grace_s`` seconds have passed since this call.

        The time of the hook counts. A second call with a shorter grace shortens what is left.
        """

    def kill(self, pod: Pod) -> None:
        """The pod's node is gone: end everything at once, as SIGKILL does. Also for a pod that is being stopped."""

    def state(self, pod: Pod) -> PodState:
        """Return how a pod is now. Asked at every step, for pods that were started; cheap."""
