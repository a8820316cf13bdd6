"""An emulated GKE whose pods are the nodes of a simulated cluster, driven by Ray's own autoscaler."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from iris_ray.errors import InvalidRequestError
from iris_ray.testing.cluster import SimulatedCluster
from iris_ray.testing.faults import NoticeChannel, Preemption
from iris_ray.testing.head_machine import JOIN_TIMEOUT_S
from iris_ray.testing.kubernetes import KubernetesWorld, NodePool, Pod
from iris_ray.testing.kubernetes.raycluster_file import ON_BY_DEFAULT, read_cluster_file
from iris_ray.testing.pod_machines import PodMachines
from iris_ray.testing.tpu_host import RunningHost, checked_seconds

UPDATE_S = 1
"""Seconds between two looks of the autoscaler; it takes whole ones. Ray's default is 5."""
IDLE_NODES_S = 5.0
"""Seconds after which empty nodes of auto-provisioned pools go; GKE's go after ten minutes."""
_LOOK_S = 0.1


class KubernetesCluster(SimulatedCluster):
    """A simulated cluster whose hosts are pods of an emulated GKE; made by `SimulatedCluster.from_raycluster`.

    Its slices come and go as Ray's autoscaler, KubeRay and the node pools have it: there is no `add_slice`. A slice is
    called as the TPU webhook calls it, such as ``v6e-16-0``.

    Attributes:
        kubernetes: What can happen there: stock-outs, quotas, lost nodes, another RayCluster file.
    """

    kubernetes: KubernetesWorld

    def __init__(
        self,
        raycluster: str | Path | Mapping[str, Any],
        idle_timeout_s: float | None,
        pools: Sequence[NodePool] | None,
        feature_gates: Collection[str],
        **basic: bool,
    ) -> None:
        super().__init__(**basic)  # type: ignore[arg-type]  # the flags that both have
        self._idle_timeout_s = None if idle_timeout_s is None else checked_seconds("idle_timeout_s", idle_timeout_s)
        self._machines: PodMachines | None = None
        read_cluster_file(raycluster, ON_BY_DEFAULT | frozenset(feature_gates))  # before anything is started
        self._raycluster, self._pools, self._gates = raycluster, pools, feature_gates

    # -- what can happen -------------------------------------------------------------------------------------------

    def pod(self, slice_name: str, worker_id: int) -> Pod:
        """Return the pod of a host, as it was started."""
        name = self._host(slice_name, worker_id).host.name
        for pod in self.kubernetes.pods():
            if pod.name == name:
                return pod
        raise InvalidRequestError(f"The pod {name} of slice {slice_name} is gone.")

    def add_slice(self, tpu_type: str, *, under: Sequence[str] = ()) -> str:
        """Raise InvalidRequestError: the autoscaler adds slices."""
        raise InvalidRequestError(
            "Slices come when a job needs them. To have one without a job, raise minReplicas by"
            " cluster.kubernetes.apply()."
        )

    def add_hosts(self, count: int, *, gpus: int = 0, labels: Mapping[str, str] | None = None) -> list[str]:
        """Raise InvalidRequestError: the autoscaler adds hosts."""
        raise InvalidRequestError("Hosts come with the worker groups of the RayCluster: cluster.kubernetes.apply().")

    def kill_host(self, slice_name: str, worker_id: int) -> None:
        """Take the node of a host away without notice."""
        victim = self._host(slice_name, worker_id)
        if victim.machine.running:
            self._console.say(f"losing the node of {victim.host.name}")
            self.kubernetes.lose_node(self.pod(slice_name, worker_id).node)

    def preempt_slice(
        self, slice_name: str, notice_s: float | None = None, *, heard_by: NoticeChannel = "both"
    ) -> Preemption:
        """Preempt the spot nodes of a slice. Its pods run their hooks, and have the grace of their node pool.

        Returns:
            The preemption, to ``wait()`` for.
        """
        if notice_s is not None or heard_by != "both":
            raise InvalidRequestError(
                "Pods are told of their end by their hooks and SIGTERM, and their node pool says how long they have:"
                " leave notice_s and heard_by out."
            )
        hosts = [host for host in self._slice(slice_name) if host.machine.running]
        if hosts:
            self._console.say(f"preempting slice {slice_name}")
            self.kubernetes.preempt(self.pod(slice_name, hosts[0].host.worker_id).node)
        preemption = Preemption(slice_name, 0.0, lambda: _wait_until_gone(hosts))
        threading.Thread(target=preemption.start, name=f"preempt-{slice_name}", daemon=True).start()
        return preemption

    def restart_gcs(self) -> None:
        """Raise InvalidRequestError: KubeRay makes another head pod."""
        raise InvalidRequestError("KubeRay starts another head when the GCS is killed: wait for it.")

    def restart_head(self) -> None:
        """Lose the head's node, and wait until KubeRay's next head is ready. As for `SimulatedCluster`."""
        self._require_no_driver_here()
        before = next(pod for pod in self.kubernetes.pods() if pod.is_head)
        machines = self._machines
        assert machines is not None
        self.kubernetes.lose_node(before.node)
        self._wait_for_head(machines)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._console.step("starting the head's pod")
        ground = self._prepare()
        self._machines = PodMachines(
            workspace=ground.workspace,
            console=self._console,
            head_address=ground.head_address,
            addresses=ground.addresses,
            starter=lambda head: self._starter_of(ground, head),
            dashboard=self._dashboard,
            joined=self._joined,
            api_variables=lambda: self.kubernetes.client_environment(),
            autoscaler_variables={"AUTOSCALER_UPDATE_INTERVAL_S": str(UPDATE_S)},
        )
        self.kubernetes = self._open.enter_context(
            KubernetesWorld(
                self._raycluster,
                self._machines,
                pools=self._pools,
                feature_gates=self._gates,
                new_pools=NodePool("new", idle_s=IDLE_NODES_S),
            )
        )
        if self._idle_timeout_s is not None:
            self.kubernetes.apply(_with_idle_timeout(self.kubernetes.raycluster(), self._idle_timeout_s))
        self.kubernetes.run()
        self._wait_for_head(self._machines)
        head = self._machines.head
        assert head is not None
        self._has_head(ground, head, self._starter_of(ground, head))
        self._console.say(f"ready at {self.address}")

    def _wait_for_head(self, machines: PodMachines) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while not machines.head_ready.wait(_LOOK_S):
            if time.monotonic() > deadline:
                said = "\n".join(f"  {event['reason']}: {event['message']}" for event in self.kubernetes.events()[-10:])
                raise RuntimeError(
                    f"After {JOIN_TIMEOUT_S:g} s the head's pod is not ready; the latest events:\n{said}"
                )

    def _joined(self, host: RunningHost) -> None:
        with self._lock:
            name, number = host.host.slice_name, host.host.worker_id
            others = [other for other in self._slices.get(name, []) if other.host.worker_id != number]
            self._slices[name] = sorted([*others, host], key=lambda one: one.host.worker_id)
        self._console.say(f"{host.host.name} has joined as worker {number} of {name}")


def _with_idle_timeout(raycluster: dict[str, Any], seconds: float) -> dict[str, Any]:
    spec = raycluster["spec"]
    spec["autoscalerOptions"] = {**(spec.get("autoscalerOptions") or {}), "idleTimeoutSeconds": round(seconds)}
    for group in spec.get("workerGroupSpecs") or []:
        group.pop("idleTimeoutSeconds", None)
    return raycluster


def _wait_until_gone(hosts: Sequence[RunningHost]) -> None:
    while any(host.machine.running for host in hosts):
        time.sleep(_LOOK_S)
