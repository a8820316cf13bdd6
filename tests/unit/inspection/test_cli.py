"""``iris-ray job stacks`` and ``profile`` of what does not run; tests/cluster/inspection has what does."""

from pathlib import Path

import pytest

from iris_ray.cli.conventions import USAGE
from iris_ray.inspection import client as inspection
from iris_ray.inspection.host import Profile
from tests.support.command_line import address_of_nobody, invoke
from tests.support.controller_in_process import ControllerInProcess


def test_only_running_tasks_have_stacks_and_profiles(world: ControllerInProcess) -> None:
    world.start("train", slices=(3,))
    waits = world.submit("eval")
    assert "no task runs: pending" in world.iris("job", "stacks", waits).stderr
    assert world.json("job", "stacks", waits) == []
    refused = world.iris("job", "profile", waits, "1", code=USAGE).stderr
    assert "task 1 is pending: only a running one can be looked into" in refused
    assert "did you mean train" in world.iris("job", "stacks", "trian", code=USAGE).stderr
    assert "7" in world.iris("job", "profile", waits, "7", code=USAGE).stderr


def test_profile_into_impossible_file_is_refused(tmp_path: Path) -> None:
    for output, said in ((tmp_path / "none" / "x.svg", "none is not a directory"), (tmp_path, "is a directory")):
        done = invoke("job", "profile", "train-1", "0", "-o", str(output), "--address", address_of_nobody())
        assert done.exit_code == USAGE
        assert said in done.stderr


def test_profile_of_a_tasks_own_job_is_written_locally(
    world: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inspection, "place_of", lambda *_: ("node", "10.0.0.1"))
    monkeypatch.setattr(inspection, "profile", lambda *_: Profile(b"a picture", waits=True))
    world.start("parent/child")
    done = world.iris("job", "profile", "parent/child", "0")
    assert "parent-child-0.svg: 9 bytes" in done.stdout
    assert "all threads waited" in done.stderr
    assert (tmp_path / "parent-child-0.svg").read_bytes() == b"a picture"


def test_one_of_several_processes_on_a_host_is_named_by_its_own_index(world: ControllerInProcess) -> None:
    world.start("train", slices=(3,))
    waits = world.submit("eval", processes_per_host=2)  # two hosts
    for command in ("profile", "chips"):
        assert "task 3 is pending" in world.iris("job", command, waits, "3", code=USAGE).stderr
        assert "there are 0 to 3" in world.iris("job", command, waits, "4", code=USAGE).stderr
