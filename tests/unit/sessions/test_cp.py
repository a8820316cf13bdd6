"""``iris-ray cp``: real sessions and real files, copied whole or not at all."""

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import pytest

from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.sessions import cp
from tests.support.controller_in_process import ControllerInProcess
from tests.unit.sessions.test_cli import JOB, begin, nursery, tasks

__all__ = ["begin", "nursery", "tasks"]
pytestmark = pytest.mark.usefixtures("tasks")
BYTES = random.Random(0).randbytes(3_000_000)


def left_behind(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".iris-ray-cp-")]


def test_file_is_copied_both_ways_byte_by_byte(world: ControllerInProcess, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "data").write_bytes(BYTES)
    (here / "data").chmod(0o750)
    sent = world.json("cp", str(here / "data"), f"{JOB}/1:{there}")
    assert (there / "data").read_bytes() == BYTES
    assert (there / "data").stat().st_mode & 0o777 == 0o750
    assert sent["target"] == str(there / "data")
    assert sent["bytes"] == len(BYTES)
    world.iris("cp", f"{JOB}/1:{there}/data", str(here / "again"))
    assert (here / "again").read_bytes() == BYTES
    (there / "data").write_text("new")
    world.iris("cp", f"{JOB}:{there}/data", str(here))
    assert (here / "data").read_text() == "new"
    assert left_behind(here) == left_behind(there) == []


def test_directory_is_copied_with_what_is_in_it(world: ControllerInProcess, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (made / "deep").mkdir(parents=True)
    (made / "deep" / "x").write_text("x")
    (made / "link").symlink_to("deep/x")
    world.iris("cp", str(made), f"{JOB}:{tmp_path}/sent")
    assert (tmp_path / "sent" / "link").read_text() == "x"
    world.iris("cp", f"{JOB}:{tmp_path}/sent", str(tmp_path / "back"))
    assert os.readlink(tmp_path / "back" / "link") == "deep/x"
    refused = world.iris("cp", f"{JOB}:{tmp_path}/sent", str(tmp_path / "back" / "deep" / "x"), code=USAGE)
    assert "exists already" in refused.stderr
    world.iris("cp", f"{JOB}:{tmp_path}/sent", str(tmp_path / "back"))
    assert (tmp_path / "back" / "sent" / "deep" / "x").exists()


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("target", ["../x", "../../x", "/etc/passwd"])
def test_directory_with_link_out_of_it_is_refused(
    world: ControllerInProcess, tmp_path: Path, target: str, to_host: bool
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "out").symlink_to(target)
    there, made = f"{JOB}:{tmp_path}", str(tmp_path / "made")
    words = (made, f"{there}/sent") if to_host else (f"{there}/made", str(tmp_path / "sent"))
    assert "link" in world.iris("cp", *words, code=FAILED if to_host else USAGE, quotes=True).stderr
    assert not (tmp_path / "sent").exists()
    assert left_behind(tmp_path) == []


def test_link_that_is_named_is_followed_both_ways(world: ControllerInProcess, tmp_path: Path) -> None:
    """Such as latest.log. A copy of the link alone would lead nowhere, or to itself."""
    here, there = tmp_path / "here", tmp_path / "there"
    for made in (here, there):
        made.mkdir()
    (here / "run-7.log").write_text("seven")
    (here / "latest").symlink_to("run-7.log")
    sent = world.json("cp", str(here / "latest"), f"{JOB}:{there}")
    assert sent["target"] == str(there / "latest")
    assert sent["bytes"] == 5
    assert (there / "latest").read_text() == "seven"
    assert not (there / "latest").is_symlink()
    (there / "link").symlink_to("latest")
    world.iris("cp", f"{JOB}:{there}/link", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "seven"
    assert not (tmp_path / "back").is_symlink()
    (there / "made").mkdir()
    (there / "made" / "x").write_text("x")
    (there / "directory").symlink_to("made")
    world.iris("cp", f"{JOB}:{there}/directory", str(tmp_path / "copied"))
    assert (tmp_path / "copied" / "x").read_text() == "x"


def test_relative_path_is_that_of_the_task(world: ControllerInProcess, tmp_path: Path) -> None:
    (tmp_path / "of-the-task").write_text("x")
    world.iris("cp", f"{JOB}:of-the-task", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_text() == "x"


def test_copy_that_is_cut_off_changes_nothing(
    world: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_bytes(BYTES)
    (tmp_path / "target").write_text("before")
    pieces = cp._pieces

    async def fewer(file: IO[bytes]) -> AsyncIterator[bytes]:
        async for data in pieces(file):
            yield data
            return

    monkeypatch.setattr(cp, "_pieces", fewer)
    done = world.iris("cp", str(tmp_path / "data"), f"{JOB}:{tmp_path}/target", code=FAILED, quotes=True)
    assert "Traceback" not in done.stderr
    assert (tmp_path / "target").read_text() == "before"
    assert left_behind(tmp_path) == []


def test_copy_from_host_that_fails_changes_nothing(world: ControllerInProcess, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("before")
    monkeyed = tmp_path / "unreadable"
    done = world.iris("cp", f"{JOB}:{monkeyed}", str(tmp_path / "target"), code=USAGE, quotes=True)
    assert f"iris-ray: there is no {monkeyed} on the task's host" in done.stderr
    assert (tmp_path / "target").read_text() == "before"
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a", "b"), "give one path on a task's host"),
        ((f"{JOB}:a", f"{JOB}:b"), "give one path on a task's host"),
        (("./no:such", f"{JOB}:b"), "there is no file or directory no:such here"),
        ((f"{JOB}/9:a", "."), "there is no task"),
        ((f"{JOB}:a", "/no/such/directory/x"), "is not a directory"),
    ],
)
def test_copy_that_can_not_work_is_refused(world: ControllerInProcess, words: tuple[str, str], said: str) -> None:
    assert said in world.iris("cp", *words, code=USAGE).stderr


def test_missing_directory_there_is_named(world: ControllerInProcess, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    done = world.iris("cp", str(tmp_path / "data"), f"{JOB}:/no/such/x", code=USAGE, quotes=True)
    assert "iris-ray: there is no directory /no/such on the task's host" in done.stderr
