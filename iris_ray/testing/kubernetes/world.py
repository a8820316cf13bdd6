"""A GKE cluster with one RayCluster: everything behind the API server, driven by time."""

import copy
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from iris_ray.errors import InvalidClusterFileError, InvalidRequestError, UnknownNameError
from iris_ray.testing.kubernetes.api_server import ADDRESS, AUTOSCALER_ROLE, ApiServer, KubernetesObjects
from iris_ray.testing.kubernetes.kubelets import Kubelets, delete_pod
from iris_ray.testing.kubernetes.kuberay import KubeRay
from iris_ray.testing.kubernetes.node_pools import Node, NodePool, NodePools
from iris_ray.testing.kubernetes.objects import CLAIMS, GROUP_LABEL, PODS, RAYCLUSTERS, Manifest, ObjectStore
from iris_ray.testing.kubernetes.pods import Pod, PodRunner
from iris_ray.testing.kubernetes.raycluster_file import ON_BY_DEFAULT, read_cluster_file

WEBHOOK_VERSION: Final = "1.3.5"
"""The newest tag of the TPU webhook."""


class KubernetesWorld:
    """One GKE cluster that runs one RayCluster.

    Nothing happens by itself: `step` does what is due at a time, in a test's virtual time; `run` steps in real time
    from a thread of its own. All methods are thread-safe.

    Args:
        raycluster: A RayCluster: the path of its YAML file, or what such a file holds. The file may hold other objects
            besides: claims of volumes and roles count, the others are ignored.
        runner: Runs the pods.
        pools: The node pools. None: pools come by auto-provisioning, one for each slice.
        feature_gates: Alpha features of KubeRay that are switched on, such as ``GCSFaultToleranceEmbeddedStorage``.
        webhook: Version of the TPU webhook. With 1.3.0 and 1.3.1 slices of several hosts stay Pending (`tpu_webhook`).
        new_pools: The pattern of auto-provisioned pools, which have its times.
        lost_node_s: Seconds until Kubernetes removes a lost node and its pods. GKE needs one or two minutes.
        backoff_s: Seconds after a stock-out or a quota in which no node is requested in that pool.

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
        webhook: str = WEBHOOK_VERSION,
        new_pools: NodePool | None = None,
        lost_node_s: float = 5.0,
        backoff_s: float = 300.0,
    ) -> None:
        self._gates = ON_BY_DEFAULT | frozenset(feature_gates)
        file = read_cluster_file(raycluster, self._gates)
        metadata = file.raycluster["metadata"]
        self._store = ObjectStore(metadata.setdefault("namespace", "default"))
        self._store.now = time.time()
        metadata["generation"] = 1
        self._store.add(RAYCLUSTERS, copy.deepcopy(file.raycluster))
        self._add_claims(file.others)
        self._name = str(metadata["name"])
        self._runner = runner
        self._kubelets = Kubelets(self._store, runner)
        self._kuberay = KubeRay(self._store, self._name, self._gates, webhook)
        pattern = new_pools or NodePool("new")
        self._pools = NodePools(
            self._store, self._kubelets, pools, pattern=pattern, lost_node_s=lost_node_s, backoff_s=backoff_s
        )
        permissions = AUTOSCALER_ROLE | frozenset(_permissions(file.others))
        self._api = KubernetesObjects(self._store, permissions)
        self._open = ExitStack()
        self._server: ApiServer | None = None
        self._directory = Path()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start the API server. Nothing else happens before the first `step` or `run`."""
        self._directory = Path(self._open.enter_context(TemporaryDirectory(prefix="iris-ray-kubernetes-")))
        self._server = ApiServer(self._store, self._api)
        self._open.callback(self._server.close)
        try:
            self._server.start(self._directory)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """End the thread and the API server, and kill all pods."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._open.close()
        with self._store.lock:
            for pod in self._kubelets.pods():
                self._runner.kill(pod)

    # -- time ------------------------------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Do everything that is due: the kubelets', KubeRay's, the scheduler's and the node pools' work, in this order.

        Args:
            now: Seconds since the epoch, never less than at the step before.
        """
        with self._store.lock:
            self._store.now = now
            self._kubelets.step()
            self._kuberay.step()
            self._pools.step()

    def run(self, period_s: float = 0.2) -> None:
        """Step in real time, every ``period_s`` seconds, from a thread of its own, until the world is closed."""
        if self._thread is not None:
            raise InvalidRequestError("This world runs already.")

        def work() -> None:
            while not self._ended.wait(period_s):
                self.step(time.time())

        self._thread = threading.Thread(target=work, name="kubernetes-world", daemon=True)
        self._thread.start()

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the RayCluster."""
        return self._name

    @property
    def namespace(self) -> str:
        """Namespace of the RayCluster."""
        return self._store.namespace

    @property
    def service_account(self) -> Path:
        """A directory with ``token``, ``ca.crt`` and ``namespace``, as pods have one of their service account."""
        return self._directory

    def client_environment(self) -> dict[str, str]:
        """Return the variables with which Ray's autoscaler, or any pod, finds and trusts the API server.

        The world does not put them into the containers' environment.
        """
        if self._server is None:
            raise InvalidRequestError("This world has not begun: use it in a with statement.")
        return {
            "KUBERNETES_SERVICE_HOST": ADDRESS,
            "KUBERNETES_SERVICE_PORT": str(self._server.port),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self._server.port),
            "RAY_KUBERAY_CA_CERT_PATH": str(self._directory / "ca.crt"),
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(self._directory / "tls.crt"),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(self._directory / "tls.key"),
        }

    def pods(self, group: str | None = None) -> list[Pod]:
        """Return the pods that were given to the runner and are still there, oldest first: of one group, or all.

        The head's group is ``headgroup``.
        """
        with self._store.lock:
            return [pod for pod in self._kubelets.pods() if group in (None, pod.group)]

    def pod_manifests(self, group: str | None = None) -> list[dict[str, Any]]:
        """Return all pods as the API server answers them, Pending ones included; oldest first."""
        with self._store.lock:
            found = [pod for pod in self._store.all(PODS) if group in (None, pod["metadata"]["labels"][GROUP_LABEL])]
            return copy.deepcopy(found)

    def nodes(self) -> list[Node]:
        """Return the nodes, oldest first."""
        with self._store.lock:
            return self._pools.nodes()

    def raycluster(self) -> dict[str, Any]:
        """Return the RayCluster as the API server would answer it."""
        with self._store.lock:
            return copy.deepcopy(self._store.raycluster(self._name))

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the events, oldest first; those about one object, such as a pod, or all."""
        with self._store.lock:
            return copy.deepcopy([e for e in self._store.events if name in (None, e["involvedObject"]["name"])])

    # -- what can happen -------------------------------------------------------------------------------------------

    def apply(self, raycluster: str | Path | Mapping[str, Any]) -> None:
        """Change the RayCluster, as ``kubectl apply`` does: with another image, a new group, …

        The lists of a custom resource are replaced whole. So each group's replicas are what the file says, or 0, and
        workersToDelete are forgotten; Ray's autoscaler then counts the pods that are there.

        Raises:
            InvalidClusterFileError: As for the constructor, or the file has another name; nothing has changed.
        """
        file = read_cluster_file(raycluster, self._gates)
        with self._store.lock:
            before = self._store.raycluster(self._name)
            if file.raycluster["metadata"]["name"] != self._name:
                raise InvalidClusterFileError(f"This world runs the RayCluster {self._name}; the file has another one.")
            spec = copy.deepcopy(file.raycluster["spec"])
            metadata = {**before["metadata"], "generation": before["metadata"]["generation"] + (spec != before["spec"])}
            self._store.put(RAYCLUSTERS, {**before, "metadata": metadata, "spec": spec})
            self._add_claims(file.others)

    def delete_pod(self, name: str, grace_s: float | None = None) -> None:
        """Delete a pod, as ``kubectl delete pod`` does; without a grace, its terminationGracePeriodSeconds hold."""
        with self._store.lock:
            manifest = self._store.get(PODS, name)
            if manifest is None:
                raise UnknownNameError(f"There is no pod {name}.")
            delete_pod(self._store, manifest, grace_s)

    def lose_node(self, node: str) -> None:
        """Take a node away without notice. Its pods' processes end at once; node and pods go ``lost_node_s`` later.

        Then the other nodes of its slice are shut down as well, for GKE makes a slice that lacks a node anew.
        """
        with self._store.lock:
            self._pools.lose(node)

    def preempt(self, node: str) -> None:
        """Preempt a spot node, and with it all nodes of its slice: their pods are stopped, with the pool's grace.

        A node is gone when its pods have ended, or 15 s after the grace.
        """
        with self._store.lock:
            self._pools.shut_down(node)

    def set_stock(self, accelerator: str, nodes: int | None) -> None:
        """Say how many more nodes with this accelerator, such as ``tpu-v6e-slice``, Google can give; None is no limit.

        Nodes that go are not given back. Pools that wait after a failure try again at once.
        """
        with self._store.lock:
            self._pools.set_stock(accelerator, nodes)

    def set_quota(self, accelerator: str, chips: int | None) -> None:
        """Set the project's quota of chips of this accelerator; None is no limit. What runs stays."""
        with self._store.lock:
            self._pools.set_quota(accelerator, chips)

    def _add_claims(self, others: Iterable[Manifest]) -> None:
        for other in others:
            if other.get("kind") == "PersistentVolumeClaim" and not self._store.get(CLAIMS, other["metadata"]["name"]):
                self._store.add(CLAIMS, copy.deepcopy(other))


def _permissions(others: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """Return what the roles of a file allow, as pairs of resource and verb; whoever is bound to them."""
    for other in others:
        if other.get("kind") in ("Role", "ClusterRole"):
            for rule in other.get("rules") or []:
                yield from ((resource, verb) for resource in rule["resources"] for verb in rule["verbs"])
