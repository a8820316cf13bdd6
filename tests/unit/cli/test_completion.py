"""What the shell completes of a cluster: the names that its Controller knows, if it answers at once."""

import subprocess
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from iris_ray.cli import completion
from iris_ray.cli.main import main
from tests.support.command_line import address_of_nobody
from tests.support.controller_in_process import ControllerInProcess

ADDRESS = "10.0.0.1:6379"


def completed(*words: str) -> list[str]:
    found = ShellComplete(main, {}, "iris-ray", "").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


@pytest.fixture
def answering(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> ControllerInProcess:
    """The cluster answers at `ADDRESS`, within a second; the process that completion starts to ask is this one."""

    def run(command: list[str], env: dict[str, str], timeout: float, **_: Any) -> Any:
        assert command[1:3] == ["-m", "iris_ray"]
        if timeout < 1.0:
            raise subprocess.TimeoutExpired(command, timeout)
        if env["RAY_ADDRESS"] != ADDRESS:
            raise subprocess.CalledProcessError(3, command)
        return subprocess.CompletedProcess(command, 0, stdout=world.iris(*command[3:]).stdout)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("RAY_ADDRESS", address_of_nobody())
    return world


def test_shell_completes_jobs_and_slices_of_answering_cluster(answering: ControllerInProcess) -> None:
    ended, runs = answering.start("tabbed-1a2b3c4d"), answering.start("tab-5e6f7a8b")
    answering.succeed(ended)
    at = ("--address", ADDRESS)
    assert completed("logs", *at, "tab") == completed("job", "status", *at, "tab") == [runs, ended]
    assert completed("why", *at, "tab") == completed("cancel", *at, "tab") == [runs]
    assert completed("logs", *at, "other") == []
    assert completed("host", "drain", *at, "v4-16-1") == ["v4-16-1"]


def test_shell_completes_nothing_of_silent_cluster(answering: ControllerInProcess) -> None:
    answering.start("tabbed")
    assert completed("logs", "tab") == []


def test_shell_does_not_wait_for_a_slow_answer(answering: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    answering.start("tabbed")
    monkeypatch.setattr(completion, "PATIENCE_S", 0.01)
    assert completed("logs", "--address", ADDRESS, "tab") == []
