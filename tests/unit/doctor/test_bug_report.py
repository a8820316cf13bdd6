"""``iris-ray bug-report``: one file that says what happened, and no value of a variable."""

from pathlib import Path

import pytest

from iris_ray.cli.conventions import USAGE
from tests.support.controller_in_process import ControllerInProcess


def test_report_of_failed_job_names_its_first_cause(
    world: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = world.start("train-1a2b3c4d")
    world.prints(job, 1, "farewell\n")
    world.fail(job, 1, "was killed by SIGKILL")
    path = tmp_path / f"{job}.report.txt"
    path.write_text("of yesterday, for everybody")
    done = world.iris("bug-report", job)
    report = path.read_text()
    assert f"{path.name}: {len(report.splitlines())} lines" in done.stdout
    assert path.stat().st_mode & 0o077 == 0, "for the person alone, until they have read it"
    said = {part.partition("\n")[0]: part for part in report.split("== iris-ray ")[1:]}
    assert "failed" in said[f"job status {job}"]
    assert "was killed by SIGKILL" in said[f"job events {job}"]
    assert "farewell" in said[f"logs {job} --tail 200"]
    assert "versions" in said["doctor"]
    assert f"job stacks {job}" not in said


def test_report_goes_to_stdout_if_asked(world: ControllerInProcess) -> None:
    job = world.submit("train", slices=(7,))
    report = world.iris("bug-report", job, "-o", "-").stdout
    assert f"== iris-ray why {job}" in report
    assert "Read this before you send it" in report


def test_report_of_unknown_job_is_refused(world: ControllerInProcess, tmp_path: Path) -> None:
    assert "there is no job" in world.iris("bug-report", "nobody", code=USAGE).stderr
    assert "is a directory" in world.iris("bug-report", "nobody", "-o", str(tmp_path), code=USAGE).stderr
