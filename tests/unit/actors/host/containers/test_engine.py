"""Which container engine a host uses, and what is asked of it."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from iris_ray.actors.host import containers as module
from iris_ray.actors.host.containers import ContainerEngine, ContainerState, find_engine
from iris_ray.errors import ContainerEngineError
from iris_ray.settings import CONTAINER_ENGINE
from tests.support.containers import StandIn
from tests.support.gangs import alive
from tests.support.waiting import wait_until


def start(engine: StandIn, name: str, *command: str) -> "subprocess.Popen[bytes]":
    label = f"--label=iris-ray.container={name}"
    client = subprocess.Popen([engine.path, "run", f"--name={name}", label, "--env=PATH", "busybox", *command])
    wait_until(lambda: engine.pid(name) is not None)
    return client


def pid_of(engine: StandIn, name: str) -> int:
    pid = engine.pid(name)
    assert pid is not None
    return pid


def test_docker_is_used_if_it_answers_and_podman_if_not(
    tmp_path: Path, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = StandIn(tmp_path, "podman")
    monkeypatch.setenv("PATH", f"{engine.path.parent}:{podman.path.parent}")
    assert find_engine({}).path == str(engine.path)
    engine.break_down()
    assert find_engine({}).path == str(podman.path)


def test_operators_choice_comes_first_and_is_not_replaced(
    tmp_path: Path, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    nerdctl = StandIn(tmp_path, "nerdctl")
    monkeypatch.setenv("PATH", str(engine.path.parent))
    assert find_engine({CONTAINER_ENGINE.name: str(nerdctl.path)}).path == str(nerdctl.path)
    nerdctl.break_down()
    with pytest.raises(ContainerEngineError, match="Cannot connect to the daemon"):
        find_engine({CONTAINER_ENGINE.name: str(nerdctl.path)})


def test_host_without_an_engine_says_why_for_each(engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(engine.path.parent))
    engine.break_down()
    message = r"docker: Cannot connect to the daemon; podman: there is no such command\). Install docker or podman"
    with pytest.raises(ContainerEngineError, match=message):
        find_engine({})


def test_container_that_runs_is_killed_and_removed(engine: StandIn) -> None:
    client = start(engine, "one", "sleep", "60")
    pid = pid_of(engine, "one")
    assert ContainerEngine(str(engine.path)).state("one") == ContainerState("running", 0, False)
    assert ContainerEngine(str(engine.path)).remove("one") is None
    assert not alive(pid)
    assert engine.containers() == []
    client.kill()
    client.wait()


def test_container_that_is_not_there_is_removed_at_once(engine: StandIn) -> None:
    assert ContainerEngine(str(engine.path)).remove("nobody", timeout_s=0.0) is None
    assert ContainerEngine(str(engine.path)).state("nobody") is None
    assert ContainerEngine(str(engine.path)).terminate("nobody") is False


def test_engine_that_does_not_answer_is_asked_again_and_says_why(
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
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    assert "timed out" in str(ContainerEngine(str(hangs)).remove("one", timeout_s=0.0))


def test_sigterm_reaches_the_program_and_its_exit_code_is_known(engine: StandIn, tmp_path: Path) -> None:
    script = "trap 'exit 7' TERM; touch $0/runs; while :; do sleep 0.05; done"
    client = start(engine, "one", "sh", "-c", script, str(tmp_path))
    wait_until((tmp_path / "runs").exists)
    docker = ContainerEngine(str(engine.path))
    assert docker.terminate("one")
    assert client.wait(60) == 7
    assert docker.state("one") == ContainerState("exited", 7, False)
    assert docker.terminate("one") is False
