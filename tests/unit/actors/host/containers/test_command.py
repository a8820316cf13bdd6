"""Which variables a container has, and what of them is on the command line that starts it."""

from dataclasses import replace
from pathlib import Path

from iris_ray.actors.host.containers import client_environment, container_environment, run_arguments
from iris_ray.model.job_spec import ContainerSpec
from tests.unit.model.test_job_info import INFO

ODD = "a b\"c'd\n$e\\ ü"


def spec(**env: str) -> ContainerSpec:
    return ContainerSpec("busybox", ["echo", ODD], env, ["--volume=/data:/data"])


def test_values_reach_client_intact_and_off_the_command_line() -> None:
    variables = {"TOKEN": "s3cret", "ODD": ODD}
    arguments = run_arguments("one", spec(), variables, INFO)
    assert not any("s3cret" in argument for argument in arguments)
    assert {"--env=TOKEN", "--env=ODD"} <= set(arguments)
    assert client_environment({"PATH": "/bin"}, variables) == {"PATH": "/bin", "TOKEN": "s3cret", "ODD": ODD}


def test_variables_affecting_the_client_go_by_value() -> None:
    variables = {"PATH": "/opt/bin", "LD_PRELOAD": "x.so", "DOCKER_HOST": "tcp://there", "DOCKER_PASSWORD": "s3cret"}
    arguments = run_arguments("one", spec(), variables, INFO)
    assert {"--env=PATH=/opt/bin", "--env=LD_PRELOAD=x.so", "--env=DOCKER_HOST=tcp://there"} <= set(arguments)
    assert "--env=DOCKER_PASSWORD" in arguments
    own = {"PATH": "/bin", "DOCKER_HOST": "unix:///here"}
    assert client_environment(own, variables) == {**own, "DOCKER_PASSWORD": "s3cret"}


def test_user_options_stand_between_ours_and_the_image() -> None:
    arguments = run_arguments("one", spec(), {}, INFO)
    assert arguments[0] == "run"
    assert arguments[-4:] == ["--volume=/data:/data", "busybox", "echo", ODD]
    ours = {"--privileged", "--net=host", "--ipc=host", "--name=one", "--label=iris-ray.container=one"}
    assert ours <= set(arguments[:-4])


def test_container_sees_directories_of_notices_and_job(tmp_path: Path) -> None:
    task = replace(INFO, local_dir="/dev/shm/job")
    arguments = run_arguments("one", spec(), {"IRIS_RAY_TASK_FILES": f"{tmp_path}/tasks/77"}, task)
    assert f"--volume={tmp_path}/tasks:{tmp_path}/tasks" in arguments
    assert "--volume=/dev/shm/job:/dev/shm/job" in arguments


def test_container_has_only_variables_of_task_chips_and_user() -> None:
    environ = {
        "HOME": "/root",
        "RAY_JOB_ID": "01",
        "TPU_NAME": "pod-1",
        "TPU_SKIP_MDS_QUERY": "true",
        "JAX_PLATFORMS": "cpu",
        "MEGASCALE_SLICE_ID": "1",
        "IRIS_RAY_TASK_TOKEN": "0a1b",
        "IRIS_RAY_TASK_FILES": "/ray/tasks/77",
        "IRIS_RAY_MODE": "simulate",
    }
    user = {"IRIS_TASK_INDEX": "99", "MEGASCALE_SLICE_ID": "9", "MEGASCALE_DEBUG": "1", "TPU_NAME": "mine"}
    found = container_environment(environ, spec(**user), INFO)
    assert found == {
        **INFO.to_env(),
        "PYTHONUNBUFFERED": "1",
        "TPU_NAME": "mine",
        "TPU_SKIP_MDS_QUERY": "true",
        "JAX_PLATFORMS": "cpu",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_DEBUG": "1",
        "IRIS_RAY_TASK_TOKEN": "0a1b",
        "IRIS_RAY_TASK_FILES": "/ray/tasks/77",
    }


def test_single_slice_container_has_no_megascale_variables() -> None:
    found = container_environment({}, spec(MEGASCALE_NUM_SLICES="2", PYTHONUNBUFFERED=""), INFO)
    assert not any(name.startswith("MEGASCALE") for name in found)
    assert found["PYTHONUNBUFFERED"] == ""
