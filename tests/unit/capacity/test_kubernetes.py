"""The client of the Kubernetes API, against a server that records what it is asked."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from iris_ray.capacity import kubernetes
from iris_ray.capacity.kubernetes import KubernetesApi
from iris_ray.errors import ProviderDeniedError, ProviderError
from iris_ray.testing.servers import ServerThread

CLUSTER = "/apis/ray.io/v1/namespaces/default/rayclusters/tpus"
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RAY_CLUSTER_NAME": "tpus", "RAY_CLUSTER_NAMESPACE": "default"}


@dataclass
class Server:
    """What it answers next, and what it was asked."""

    answer: Any = field(default_factory=dict)
    status: int = 200
    asked: list[tuple[str, str, str | None, Any]] = field(default_factory=list)
    types: list[str | None] = field(default_factory=list)
    address: str = ""

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        body, authorization = json.loads(await request.text() or "null"), request.headers.get("Authorization")
        self.asked.append((request.method, request.path_qs, authorization, body))
        self.types.append(request.headers.get("Content-Type"))
        answer = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        return web.Response(body=answer, status=self.status)


@pytest.fixture
def server() -> Iterator[Server]:
    state, thread = Server(), ServerThread("server")
    state.address = thread.listen(state.respond, "127.0.0.1")
    yield state
    thread.close()


@pytest.fixture
def api(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesApi:
    """The account's token is ``secret``."""
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    return KubernetesApi(f"http://{server.address}", "default", "tpus")


def test_cluster_is_asked_with_the_accounts_newest_token(api: KubernetesApi, server: Server, tmp_path: Path) -> None:
    server.answer = {"spec": {}}
    assert api.ray_cluster() == {"spec": {}}
    (tmp_path / "token").write_text("newer")
    api.ray_cluster()
    assert server.asked == [
        ("GET", CLUSTER, "Bearer secret", None),
        ("GET", CLUSTER, "Bearer newer", None),
    ]


def test_patch_is_a_json_patch(api: KubernetesApi, server: Server) -> None:
    patch = [{"op": "add", "path": "/spec/workerGroupSpecs/0/replicas", "value": 1}]
    server.answer = {"spec": {"replicas": 1}}
    assert api.patch_ray_cluster(patch) == server.answer
    assert server.asked == [("PATCH", CLUSTER, "Bearer secret", patch)]
    assert server.types == ["application/json-patch+json"]


def test_pods_and_events_are_those_of_the_cluster(api: KubernetesApi, server: Server) -> None:
    server.answer = {"items": [{"metadata": {"name": "a"}}]}
    assert api.pods("Pending") == api.pod_events("FailedScaleUp") == server.answer["items"]
    asked = [path.replace("%2F", "/").replace("%3D", "=").replace("%2C", ",") for _, path, _, _ in server.asked]
    assert asked == [
        "/api/v1/namespaces/default/pods?labelSelector=ray.io/cluster=tpus&fieldSelector=status.phase=Pending",
        "/api/v1/namespaces/default/events?fieldSelector=involvedObject.kind=Pod,reason=FailedScaleUp",
    ]


@pytest.mark.parametrize(
    ("status", "answer", "kind", "words"),
    [
        (403, {"message": "rayclusters is forbidden"}, ProviderDeniedError, "403 rayclusters is forbidden"),
        (401, {"message": "who are you"}, ProviderDeniedError, "401 who are you"),
        (
            422,
            {"message": "the test failed"},
            ProviderError,
            "refuses GET default/rayclusters/tpus: 422 the test failed",
        ),
        (500, [], ProviderError, "500 Internal Server Error"),
        (502, b"<html>", ProviderError, "can't be asked"),
    ],
)
def test_refusal_is_an_error_with_its_words(
    api: KubernetesApi, server: Server, status: int, answer: Any, kind: type[ProviderError], words: str
) -> None:
    server.status, server.answer = status, answer
    with pytest.raises(ProviderError, match=words) as caught:
        api.ray_cluster()
    assert type(caught.value) is kind


def test_unreachable_api_is_an_error() -> None:
    with pytest.raises(ProviderError, match="can't be asked"):
        KubernetesApi("http://127.0.0.1:1", "default", "tpus").ray_cluster()


def test_pod_names_api_and_replaced_certificates() -> None:
    found = KubernetesApi.of_this_pod(
        {
            **POD,
            "KUBERNETES_SERVICE_PORT_HTTPS": "6443",
            "RAY_KUBERAY_CA_CERT_PATH": "/ca",
            "RAY_KUBERAY_CLIENT_CERT_PATH": "/cert",
            "RAY_KUBERAY_CLIENT_KEY_PATH": "/key",
        }
    )
    assert found is not None
    assert (found.address, found.namespace, found.cluster) == ("https://10.0.0.1:6443", "default", "tpus")
    assert (found.certificate, found.client) == ("/ca", ("/cert", "/key"))


def test_namespace_of_older_kuberay_is_the_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    pod = {**POD, "RAY_CLUSTER_NAMESPACE": "", "KUBERNETES_SERVICE_HOST": "fd00::1"}
    assert KubernetesApi.of_this_pod(pod) is None
    (tmp_path / "namespace").write_text("tpus")
    found = KubernetesApi.of_this_pod(pod)
    assert found is not None
    assert (found.address, found.namespace) == ("https://[fd00::1]:443", "tpus")


@pytest.mark.parametrize("lacking", ["KUBERNETES_SERVICE_HOST", "RAY_CLUSTER_NAME"])
def test_process_outside_kuberay_has_no_api(lacking: str) -> None:
    assert KubernetesApi.of_this_pod({name: value for name, value in POD.items() if name != lacking}) is None
