"""The main paths on ordinary Ray nodes, two hosts each, three slices, on every Ray and Python that iris_ray takes.

And KubeRay, on every Ray.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command_line import REPOSITORY

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]

OLDEST = "2.49.2"
OLDER = (OLDEST, "2.55.1")
NEWEST = "3.13"
OTHER_PYTHONS = ("3.12", NEWEST)  # on 3.12, CI runs what launches with Levanter and Fray
PATIENCE_S = 300.0
EXPECTED = {
    "results come in the order of slices and hosts": True,
    "an error reaches the caller": "ValueError: no such batch",
    "a crash is told apart": "TaskCrashedError",
    "a cancelled reference stops the gang": "TaskCancelledError",
    "a task without chips": [7],
    "a lost host costs one attempt on another slice": [2, True],
    "a drained node gives notice": "Ray is draining it",
    "iris-ray": {"ls": 0, "host ls": 0, "doctor": 0},
}


def pythons() -> list[object]:
    found: list[object] = [pytest.param(Path(sys.executable), id="newest", marks=pytest.mark.long)]
    environments = [(f".venv-ray-{ray}", ray, "make ray-versions", ray == OLDEST) for ray in OLDER]
    environments += [(f".venv-python-{it}", f"python{it}", "make pythons", it == NEWEST) for it in OTHER_PYTHONS]
    for folder, name, target, is_way_in in environments:
        ready = (REPOSITORY / folder / ".ready").exists()
        skip = pytest.mark.skipif(not ready, reason=f"needs {folder}: {target}")
        marks = [skip, pytest.mark.way_in if is_way_in else pytest.mark.long]
        found.append(pytest.param(REPOSITORY / folder / "bin" / "python", id=name, marks=marks))
    return found


@pytest.mark.parametrize("python", pythons())
def test_main_paths_work_on_plain_nodes(python: Path, tmp_path: Path) -> None:
    assert found_by(python, tmp_path, "tests.support.main_paths", str(tmp_path)) == EXPECTED


@pytest.mark.parametrize("python", pythons()[: 1 + len(OLDER)])  # every Ray
def test_rays_autoscaler_makes_missing_slices_on_kuberay(python: Path, tmp_path: Path) -> None:
    for story, found, wanted in found_by(python, tmp_path, "tests.support.kuberay_scenarios"):
        assert found == wanted, story


def found_by(python: Path, directory: Path, module: str, *arguments: str) -> Any:
    """What a module writes into the file that is its last argument."""
    found = directory / "found.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("IRIS_", "RAY_"))}
    command = [str(python), "-m", module, *arguments, str(found)]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own,  # short, for socket paths
        subprocess.Popen(
            command, cwd=REPOSITORY, env={**environment, "PYTHONPATH": str(REPOSITORY), "RAY_TMPDIR": own}
        ) as driver,
    ):
        try:
            assert driver.wait(PATIENCE_S) == 0
        finally:
            if driver.poll() is None:
                end_tree(driver)
    return json.loads(found.read_text())


def end_tree(driver: "subprocess.Popen[bytes]") -> None:
    """End a driver that hangs, and the nodes that it has started."""
    top = psutil.Process(driver.pid)
    for process in [*top.children(recursive=True), top]:
        process.kill()
