"""The head's machine is lost and comes back, on a cluster whose GCS keeps everything on disk."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.testing import SimulatedCluster
from tests.support.waiting import wait_until

SUBMIT = """
import sys, time
from pathlib import Path
from iris_ray import IrisClient, ResourceSpec, get_job_info, tpu_device

directory = Path(sys.argv[2])

def work():
    me = get_job_info()
    (directory / f"{me.job_id}-{me.attempt}-{me.task_index}").touch()
    while not (directory / "finish").exists():
        time.sleep(0.1)

with IrisClient.remote(sys.argv[1]) as client:
    need = ResourceSpec(device=tpu_device("v4-16"))
    for _ in range(2):
        print(client.submit(work, resources=need, detached=True).job_id)
"""

TRAIN = """
import sys, time
from pathlib import Path
from beside import WORD
from iris_ray import get_job_info

directory, me = Path(sys.argv[1]), get_job_info()
(directory / f"{me.job_id}-{me.attempt}-{me.task_index}-{WORD}").touch()
while not (directory / "finish").exists():
    time.sleep(0.1)
"""


@pytest.fixture
def headless(no_shared_cluster: None) -> Iterator[SimulatedCluster]:
    """A cluster of which this process is no driver."""
    with SimulatedCluster({"v4-16": 1}, connect=False, persistent=True, quiet=True) as running:
        yield running


@pytest.mark.long
def test_detached_jobs_survive_head_restart(headless: SimulatedCluster, tmp_path: Path) -> None:
    """The Controller and what keeps the jobs were on it. The one that ran begins again, the other one waits on."""

    def starts(job_id: str) -> set[str]:
        return {path.name.removeprefix(f"{job_id}-") for path in tmp_path.glob(f"{job_id}-*")}

    def listed(job_id: str) -> str:
        listing = [sys.executable, "-m", "iris_ray", "ls", "--all", "--address", headless.address]
        said = subprocess.run(listing, capture_output=True, text=True, timeout=120).stdout
        return next((line for line in said.splitlines() if job_id in line), "")

    command = [sys.executable, "-c", SUBMIT, headless.address, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, second = done.stdout.split()
    wait_until(lambda: starts(first) == {"1-0", "1-1"}, 120)
    wait_until(lambda: "running" in listed(first), 60)  # or its launch has failed, and the other one goes first
    headless.restart_head()
    wait_until(lambda: starts(first) >= {"2-0", "2-1"}, 120)
    assert not starts(second)
    (tmp_path / "finish").touch()
    wait_until(lambda: starts(second) >= {"1-0", "1-1"}, 120)

    wait_until(lambda: "succeeded" in listed(first) and "succeeded" in listed(second), 60)


@pytest.mark.long
def test_job_of_a_laptop_survives_head_restart(no_shared_cluster: None, tmp_path: Path) -> None:
    """It reaches nothing but the dashboard, and the job that submitted its job ran on the head."""
    workspace, trace = tmp_path / "workspace", tmp_path / "trace"
    workspace.mkdir()
    trace.mkdir()
    (workspace / "beside.py").write_text("WORD = 'blue'")
    (workspace / "train.py").write_text(TRAIN)
    with SimulatedCluster({"v4-16": 1}, connect=False, dashboard=True, persistent=True, quiet=True) as running:
        submit = [sys.executable, "-m", "iris_ray", "submit", "--address", str(running.dashboard_url), "--tpu", "v4-16"]
        command = [*submit, "train.py", "--", str(trace)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=workspace)
        assert done.returncode == 0, done.stdout + done.stderr
        job_id = done.stdout.strip()
        wait_until(lambda: {path.name for path in trace.iterdir()} == {f"{job_id}-1-0-blue", f"{job_id}-1-1-blue"}, 120)
        running.restart_head()
        again = {f"{job_id}-2-0-blue", f"{job_id}-2-1-blue"}
        wait_until(lambda: {path.name for path in trace.iterdir()} >= again, 180)
        (trace / "finish").touch()
