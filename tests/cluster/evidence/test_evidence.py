"""What is left of tasks that crash and of a gang that hangs, on real nodes."""

import os
import time
from pathlib import Path

import pytest
import ray

from iris_ray import get_job_info, heartbeat, run_on_pod
from iris_ray.errors import TaskCrashedError
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris, iris_json
from tests.support.gangs import all_jobs


def test_crash_names_the_logs_that_libtpu_has_left(cluster: SimulatedCluster, tmp_path: Path) -> None:
    def dies_in_libtpu() -> None:
        me = get_job_info()
        assert me is not None
        if me.task_index == 0:
            name = f"tpu_driver.host.root.log.FATAL.20261130-040000.{os.getpid()}"
            Path(os.environ["TPU_LOG_DIR"], name).write_text("Check failed: chip\nAPI_KEY=abcdef\n")
            os.abort()
        time.sleep(1000.0)

    (tmp_path / "logs").mkdir()
    function = ray.remote(runtime_env={"env_vars": {"TPU_LOG_DIR": str(tmp_path / "logs")}})(dies_in_libtpu)
    with pytest.raises(TaskCrashedError, match="SIGABRT; see the last lines of libtpu's logs"):
        run_on_pod(function, "v4-16", max_retries_failure=0)
    job = all_jobs()[-1].job_id
    command = f"iris-ray cp --output {job}/0:iris-ray . --attempt 1"
    assert command in " ".join(iris(cluster, "job", "status", job).stdout.split())
    iris(cluster, *command.split()[1:4], str(tmp_path / "kept"), *command.split()[5:])
    assert "Check failed: chip" in (tmp_path / "kept" / "libtpu.txt").read_text()
    report = iris(cluster, "bug-report", job, "--output", "-").stdout
    assert "== task 0, attempt 1: libtpu.txt" in report
    assert "API_KEY=***" in report
    assert "abcdef" not in report


def test_hang_leaves_the_stacks_and_the_output_of_every_task(cluster: SimulatedCluster, tmp_path: Path) -> None:
    def hangs() -> None:
        heartbeat(0)
        print("before the hang", flush=True)
        time.sleep(1000.0)

    with pytest.raises(RuntimeError, match="no task has made progress"):
        run_on_pod(hangs, "v4-16", max_retries_failure=0, stall_timeout=3.0)
    job = all_jobs()[-1].job_id
    found = {(one["task"], one["path"]) for one in iris_json(cluster, "cp", "--output", job)}
    assert {(task, f"iris-ray/{name}") for task in (0, 1) for name in ("stacks.txt", "output.txt")} <= found
    for task in (0, 1):
        iris(cluster, "cp", "--output", f"{job}/{task}:iris-ray", str(tmp_path / str(task)))
        assert "hangs" in (tmp_path / str(task) / "stacks.txt").read_text()
        assert "before the hang" in (tmp_path / str(task) / "output.txt").read_text()
    assert f"iris-ray cp --output {job}" in " ".join(iris(cluster, "job", "status", job).stdout.split())
