"""A GKE cluster with one RayCluster: everything behind the API server, driven by time."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from iris_ray.testing.kubernetes.node_pools import Node, NodePool
from iris_ray.testing.kubernetes.pods import Pod, PodRunner


class KubernetesWorld:
    """One GKE cluster that runs one RayCluster.

    Nothing happens by itself: `step` does what is due at a time, in a test's virtual time; `run` steps in real time from
    a thread of its own. All methods are thread-safe.

    Args:
        raycluster: A RayCluster: the path of its YAML file, or what such a file holds.
        runner: Runs the pods.
        pools: The node pools. None: pools come by auto-provisioning, one for each slice.
        feature_gates: Alpha features of KubeRay that are switched on, such as ``GCSFaultToleranceEmbeddedStorage``.
            Without a name here its default in KubeRay 1.7 holds.
        namespace: Of the RayCluster if its file names none.
        port: Of the API server, on 127.0.0.1; 0 takes any free one.

    Raises:
        InvalidClusterFileError: The file is no RayCluster, or KubeRay or the webhook refuses it. The message names the
            line and the field.
    """

    def __init__(
        self,
        raycluster: str | Path | Mapping[str, Any],
        runner: PodRunner,
        *,
        pools: Sequence[NodePool] | None = None,
        feature_gates: Collection[str] = (),
        namespace: str = "default",
        port: int = 0,
    ) -> None: ...

    def __enter__(self) -> Self:
        """Start the API server. Nothing else happens before the first `step` or `run`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the thread and the API server, and kill all pods."""

    # -- time ------------------------------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Do everything that is due: the kubelets', KubeRay's, the scheduler's and the node pools' work, in this order.

        Args:
            now: Seconds since the epoch, never less than at the step before.
        """

    def run(self, period_s: float = 0.2) -> None:
        """Step in real time, every so many seconds, from a thread of its own, until the world is closed."""

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the RayCluster."""

    @property
    def namespace(self) -> str:
        """Namespace of the RayCluster."""

    def client_environment(self) -> dict[str, str]:
        """Return the variables with which Ray's autoscaler, or any pod, finds and trusts the API server.

        KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT_HTTPS, RAY_KUBERAY_CA_CERT_PATH, RAY_KUBERAY_CLIENT_CERT_PATH and
        RAY_KUBERAY_CLIENT_KEY_PATH. The world does not put them into the containers' environment.
        """

    def pods(self, group: str | None = None) -> list[Pod]:
        """Return the pods that are bound to a node, oldest first; those of one worker group, or all."""

    def pod_manifests(self, group: str | None = None) -> list[dict[str, Any]]:
        """Return all pods as the API server answers them, also those that are Pending; oldest first."""

    def nodes(self) -> list[Node]:
        """Return the nodes, oldest first."""

    def raycluster(self) -> dict[str, Any]:
        """Return the RayCluster as the API server would answer it."""

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the events, oldest first; those about one object, such as a pod, or all."""

    def resolve(self, hostname: str) -> str | None:
        """Return the IP address of a name that the cluster's DNS knows, or None.

        It knows the head's service (``tpus-head-svc.default.svc.cluster.local``) and what the webhook puts into
        TPU_WORKER_HOSTNAMES (``v6e-16-0-1.tpus-headless``); both as soon as the pod has an address.
        """

    # -- what can happen -------------------------------------------------------------------------------------------

    def apply(self, raycluster: str | Path | Mapping[str, Any]) -> None:
        """Change the RayCluster, as ``kubectl apply`` does: with another image, a new group, …

        The autoscaler's replicas and workersToDelete stay if the file names none.

        Raises:
            InvalidClusterFileError: As for the constructor; nothing has changed.
        """

    def delete_pod(self, name: str, grace_s: float | None = None) -> None:
        """Delete a pod, as ``kubectl delete pod`` does; without a grace, its terminationGracePeriodSeconds hold."""

    def lose_node(self, node: str) -> None:
        """Take a node away without notice. Its pod's processes end at once, and the pod goes after 5 s."""

    def preempt(self, node: str) -> None:
        """Preempt a spot node, and with it all nodes of its slice: their pods are stopped, with the pool's grace.

        The nodes are gone when their pods have ended, or when the pool's ``preemption_grace_s`` have passed.
        """

    def set_stock(self, accelerator: str, nodes: int | None) -> None:
        """Say how many more nodes with this accelerator, such as ``tpu-v6e-slice``, Google can give; None is no limit."""

    def set_quota(self, accelerator: str, chips: int | None) -> None:
        """Set the project's quota of chips of this accelerator; None is no limit. What runs stays."""
