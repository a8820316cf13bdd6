"""A job of Fray's becomes a complete request of ours, or is refused by name. Nothing is dropped without a word."""

import dataclasses
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from iris_ray.errors import InvalidFunctionError, InvalidRequestError, UnsupportedOptionError
from iris_ray.fray import job_request
from iris_ray.fray.actor_server import actor_request
from iris_ray.fray.client import Client
from iris_ray.fray.job_request import Command, InTask, band_of
from iris_ray.model.options import PriorityBand

types = pytest.importorskip("fray.types", reason="needs Fray: make marin")


def fray_request(request: Any) -> Any:
    return job_request.fray_request(request, Client)


def job(**asked: Any) -> Any:
    entrypoint = types.Entrypoint.from_callable(print, ["a"], {"end": "b"})
    return types.JobRequest(**{"name": "job", "entrypoint": entrypoint, **asked})


def environment(**asked: Any) -> Any:
    return types.EnvironmentConfig(workspace="/somewhere", **asked)


def test_retries_name_and_priority_come_from_the_job() -> None:
    spec = fray_request(job(max_retries_failure=2, max_retries_preemption=3, priority=3)).spec
    assert (spec.name, spec.max_retries_failure, spec.max_retries_preemption) == ("job", 2, 3)
    assert spec.priority is PriorityBand.BATCH


@pytest.mark.parametrize("asked", [{}, {"max_task_failures": 0}, {"max_task_failures": 3}])
def test_task_failures_are_those_of_frays_job(asked: dict[str, int]) -> None:
    """Fray's default is 0: the job fails with the first failed attempt."""
    if "max_task_failures" not in {field.name for field in dataclasses.fields(types.JobRequest)}:
        pytest.skip("this release of Fray has no such field")
    assert fray_request(job(**asked)).spec.max_task_failures == asked.get("max_task_failures", 0)


def test_timeout_is_the_longest_run() -> None:
    if "timeout" not in {field.name for field in dataclasses.fields(types.JobRequest)}:
        pytest.skip("this release of Fray has no such field")
    assert fray_request(job(timeout=types.Duration.from_minutes(90))).spec.max_runtime == 5400.0
    assert fray_request(job()).spec.max_runtime is None


def test_job_without_retries_has_frays_budgets() -> None:
    spec = fray_request(job()).spec
    assert (spec.max_retries_failure, spec.max_retries_preemption) == (0, 100)


def test_replicas_of_job_win_over_slices_of_resources() -> None:
    two = types.ResourceConfig.with_tpu("v4-16", slice_count=2)
    counts = [fray_request(job(resources=two, replicas=n)).spec.coscheduling for n in (None, 6)]
    assert [config.num_groups for config in counts if config] == [(2,), (3,)]


def test_job_variables_win_over_device_variables() -> None:
    tpu = types.ResourceConfig.with_tpu("v6e-16")
    plain = fray_request(job(resources=tpu)).env
    assert plain["JAX_PLATFORMS"] == ""
    assert "vmem" in plain["LIBTPU_INIT_ARGS"]
    own = fray_request(job(resources=tpu, environment=environment(env_vars={"JAX_PLATFORMS": "cpu", "A": "b"}))).env
    assert own == {**plain, "JAX_PLATFORMS": "cpu", "A": "b"}
    assert fray_request(job()).env["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        (types.ResourceConfig(cpu=1.5, ram="2g"), (2 * 1024**3, 1.5, 0, 0)),
        (types.ResourceConfig.with_gpu("H100", count=2, cpu=1, ram="1g"), (1024**3, 1.0, 2, 0)),
        (types.ResourceConfig.with_tpu("v4-16", cpu=1, ram="1g"), (1024**3, 1.0, 0, 4)),
    ],
    ids=str,
)
def test_iris_code_in_task_knows_its_resources(
    monkeypatch: pytest.MonkeyPatch, asked: Any, has: tuple[float, ...]
) -> None:
    env_resources = pytest.importorskip("iris.env_resources")
    monkeypatch.setenv("IRIS_TASK_RESOURCES", fray_request(job(resources=asked)).env["IRIS_TASK_RESOURCES"])
    env_resources._read_iris_resource_proto.cache_clear()
    found = env_resources.TaskResources.from_environment()
    assert (found.memory_bytes, found.cpu_cores, found.gpu_count, found.tpu_count) == has


def test_packages_go_to_runtime_environment() -> None:
    made = fray_request(job(environment=environment(pip_packages=["einops"], env_vars={"PYTHONHASHSEED": "1"})))
    assert made.process.runtime_env == {"pip": ["einops"], "env_vars": {"PYTHONHASHSEED": "1"}}


def test_extras_are_left_to_image_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fray_request(job(environment=environment(extras=["tpu"])))
    assert "job job: extras ['tpu'] are not installed; the image of the cluster must have them" in caplog.text


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"name": "a/b"}, InvalidRequestError, "without slashes"),
        ({"priority": 7}, InvalidRequestError, "priority is 7"),
        ({"max_retries_failure": -1}, InvalidRequestError, "max_retries_failure"),
        ({"entrypoint": types.Entrypoint()}, InvalidFunctionError, "neither a function nor a program"),
        ({"resources": types.ResourceConfig(image="x")}, UnsupportedOptionError, "image of the resources is 'x'"),
        (
            {"environment": types.EnvironmentConfig(docker_image="x")},
            UnsupportedOptionError,
            "docker_image of the environment is 'x'",
        ),
        ({"environment": environment(env_vars={"A": 1})}, InvalidRequestError, "env must be"),
    ],
    ids=str,
)
def test_unsupported_values_are_refused_by_name(asked: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fray_request(job(**asked))


@pytest.mark.parametrize(
    ("newer", "said"),
    [
        ("processes_per_task", "one process"),
        ("secrets", "the secret a.key would be a file"),
        ("setup_scripts", "in"),
    ],
)
def test_options_of_newer_fray_are_refused(newer: str, said: str) -> None:
    made = job(environment=environment())
    holder = made if newer == "processes_per_task" else made.environment
    object.__setattr__(holder, newer, {"processes_per_task": 2, "secrets": {"a.key": "abc"}}.get(newer, ["x"]))
    with pytest.raises(UnsupportedOptionError, match=said) as refused:
        fray_request(made)
    assert "abc" not in str(refused.value)


def test_secrets_of_frays_job_stay_secret() -> None:
    if "secrets" not in {field.name for field in dataclasses.fields(types.EnvironmentConfig)}:
        pytest.skip("this release of Fray has no such field")
    made = fray_request(job(environment=environment(secrets={"HF_TOKEN": "abc"})))
    assert made.secrets["HF_TOKEN"].value == "abc"
    assert "abc" not in repr(made)


@pytest.mark.parametrize("isolated", [False, True])
def test_tokens_of_environment_are_forwarded_unless_job_is_isolated(
    isolated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secrets = pytest.importorskip("rigging.secrets", reason="needs Fray: make marin")
    if not hasattr(secrets, "forwarded_secrets"):
        pytest.skip("this release of Fray forwards none")
    for name, value in {"HF_TOKEN": "mine", "WANDB_API_KEY": "key", secrets.SECRETS_DIR_ENV: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "MOUNTED").write_text("there")
    (tmp_path / "a.file").write_text("no variable can have this name")
    behavior = secrets.SecretBehavior.ISOLATE if isolated else secrets.SecretBehavior.INHERIT
    asked = environment(secrets={"HF_TOKEN": "named"}, secret_behavior=behavior)
    found = {name: secret.value for name, secret in fray_request(job(environment=asked)).secrets.items()}
    assert found == {"HF_TOKEN": "named", **({} if isolated else {"WANDB_API_KEY": "key", "MOUNTED": "there"})}
    without = fray_request(job(environment=None)).secrets  # Fray's default
    assert {name: secret.value for name, secret in without.items()} == {
        "HF_TOKEN": "mine", "WANDB_API_KEY": "key", "MOUNTED": "there",
    }  # fmt: skip
    in_env = environment(env_vars={"WANDB_API_KEY": "of the job"}, secrets={"HF_TOKEN": "named"})
    assert "WANDB_API_KEY" not in fray_request(job(environment=in_env)).secrets


def test_forwarded_secret_that_no_task_can_get_does_not_fail_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = {"HF_TOKEN": "mine", "CERTIFICATES": 20_000 * "s3cr3t", "EMPTY": "", "BINARY": "a\0b"}
    monkeypatch.setattr(job_request, "forwarded_secrets", lambda exclude: there)
    with caplog.at_level(logging.WARNING):
        assert fray_request(job()).secrets.keys() == {"HF_TOKEN"}
    for name in ("CERTIFICATES", "EMPTY", "BINARY"):
        assert f"the secret {name} of this process is not forwarded" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_bands_are_those_of_iris() -> None:
    job_pb2 = pytest.importorskip("iris.rpc.job_pb2")
    numbers = {name.removeprefix("PRIORITY_BAND_"): number for name, number in job_pb2.PriorityBand.items()}
    numbers.setdefault("SYSTEM", 4)  # older releases lack it
    assert {band: band_of(numbers[band.name]) for band in PriorityBand} == {band: band for band in PriorityBand}
    assert fray_request(job(priority=4)).spec.priority_reason == "its program has asked for Fray's priority 4"
    assert fray_request(job(priority=1)).spec.priority_reason is None
    with pytest.raises(InvalidRequestError, match="priority is True"):
        band_of(True)


@pytest.mark.parametrize(("priority", "band"), [(0, PriorityBand.BATCH), (1, PriorityBand.PRODUCTION)])
def test_job_without_priority_has_band_of_its_parent(
    priority: int, band: PriorityBand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IRIS_PRIORITY", "batch")
    assert job_request.fray_request(job(priority=priority), Client).spec.priority is band
    config = types.ActorConfig(priority=priority)
    made = actor_request(Client, dict, (), {}, "eval", 1, None, config, None)
    assert made.spec.priority is band


def test_unpicklable_function_is_refused_at_once() -> None:
    with pytest.raises(InvalidFunctionError, match="can't be pickled"):
        fray_request(job(entrypoint=types.Entrypoint.from_callable(print, [sys.stdout])))


def inner(request: Any) -> Any:
    """What runs in the task once the client is set."""
    task = cloudpickle.loads(request.pickled_function)
    assert isinstance(task, InTask)
    return cloudpickle.loads(task.pickled)


def test_function_gets_its_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    inner(fray_request(job()))()
    assert capfd.readouterr().out == "ab"


def test_program_gets_unchanged_arguments_and_its_exit_code_counts(capfd: pytest.CaptureFixture[str]) -> None:
    program = types.Entrypoint.from_binary(
        sys.executable, ["-c", "import sys; print(sys.argv); sys.exit(3)", "a b", "$HOME"]
    )
    command = inner(fray_request(job(entrypoint=program)))
    assert isinstance(command, Command)
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        command()
    assert capfd.readouterr().out == "['-c', 'a b', '$HOME']\n"
    replace(command, arguments=("-c", "pass"))()
