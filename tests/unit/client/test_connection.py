"""Refused in words: a cluster of another Ray or Python, one that can't be joined from here, a choice among several."""

import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray._private import services
from ray._private.utils import check_version_info

from iris_ray.actors.calls import ray_internals
from iris_ray.client.connection import connect, require_cluster
from iris_ray.errors import InvalidRequestError, NoClusterError, VersionMismatchError

OTHER = {"ray_version": "2.49.2", "python_version": "3.9.7"}


class Greeting(socketserver.BaseRequestHandler):
    """Greets as a Ray head does, with an HTTP/2 SETTINGS frame."""

    def handle(self) -> None:
        self.request.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))


@pytest.fixture
def head() -> Iterator[str]:
    """The address of a server that greets as a Ray head does."""
    with socketserver.TCPServer(("127.0.0.2", 0), Greeting) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"127.0.0.2:{server.server_address[1]}"
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("join", [lambda: connect("auto"), require_cluster])
def test_cluster_of_other_ray_is_refused_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, join: Callable[[], None], head: str
) -> None:
    def init(**_: Any) -> None:
        check_version_info(OTHER, "node 10.0.0.9")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_internals, "addresses_found_on_this_machine", lambda: [head])
    monkeypatch.setattr(services, "find_node_ids", lambda: {"ab12"}, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(VersionMismatchError) as refused:
        join()
    for said in ("Ray: 2.49.2 Python: 3.9.7", f"Ray: {ray.__version__}", "of the cluster's image here"):
        assert said in str(refused.value)


@pytest.mark.skipif(not hasattr(services, "find_node_ids"), reason="this Ray compares IP addresses")
@pytest.mark.parametrize("way", ["connect", "require_cluster"])
def test_head_that_answers_is_refused_where_no_node_runs(monkeypatch: pytest.MonkeyPatch, way: str, head: str) -> None:
    monkeypatch.setattr(services, "find_node_ids", set)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray waits a minute for a node"))
    monkeypatch.setenv("RAY_ADDRESS", head)
    with pytest.raises(NoClusterError) as refused:
        connect(head) if way == "connect" else require_cluster()
    for said in (head, "no Ray node runs on this machine", "http://HEAD:8265", "iris-ray submit --ray-job"):
        assert said in str(refused.value)


@pytest.mark.parametrize("given", [None, "", "auto"])
@pytest.mark.parametrize("join", [lambda: connect("auto"), require_cluster])
def test_nobody_chooses_among_clusters_of_one_machine(
    monkeypatch: pytest.MonkeyPatch, join: Callable[[], None], given: str | None
) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"10.0.0.1:6380", "10.0.0.1:6379"})
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it has joined one of them"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(InvalidRequestError, match=r"^2 Ray clusters run .*, at 10\.0\.0\.1:6379, 10\.0\.0\.1:6380;"):
        join()
