"""Levanter's config of a program in containers: what is refused, what is sent, and what runs on the cluster."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from iris_ray import RayJobConfig
from iris_ray.errors import InvalidRequestError, InvalidSliceCountError, UnknownTPUTypeError
from iris_ray.levanter import RunDockerOnPodConfig, docker, run_docker_on_pod, submit_tpu_job_on_ray

ODD = "a b\"c'd\n$e"
CONFIG = RunDockerOnPodConfig(
    "gcr.io/p/train", ["python", ODD], "v4-16", MappingProxyType({"A": ODD}), retries=3, node_count=2
)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"image_id": "-x"}, InvalidRequestError, "image_id is '-x'"),
        ({"command": "echo 'a"}, InvalidRequestError, "which no shell could read: No closing quotation"),
        ({"command": [7]}, InvalidRequestError, r"command is \[7\]"),
        ({"tpu_type": "v4-15"}, UnknownTPUTypeError, "v4-16"),
        ({"env": {"A": 7}}, InvalidRequestError, "env must be a mapping"),
        ({"env": {"A": "x" * 200_000}}, InvalidRequestError, "the environment variable A takes"),
        ({"node_count": 0}, InvalidSliceCountError, "at least 1 slice"),
        ({"node_count": 90_000}, InvalidRequestError, "180000 tasks, and the limit is 100,000"),
        ({"retries": -1}, InvalidRequestError, "max_retries_failure is -1; give an int of 0 or more"),
        ({"retries": 2.5}, InvalidRequestError, "max_retries_failure is 2.5"),
        ({"name": "x" * 200}, InvalidRequestError, "has 200 characters, and the limit is 100"),
        ({"name": 7}, InvalidRequestError, "name is 7; give a str"),
    ],
)
def test_impossible_config_is_refused(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        RunDockerOnPodConfig(**{"image_id": "busybox", "command": ["true"], "tpu_type": "v4-16", **changes})


def test_config_has_levanters_fields_and_hides_values() -> None:
    config = RunDockerOnPodConfig("busybox", "echo 'a b' c", "v4-16", env={"TOKEN": "s3cret"})
    assert (config.name, config.retries, config.node_count) == ("levanter", 10, 1)
    assert config.arguments == ["echo", "a b", "c"]
    assert "s3cret" not in repr(config)


def test_config_travels_as_file_and_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        "iris_ray.docker.client.run_docker_on_pod", lambda *args, **options: ran.append((args, options))
    )

    def submit(config: RayJobConfig, address: str, run_id: str | None) -> str:
        assert not config.env
        assert config.command[:3] == ["python", "-m", "iris_ray.levanter.docker"]
        assert isinstance(config.working_dir, str)
        docker.main(Path(config.working_dir) / config.command[3])
        return f"{run_id} at {address}"

    monkeypatch.setattr("iris_ray.remote.ray_jobs.submit_tpu_job_on_ray", submit)
    assert submit_tpu_job_on_ray(CONFIG, "http://there") == "run_docker_levanter at http://there"
    assert submit_tpu_job_on_ray(CONFIG, "http://there", "mine") == "mine at http://there"
    spaced = replace(CONFIG, name="my run")
    assert submit_tpu_job_on_ray(spaced, "http://there") == "run_docker_my-run at http://there"
    ran.pop()
    wanted = {"tpu_type": "v4-16", "num_slices": 2, "env": {"A": ODD}, "name": "levanter", "max_retries_failure": 3}
    assert ran == [(("gcr.io/p/train", ["python", ODD]), wanted)] * 2


def test_retries_by_levanters_name_are_failure_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[dict[str, Any]] = []
    monkeypatch.setattr("iris_ray.docker.client.run_docker_on_pod", lambda *_, **options: ran.append(options))
    for given in ({"retries": 3}, {"max_retries_failure": 4}, {}):
        run_docker_on_pod("busybox", ["true"], tpu_type="v4-16", **dict[str, Any](given))
    assert [options["max_retries_failure"] for options in ran] == [3, 4, 10]


def test_other_configs_are_sent_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "iris_ray.remote.ray_jobs.submit_tpu_job_on_ray", lambda config, address, run_id: f"{config.name} at {address}"
    )
    assert submit_tpu_job_on_ray(RayJobConfig(["python", "train.py"], None), "http://there") == "train at http://there"
