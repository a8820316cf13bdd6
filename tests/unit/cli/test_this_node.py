"""Which Ray node of this machine is meant."""

from pathlib import Path

import psutil
import pytest

from iris_ray.cli.give_notice import LocalNode, local_nodes, this_node
from iris_ray.errors import InvalidRequestError, UnknownNameError
from iris_ray.settings import HOST_DIR


class Raylet:
    """A process as psutil shows it."""

    def __init__(self, *command: str, environ: dict[str, str] | None = None) -> None:
        self.info = {"cmdline": list(command)}
        self._environ = environ

    def environ(self) -> dict[str, str]:
        if self._environ is None:
            raise psutil.AccessDenied
        return self._environ

    def uids(self) -> object:
        return type("Uids", (), {"real": 1000})


def raylet(node_id: str, gcs: str = "10.0.0.1:6379", resources: str = "TPU,4.0,CPU,8", **environ: str) -> Raylet:
    flags = {"node_id": node_id, "gcs-address": gcs, "static_resource_list": resources, "temp_dir": "/tmp/ray"}
    return Raylet(
        "/ray/core/src/ray/raylet/raylet", *(f"--{name}={value}" for name, value in flags.items()), environ=environ
    )


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[Raylet]:
    """The processes of this machine; a test adds some."""
    found = [Raylet("python", "--node_id=no raylet"), Raylet()]
    monkeypatch.setattr(psutil, "process_iter", lambda *_: iter(found))
    return found


def test_node_of_pod_is_found_by_its_raylet(running: list[Raylet]) -> None:
    running.append(raylet("a" * 56))
    assert this_node("the-head-svc.default.svc:6379", {}) == LocalNode(
        "a" * 56, "10.0.0.1:6379", Path("/tmp/ray/iris_ray-1000"), takes_jobs=True
    )


def test_raylet_of_another_user_hides_the_directory(running: list[Raylet]) -> None:
    running.append(raylet("a" * 56))
    running[-1]._environ = None
    assert this_node("auto", {}).directory is None


def test_address_and_directory_tell_several_nodes_apart(running: list[Raylet]) -> None:
    running += [raylet("a" * 56, **{HOST_DIR.name: "/a"}), raylet("b" * 56, **{HOST_DIR.name: "/b"})]
    running.append(raylet("c" * 56, gcs="10.0.0.7:6379"))
    assert this_node("10.0.0.7:6379", {}).node_id == "c" * 56
    assert this_node("auto", {HOST_DIR.name: "/b"}).node_id == "b" * 56
    with pytest.raises(InvalidRequestError, match="2 Ray nodes run on this machine: aaaaaaaaaaaa, bbbbbbbbbbbb"):
        this_node("10.0.0.1:6379", {})


def test_head_without_cpus_for_tasks_has_no_jobs_to_tell(running: list[Raylet]) -> None:
    running.append(raylet("a" * 56, resources="node:10.0.0.1,1.0,CPU,0,memory,1e9"))
    with pytest.raises(UnknownNameError, match="no job can run on this machine"):
        this_node("auto", {})


def test_nodes_of_this_machine_are_read_without_ray(running: list[Raylet]) -> None:
    running += [raylet("a" * 56), Raylet("/ray/raylet", "--flag-of-an-older-ray")]
    assert [node.node_id for node in local_nodes()] == ["a" * 56]
