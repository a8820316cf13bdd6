"""Output directories on real hosts: they outlive their tasks, stay within the limit, and age out."""

import os
import time
from pathlib import Path

import pytest

from iris_ray import IrisClient, ResourceSpec, get_job_info, run_on_pod
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris, iris_json
from tests.support.gangs import all_jobs
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def job(cluster: SimulatedCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job whose two tasks write a file in each of two attempts; the first one fails when both have written."""
    written = tmp_path_factory.mktemp("written")

    def writes() -> None:
        me = get_job_info()
        assert me is not None
        Path(os.environ["IRIS_OUTPUT_DIR"], "attempt").write_text(f"{me.attempt} of {me.task_index}")
        (written / f"{me.attempt}-{me.task_index}").touch()
        until = time.monotonic() + 120.0
        while len(list(written.glob(f"{me.attempt}-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        if me.attempt == 1:
            raise RuntimeError("the first attempt fails")

    run_on_pod(writes, "v4-16", max_retries_failure=1)
    return all_jobs()[-1].job_id


def test_files_of_every_attempt_outlive_the_job(cluster: SimulatedCluster, job: str, tmp_path: Path) -> None:
    found = iris_json(cluster, "cp", "--output", job)
    assert [(one["task"], one["attempt"], one["path"]) for one in found] == [
        (0, 1, "attempt"),
        (0, 2, "attempt"),
        (1, 1, "attempt"),
        (1, 2, "attempt"),
    ]
    iris(cluster, "cp", "--output", f"{job}/1", str(tmp_path / "latest"))
    iris(cluster, "cp", "--output", f"{job}/1:attempt", str(tmp_path / "first"), "--attempt", "1")
    assert (tmp_path / "latest" / "attempt").read_text() == "2 of 1"
    assert (tmp_path / "first").read_text() == "1 of 1"


@pytest.mark.usefixtures("job")  # the settings need a Controller
def test_running_task_that_writes_too_much_loses_its_oldest_files(cluster: SimulatedCluster) -> None:
    def fills() -> list[str]:
        me, path = get_job_info(), Path(os.environ["IRIS_OUTPUT_DIR"])
        assert me is not None
        for number in range(8 if me.task_index == 0 else 0):
            (path / str(number)).write_bytes(os.urandom(1 << 20) * 200)
            time.sleep(0.1)
        until = time.monotonic() + 90.0
        while len(list(path.iterdir())) > 5 and time.monotonic() < until:
            time.sleep(0.5)
        return sorted(one.name for one in path.iterdir())

    iris(cluster, "cluster", "settings", "set", "task_output_gb=1")
    try:
        left, *_ = run_on_pod(fills, "v4-16")
        assert left == ["3", "4", "5", "6", "7"]
        name = all_jobs()[-1].job_id
        done = iris(cluster, "cp", "--output", name)
        assert "3 files, 600 MB, were removed to stay within the cluster setting task_output_gb" in done.stderr
    finally:
        iris(cluster, "cluster", "settings", "reset", "task_output_gb")


def test_task_without_chips_that_fills_its_directory_and_ends_at_once_is_bounded(cluster: SimulatedCluster) -> None:
    """Its host has no chips and is shared, and no look sees the task while it runs."""

    def fills() -> None:
        for number in range(8):
            Path(os.environ["IRIS_OUTPUT_DIR"], str(number)).write_bytes(os.urandom(1 << 20) * 200)

    iris(cluster, "cluster", "settings", "set", "task_output_gb=1")
    try:
        job = IrisClient().submit(fills, "fills", resources=ResourceSpec(cpu=1))
        job.results(180)
        wait_until(lambda: len(iris_json(cluster, "cp", "--output", job.job_id)) == 5)
    finally:
        iris(cluster, "cluster", "settings", "reset", "task_output_gb")


@pytest.mark.proof
def test_unused_directories_leave_nothing_behind(cluster: SimulatedCluster) -> None:
    run_on_pod(lambda: None, "v4-16")
    name = all_jobs()[-1].job_id
    roots = [cluster.host_dir(slice_name, 0) / "outputs" for slice_name in cluster.slice_names]
    wait_until(lambda: not any((root / name).exists() for root in roots), 30)
