"""The emulated API server, asked as clients of Kubernetes ask."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests
import yaml

from iris_ray.testing.kubernetes import KubernetesWorld
from iris_ray.testing.kubernetes.api_server import JSON_PATCH
from iris_ray.testing.kubernetes.patches import PatchError, json_patch
from tests.support.kubernetes import EMBEDDED_STORAGE, GKE_FILE, PaperPods, PlayedWorld, changed, played_world
from tests.support.waiting import wait_until

PODS = "/api/v1/namespaces/default/pods"
CLUSTER = "/apis/ray.io/v1/namespaces/default/rayclusters/tpus"


@pytest.fixture
def played() -> Iterator[PlayedWorld]:
    with played_world() as played:
        yield played


def ask(
    world: KubernetesWorld, path: str, method: str = "GET", body: object = None, kind: str = JSON_PATCH, **more: Any
) -> requests.Response:
    variables = world.client_environment()
    certificate = variables["RAY_KUBERAY_CLIENT_CERT_PATH"], variables["RAY_KUBERAY_CLIENT_KEY_PATH"]
    options = {"cert": certificate, "verify": variables["RAY_KUBERAY_CA_CERT_PATH"], "timeout": 10, **more}
    url = f"https://{variables['KUBERNETES_SERVICE_HOST']}:{variables['KUBERNETES_SERVICE_PORT_HTTPS']}{path}"
    data = None if body is None else json.dumps(body)
    headers = {"Content-Type": kind, **(options.pop("headers", None) or {})}
    return requests.request(method, url, data=data, headers=headers, **options)


def status(answer: requests.Response) -> tuple[int, str]:
    """Code and reason of a refusal, which is a Status object."""
    said = answer.json()
    assert (said["kind"], said["status"], said["code"]) == ("Status", "Failure", answer.status_code)
    return answer.status_code, said["reason"]


# -- who is let in -----------------------------------------------------------------------------------------------------


def test_client_needs_certificate_or_token(played: PlayedWorld) -> None:
    token = (played.world.service_account / "token").read_text()
    bearer = {"Authorization": f"Bearer {token}"}
    assert status(ask(played.world, PODS, cert=None)) == (401, "Unauthorized")
    assert ask(played.world, PODS, cert=None, headers=bearer).ok
    assert ask(played.world, PODS).ok


def test_server_is_trusted_through_its_own_authority_only(played: PlayedWorld) -> None:
    with pytest.raises(requests.exceptions.SSLError):
        ask(played.world, PODS, verify=True)


def test_service_account_may_read_events_only_with_a_role(tmp_path: Any) -> None:
    rules = [{"apiGroups": [""], "resources": ["events"], "verbs": ["list"]}]
    role = {"kind": "Role", "metadata": {"name": "more"}, "rules": rules}
    path = tmp_path / "mine.yaml"
    path.write_text(f"{GKE_FILE.read_text()}\n---\n{yaml.safe_dump(role)}")
    events = "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name=tpus"
    with played_world(changed()) as without:
        assert status(ask(without.world, events)) == (403, "Forbidden")
    with played_world(path) as played:
        reasons = [event["reason"] for event in ask(played.world, events).json()["items"]]
    assert "CreatedHeadPod" in reasons


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/api/v1/namespaces/default/pods/nothing", (404, "NotFound")),
        ("/api/v1/namespaces/other/rayclusters/tpus", (404, "NotFound")),
        ("/apis/ray.io/v1alpha1/namespaces/default/rayclusters/tpus", (404, "NotFound")),
        ("/apis/ray.io/v1/namespaces/other/rayclusters/tpus", (404, "NotFound")),
        ("/api/v1/nodes", (404, "NotFound")),
        (f"{PODS}?watch=true", (400, "BadRequest")),
        (f"{PODS}?resourceVersion=newest", (400, "BadRequest")),
        (f"{PODS}?resourceVersion=1000000", (504, "Timeout")),
    ],
)
def test_wrong_question_gets_a_status(played: PlayedWorld, path: str, answer: tuple[int, str]) -> None:
    assert status(ask(played.world, path)) == answer


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("", 3),
        ("labelSelector=ray.io/cluster%3Dtpus", 3),
        ("labelSelector=ray.io/cluster=tpus,ray.io/node-type!=head", 2),
        ("labelSelector=ray.io/group=v6e-8", 2),
        ("labelSelector=replicaIndex", 2),
        ("labelSelector=!replicaIndex", 1),
        ("labelSelector=ray.io/cluster=others", 0),
        ("fieldSelector=status.phase=Running", 3),
        ("fieldSelector=status.phase=Pending", 0),
        ("resourceVersion=0&resourceVersionMatch=NotOlderThan", 3),
    ],
)
def test_pods_are_selected_by_labels_and_fields(played: PlayedWorld, query: str, count: int) -> None:
    played.set_group("v6e-8", replicas=2)
    played.play(5)
    answer = ask(played.world, f"{PODS}?{query}").json()
    assert (answer["kind"], len(answer["items"])) == ("PodList", count)
    assert int(answer["metadata"]["resourceVersion"]) > 0


# -- changing ----------------------------------------------------------------------------------------------------------


def test_replicas_that_are_patched_become_pods(played: PlayedWorld) -> None:
    operation = {"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": 1}
    missing = {"op": "replace", "path": "/spec/workerGroupSpecs/0/scaleStrategy", "value": {"workersToDelete": []}}
    before = ask(played.world, CLUSTER).json()["metadata"]
    after = ask(played.world, CLUSTER, "PATCH", [operation, missing]).json()["metadata"]
    assert after["generation"] == before["generation"] + 1
    assert int(after["resourceVersion"]) > int(before["resourceVersion"])
    played.play(5)
    assert len(played.world.pods("v6e-16")) == 4


@pytest.mark.parametrize(
    ("body", "kind", "answer"),
    [
        ([{"op": "test", "path": "/metadata/resourceVersion", "value": "0"}], JSON_PATCH, (422, "Invalid")),
        ([{"op": "replace", "path": "/spec/workerGroupSpecs/7/replicas", "value": 1}], JSON_PATCH, (422, "Invalid")),
        ([{"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": "1"}], JSON_PATCH, (422, "Invalid")),
        ({"spec": {}}, "application/merge-patch+json", (415, "UnsupportedMediaType")),
    ],
)
def test_wrong_patch_is_refused_and_changes_nothing(
    played: PlayedWorld, body: object, kind: str, answer: tuple[int, str]
) -> None:
    before = ask(played.world, CLUSTER).json()
    assert status(ask(played.world, CLUSTER, "PATCH", body, kind)) == answer
    assert ask(played.world, CLUSTER).json() == before


def test_cluster_that_kuberay_refuses_gets_an_event_and_no_pods(played: PlayedWorld) -> None:
    add = {"op": "add", "path": "/spec/networkPolicy", "value": {}}
    assert ask(played.world, CLUSTER, "PATCH", [add]).ok
    played.play(5)
    assert len(played.world.pods()) == 1
    assert "RayClusterNetworkPolicy" in next(iter(played.messages("InvalidRayClusterSpec")))


# -- patches and real time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"op": "add", "path": "/a/1", "value": 9}, {"a": [1, 9, 2], "b": {"c": 3}}),
        ({"op": "add", "path": "/a/-", "value": 9}, {"a": [1, 2, 9], "b": {"c": 3}}),
        ({"op": "remove", "path": "/b/c"}, {"a": [1, 2], "b": {}}),
        ({"op": "replace", "path": "/b/new", "value": 9}, {"a": [1, 2], "b": {"c": 3, "new": 9}}),
        ({"op": "add", "path": "/b/x~1y~0z", "value": 9}, {"a": [1, 2], "b": {"c": 3, "x/y~z": 9}}),
        ({"op": "replace", "path": "/a/2", "value": 9}, None),
        ({"op": "add", "path": "/a/4", "value": 9}, None),
        ({"op": "remove", "path": "/b/new"}, None),
        ({"op": "add", "path": "/c/d", "value": 9}, None),
        ({"op": "copy", "path": "/c"}, None),
        ({"path": "/c"}, None),
    ],
)
def test_json_patch_is_applied_as_kubernetes_does(operation: Mapping[str, Any], expected: object) -> None:
    document = {"a": [1, 2], "b": {"c": 3}}
    if expected is None:
        with pytest.raises(PatchError):
            json_patch(document, [operation])
    else:
        assert json_patch(document, [operation]) == expected
    assert document == {"a": [1, 2], "b": {"c": 3}}


def test_world_that_runs_by_itself_brings_pods() -> None:
    runner = PaperPods(now=time.time())
    with KubernetesWorld(GKE_FILE, runner, feature_gates=[EMBEDDED_STORAGE]) as world:
        world.run(0.01)
        wait_until(lambda: [pod.is_head for pod in world.pods()] == [True])
    assert runner.verbs("kill") == runner.verbs("start")
