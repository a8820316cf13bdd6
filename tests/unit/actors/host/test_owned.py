"""What tasks own outside their process trees: a host is free only if that is known to be gone."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.host import owned
from iris_ray.actors.host.owned import end_owned
from iris_ray.actors.protocol.services import Service
from iris_ray.actors.protocol.task_files import TaskFiles

Place = Callable[[Any], None]


@pytest.fixture
def files(tmp_path: Path) -> TaskFiles:
    files = TaskFiles.of_process(tmp_path, 7)
    files.all_owned.mkdir(parents=True)
    files.owned("boxes").write_text("a box")
    return files


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Say what the service ``boxes`` does to end what a task owns."""
    monkeypatch.setattr(owned, "installed_services", lambda: [Service("boxes", ends_owned="somewhere:end")])
    monkeypatch.setattr(owned, "END_S", 0.2)
    return lambda function: monkeypatch.setattr(owned, "imported", lambda _: function)


def hangs(_: TaskFiles) -> list[str]:
    time.sleep(2.0)
    return []


def exits(_: TaskFiles) -> list[str]:
    raise SystemExit(3)


def test_what_a_service_leaves_is_left(files: TaskFiles, ends: Place) -> None:
    ends(lambda _: ["a box (it is stuck)"])
    assert end_owned(files) == ["a box (it is stuck)"]
    assert files.all_owned.exists()
    files.owned("boxes").unlink()  # as the service does
    ends(lambda _: [])
    assert end_owned(files) == []
    assert not files.all_owned.exists()


def test_files_of_other_tasks_are_not_listed(files: TaskFiles, ends: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have thousands of them."""
    listed, list_directory = list[str](), os.listdir

    def noted(folder: Any) -> list[str]:
        listed.append(str(folder))
        return list_directory(folder)

    monkeypatch.setattr(os, "listdir", noted)
    ends(lambda _: ["a box"])
    assert end_owned(files) == ["a box"]
    assert listed == [str(files.all_owned)]


@pytest.mark.parametrize(
    "function",
    [exits, lambda _: None, lambda _: {}, lambda _: [5], 5],
    ids=["exits", "None", "dict", "number", "no function"],
)
def test_host_is_not_free_if_a_service_fails(files: TaskFiles, ends: Place, function: Any) -> None:
    ends(function)
    (left,) = end_owned(files)
    assert "processes that the service boxes has started for pid 7 (" in left


def test_service_that_hangs_keeps_no_process_from_its_exit(files: TaskFiles, ends: Place) -> None:
    ends(hangs)
    (left,) = end_owned(files)
    assert "no answer within 0.2 s" in left
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("boxes"))


def test_host_is_not_free_if_its_files_cannot_be_read(
    files: TaskFiles, ends: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    ends(lambda _: [])
    monkeypatch.setattr(os, "listdir", fails)
    monkeypatch.setattr(os, "scandir", fails)
    (left,) = end_owned(files)
    assert "can't be read" in left
    monkeypatch.undo()
    assert end_owned(TaskFiles("/nonexistent/tasks/7")) == []


def test_record_that_was_broken_off_owns_nothing(tmp_path: Path) -> None:
    files = TaskFiles(str(tmp_path / "77"))
    files.all_owned.mkdir()
    unfinished = Path(f"{files.owned('box')}.4242")
    unfinished.write_text("ha")
    assert end_owned(files) == []
    assert not unfinished.exists()
