"""The files of real clusters in examples/clusters: checked as far as that goes without a cloud."""

import copy
import gzip
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jsonschema
import pytest
import yaml
from click import Context
from ray.autoscaler._private.util import prepare_config, validate_config

from iris_ray.cli.give_notice import give_notice
from iris_ray.model.topology import get_tpu_config
from iris_ray.settings import GCS_BOUNDS
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


def test_every_cluster_bounds_what_its_gcs_remembers() -> None:
    wanted = {name: str(bound) for name, bound in GCS_BOUNDS.items()}
    for cluster in (raycluster(), gated_raycluster()):
        (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
        assert wanted.items() <= {one["name"]: one["value"] for one in container["env"]}.items()
    (start,) = (line for line in load("gce.yaml")["head_start_ray_commands"] if "ray start" in line)
    assert all(f"{name}={bound}" in start.split() for name, bound in wanted.items())


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


def test_groups_with_chips_give_notice_before_pods_end() -> None:
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


def test_groups_for_gke_are_slices_of_named_type() -> None:
    for group in raycluster()["spec"]["workerGroupSpecs"]:
        config = get_tpu_config(group["groupName"])
        pod = group["template"]["spec"]
        sides = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        chips = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
        assert chips * group["numOfHosts"] == config.chip_count == int(sides[0]) * int(sides[1])


def test_cluster_for_gce_is_what_rays_launcher_takes() -> None:
    whole = prepare_config(load("gce.yaml"))
    validate_config(whole)
    *_, start, start_controller = map(shlex.split, whole["head_start_ray_commands"])
    assert start_controller[:5] == ["iris-ray", "cluster", "controller", "start", "--setting"]
    assert "RAY_gcs_storage=rocksdb" in start
    assert not any("autoscaling" in word for word in start), "the provisioner brings slices"


class Answers:
    """A client of a Google API that answers each chain of calls with the same, and remembers what it was sent."""

    def __init__(self, **replies: Any) -> None:
        self.replies = replies
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.sent.append((name, arguments))
            reply = self.replies.get(name)
            return self if reply is None else SimpleNamespace(execute=lambda: copy.deepcopy(reply))

        return call


@pytest.fixture
def rays_bootstrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The code with which ``ray up`` prepares a project, without Google's libraries, which it needs for calls only."""
    for part in ("", ".discovery", ".errors", ".http"):
        monkeypatch.setitem(sys.modules, f"googleapiclient{part}", MagicMock())
    for name in ("google_auth_httplib2", "httplib2"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    before = set(sys.modules)
    yield importlib.import_module("ray.autoscaler._private.gcp.config")
    for name in set(sys.modules) - before:  # others shall not find the code with these stand-ins in it
        if name.startswith("ray.autoscaler._private.gcp"):
            del sys.modules[name]


def test_ray_up_and_our_setup_give_the_head_all_it_needs(
    rays_bootstrap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = prepare_config(load("gce.yaml"))
    cluster["auth"]["ssh_private_key"] = "~/key"
    account = f"ray-autoscaler-sa-v1@{PROJECT}.iam.gserviceaccount.com"
    crm = Answers(
        get={"projectId": PROJECT, "lifecycleState": "ACTIVE"}, getIamPolicy={"bindings": []}, setIamPolicy={}
    )
    iam = Answers(get={"email": account, "projectId": PROJECT})
    compute = Answers()  # it has no subnets: the file names one
    monkeypatch.setattr(rays_bootstrap, "construct_clients_from_provider_config", lambda _: (crm, iam, compute, None))
    whole = rays_bootstrap.bootstrap_gcp(cluster)
    (policy,) = [arguments["body"]["policy"] for name, arguments in crm.sent if name == "setIamPolicy"]
    by_ray = {binding["role"] for binding in policy["bindings"]}
    assert "roles/tpu.admin" not in by_ray, "Ray grants it only with a TPU type in the file"
    calls = set_up(tmp_path, existing=False)
    by_us = {shlex.split(line)[-2].removeprefix("--role=") for line in calls if account in line and "add-iam" in line}
    assert {"roles/tpu.admin", "roles/iam.serviceAccountUser", "roles/compute.admin"} <= by_ray | by_us
    assert whole["head_node"]["serviceAccounts"][0]["email"] == account
    (interface,) = whole["available_node_types"]["head"]["node_config"]["networkInterfaces"]
    assert any(f"subnets create {interface['subnetwork'].rpartition('/')[2]} " in line for line in calls)


PROJECT = "my-project"


def set_up(tmp_path: Path, existing: bool) -> list[str]:
    """Run gce-setup.sh with a gcloud that notes its arguments, and finds what it is asked for if it exists already."""
    (fake := tmp_path / "gcloud").write_text(
        f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\n[[ "$*" != *" describe "* ]] || exit {0 if existing else 1}\n'
    )
    fake.chmod(0o755)
    command = ["bash", str(CLUSTERS / "gce-setup.sh"), PROJECT, "us-east5", "us-central1"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert f"us-east5-docker.pkg.dev/{PROJECT}/images" in done.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    (tmp_path / "calls").unlink()
    return calls


def test_setup_for_gce_makes_network_with_nat_in_each_region(tmp_path: Path) -> None:
    calls = set_up(tmp_path, existing=False)
    for region in ("us-east5", "us-central1"):
        assert sum("nats create iris" in line and f"--region={region}" in line for line in calls) == 1
        assert sum("--enable-private-ip-google-access" in line and f"--region={region}" in line for line in calls) == 1
    ranges = [word for line in calls for word in line.split() if word.startswith("--range=")]
    assert len(ranges) == len(set(ranges)) == 2


def test_setup_for_gce_makes_nothing_twice(tmp_path: Path) -> None:
    assert not [line for line in set_up(tmp_path, existing=True) if " create " in line]


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
