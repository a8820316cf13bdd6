"""The kubelets of all nodes: they run bound pods, report their status, and end deleted ones.

Sources: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ (phases, termination) and
https://kubernetes.io/docs/concepts/cluster-administration/node-shutdown/ (what a pod says when its node is shut down);
pkg/registry/core/pod/strategy.go of Kubernetes (a pod that is not bound, or has ended, is deleted at once). Containers
are never restarted: with Ray's autoscaler v2, KubeRay sets the restart policy to Never.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from iris_ray.testing.kubernetes.objects import (
    CLAIMS,
    GROUP_LABEL,
    NODE_POOL_LABEL,
    NODES,
    PODS,
    SECRETS,
    Manifest,
    ObjectStore,
    answers,
    condition,
    has_ended,
    is_ready,
)
from iris_ray.testing.kubernetes.pods import Container, Pod, PodRunner, PodState
from iris_ray.testing.kubernetes.ray_pod import START_COMMAND

SHUTDOWN_MESSAGE: Final = "Pod was terminated in response to imminent node shutdown."

_REFERENCE: Final = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_LABEL_PATH: Final = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class _NotYet(Exception):
    """A container can't be made before something else is there."""


class Kubelets:
    """Drives a runner. All methods need the store's lock."""

    def __init__(self, store: ObjectStore, runner: PodRunner) -> None:
        self._store, self._runner = store, runner
        self._given: dict[str, Pod] = {}
        self._stopping: dict[str, float] = {}
        self._shut_down: set[str] = set()

    def pods(self) -> list[Pod]:
        """Return the pods that the runner was given and that are still there, oldest first."""
        return list(self._given.values())

    def step(self) -> None:
        """Start pods that were bound, end those that are deleted, and bring every pod's status up to date."""
        manifests = self._store.all(PODS)
        for uid in self._given.keys() - {manifest["metadata"]["uid"] for manifest in manifests}:
            del self._given[uid]  # it had ended, and was deleted
        for manifest in manifests:
            uid, metadata = manifest["metadata"]["uid"], manifest["metadata"]
            node = self._store.get(NODES, manifest["spec"].get("nodeName", ""))
            if node is None or not answers(node):
                continue
            if uid not in self._given:
                if "deletionTimestamp" in metadata:
                    self.forget(manifest)
                elif is_ready(node):
                    self._start(manifest, node)
                continue
            pod = self._given[uid]
            if "deletionTimestamp" in metadata:
                self.stop(manifest, metadata["deletionGracePeriodSeconds"])
            if not has_ended(manifest):
                self._update(manifest, self._runner.state(pod))
            if has_ended(manifest) and "deletionTimestamp" in metadata:
                self.forget(manifest)

    def stop(self, manifest: Manifest, grace_s: float) -> None:
        """Have a pod stopped, unless it is being stopped already within that time."""
        uid = manifest["metadata"]["uid"]
        deadline = self._store.now + grace_s
        if not has_ended(manifest) and uid in self._given and deadline < self._stopping.get(uid, float("inf")):
            self._stopping[uid] = deadline
            self._runner.stop(self._given[uid], grace_s)

    def shut_down(self, manifest: Manifest, grace_s: float) -> None:
        """Have a pod stopped because its node shuts down: it fails, and says why."""
        uid = manifest["metadata"]["uid"]
        if uid in self._given and not has_ended(manifest):
            self._shut_down.add(uid)
            at = self._store.timestamp()
            condition(manifest, "DisruptionTarget", True, "TerminationByKubelet", SHUTDOWN_MESSAGE, at)
            self._store.put(PODS, manifest)
            self.stop(manifest, grace_s)

    def kill(self, manifest: Manifest) -> None:
        """End a pod's processes at once: its node is gone. Its status stays as the node has last told it."""
        if (pod := self._given.get(manifest["metadata"]["uid"])) is not None:
            self._runner.kill(pod)

    def forget(self, manifest: Manifest) -> None:
        """Remove a pod from the cluster; its processes have ended."""
        uid = manifest["metadata"]["uid"]
        self._given.pop(uid, None)
        self._stopping.pop(uid, None)
        self._shut_down.discard(uid)
        self._store.remove(PODS, manifest["metadata"]["name"])

    def _start(self, manifest: Manifest, node: Manifest) -> None:
        manifest["status"]["hostIP"] = node["status"]["addresses"][0]["address"]
        try:
            pod = bound_pod(manifest, node, self._store)
        except _NotYet as missing:
            self._store.record_event(manifest, "Failed", f"Error: {missing}", "kubelet", warning=True)
            return
        self._given[pod.uid] = pod
        self._store.record_event(manifest, "Started", f"Started container {pod.ray_container.name}", "kubelet")
        self._store.put(PODS, manifest)
        self._runner.start(pod)

    def _update(self, manifest: Manifest, state: PodState) -> None:
        status, names = manifest["status"], [container["name"] for container in manifest["spec"]["containers"]]
        before = repr(status)
        if state.ip is not None:
            status.update(podIP=state.ip, podIPs=[{"ip": state.ip}])
        ready = state.ready and names[0] in state.running
        status["containerStatuses"] = [
            {
                "name": container["name"],
                "image": container["image"],
                "ready": name in state.running and (ready or name != names[0]),
                "restartCount": 0,
                "state": _container_state(name, state),
                "resources": container.get("resources") or {},
            }
            for name, container in zip(names, manifest["spec"]["containers"], strict=True)
        ]
        at = self._store.timestamp()
        condition(manifest, "Ready", ready, "" if ready else "ContainersNotReady", "", at)
        if all(name in state.exit_codes for name in names):
            status["phase"] = "Failed" if any(state.exit_codes.values()) else "Succeeded"
            if manifest["metadata"]["uid"] in self._shut_down:
                status.update(phase="Failed", reason="Terminated", message=SHUTDOWN_MESSAGE)
        elif state.running or state.exit_codes:
            status["phase"] = "Running"
        if repr(status) != before:
            self._store.put(PODS, manifest)


def delete_pod(store: ObjectStore, manifest: Manifest, grace_s: float | None = None) -> None:
    """Delete a pod as the API server does: at once, or by marking it for its kubelet."""
    metadata = manifest["metadata"]
    if not manifest["spec"].get("nodeName") or has_ended(manifest):
        store.remove(PODS, metadata["name"])
        return
    grace = manifest["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
    if "deletionTimestamp" not in metadata or grace < metadata["deletionGracePeriodSeconds"]:
        metadata.setdefault("deletionTimestamp", store.timestamp())
        metadata["deletionGracePeriodSeconds"] = grace
        store.put(PODS, manifest)


def bound_pod(manifest: Manifest, node: Manifest, store: ObjectStore) -> Pod:
    """Return a pod in the form that a runner gets; raises _NotYet if a secret that it names is not there."""
    spec, metadata = manifest["spec"], manifest["metadata"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec.get("volumes") or []
        if "persistentVolumeClaim" in volume
    }
    containers = tuple(_container(container, manifest, claims, store) for container in spec["containers"])
    return Pod(
        uid=metadata["uid"],
        name=metadata["name"],
        group=metadata["labels"].get(GROUP_LABEL, ""),
        labels=dict(metadata["labels"]),
        node=node["metadata"]["name"],
        node_pool=node["metadata"]["labels"].get(NODE_POOL_LABEL, ""),
        containers=containers,
        ray_start_params=_parameters(containers[0].environment.get(START_COMMAND, "")),
        manifest=manifest,
    )


def missing_claim(manifest: Manifest, store: ObjectStore) -> str | None:
    """Return the name of a claim that a pod mounts and that is not there, or None."""
    for volume in manifest["spec"].get("volumes") or []:
        name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if name and store.get(CLAIMS, name) is None:
            return str(name)
    return None


def _container(container: Manifest, pod: Manifest, claims: Mapping[str, str], store: ObjectStore) -> Container:
    environment: dict[str, str] = {}
    for variable in container.get("env") or []:
        value = _value(variable, pod, store)
        if value is not None:
            environment[variable["name"]] = _expanded(value, environment)
    resources = container.get("resources") or {}
    hook = ((container.get("lifecycle") or {}).get("preStop") or {}).get("exec") or {}
    return Container(
        name=container["name"],
        image=container["image"],
        environment=environment,
        pre_stop=tuple(hook.get("command") or ()),
        limits={name: str(quantity) for name, quantity in (resources.get("limits") or {}).items()},
        claims={
            mount["mountPath"]: claims[mount["name"]]
            for mount in container.get("volumeMounts") or []
            if mount["name"] in claims
        },
    )


def _value(variable: Manifest, pod: Manifest, store: ObjectStore) -> str | None:
    source = variable.get("valueFrom")
    if source is None:
        return str(variable.get("value", ""))
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"])
    if "secretKeyRef" in source:
        reference = source["secretKeyRef"]
        secret = store.get(SECRETS, reference["name"])
        if secret is not None and reference["key"] in secret["stringData"]:
            return str(secret["stringData"][reference["key"]])
        if reference.get("optional"):
            return None
        raise _NotYet(f'secret "{reference["name"]}" not found')
    raise _NotYet(f"{variable['name']} comes from {', '.join(source)}, which this emulator does not know")


def _field(pod: Manifest, path: str) -> str:
    if found := _LABEL_PATH.fullmatch(path):
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    value: Any = pod
    for step in path.split("."):
        value = value.get(step, "") if isinstance(value, Mapping) else ""
    return str(value)


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by a variable that stands further above; ``$$`` is a dollar, and unknown names stay."""
    return _REFERENCE.sub(lambda found: environment.get(found[1], found[0]) if found[1] else "$", text)


def _container_state(name: str, state: PodState) -> Manifest:
    if name in state.exit_codes:
        code = state.exit_codes[name]
        return {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
    return {"running": {}} if name in state.running else {"waiting": {"reason": "ContainerCreating"}}


def _parameters(start_command: str) -> dict[str, str]:
    options = (word[2:].partition("=") for word in shlex.split(start_command) if word.startswith("--"))
    return {name: value if equals else "true" for name, equals, value in options if name != "head"}
