"""What `run_docker_on_pod` refuses at the door, and the request that it makes of the rest."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iris_ray import Secret, run_docker_on_pod
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.payloads import load
from iris_ray.docker import client as module
from iris_ray.docker.core import ContainerSpec
from iris_ray.errors import (
    InvalidModeError,
    InvalidRequestError,
    InvalidTopologyError,
    TaskCrashedError,
    UnknownTPUTypeError,
)
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.parts import part_attribute
from tests.support.containers import a_stand_in

FILE = Secret("s3cr3t", as_file=True)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"image_id": "--net=none"}, InvalidRequestError, "image_id is '--net=none'"),
        ({"command": "python train.py"}, InvalidRequestError, "command is 'python train.py'; give a list"),
        ({"env": [("A", "b")]}, InvalidRequestError, "env must be a mapping"),
        ({"env": {"A": "x" * 200_000}}, InvalidRequestError, "the environment variable A takes"),
        ({"env": {"A": "nul\0"}}, InvalidRequestError, "there is a NUL in it"),
        ({"env": {"A": "\ud800"}}, InvalidRequestError, "it holds half of a character"),
        ({"container_options": ["--rm"]}, InvalidRequestError, "'--rm', which is iris_ray's"),
        ({"topology": "4x4"}, InvalidTopologyError, "has parts of whole hosts in these shapes: 2x2x1"),
        ({"topology": "2x2x1", "num_slices": 2}, InvalidTopologyError, "would connect parts by MEGASCALE"),
        ({"tpu_type": "v4-15"}, UnknownTPUTypeError, "v4-16"),
        ({"max_retries_failure": -1}, InvalidRequestError, "max_retries_failure is -1"),
        ({"name": 7}, InvalidRequestError, "name is 7; give a str"),
        ({"mode": "clutser"}, InvalidModeError, "did you mean 'cluster'"),
        ({"secrets": {"KEY": "s3cr3t"}}, InvalidRequestError, "secrets must be a mapping of names to secrets"),
        ({"secrets": {"KEY": Secret("s3cr3t")}}, InvalidRequestError, r"docker inspect.*KEY.*as_file=True.*exec …"),
        ({"secrets": {"KEY": FILE}, "env": {"KEY": "x"}}, InvalidRequestError, "KEY is in secrets and in env"),
        ({"preload": ["jax"]}, TypeError, "unexpected keyword argument 'preload'"),
        ({"max_retry_failure": 3}, TypeError, "did you mean 'max_retries_failure'"),
    ],
)
def test_bad_arguments_are_refused_before_acquiring_anything(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {"image_id": "busybox", "command": ["true"], "tpu_type": "v4-16"}
    with pytest.raises(error, match=message) as refused:
        run_docker_on_pod(**{**good, **given})
    assert "s3cr3t" not in str(refused.value)


@pytest.fixture
def request_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunRequest]:
    """Calls the function and returns the request that it would run."""
    made: list[RunRequest] = []
    monkeypatch.setattr(module, "run_request", lambda request, mode: made.append(request))

    def call(*args: Any, **options: Any) -> RunRequest:
        assert run_docker_on_pod(*args, tpu_type="v4-16", **options) is None
        return made.pop()

    return call


def test_arguments_reach_the_job_and_the_container(request_of: Callable[..., RunRequest]) -> None:
    request = request_of(
        "gcr.io/p/train:v7",
        ["python", "t.py"],
        num_slices=2,
        max_retries_failure=3,
        spares=1,
        env={"A": "b", "HOME": "/x"},
    )
    spec = request.spec
    assert (spec.name, spec.max_retries_failure, spec.max_retries_preemption, spec.spares) == ("train", 3, 10_000, 1)
    (container,) = load(request.pickled_function).args
    assert container == ContainerSpec("gcr.io/p/train:v7", ["python", "t.py"], {"A": "b", "HOME": "/x"})
    assert not request.env, "the variables are the container's, and not those of the process that starts it"
    assert "env_vars" not in request.process.runtime_env


def test_containers_run_on_a_part_of_a_slice(request_of: Callable[..., RunRequest]) -> None:
    spec = request_of("busybox", [], topology="2x2x1").spec
    assert spec.coscheduling == CoschedulingConfig(part_attribute("2x2x1"))
    assert (spec.replicas, spec.whole_groups) == (1, False)


def test_secrets_travel_beside_the_container(request_of: Callable[..., RunRequest]) -> None:
    given = {"KEY": FILE, "STORED": Secret.from_store("A", as_file=True)}
    request = request_of("busybox", [], secrets=given)
    (container,) = load(request.pickled_function).args
    assert (container.secrets, request.spec.stored_secrets) == (("KEY", "STORED"), ("A",))
    assert request.secrets["KEY"].value == "s3cr3t"
    assert b"s3cr3t" not in request.pickled_function


@pytest.mark.parametrize(
    ("image", "name"),
    [("busybox", "busybox"), ("localhost:5000/a/b@sha256:0a1b", "b"), ("k8s.gcr.io/pause:3.9", "pause")],
)
def test_job_is_named_after_its_image_by_default(request_of: Callable[..., RunRequest], image: str, name: str) -> None:
    assert request_of(image, []).spec.name == name
    assert request_of(image, [], name="mine").spec.name == "mine"


def test_help_shows_the_options() -> None:
    parameters = inspect.signature(run_docker_on_pod).parameters
    assert {"stall_timeout", "spares", "keep_warm", "priority"} <= set(parameters)
    assert parameters["max_retries_failure"].default == 10


def test_local_containers_get_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_stand_in(tmp_path) as engine:
        monkeypatch.setenv("IRIS_RAY_CONTAINER_ENGINE", str(engine.path))
        script = 'cat "$KEY" > $0-$IRIS_TASK_INDEX'
        command = ["sh", "-c", script, str(tmp_path / "read")]
        path = {"PATH": os.environ["PATH"]}
        run_docker_on_pod("busybox", command, tpu_type="v4-16", mode="simple", secrets={"KEY": FILE}, env=path)
    assert [(tmp_path / f"read-{index}").read_text() for index in range(2)] == ["s3cr3t"] * 2


def test_failing_local_container_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' engine clients are killed, and what hangs on the engine is not."""
    script = (
        "touch $0-$IRIS_TASK_INDEX; [ $IRIS_TASK_INDEX = 1 ] || exec env -i sleep 60; while [ ! -e $0-0 ]; do :; done"
    )
    with a_stand_in(tmp_path) as engine:
        monkeypatch.setenv("IRIS_RAY_CONTAINER_ENGINE", str(engine.path))
        with pytest.raises(TaskCrashedError, match="worker 1: the container's program exited with code 5"):
            run_docker_on_pod(
                "busybox", ["sh", "-c", f"{script}; exit 5", str(tmp_path / "runs")], tpu_type="v4-16", mode="simple"
            )
        assert len(engine.calls("run")) == 2
        assert engine.containers() == []
