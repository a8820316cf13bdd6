"""A task has its output directory from its first line on."""

import os
from pathlib import Path

import pytest
from ray import cloudpickle

from iris_ray.actors.host import task_process
from tests.unit.actors.host.test_task_process import _environment_comes_back, run

__all__ = ["_environment_comes_back"]


def test_directory_is_there_however_late_a_hook_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """User code goes on without a hook that does not return within a second, as on an overloaded host."""
    monkeypatch.setattr(task_process, "call_hooks", lambda places, files: None)
    end = run(lambda: os.listdir(os.environ["IRIS_OUTPUT_DIR"]))
    assert (end.error, cloudpickle.loads(end.payload)) == ("", [])


def test_task_whose_directory_can_not_be_created_goes_on(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("in the way")
    end = run(lambda: os.environ["IRIS_OUTPUT_DIR"])
    assert cloudpickle.loads(end.payload) == str(tmp_path / "outputs" / "job" / "task-1.attempt-2")
