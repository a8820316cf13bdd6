"""GKE's node pools: their nodes, the autoscaling of these, and the pods that they get.

Sources: https://cloud.google.com/kubernetes-engine/docs, concepts/plan-tpus (a pool of a topology of several hosts is
one slice, and scales as a whole), concepts/spot-vms (of a spot VM's 30 s pods get 15), concepts/node-auto-provisioning
(spot nodes have a taint), how-to/node-auto-repair (a slice that lacks a node is made anew); the FAQ of
github.com/kubernetes/autoscaler (events). The words of FailedScaleUp are those that people report from GKE.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil
from typing import Any, Final

from iris_ray.errors import UnknownNameError
from iris_ray.testing.kubernetes.kubelets import Kubelets, missing_claim
from iris_ray.testing.kubernetes.objects import (
    ACCELERATOR_LABEL,
    NODE_POOL_LABEL,
    NODES,
    PODS,
    SPOT_LABEL,
    TOPOLOGY_LABEL,
    TPU_RESOURCE,
    Manifest,
    ObjectStore,
    condition,
    has_ended,
    requests,
)
from iris_ray.testing.kubernetes.raycluster_file import hosts_of_topology
from iris_ray.testing.kubernetes.scheduling import hindrance, unschedulable

OUT_OF_STOCK: Final = "GCE out of resources"
OVER_QUOTA: Final = "GCE quota exceeded"

_ZONE: Final = "simulated-a"
_SYSTEM_PODS_S: Final = 15.0
_MOST_NODES: Final = 1_000  # of an auto-provisioned pool
_TPU_TAINT: Final = {"key": TPU_RESOURCE, "value": "present", "effect": "NoSchedule"}
_SPOT_TAINT: Final = {"key": SPOT_LABEL, "value": "true", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True)
class NodePool:
    """A node pool, as ``gcloud container node-pools create`` makes it.

    A pool whose topology needs several hosts is one slice: it has none of its nodes, or all.

    Attributes:
        name: unique in the world.
        accelerator: value of ``cloud.google.com/gke-tpu-accelerator``, such as ``tpu-v6e-slice``; empty without TPU.
        topology: value of ``cloud.google.com/gke-tpu-topology``, such as ``4x4``.
        chips_per_node: as the machine type has it: 4 for ``ct6e-standard-4t``.
        max_nodes: the largest number of nodes; a slice has as many as its topology needs, whatever this says.
        spot: whether its nodes are spot VMs, with their label.
        cpus, memory_gib, disk_gib: what pods may request of a node; its disk is ``ephemeral-storage``. GKE leaves them
            43 GiB of its usual boot disk of 100 GB.
        taints: further taints, as ``{"key": …, "value": …, "effect": "NoSchedule"}``; TPU nodes have theirs.
        labels: further labels.
        provision_s: how long a new node takes until it is ready.
        idle_s: seconds after which a node, or slice, without pods goes.
        preemption_grace_s: the time that the pods of a preempted node have; 15 s unless the pool says otherwise.
    """

    name: str
    accelerator: str = ""
    topology: str = ""
    chips_per_node: int = 0
    max_nodes: int = 1
    spot: bool = False
    cpus: float = 180
    memory_gib: float = 720
    disk_gib: float = 43
    taints: tuple[Mapping[str, str], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    provision_s: float = 0.0
    idle_s: float = 600.0
    preemption_grace_s: float = 15.0

    @property
    def slice_hosts(self) -> int:
        """The number of hosts of the slice that this pool is; 1 if each of its nodes is on its own."""
        return hosts_of_topology(self.topology, self.chips_per_node) if self.accelerator else 1

    def node(self, name: str, address: str) -> Manifest:
        """Return a node of this pool as the API server answers it."""
        labels = {"kubernetes.io/hostname": name, NODE_POOL_LABEL: self.name, "topology.kubernetes.io/zone": _ZONE}
        allocatable = {"cpu": f"{self.cpus:g}", "memory": f"{self.memory_gib:g}Gi", "pods": "110"}
        allocatable["ephemeral-storage"] = f"{self.disk_gib:g}Gi"
        taints = [dict(taint) for taint in self.taints]
        if self.accelerator:
            labels |= {ACCELERATOR_LABEL: self.accelerator, TOPOLOGY_LABEL: self.topology}
            allocatable[TPU_RESOURCE] = str(self.chips_per_node)
            taints.append(_TPU_TAINT)
        if self.spot:
            labels[SPOT_LABEL] = "true"
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {**labels, **self.labels}},
            "spec": {"taints": taints},
            "status": {
                "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
                "allocatable": allocatable,
                "capacity": dict(allocatable),
                "conditions": [],
            },
        }


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is there, or on its way.

    Attributes:
        ready: whether it is there and takes pods: it neither shuts down nor is lost.
    """

    name: str
    pool: str
    ready: bool


class _Stage(Enum):
    COMING = "on its way"
    READY = "there"
    LEAVING = "shutting down"
    LOST = "gone, and Kubernetes does not know yet"


@dataclass(slots=True, eq=False)
class _Machine:
    manifest: Manifest
    pool: NodePool
    stage: _Stage
    due: float
    """When it is ready, or gone."""
    used_at: float = 0.0

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


class NodePools:
    """All node pools of a cluster, its scheduler and its autoscaler of nodes. All methods need the store's lock.

    Args:
        store: The cluster's objects.
        kubelets: The kubelets of the nodes.
        pools: The pools. None: they are auto-provisioned, with nodes just as large as their pods need.
        pattern: The pattern of auto-provisioned pools, which have its times.
        lost_node_s: Seconds until Kubernetes removes a lost node and its pods. GKE needs one or two minutes.
        backoff_s: Seconds after a failure in which no node is requested in that pool; GKE takes 300 s or more.
    """

    def __init__(
        self,
        store: ObjectStore,
        kubelets: Kubelets,
        pools: Sequence[NodePool] | None,
        *,
        pattern: NodePool,
        lost_node_s: float,
        backoff_s: float,
    ) -> None:
        self._store, self._kubelets = store, kubelets
        self._pools = list(pools or ())
        self._pattern = pattern if pools is None else None
        self._lost_node_s, self._backoff_s = lost_node_s, backoff_s
        self._machines: list[_Machine] = []
        self._stock: dict[str, int | None] = {}
        self._quota: dict[str, int | None] = {}
        self._failures: dict[str, tuple[float, str]] = {}
        """When pools of a kind could not get nodes the last time, and why."""
        self._made = 0

    def nodes(self) -> list[Node]:
        """Return all nodes, oldest first."""
        return [Node(found.name, found.pool.name, found.stage is _Stage.READY) for found in self._machines]

    def set_stock(self, accelerator: str, nodes: int | None) -> None:
        self._stock[accelerator] = nodes
        self._failures.clear()

    def set_quota(self, accelerator: str, chips: int | None) -> None:
        self._quota[accelerator] = chips
        self._failures.clear()

    # -- nodes that go ---------------------------------------------------------------------------------------------

    def lose(self, node: str) -> None:
        """Take a node away without notice; raises UnknownNameError if there is none of that name."""
        machine = self._machine(node)
        machine.stage, machine.due = _Stage.LOST, self._store.now + self._lost_node_s
        for pod in self._pods_on(machine):
            self._kubelets.kill(pod)
        self._set_ready(machine, "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")

    def shut_down(self, node: str) -> None:
        """Shut a node down with the grace of its pool, and with it all nodes of its slice."""
        machine = self._machine(node)
        whole = machine.pool.slice_hosts > 1
        for found in self._machines:
            if found.stage is _Stage.READY and (found is machine or (whole and found.pool is machine.pool)):
                found.stage = _Stage.LEAVING
                found.due = self._store.now + found.pool.preemption_grace_s + _SYSTEM_PODS_S
                self._set_ready(found, "False", "KubeletNotReady", "node is shutting down")
                for pod in self._pods_on(found):
                    grace = min(found.pool.preemption_grace_s, pod["spec"]["terminationGracePeriodSeconds"])
                    self._kubelets.shut_down(pod, grace)

    # -- time ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Bring and remove the nodes that are due, bind pods to nodes, and ask for the nodes that pods lack."""
        now = self._store.now
        for machine in list(self._machines):
            if machine.stage is _Stage.COMING and now >= machine.due:
                machine.stage, machine.used_at = _Stage.READY, now
                self._store.add(NODES, machine.manifest)
                self._set_ready(machine, "True", "KubeletReady", "kubelet is posting ready status")
            elif machine.stage is _Stage.LOST and now >= machine.due:
                self._remove(machine)
                rest = next((other for other in self._machines if other.pool is machine.pool), None)
                if rest is not None and machine.pool.slice_hosts > 1:
                    self.shut_down(rest.name)
            elif machine.stage is _Stage.LEAVING and (
                now >= machine.due or all(map(has_ended, self._pods_on(machine)))
            ):
                self._remove(machine)
        self._ask_for_nodes(self._bind())
        self._release_idle()

    def _bind(self) -> list[Manifest]:
        """Bind pods to nodes; return those that fit on none."""
        placed = self._placed()
        ready = [machine.manifest for machine in self._machines if machine.stage is _Stage.READY]
        left = []
        for pod in self._store.all(PODS):
            if pod["spec"].get("nodeName"):
                continue
            if (claim := missing_claim(pod, self._store)) is not None:
                self._cannot_schedule(pod, f'persistentvolumeclaim "{claim}" not found')
                continue
            reasons = {node["metadata"]["name"]: hindrance(pod, node, placed) for node in ready}
            chosen = next((node for node in ready if reasons[node["metadata"]["name"]] is None), None)
            if chosen is None:
                self._cannot_schedule(pod, unschedulable([str(reason) for reason in reasons.values()], len(ready)))
                left.append(pod)
                continue
            pod["spec"]["nodeName"] = name = chosen["metadata"]["name"]
            condition(pod, "PodScheduled", True, "", "", self._store.timestamp())
            message = f"Successfully assigned {self._store.namespace}/{pod['metadata']['name']} to {name}"
            self._store.record_event(pod, "Scheduled", message, "default-scheduler")
            self._store.put(PODS, pod)
            placed.append((pod, chosen))
        return left

    def _cannot_schedule(self, pod: Manifest, message: str) -> None:
        if condition(pod, "PodScheduled", False, "Unschedulable", message, self._store.timestamp()):
            self._store.put(PODS, pod)
        self._store.record_event(pod, "FailedScheduling", message, "default-scheduler", warning=True)

    def _ask_for_nodes(self, pods: list[Manifest]) -> None:
        placed = self._placed()
        for pod in pods:
            coming = (machine for machine in self._machines if machine.stage is _Stage.COMING)
            node = next((found.manifest for found in coming if hindrance(pod, found.manifest, placed) is None), None)
            node = node or self._scale_up(pod, placed)
            if node is not None:
                placed.append((pod, node))

    def _scale_up(self, pod: Manifest, placed: list[tuple[Manifest, Manifest]]) -> Manifest | None:
        """Ask for the nodes that a pod lacks; return one of them, or None if no pool can help."""
        reasons = []
        for pool in self._candidates(pod):
            count = pool.slice_hosts
            have = sum(machine.pool is pool for machine in self._machines)
            most = pool.max_nodes if count == 1 else count
            if (reason := hindrance(pod, pool.node("", ""), placed)) is not None:
                reasons.append(reason)
            elif have + count > most:
                reasons.append("max node group size reached")
            elif (failure := self._failure(pool, count)) is not None:
                failed_at, why = failure
                if failed_at < self._store.now:
                    reasons.append("in backoff after failed scale-up")
                    continue
                message = (
                    f"Node scale up in zones {_ZONE} associated with this pod failed: {why}."
                    " Pod is at risk of not being scheduled."
                )
                self._store.record_event(pod, "FailedScaleUp", message, "cluster-autoscaler", warning=True)
                return None
            else:
                if pool not in self._pools:
                    self._pools.append(pool)
                message = f"pod triggered scale-up: [{{{pool.name} {have}->{have + count} (max: {most})}}]"
                self._store.record_event(pod, "TriggeredScaleUp", message, "cluster-autoscaler")
                machines = [self._make(pool) for _ in range(count)]
                return machines[0].manifest
        message = f"pod didn't trigger scale-up: {', '.join(f'1 {reason}' for reason in reasons)}"
        self._store.record_event(pod, "NotTriggerScaleUp", message, "cluster-autoscaler")
        return None

    def _candidates(self, pod: Manifest) -> Iterator[NodePool]:
        yield from self._pools
        if self._pattern is not None:
            yield _provisioned_for(pod, self._pattern, f"nap-{self._made}")

    def _failure(self, pool: NodePool, count: int) -> tuple[float, str] | None:
        """Return when and why Google did not give so many nodes, or None and take them from the stock."""
        kind = f"{pool.accelerator} {pool.topology} {pool.spot}"
        known = self._failures.get(kind)
        if known is None or self._store.now >= known[0] + self._backoff_s:
            why = self._lacking(pool, count)
            if why is None:
                return None
            known = self._failures[kind] = self._store.now, why
        return known

    def _lacking(self, pool: NodePool, count: int) -> str | None:
        quota, stock = self._quota.get(pool.accelerator), self._stock.get(pool.accelerator)
        used = sum(m.pool.chips_per_node for m in self._machines if m.pool.accelerator == pool.accelerator)
        if quota is not None and used + count * pool.chips_per_node > quota:
            return OVER_QUOTA
        if stock is not None:
            if stock < count:
                return OUT_OF_STOCK
            self._stock[pool.accelerator] = stock - count
        return None

    def _make(self, pool: NodePool) -> _Machine:
        self._made += 1
        address = f"10.128.{self._made // 250}.{self._made % 250 + 2}"
        manifest = pool.node(f"gke-{pool.name}-{self._store.suffix()}", address)
        machine = _Machine(manifest, pool, _Stage.COMING, self._store.now + pool.provision_s)
        self._machines.append(machine)
        return machine

    def _release_idle(self) -> None:
        for pool in list(self._pools):
            machines = [machine for machine in self._machines if machine.pool is pool]
            ready = [machine for machine in machines if machine.stage is _Stage.READY]
            for machine in ready:
                if self._pods_on(machine):
                    machine.used_at = self._store.now
            idle = [machine for machine in ready if self._store.now - machine.used_at >= pool.idle_s]
            if len(idle) == len(machines) or pool.slice_hosts == 1:
                for machine in idle:
                    self._remove(machine)
            if self._pattern is not None and not any(machine.pool is pool for machine in self._machines):
                self._pools.remove(pool)

    # -- help ------------------------------------------------------------------------------------------------------

    def _machine(self, name: str) -> _Machine:
        found = next((found for found in self._machines if found.name == name and found.stage is not _Stage.LOST), None)
        if found is None:
            raise UnknownNameError(f"There is no node {name}. There are {', '.join(m.name for m in self._machines)}.")
        return found

    def _remove(self, machine: _Machine) -> None:
        """Remove a node, with its pods that have not ended."""
        self._machines.remove(machine)
        for pod in self._pods_on(machine):
            if not has_ended(pod):
                self._kubelets.kill(pod)
                self._kubelets.forget(pod)
        self._store.remove(NODES, machine.name)

    def _pods_on(self, machine: _Machine) -> list[Manifest]:
        return [pod for pod in self._store.all(PODS) if pod["spec"].get("nodeName") == machine.name]

    def _placed(self) -> list[tuple[Manifest, Manifest]]:
        nodes = {machine.name: machine.manifest for machine in self._machines}
        return [
            (pod, nodes[pod["spec"]["nodeName"]])
            for pod in self._store.all(PODS)
            if pod["spec"].get("nodeName") in nodes and not has_ended(pod)
        ]

    def _set_ready(self, machine: _Machine, status: str, reason: str, message: str) -> None:
        new = {"type": "Ready", "status": status, "reason": reason, "message": message}
        machine.manifest["status"]["conditions"] = [{**new, "lastTransitionTime": self._store.timestamp()}]
        self._store.put(NODES, machine.manifest)
        if status != "True":
            self._store.record_event(machine.manifest, "NodeNotReady", message, "node-controller")


def _provisioned_for(pod: Manifest, pattern: NodePool, name: str) -> NodePool:
    """Return the pool that node auto-provisioning makes for a pod."""
    selector: Mapping[str, Any] = pod["spec"].get("nodeSelector") or {}
    wanted = requests(pod["spec"])
    spot = selector.get(SPOT_LABEL) == "true"
    topology = selector.get(TOPOLOGY_LABEL, "")
    return replace(
        pattern,
        name=name,
        accelerator=selector.get(ACCELERATOR_LABEL, ""),
        topology=topology,
        chips_per_node=int(wanted.get(TPU_RESOURCE, 0)),
        max_nodes=_MOST_NODES,
        spot=spot,
        cpus=ceil(wanted.get("cpu", 0)),
        memory_gib=ceil(wanted.get("memory", 0) / 2**30),
        taints=(*pattern.taints, *((_SPOT_TAINT,) if spot else ())),
    )
