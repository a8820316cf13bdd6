"""Jobs of Fray's on a simulated cluster, where Fray is installed: `make fray`."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from iris_ray import IrisClient, get_job_info
from iris_ray.fray import Client
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace
from tests.support.waiting import wait_until

types = pytest.importorskip("fray.types", reason="needs Fray: make fray")
fray_client = pytest.importorskip("fray.client")
pytestmark = pytest.mark.proof

CPU = types.ResourceConfig(cpu=1, ram="100m")
V4_16 = types.ResourceConfig.with_tpu("v4-16", cpu=1, ram="100m")
STATUS = types.JobStatus


@pytest.fixture
def client(cluster: SimulatedCluster) -> Client:
    return Client()


def job(name: str, function: Any, *args: Any, resources: Any = CPU, **options: Any) -> Any:
    options.setdefault("environment", types.EnvironmentConfig(workspace=".", env_vars={"JAX_PLATFORMS": "cpu"}))
    entrypoint = types.Entrypoint.from_callable(function, args)
    return types.JobRequest(name=name, entrypoint=entrypoint, resources=resources, **options)


def write_place(folder: Path) -> None:
    me = get_job_info()
    assert me is not None
    (folder / f"{me.task_index}").write_text(f"{me.num_tasks} {me.num_slices} {bool(me.slice_name)}")


def places(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir())]


def sleep() -> None:
    time.sleep(600)


def test_job_runs_on_all_hosts_of_slices_as_one_gang(client: Client, tmp_path: Path) -> None:
    resources = types.ResourceConfig.with_tpu("v4-16", slice_count=2, cpu=1, ram="100m")
    handle = client.submit(job("train", write_place, tmp_path, resources=resources))
    assert handle.wait(120) is STATUS.SUCCEEDED
    assert places(tmp_path) == ["4 2 True"] * 4
    assert handle.job_id.startswith("train-")


def test_tasks_without_tpu_run_each_for_itself_and_what_a_program_prints_is_in_the_logs(
    client: Client, tmp_path: Path
) -> None:
    tasks = client.submit(job("tokenise", write_place, tmp_path, replicas=3))
    program = types.Entrypoint.from_binary(sys.executable, ["-c", "print('a\\nb c\\nd')"])
    printed = client.submit(types.JobRequest("print", program, CPU))
    statuses = fray_client.wait_all([tasks, printed], timeout=120)
    assert statuses == [STATUS.SUCCEEDED] * 2
    assert places(tmp_path) == ["3 1 False"] * 3
    assert printed.logs() == ("a", "b c", "d")
    assert printed.logs(max_lines=2) == ("b c", "d")


def test_failure_is_an_error_of_frays_with_the_reason_unless_the_status_is_wanted(client: Client) -> None:
    program = types.Entrypoint.from_binary(sys.executable, ["-c", "import sys; sys.exit(3)"])
    handle = client.submit(types.JobRequest("fails", program, CPU))
    with pytest.raises(fray_client.JobFailed) as failed:
        handle.wait(120)
    assert (failed.value.job_id, failed.value.failed_status) == (handle.job_id, STATUS.FAILED)
    assert "exit status 3" in "".join(failed.value.__notes__)
    assert handle.wait(raise_on_failure=False) is STATUS.FAILED


def test_job_is_found_by_its_name_until_it_is_terminated(client: Client) -> None:
    handle = client.submit(job("long", sleep, resources=V4_16))
    wait_until(lambda: handle.status() is STATUS.RUNNING)
    assert Client().submit(job("long", sleep, resources=V4_16)).job_id == handle.job_id
    with pytest.raises(fray_client.JobAlreadyExists) as refused:
        client.submit(job("long", sleep), adopt_existing=False)
    found = refused.value.handle
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s: it does not wait: attempt 1 is running on"):
        found.wait(0.1)
    assert found.wait(0.1, raise_on_failure=False) is STATUS.RUNNING
    found.terminate()
    assert handle.wait(60, raise_on_failure=False) is STATUS.STOPPED
    with pytest.raises(fray_client.JobFailed):
        handle.wait()
    again = client.submit(job("long", print, resources=V4_16))
    assert again.job_id != handle.job_id
    assert again.wait(60) is STATUS.SUCCEEDED


def test_preempted_gang_starts_again(client: Client, cluster: SimulatedCluster, trace: Trace) -> None:
    handle = client.submit(job("train", trace.gang(), resources=V4_16))
    cluster.preempt_slice(trace.wait_for_tasks(2)[0]["slice"])
    trace.wait_for_tasks(2, attempt=2)
    trace.finish()
    assert handle.wait(120) is STATUS.SUCCEEDED
    assert IrisClient().job_status(handle.job_id).preemptions == 1
