"""Files of RayClusters: what is refused, with the line and the field."""

import gzip
import json
from pathlib import Path

import pytest
import yaml

from iris_ray.errors import InvalidClusterFileError
from iris_ray.testing.kubernetes.raycluster_file import read_cluster_file, with_defaults
from tests.docs.pages import REPOSITORY
from tests.support.kubernetes import EMBEDDED_STORAGE, GKE_FILE

TEXT = GKE_FILE.read_text().split("---\n")[-1]


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def refusal(tmp_path: Path, text: str, *gates: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InvalidClusterFileError) as caught:
        read_cluster_file(path, gates or (EMBEDDED_STORAGE,))
    return str(caught.value)


def test_shipped_file_is_taken_with_the_defaults_of_the_crd() -> None:
    read = read_cluster_file(GKE_FILE, [EMBEDDED_STORAGE])
    groups = read.raycluster["spec"]["workerGroupSpecs"]
    assert [(group["groupName"], group["numOfHosts"], group["replicas"]) for group in groups] == [
        ("v6e-16", 4, 0),
        ("v6e-8", 1, 0),
    ]
    assert groups == read_cluster_file(read.raycluster, [EMBEDDED_STORAGE]).raycluster["spec"]["workerGroupSpecs"]


def test_defaults_of_groups_are_those_of_kuberays_crd() -> None:
    schema = json.loads(gzip.decompress((REPOSITORY / "tests" / "data" / "raycluster-schema.json.gz").read_bytes()))
    group = schema["properties"]["spec"]["properties"]["workerGroupSpecs"]["items"]["properties"]
    filled = with_defaults({"spec": {"workerGroupSpecs": [{}]}})["spec"]["workerGroupSpecs"][0]
    assert {name: group[name]["default"] for name in filled} == filled


@pytest.mark.parametrize(
    ("old", "new", "at", "words"),
    [
        ("apiVersion: ray.io/v1", "apiVersion: ray.io/v1alpha1", "apiVersion", "has ray.io/v1"),
        ("  name: tpus", "  name: 1-TPUS", "  name: 1-TPUS", "can't be called '1-TPUS'"),
        ("      numOfHosts: 4\n", "", "groupName: v6e-16", "numOfHosts is 1 (1 if the file names none)"),
        ("      numOfHosts: 4", "      numOfHosts: 2", "      numOfHosts", "has 4 hosts, and numOfHosts is 2"),
        ("numOfHosts: 4", "numOfHosts: four", "numOfHosts: four", "a number from 1 on, not 'four'"),
        ("minReplicas: 0", "minReplicas: 9", "minReplicas: 9", "9 is more than maxReplicas"),
        ("groupName: v6e-8", "groupName: v6e-16", "groupName: v6e-16", "two groups are called v6e-16"),
        ('google.com/tpu: "4"}', "google.com/tpu: four}", "google.com/tpu: four", "not a quantity of Kubernetes"),
        ('rayVersion: "2.60.0"', 'rayVersion: "2.51.0"', "    mode: token", "from 2.52.0 on"),
        (
            "            cloud.google.com/gke-tpu-topology: 4x4\n",
            "",
            "template:\n        spec:\n          terminationG",
            "-topology",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, old: str, new: str, at: str, words: str) -> None:
    text = TEXT.replace(old, new, 1)
    said = refusal(tmp_path, text)
    assert words in said
    assert f"mine.yaml, line {line_of(text, at)}," in said


def test_alpha_feature_is_refused_without_its_gate(tmp_path: Path) -> None:
    text = TEXT.replace("  headGroupSpec:", "  gcsFaultToleranceOptions:\n    backend: rocksdb\n  headGroupSpec:")
    said = refusal(tmp_path, text, "RayMultiHostIndexing")
    line = line_of(text, "backend: rocksdb")
    assert f"line {line}, spec.gcsFaultToleranceOptions.backend" in said
    assert "GCSFaultToleranceEmbeddedStorage" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT.replace("kind: RayCluster", "kind: RayJob"), f"holds 0 (RayJob in line {line_of(TEXT, 'apiVersion')})"),
        (f"{TEXT}\n---\n{TEXT}", "holds 2"),
        ("a: [", "is not valid YAML"),
        ("", "holds 0"),
    ],
)
def test_file_without_exactly_one_raycluster_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_missing_file_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidClusterFileError, match=r"nothing\.yaml can't be read"):
        read_cluster_file("nothing.yaml", ())


def test_other_objects_in_the_file_are_kept(tmp_path: Path) -> None:
    role = {"apiVersion": "v1", "kind": "Role", "metadata": {"name": "more"}, "rules": []}
    path = tmp_path / "mine.yaml"
    path.write_text(f"{TEXT}\n---\n{yaml.safe_dump(role)}")
    assert read_cluster_file(path, [EMBEDDED_STORAGE]).others == (role,)
