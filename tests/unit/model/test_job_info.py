"""What a task knows about itself, through its environment."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from iris_ray.errors import InvalidRequestError
from iris_ray.model.job_info import JobInfo
from iris_ray.task.job_info import get_job_info

INFO = JobInfo(
    job_id="train-1f",
    task_id="train-1f/task-5",
    task_index=5,
    num_tasks=8,
    attempt=3,
    slice_id=1,
    num_slices=2,
    slice_name="slice-b",
    worker_id=1,
    coordinator_address="10.0.0.1:20002",
)


def test_get_job_info_outside_a_task_is_none() -> None:
    assert get_job_info({}) is None
    assert get_job_info({"IRIS_RAY_HOST_DIR": "/somewhere"}) is None


@pytest.mark.parametrize("previous", [None, 0, 5])
def test_get_job_info_reads_back_what_to_env_wrote(previous: int | None) -> None:
    info = replace(INFO, previous_task_index=previous)
    assert get_job_info(info.to_env()) == info


@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("hosts", [(), ("10.0.0.1:4000",), ("10.0.0.1:4000", "", "10.0.0.3:4001")])
def test_addresses_travel_once_for_each_host(hosts: tuple[str, ...], per_host: int) -> None:
    of_tasks = tuple(address for address in hosts for _ in range(per_host))
    info = replace(INFO, file_services=of_tasks, processes_per_host=per_host)
    env = info.to_env()
    assert env["IRIS_FILE_SERVICES"] == ",".join(hosts)
    assert get_job_info(env) == info


def test_child_process_of_task_has_its_job_info() -> None:
    script = "from iris_ray import get_job_info; print(get_job_info())"
    child = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **INFO.to_env()}, capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == repr(INFO)


@pytest.mark.parametrize("missing", ["IRIS_JOB_ID", "IRIS_LOCAL_DIR"])
def test_child_with_incomplete_variables_is_told_what_is_missing(missing: str) -> None:
    env = INFO.to_env()
    del env[missing]
    with pytest.raises(InvalidRequestError, match=f"IRIS_TASK_ID is set, and {missing} is not"):
        get_job_info(env)
