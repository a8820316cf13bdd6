"""Containers of tasks: their commands, their engine, their ends."""

import asyncio
import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.task_watch import TaskWatch
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.docker import host as module
from iris_ray.docker.core import ContainerSpec
from iris_ray.docker.host import (
    ContainerEngine,
    ContainerRecord,
    ContainerState,
    client_environment,
    container_environment,
    end_container,
    find_engine,
    run_arguments,
)
from iris_ray.errors import ContainerEngineError
from iris_ray.processes.tree import TOKEN_VARIABLE
from iris_ray.settings import CONTAINER_ENGINE
from tests.support.containers import StandIn
from tests.support.gangs import alive
from tests.support.processes import TOKEN, Make, Nursery, tree, watched
from tests.support.waiting import wait_until
from tests.unit.model.test_job_info import INFO

# -- commands ---------------------------------------------------------------------------------------------------------


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
    changing = {
        "PATH": "/opt/bin",
        "LD_PRELOAD": "x.so",
        "DOCKER_HOST": "tcp://there",
        "SSL_CERT_FILE": "/in/the/image.pem",  # with it, podman would trust no registry
    }
    variables = changing | {"DOCKER_PASSWORD": "s3cret"}
    arguments = run_arguments("one", spec(), variables, INFO)
    assert {f"--env={name}={value}" for name, value in changing.items()} <= set(arguments)
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
    task = replace(INFO, local_dir="/dev/shm/job/files")
    arguments = run_arguments("one", spec(), {"IRIS_RAY_TASK_FILES": f"{tmp_path}/tasks/77"}, task)
    assert f"--volume={tmp_path}/tasks:{tmp_path}/tasks" in arguments
    assert "--volume=/dev/shm/job:/dev/shm/job" in arguments


def test_container_has_the_output_directory_of_its_task_at_the_same_path() -> None:
    path = "/tmp/ray/iris_ray-0/outputs/job/task-0.attempt-1"
    variables = container_environment({"IRIS_OUTPUT_DIR": path}, spec(), INFO)
    assert variables["IRIS_OUTPUT_DIR"] == path
    arguments = run_arguments("one", spec(), variables, INFO)
    assert f"--volume={path}:{path}" in arguments


def test_container_has_only_variables_of_task_chips_and_user() -> None:
    environ = {
        "HOME": "/root",
        "RAY_JOB_ID": "01",
        "CLOUD_TPU_TASK_ID": "0",
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
        "CLOUD_TPU_TASK_ID": "0",
        "TPU_NAME": "mine",
        "TPU_SKIP_MDS_QUERY": "true",
        "JAX_PLATFORMS": "cpu",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_DEBUG": "1",
        "IRIS_RAY_TASK_TOKEN": "0a1b",
        "IRIS_RAY_TASK_FILES": "/ray/tasks/77",
    }


def test_container_has_paths_of_secrets_and_their_directory_mounted() -> None:
    wanted, directory = replace(spec(KEY="of the user"), secrets=("KEY", "IRIS_JOB_ID")), "/dev/shm/iris-ray-secrets-x"
    found = container_environment({"KEY": "/proc/7/fd/9"}, wanted, INFO, directory)
    assert (found["KEY"], found["IRIS_JOB_ID"]) == (f"{directory}/KEY", INFO.job_id)
    arguments = run_arguments("one", wanted, found, INFO, directory)
    assert f"--volume={directory}:{directory}:ro" in arguments
    assert not any("secrets" in argument for argument in run_arguments("one", spec(), {}, INFO))


def test_single_slice_container_has_no_megascale_variables() -> None:
    found = container_environment({}, spec(MEGASCALE_NUM_SLICES="2", PYTHONUNBUFFERED=""), INFO)
    assert not any(name.startswith("MEGASCALE") for name in found)
    assert found["PYTHONUNBUFFERED"] == ""


# -- engines ----------------------------------------------------------------------------------------------------------


def start(engine: StandIn, name: str, *command: str) -> "subprocess.Popen[bytes]":
    label = f"--label=iris-ray.container={name}"
    client = subprocess.Popen([engine.path, "run", f"--name={name}", label, "--env=PATH", "busybox", *command])
    wait_until(lambda: engine.pid(name) is not None)
    return client


def pid_of(engine: StandIn, name: str) -> int:
    pid = engine.pid(name)
    assert pid is not None
    return pid


def test_docker_is_used_if_it_answers_else_podman(
    tmp_path: Path, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = StandIn(tmp_path, "podman")
    monkeypatch.setenv("PATH", f"{engine.path.parent}:{podman.path.parent}")
    assert find_engine({}).path == str(engine.path)
    engine.break_down()
    assert find_engine({}).path == str(podman.path)


def test_operators_engine_choice_wins_and_is_not_replaced(
    tmp_path: Path, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    nerdctl = StandIn(tmp_path, "nerdctl")
    monkeypatch.setenv("PATH", str(engine.path.parent))
    assert find_engine({CONTAINER_ENGINE.name: str(nerdctl.path)}).path == str(nerdctl.path)
    nerdctl.break_down()
    with pytest.raises(ContainerEngineError, match="Cannot connect to the daemon"):
        find_engine({CONTAINER_ENGINE.name: str(nerdctl.path)})


def test_host_without_engine_says_why_for_each(engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(engine.path.parent))
    engine.break_down()
    message = r"docker: Cannot connect to the daemon; podman: there is no such command\). Install docker or podman"
    with pytest.raises(ContainerEngineError, match=message):
        find_engine({})


def test_running_container_is_killed_and_removed(engine: StandIn) -> None:
    client = start(engine, "one", "sleep", "60")
    pid = pid_of(engine, "one")
    assert ContainerEngine(str(engine.path)).state("one") == ContainerState("running", 0, False)
    assert ContainerEngine(str(engine.path)).remove("one") is None
    assert not alive(pid)
    assert engine.containers() == []
    client.kill()
    client.wait()


def test_missing_container_is_removed_at_once(engine: StandIn) -> None:
    assert ContainerEngine(str(engine.path)).remove("nobody", timeout_s=0.0) is None
    assert ContainerEngine(str(engine.path)).state("nobody") is None
    assert ContainerEngine(str(engine.path)).terminate("nobody") is False


def test_silent_engine_is_asked_again_and_says_why(
    engine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.break_down()
    docker = ContainerEngine(str(engine.path))
    assert docker.remove("one", timeout_s=0.0) == "Cannot connect to the daemon"
    threading.Timer(0.5, engine.repair).start()
    assert docker.remove("one") is None
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    os.chmod(hangs, 0o755)
    monkeypatch.setattr(module, "LEAST_ANSWER_S", 0.2)
    began = time.monotonic()
    assert "timed out" in str(ContainerEngine(str(hangs)).remove("one", timeout_s=0.3))
    assert time.monotonic() - began < 10, "a task's result doesn't wait for an engine that hangs"


def test_sigterm_reaches_program_and_exit_code_is_known(engine: StandIn, tmp_path: Path) -> None:
    script = "trap 'exit 7' TERM; touch $0/runs; while :; do sleep 0.05; done"
    client = start(engine, "one", "sh", "-c", script, str(tmp_path))
    wait_until((tmp_path / "runs").exists)
    docker = ContainerEngine(str(engine.path))
    assert docker.terminate("one")
    assert client.wait(60) == 7
    assert docker.state("one") == ContainerState("exited", 7, False)
    assert docker.terminate("one") is False


# -- ends: a host ends the containers of its tasks --------------------------------------------------------------------


def container_of(directory: Path, engine: StandIn, pid: int, *command: str) -> int:
    """Start a container that is recorded as that of a task's process, and whose client is gone; return its process."""
    name = f"of-{pid}"
    ContainerRecord(str(engine.path), name).write(TaskFiles.of_process(directory, pid))
    given = {**os.environ, TOKEN_VARIABLE: TOKEN}
    arguments = ["run", f"--name={name}", f"--label=iris-ray.container={name}", "--env=PATH", f"--env={TOKEN_VARIABLE}"]
    client = subprocess.Popen([engine.path, *arguments, "busybox", *command], env=given)
    wait_until(lambda: engine.pid(name) is not None)
    client.kill()
    client.wait()
    found = engine.pid(name)
    assert found is not None
    if command == WITHOUT_TOKEN:  # it has the token until `env` has become `sleep`
        wait_until(lambda: TOKEN_VARIABLE not in psutil.Process(found).environ())
    return found


WITHOUT_TOKEN = ("env", "-i", "sleep", "60")
"""A program that can't be found by its environment: only its engine can end it."""


def test_next_actor_ends_container_of_earlier_task(tmp_path: Path, engine: StandIn, nursery: Nursery) -> None:
    process = nursery.sleeper()
    ProcessLedger(tmp_path).record(tree(process))
    pid = container_of(tmp_path, engine, process.pid, *WITHOUT_TOKEN)
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not alive(pid)
    assert engine.containers() == []
    assert list((tmp_path / "tasks").iterdir()) == []


def test_container_that_cannot_be_ended_blocks_the_host(
    tmp_path: Path, engine: StandIn, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = nursery.sleeper()
    ledger, one = ProcessLedger(tmp_path), tree(process)
    ledger.record(one)
    pid = container_of(tmp_path, engine, process.pid, *WITHOUT_TOKEN)
    monkeypatch.setattr("iris_ray.docker.host.end_container", lambda files: end_container(files, 0.0))
    engine.break_down()
    name = f"of-{process.pid}"
    assert ledger.end_leftovers() == [f"container {name} (Cannot connect to the daemon)"]
    ledger.forget(one)  # a container whose task is forgotten is not
    assert ledger.end_leftovers() == [f"container {name} (Cannot connect to the daemon)"]
    assert alive(pid)
    engine.repair()
    monkeypatch.undo()
    assert ledger.end_leftovers() == []
    assert not alive(pid)


def test_stopped_task_ends_with_its_container(tmp_path: Path, engine: StandIn, make: Make) -> None:
    child = make("time.sleep(60)")
    pids = []

    async def stop(watch: TaskWatch) -> object:
        child.start()
        while not TaskFiles.of_process(tmp_path, child.process.pid).started.exists():
            await asyncio.sleep(0.01)
        pids.append(container_of(tmp_path, engine, child.process.pid, *WITHOUT_TOKEN))
        child.process.kill()
        child.process.wait()
        while not watch.ended:
            await asyncio.sleep(0.01)
        return await watch.end("cancelled")

    assert watched(child, tmp_path, stop) is None
    assert not any(map(alive, pids))
    assert engine.containers() == []


def test_container_of_running_task_is_left_alone(tmp_path: Path, engine: StandIn, nursery: Nursery) -> None:
    task, leftover = nursery.sleeper(), nursery.sleeper()
    shared = ProcessLedger(tmp_path, exclusive=False)
    shared.record(tree(task, "another"))
    pid = container_of(tmp_path, engine, task.pid, *WITHOUT_TOKEN)
    exclusive = ProcessLedger(tmp_path)
    exclusive.record(tree(leftover))
    assert exclusive.end_leftovers() == []
    assert alive(pid)


def test_containers_program_and_children_belong_to_their_task(
    tmp_path: Path, engine: StandIn, nursery: Nursery
) -> None:
    """Its first process carries the token; others may have another environment. So they are no strangers on chips."""
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(process))
    pid = container_of(tmp_path, engine, process.pid, "sh", "-c", "env -i sleep 60; true")
    first = psutil.Process(pid)
    (child,) = wait_until(first.children)
    wait_until(lambda: child.name() == "sleep")
    assert TOKEN_VARIABLE not in child.environ()
    assert ledger.owned({first.pid}) == {first.pid}
    assert ledger.owned({child.pid}) == {child.pid}
    assert not ledger.owned({nursery.sleeper().pid})


def test_container_whose_record_is_unreadable_blocks_the_host(
    tmp_path: Path, engine: StandIn, nursery: Nursery
) -> None:
    process = nursery.sleeper()
    ProcessLedger(tmp_path).record(tree(process))
    pid = container_of(tmp_path, engine, process.pid, *WITHOUT_TOKEN)
    record = TaskFiles.of_process(tmp_path, process.pid).owned("docker")
    aside = record.rename(tmp_path / "aside")
    record.mkdir()  # reading it fails
    (left,) = ProcessLedger(tmp_path).end_leftovers()
    assert left.startswith(f"processes that the service docker has started for pid {process.pid} (IsADirectoryError")
    assert alive(pid)
    record.rmdir()
    aside.rename(record)
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not alive(pid)


def test_task_without_a_container_needs_no_engine(tmp_path: Path) -> None:
    files = TaskFiles.of_process(tmp_path, 77)
    assert end_container(files) == []
    files.all_owned.mkdir(parents=True)
    files.owned("docker").write_text("{")
    assert end_container(files) == []
