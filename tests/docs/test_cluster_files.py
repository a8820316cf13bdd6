"""The files of real clusters in examples/clusters: checked as far as that goes without a cloud."""

import gzip
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click import Context
from ray.autoscaler._private.util import prepare_config, validate_config

from iris_ray.cli.give_notice import give_notice
from iris_ray.model.topology import get_tpu_config
from tests.docs.pages import REPOSITORY

CLUSTERS = REPOSITORY / "examples" / "clusters"
SCHEMA = REPOSITORY / "tests" / "data" / "raycluster-schema.json.gz"
"""Of RayCluster in KubeRay 1.7.0: helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml without its descriptions."""
SPOT_NODES_GIVE_S = 15
RAY = re.compile(r"rayproject/ray:(?P<version>[\d.]+)-py311")


def strict(schema: Any) -> Any:
    """A schema that also refuses names that it does not know, as ``kubectl apply`` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(part) for name, part in schema.items()}
    known = closed.get("properties")
    if (
        isinstance(known, dict)
        and closed.get("type") == "object"
        and not closed.get("x-kubernetes-preserve-unknown-fields")
    ):
        closed.setdefault("additionalProperties", False)
    if closed.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


def load(name: str, kind: str | None = None) -> dict[str, Any]:
    """The only object of a file, or its only one of a kind."""
    loaded = yaml.safe_load_all((CLUSTERS / name).read_text())
    (found,) = (one for one in loaded if kind in (None, one.get("kind")))
    return found


def raycluster() -> dict[str, Any]:
    return load("gke.yaml", "RayCluster")


def gated_raycluster() -> dict[str, Any]:
    """The RayCluster that ``kubectl kustomize`` makes of it, for an operator with the feature gate."""
    (operations,) = (
        yaml.safe_load(patch["patch"])
        for patch in load("kustomization.yaml")["patches"]
        if patch["target"]["kind"] == "RayCluster"
    )
    changed: Any = raycluster()
    for operation in operations:
        *way, last = operation["path"].strip("/").split("/")
        place = changed
        for step in way:
            place = place[int(step)] if isinstance(place, list) else place[step]
        if operation["op"] != "add":
            del place[last]
        if operation["op"] != "remove":
            place[last] = operation["value"]
    return changed


@pytest.fixture(scope="module")
def schema() -> Any:
    found = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    found["properties"].pop("metadata")  # the API server's
    spec = strict(found["properties"].pop("spec"))
    return {**found, "properties": {"spec": spec}}


@pytest.mark.parametrize("described", [raycluster, gated_raycluster])
def test_cluster_for_gke_is_what_kuberay_takes(schema: Any, described: Callable[[], dict[str, Any]]) -> None:
    jsonschema.validate(described(), schema)


def test_cluster_for_gke_needs_no_feature_gate_and_keeps_its_records() -> None:
    """Its gates: ray-operator/pkg/features/features.go of KubeRay 1.7. The add-on has none of the alpha ones."""
    spec = raycluster()["spec"]
    assert spec.keys().isdisjoint({"gcsFaultToleranceOptions", "networkPolicy", "tlsOptions", "historyServerOptions"})
    head = spec["headGroupSpec"]["template"]["spec"]
    (container,) = head["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    (mount,), (volume,) = container["volumeMounts"], head["volumes"]
    assert environment["RAY_gcs_storage"] == "rocksdb"
    assert environment["RAY_gcs_storage_path"] == mount["mountPath"]
    assert mount["name"] == volume["name"]
    claim = load("gke.yaml", "PersistentVolumeClaim")["metadata"]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    assert head["securityContext"]["fsGroup"], "KubeRay sets none, and a new volume is root's"


def test_gated_cluster_for_gke_leaves_the_volume_to_kuberay() -> None:
    """KubeRay refuses the variables of its own embedded storage: ray-operator/controllers/ray/utils/validation.go."""
    spec = gated_raycluster()["spec"]
    assert spec["gcsFaultToleranceOptions"]["storage"]["deletionPolicy"] == "Retain"
    head = spec["headGroupSpec"]["template"]["spec"]
    assert not any(variable["name"].startswith("RAY_gcs_storage") for variable in head["containers"][0]["env"])
    assert "volumes" not in head
    assert "volumeMounts" not in head["containers"][0]
    assert head["securityContext"]["fsGroup"]


def test_everything_in_gke_waits_as_long_for_a_lost_head() -> None:
    """Kubernetes takes six minutes to give up a volume at a node that is gone (kube-controller-manager)."""
    spec = raycluster()["spec"]
    pods = [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    variables = [v for pod in pods for container in pod["spec"]["containers"] for v in container["env"]]
    waits = [int(v["value"]) for v in variables if v["name"] == "RAY_gcs_rpc_server_reconnect_timeout_s"]
    assert len(waits) == len(pods)
    assert min(waits) > 6 * 60


def test_budget_and_network_policy_for_gke_are_about_its_pods() -> None:
    """With `minAvailable`: Kubernetes knows no scale of a RayCluster, which `maxUnavailable` would need."""
    cluster = {"ray.io/cluster": raycluster()["metadata"]["name"]}
    budget, policy = (load("gke.yaml", kind)["spec"] for kind in ("PodDisruptionBudget", "NetworkPolicy"))
    assert budget["selector"]["matchLabels"] == {**cluster, "ray.io/node-type": "head"}
    assert budget["minAvailable"] == 1
    assert policy["podSelector"]["matchLabels"] == cluster
    assert {"from": [{"podSelector": {"matchLabels": cluster}}]} in policy["ingress"]


def test_wrong_name_in_a_cluster_for_gke_would_be_seen(schema: Any) -> None:
    cluster = raycluster()
    cluster["spec"]["workerGroupSpecs"][0]["numOfHost"] = 4
    with pytest.raises(jsonschema.ValidationError, match="numOfHost"):
        jsonschema.validate(cluster, schema)


def test_every_group_with_chips_gives_notice_in_time_before_its_pods_end() -> None:
    groups = raycluster()["spec"]["workerGroupSpecs"]
    assert groups
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert (
            container["resources"]["limits"]["google.com/tpu"] == container["resources"]["requests"]["google.com/tpu"]
        )
        program, group_name, command, *arguments = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (program, group_name, command) == ("iris-ray", "host", give_notice.name)
        context: Context = give_notice.make_context(command, list(arguments))
        assert context.params["seconds"] < SPOT_NODES_GIVE_S < pod["terminationGracePeriodSeconds"]


def test_groups_for_gke_are_slices_of_the_type_that_they_are_called_by() -> None:
    for group in raycluster()["spec"]["workerGroupSpecs"]:
        config = get_tpu_config(group["groupName"])
        pod = group["template"]["spec"]
        sides = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        chips = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
        assert chips * group["numOfHosts"] == config.chip_count == int(sides[0]) * int(sides[1])


def test_cluster_for_gce_is_what_rays_launcher_takes() -> None:
    whole = prepare_config(load("gce.yaml"))
    validate_config(whole)
    for name, kind in whole["available_node_types"].items():
        if "acceleratorType" in kind["node_config"]:
            config = get_tpu_config(kind["node_config"]["acceleratorType"])
            assert (name, kind["resources"]["TPU"]) == (config.name, config.chips_per_vm)
    *_, start, start_controller = map(shlex.split, whole["head_start_ray_commands"])
    assert start_controller[:5] == ["iris-ray", "cluster", "controller", "start", "--setting"]
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start
    assert "RAY_gcs_storage=rocksdb" in start


def test_all_have_the_newest_ray_that_iris_ray_takes() -> None:
    dockerfile = RAY.search((CLUSTERS / "Dockerfile").read_text())
    assert dockerfile is not None
    version = raycluster()["spec"]["rayVersion"]
    assert version == dockerfile["version"]
    major, minor, _ = version.split(".")
    assert re.search(
        rf'"ray\[default\]>=2\.\d+,<{major}\.{int(minor) + 1}"', (REPOSITORY / "pyproject.toml").read_text()
    )


@pytest.mark.parametrize("name", ["gke.yaml", "gce.yaml"])
def test_image_is_the_one_that_the_dockerfile_shows_how_to_build(name: str) -> None:
    text = Path(CLUSTERS / name).read_text()
    (image,) = set(re.findall(r"image: (us-\S+)", text))
    assert image.endswith("/iris-ray:1")
    assert "/iris-ray:1" in (CLUSTERS / "Dockerfile").read_text()
