"""An export from a cluster with jobs, imported on a new one: the jobs run there, with the files that they had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from iris_ray.testing import SimulatedCluster

SCRIPT = """\
import os, pathlib, sys
import beside  # a module of the working directory
pathlib.Path(sys.argv[1], "ran").write_text(f"{beside.WORD} {os.environ['TOLD']}")
"""


@pytest.mark.usefixtures("no_shared_cluster")
def test_waiting_job_runs_on_new_head_with_its_directory(tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()
    (work / "train.py").write_text(SCRIPT)
    (work / "beside.py").write_text("WORD = 'beside'")
    file = str(tmp_path / "queue.jsonl")
    with SimulatedCluster(connect=False, quiet=True) as old:
        options = ("--tpu", "v4-8", "--working-dir", str(work), "--env", "TOLD=it", "--name", "train")
        job = iris(old, "submit", str(work / "train.py"), *options, "--", str(tmp_path)).strip()
        iris(old, "cluster", "limits", "bob", "--chips", "8")
        assert "1 job" in iris(old, "cluster", "controller", "export", file, "--variables")
    (work / "beside.py").unlink()  # it has travelled
    with SimulatedCluster({"v4-8": 1}, connect=False, quiet=True) as new:
        assert "1 job in the queue" in iris(new, "cluster", "controller", "import", file)
        iris(new, "logs", "-f", job)
        assert (tmp_path / "ran").read_text() == "beside it"
        assert "bob" in iris(new, "cluster", "limits")


def iris(cluster: SimulatedCluster, *arguments: str) -> str:
    """Run a command on the cluster; return what it prints."""
    environ = {**os.environ, "RAY_ADDRESS": cluster.address, "IRIS_USER": "ann"}
    command = [sys.executable, "-m", "iris_ray", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout
