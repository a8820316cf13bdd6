"""KubeRay: the operator that keeps the pods of a RayCluster as its spec says.

Source: ray-operator/controllers/ray/raycluster_controller.go of KubeRay 1.7.0 (reconcilePods, shouldDeletePod,
reconcileMultiHostWorkerGroup, shouldRecreatePodsForUpgrade). One `step` is one reconciliation. Where the operator
returns and comes back later, the step ends. Pods that are being deleted count until they are gone, as they do for it.
"""

import copy
import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any, Final

from iris_ray.testing.kubernetes.kubelets import delete_pod
from iris_ray.testing.kubernetes.objects import (
    CLAIMS,
    GROUP_LABEL,
    PODS,
    RAYCLUSTERS,
    SECRETS,
    Manifest,
    ObjectStore,
    condition,
    has_ended,
    is_ready,
)
from iris_ray.testing.kubernetes.pods import HEAD_GROUP
from iris_ray.testing.kubernetes.ray_pod import (
    TOKEN_KEY,
    head_pod,
    head_service,
    storage_claim,
    token_secret,
    worker_pod,
)
from iris_ray.testing.kubernetes.raycluster_file import RefusedSpec, check_raycluster
from iris_ray.testing.kubernetes.tpu_webhook import REPLICA_INDEX_LABEL, REPLICA_NAME_LABEL, WebhookRefusal, admit

HASH_ANNOTATION: Final = "ray.io/upgrade-strategy-recreate-hash"
_SOURCE: Final = "raycluster-controller"


class _Later(Exception):
    """The operator does no more now, and comes back."""


class KubeRay:
    """Reconciles one RayCluster. All methods need the store's lock."""

    def __init__(self, store: ObjectStore, name: str, feature_gates: frozenset[str], webhook: str) -> None:
        self._store, self._name, self._gates, self._webhook = store, name, feature_gates, webhook

    def step(self) -> None:
        """Reconcile once."""
        raycluster = self._store.raycluster(self._name)
        try:
            check_raycluster(raycluster, self._gates)
        except RefusedSpec as refusal:
            message = f"The RayCluster spec is invalid {self._store.namespace}/{self._name}: {refusal}"
            self._event(raycluster, "InvalidRayClusterSpec", message, warning=True)
            return
        self._make_secret_and_claim(raycluster)
        try:
            self._reconcile_pods(raycluster)
        except _Later:
            pass
        except WebhookRefusal as refusal:
            self._event(raycluster, "FailedToCreateWorkerPod", f"Failed to create worker Pod: {refusal}", warning=True)
        self._tell_status(raycluster)

    # -- pods ------------------------------------------------------------------------------------------------------

    def _reconcile_pods(self, raycluster: Manifest) -> None:
        spec = raycluster["spec"]
        if spec.get("suspend"):
            self._delete(raycluster, self._store.all(PODS), "suspension")
            return
        heads = self._pods(HEAD_GROUP)
        recreate = (spec.get("upgradeStrategy") or {}).get("type") == "Recreate"
        if heads and recreate and heads[0]["metadata"]["annotations"][HASH_ANNOTATION] != spec_hash(spec):
            self._delete(raycluster, self._store.all(PODS), "spec change with Recreate upgradeStrategy")
            return
        if not heads:
            head = head_pod(raycluster)
            head["metadata"]["annotations"] |= {HASH_ANNOTATION: spec_hash(spec), "ray.io/kuberay-version": "v1.7.0"}
            self._create(raycluster, head, "Head")
        elif should_be_deleted(heads[0]):
            self._delete(raycluster, heads, "it ended")
            raise _Later
        for group in spec.get("workerGroupSpecs") or []:
            if group.get("suspend"):
                self._delete(raycluster, self._pods(group["groupName"]), "suspension")
            elif group["numOfHosts"] > 1:
                self._reconcile_slices(raycluster, group)
            else:
                self._reconcile_workers(raycluster, group)

    def _reconcile_workers(self, raycluster: Manifest, group: Mapping[str, Any]) -> None:
        """Keep a group whose replicas are one pod each."""
        pods = self._pods(group["groupName"])
        if ended := [pod for pod in pods if should_be_deleted(pod)]:
            self._delete(raycluster, ended, "they ended")
            raise _Later
        to_delete = set(_workers_to_delete(group))
        gone = [pod for pod in pods if pod["metadata"]["name"] in to_delete]
        self._delete(raycluster, gone, "autoscaler scale-down request")
        left = [pod for pod in pods if pod not in gone]
        missing = desired_replicas(group) - len(left)
        numbers = _free_numbers({int(pod["metadata"]["labels"][REPLICA_INDEX_LABEL]) for pod in left}, missing)
        for number in numbers:
            self._create(raycluster, worker_pod(raycluster, group, "", number, 0), "Worker")
        if missing < 0 and not raycluster["spec"].get("enableInTreeAutoscaling"):
            self._delete(raycluster, left[:-missing], "scaling down")

    def _reconcile_slices(self, raycluster: Manifest, group: Mapping[str, Any]) -> None:
        """Keep a group whose replicas have several pods: each replica is made, and goes, as a whole."""
        pods = self._pods(group["groupName"])
        replicas: dict[str, list[Manifest]] = {}
        for pod in pods:
            replicas.setdefault(pod["metadata"]["labels"][REPLICA_NAME_LABEL], []).append(pod)
        for members in replicas.values():
            if len(members) < group["numOfHosts"]:
                self._delete(raycluster, members, "cleanup of incomplete multi-host group")
                raise _Later
        whole = {name: members for name, members in replicas.items() if not any(map(should_be_deleted, members))}
        for name in replicas.keys() - whole.keys():
            self._delete(raycluster, replicas[name], "a pod of the replica ended")
        to_delete = set(_workers_to_delete(group))
        unwanted = [
            pod
            for members in replicas.values()
            if to_delete & {pod["metadata"]["name"] for pod in members}
            for pod in members
        ]
        if unwanted:
            self._delete(raycluster, unwanted, "autoscaler scale-down request")
            raise _Later
        missing = desired_replicas(group) - len(whole)
        taken = {int(members[0]["metadata"]["labels"][REPLICA_INDEX_LABEL]) for members in whole.values()}
        for number in _free_numbers(taken, missing):
            name = f"{group['groupName']}-{self._store.suffix()}"
            for host in range(group["numOfHosts"]):
                self._create(raycluster, worker_pod(raycluster, group, name, number, host), "Worker")
        if missing < 0 and not raycluster["spec"].get("enableInTreeAutoscaling"):
            for members in list(whole.values())[:-missing]:
                self._delete(raycluster, members, "scaling down")

    def _pods(self, group: str) -> list[Manifest]:
        return [pod for pod in self._store.all(PODS) if pod["metadata"]["labels"].get(GROUP_LABEL) == group]

    def _create(self, raycluster: Manifest, pod: Manifest, kind: str) -> None:
        admit(pod, self._store.all(PODS), self._webhook)
        self._store.add(PODS, pod)
        name = f"{self._store.namespace}/{pod['metadata']['name']}"
        self._event(raycluster, f"Created{kind}Pod", f"Created {kind.lower()} Pod {name}")

    def _delete(self, raycluster: Manifest, pods: list[Manifest], reason: str) -> None:
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                kind = "Head" if pod["metadata"]["labels"][GROUP_LABEL] == HEAD_GROUP else "Worker"
                message = f"Deleted {kind.lower()} Pod {self._store.namespace}/{pod['metadata']['name']}: {reason}"
                self._event(raycluster, f"Deleted{kind}Pod", message)
                delete_pod(self._store, pod)

    # -- other objects ---------------------------------------------------------------------------------------------

    def _make_secret_and_claim(self, raycluster: Manifest) -> None:
        name = token_secret(raycluster)
        if name is not None and self._store.get(SECRETS, name) is None:
            metadata = {"name": name, "namespace": self._store.namespace}
            data = {TOKEN_KEY: secrets.token_hex(32)}
            self._store.add(SECRETS, {"kind": "Secret", "metadata": metadata, "stringData": data})
        options = raycluster["spec"].get("gcsFaultToleranceOptions") or {}
        if options.get("backend") == "rocksdb" and not (options.get("storage") or {}).get("claimName"):
            claim = storage_claim(raycluster)
            if self._store.get(CLAIMS, claim) is None:
                metadata = {"name": claim, "namespace": self._store.namespace}
                self._store.add(CLAIMS, {"kind": "PersistentVolumeClaim", "metadata": metadata})
                self._event(raycluster, "CreatedPVC", f"Created GCS storage PVC {self._store.namespace}/{claim}")

    def _tell_status(self, raycluster: Manifest) -> None:
        pods, groups = self._store.all(PODS), raycluster["spec"].get("workerGroupSpecs") or []
        workers = [pod for pod in pods if pod["metadata"]["labels"][GROUP_LABEL] != HEAD_GROUP]
        head = next(iter(self._pods(HEAD_GROUP)), None)
        desired = sum(desired_replicas(group) * group["numOfHosts"] for group in groups)
        status = raycluster.setdefault("status", {})
        before = repr(status)
        status.update(
            desiredWorkerReplicas=desired,
            minWorkerReplicas=sum(group["minReplicas"] * group["numOfHosts"] for group in groups),
            readyWorkerReplicas=sum(map(is_ready, workers)),
            availableWorkerReplicas=sum(pod["status"]["phase"] == "Running" for pod in workers),
            observedGeneration=raycluster["metadata"].get("generation", 1),
        )
        ready = head is not None and is_ready(head)
        reason = "HeadPodRunningAndReady" if ready else "HeadPodNotFound" if head is None else "ContainersNotReady"
        condition(raycluster, "HeadPodReady", ready, reason, "", self._store.timestamp())
        if ready and head is not None:
            service, _, _ = head_service(raycluster).partition(".")
            address = head["status"].get("podIP", "")
            status["head"] = {"podIP": address, "podName": head["metadata"]["name"], "serviceName": service}
        if len(pods) == desired + 1 and all(map(is_ready, pods)):
            status["state"] = "ready"
        if repr(status) != before:
            self._store.put(RAYCLUSTERS, raycluster)

    def _event(self, raycluster: Manifest, reason: str, message: str, *, warning: bool = False) -> None:
        self._store.record_event(raycluster, reason, message, _SOURCE, warning=warning)


def desired_replicas(group: Mapping[str, Any]) -> int:
    """Return how many replicas a group shall have: its replicas, within its bounds."""
    return int(min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"]))


def should_be_deleted(pod: Manifest) -> bool:
    """Say whether KubeRay deletes a pod because it has ended, or its Ray container has and will not start again."""
    if has_ended(pod):
        return True
    statuses = pod["status"].get("containerStatuses") or []
    ray_ended = bool(statuses) and "terminated" in statuses[0]["state"]
    return ray_ended and pod["spec"].get("restartPolicy") == "Never"


def spec_hash(spec: Mapping[str, Any]) -> str:
    """Return a hash of all that means new pods: not of numbers of replicas, tolerations and the strategy itself."""
    relevant = copy.deepcopy({name: value for name, value in spec.items() if name != "upgradeStrategy"})
    for group in [relevant["headGroupSpec"], *(relevant.get("workerGroupSpecs") or [])]:
        for name in ("replicas", "minReplicas", "maxReplicas", "scaleStrategy"):
            group.pop(name, None)
        group["template"]["spec"].pop("tolerations", None)
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _workers_to_delete(group: Mapping[str, Any]) -> list[str]:
    return list((group.get("scaleStrategy") or {}).get("workersToDelete") or [])


def _free_numbers(taken: set[int], count: int) -> list[int]:
    free = (number for number in range(len(taken) + max(count, 0)) if number not in taken)
    return [next(free) for _ in range(count)]
