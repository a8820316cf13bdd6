"""The pods that KubeRay makes of a RayCluster's templates.

Source: ray-operator/controllers/ray/common/pod.go of KubeRay 1.7.0 (DefaultHeadPodTemplate, DefaultWorkerPodTemplate,
BuildPod, setContainerEnvVars, BuildAutoscalerContainer) and utils/constant.go. Left out: probes, /dev/shm, and the init
container that lets a worker wait for the head. A `PodRunner` has to wait in its place.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any, Final

from iris_ray.testing.kubernetes.objects import CLUSTER_LABEL, GROUP_LABEL, TPU_RESOURCE, Manifest, amount
from iris_ray.testing.kubernetes.pods import HEAD_GROUP
from iris_ray.testing.kubernetes.tpu_webhook import HOST_INDEX_LABEL, REPLICA_INDEX_LABEL, REPLICA_NAME_LABEL

NODE_TYPE_LABEL: Final = "ray.io/node-type"
START_COMMAND: Final = "KUBERAY_GEN_RAY_START_CMD"
GCS_PORT: Final = "6379"
TOKEN_KEY: Final = "auth_token"
STORAGE_PATH: Final = "/data/gcs"

_VERSION: Final = "v1.7.0"
_LONGEST_PREFIX: Final = 50
_RECONNECT_S: Final = "600"  # DefaultWorkerRayGcsReconnectTimeoutS
_WITH_A_VALUE: Final = ("log-color", "include-dashboard", "include-log-monitor")
"""Options of ``ray start`` that take true or false as their value."""


def head_pod(raycluster: Manifest) -> Manifest:
    """Return a new head pod, without a name of its own yet."""
    spec, name = raycluster["spec"], raycluster["metadata"]["name"]
    group = spec["headGroupSpec"]
    pod = _pod(raycluster, group, "head", HEAD_GROUP, _generate_name(name, "head"))
    parameters = _ray_start_params(group)
    parameters.setdefault("dashboard-host", "0.0.0.0")
    container = pod["spec"]["containers"][0]
    environment = container["env"]
    options = spec.get("autoscalerOptions") or {}
    if spec.get("enableInTreeAutoscaling"):
        parameters["no-monitor"] = "true"
        pod["spec"]["containers"].append(_autoscaler(container["image"], options, _token_variables(raycluster)))
        environment.append(_variable("RAY_enable_autoscaler_v2", str(options.get("version") == "v2").lower()))
    storage = spec.get("gcsFaultToleranceOptions") or {}
    if storage.get("backend") == "rocksdb":
        environment += [_variable("RAY_gcs_storage", "rocksdb"), _variable("RAY_gcs_storage_path", STORAGE_PATH)]
        container.setdefault("volumeMounts", []).append({"name": "gcs-storage", "mountPath": STORAGE_PATH})
        claim = {"persistentVolumeClaim": {"claimName": storage_claim(raycluster)}}
        pod["spec"].setdefault("volumes", []).append({"name": "gcs-storage", **claim})
    environment.append(_variable("RAY_USAGE_STATS_EXTRA_TAGS", f"kuberay_version={_VERSION};kuberay_crd=RayCluster"))
    _finish(pod, raycluster, "head", parameters)
    return pod


def worker_pod(raycluster: Manifest, group: Mapping[str, Any], replica_name: str, replica: int, host: int) -> Manifest:
    """Return a new worker pod, without a name of its own yet.

    Args:
        raycluster: its cluster.
        group: its worker group.
        replica_name: name of its replica, such as ``v6e-16-xh3hf``; unused in a group with one host a replica.
        replica: number of its replica within the group.
        host: its number within the replica.
    """
    name = group["groupName"]
    pod = _pod(raycluster, group, "worker", name, _generate_name(f"{raycluster['metadata']['name']}-{name}", "worker"))
    pod["metadata"]["labels"][REPLICA_INDEX_LABEL] = str(replica)
    if group["numOfHosts"] > 1:
        pod["metadata"]["labels"] |= {REPLICA_NAME_LABEL: replica_name, HOST_INDEX_LABEL: str(host)}
    parameters = _ray_start_params(group)
    parameters.setdefault("address", f"{head_service(raycluster)}:{head_port(raycluster)}")
    environment = pod["spec"]["containers"][0]["env"]
    reconnect = "RAY_gcs_rpc_server_reconnect_timeout_s"
    if raycluster["spec"].get("gcsFaultToleranceOptions") and not _has(environment, reconnect):
        environment.append(_variable(reconnect, _RECONNECT_S))
    _finish(pod, raycluster, "worker", parameters)
    return pod


def head_service(raycluster: Manifest) -> str:
    """Return the full name of the head's service."""
    metadata = raycluster["metadata"]
    service = (raycluster["spec"]["headGroupSpec"].get("headService") or {}).get("metadata") or {}
    return f"{service.get('name') or metadata['name'] + '-head-svc'}.{metadata['namespace']}.svc.cluster.local"


def head_port(raycluster: Manifest) -> str:
    return str((raycluster["spec"]["headGroupSpec"].get("rayStartParams") or {}).get("port", GCS_PORT))


def storage_claim(raycluster: Manifest) -> str:
    """Return the name of the claim that holds the GCS's embedded storage."""
    storage = raycluster["spec"]["gcsFaultToleranceOptions"].get("storage") or {}
    return str(storage.get("claimName") or f"{raycluster['metadata']['name']}-gcs-pvc")


def token_secret(raycluster: Manifest) -> str | None:
    """Return the name of the secret that holds the cluster's token; None if it has no token."""
    options = raycluster["spec"].get("authOptions") or {}
    if options.get("mode") != "token":
        return None
    return str(options.get("secretName") or raycluster["metadata"]["name"])


def _generate_name(prefix: str, node_type: str) -> str:
    return f"{prefix[:_LONGEST_PREFIX]}-{node_type}-".lower()


def _pod(raycluster: Manifest, group: Mapping[str, Any], node_type: str, name: str, generate_name: str) -> Manifest:
    template, metadata = copy.deepcopy(dict(group["template"])), raycluster["metadata"]
    cluster = metadata["name"]
    own = {CLUSTER_LABEL: cluster, NODE_TYPE_LABEL: node_type, GROUP_LABEL: name}
    labels = {
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{cluster}-{node_type}"[-63:],
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
        **((template.get("metadata") or {}).get("labels") or {}),
        **(group.get("labels") or {}),
        **own,
    }
    owner = {"apiVersion": raycluster["apiVersion"], "kind": "RayCluster", "name": cluster, "uid": metadata.get("uid")}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": generate_name,
            "namespace": metadata["namespace"],
            "labels": labels,
            "annotations": dict((template.get("metadata") or {}).get("annotations") or {}),
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": template["spec"],
        "status": {"phase": "Pending", "conditions": []},
    }
    options = raycluster["spec"].get("autoscalerOptions") or {}
    if raycluster["spec"].get("enableInTreeAutoscaling") and options.get("version") == "v2":
        pod["spec"]["restartPolicy"] = "Never"
    pod["spec"].setdefault("terminationGracePeriodSeconds", 30)
    container = pod["spec"]["containers"][0]
    container["env"] = [*(container.get("env") or []), *_missing(container, _token_variables(raycluster))]
    return pod


def _token_variables(raycluster: Manifest) -> list[Manifest]:
    secret = token_secret(raycluster)
    if secret is None:
        return []
    source = {"secretKeyRef": {"name": secret, "key": TOKEN_KEY}}
    return [_variable("RAY_AUTH_MODE", "token"), {"name": "RAY_AUTH_TOKEN", "valueFrom": source}]


def _autoscaler(image: str, options: Mapping[str, Any], token: list[Manifest]) -> Manifest:
    command = "ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME) --cluster-namespace $(RAY_CLUSTER_NAMESPACE)"
    amounts = {"cpu": "500m", "memory": "512Mi"}
    return {
        "name": "autoscaler",
        "image": options.get("image") or image,
        "command": options.get("command") or ["/bin/bash", "-c", "--"],
        "args": options.get("args") or [command],
        "env": [
            *_fields(
                RAY_CLUSTER_NAME=f"metadata.labels['{CLUSTER_LABEL}']", RAY_CLUSTER_NAMESPACE="metadata.namespace"
            ),
            *_fields(RAY_HEAD_POD_NAME="metadata.name"),
            _variable("KUBERAY_CRD_VER", "v1"),
            _variable("KUBERAY_GEN_AUTOSCALER_START_CMD", command),
            *token,
            *(options.get("env") or []),
        ],
        "resources": options.get("resources") or {"limits": amounts, "requests": amounts},
    }


def _ray_start_params(group: Mapping[str, Any]) -> dict[str, str]:
    parameters = {name: str(value) for name, value in (group.get("rayStartParams") or {}).items()}
    custom = {}
    for name, quantity in (group.get("resources") or {}).items():
        option = {"cpu": "num-cpus", "memory": "memory", "gpu": "num-gpus", "nvidia.com/gpu": "num-gpus"}.get(
            name.lower()
        )
        if option is None:
            custom[name] = float(amount(quantity))
        else:
            parameters[option] = str(int(amount(quantity)))
    if custom:
        parameters["resources"] = f"'{json.dumps(custom)}'"
    if group.get("labels"):
        parameters["labels"] = ",".join(f"{name}={value}" for name, value in sorted(group["labels"].items()))
    return parameters


def _finish(pod: Manifest, raycluster: Manifest, node_type: str, parameters: dict[str, str]) -> None:
    """Complete the options of ``ray start``, and put it and KubeRay's variables into the Ray container."""
    container = pod["spec"]["containers"][0]
    resources = container.get("resources") or {}
    limits, requested = resources.get("limits") or {}, resources.get("requests") or {}
    parameters |= {"block": "true"}
    parameters.setdefault("metrics-export-port", "8080")
    parameters.setdefault("dashboard-agent-listen-port", "52365")
    if cpus := limits.get("cpu") or requested.get("cpu"):
        parameters.setdefault("num-cpus", str(-int(-amount(cpus) // 1)))
    if memory := limits.get("memory"):
        parameters.setdefault("memory", str(int(amount(memory))))
    chips = float(amount(limits.get(TPU_RESOURCE, 0)))
    custom = json.loads(parameters.get("resources", "{}").replace("\\", "").strip("'\""))
    if chips and "TPU" not in custom:
        parameters["resources"] = f"'{json.dumps({**custom, 'TPU': chips})}'"
    start = f"ray start {'--head ' if node_type == 'head' else ''}{_options(parameters)}"
    given = [*(container.get("command") or []), *(container.get("args") or [])]
    overwritten = str((raycluster["metadata"].get("annotations") or {}).get("ray.io/overwrite-container-cmd")).lower()
    if overwritten != "true" and "ray start" not in " ".join(given):
        generated = f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {start}"
        container["command"] = ["/bin/bash", "-c", "--"]
        container["args"] = [f"{' '.join(given)} && {generated}" if given else generated]
    environment, host = container["env"], "127.0.0.1"
    if node_type == "worker":
        host = head_service(raycluster)
        environment += [_variable("FQ_RAY_IP", host), _variable("RAY_IP", host.partition(".")[0])]
    environment += _fields(
        RAY_CLUSTER_NAME=f"metadata.labels['{CLUSTER_LABEL}']",
        RAY_CLUSTER_NAMESPACE="metadata.namespace",
        RAY_CLOUD_INSTANCE_ID="metadata.name",
        RAY_NODE_TYPE_NAME=f"metadata.labels['{GROUP_LABEL}']",
    )
    environment.append(_variable(START_COMMAND, start))
    port = head_port(raycluster)
    defaults = [
        _variable("RAY_PORT", port),
        _variable("RAY_ADDRESS", f"{host}:{port}"),
        _variable("RAY_USAGE_STATS_KUBERAY_IN_USE", "1"),
        _variable("RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE", "1"),
    ]
    environment += _missing(container, defaults)


def _options(parameters: Mapping[str, str]) -> str:
    """Return the options of ``ray start``; a switch that is on has no value, and one that is off is left out."""
    words = []
    for name, value in sorted(parameters.items()):
        if value.lower() in ("true", "false") and name not in _WITH_A_VALUE:
            words += [f"--{name}"] if value.lower() == "true" else []
        else:
            words.append(f"--{name}={value}")
    return " ".join(words)


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _fields(**paths: str) -> list[Manifest]:
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in paths.items()]


def _has(environment: list[Manifest], name: str) -> bool:
    return any(variable["name"] == name for variable in environment)


def _missing(container: Manifest, variables: list[Manifest]) -> list[Manifest]:
    return [variable for variable in variables if not _has(container.get("env") or [], variable["name"])]
