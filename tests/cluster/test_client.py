"""`IrisClient` on a simulated cluster: jobs of every kind, what can be asked about them, and their ends."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray import (
    Constraint,
    ConstraintOp,
    CoschedulingConfig,
    IrisClient,
    JobState,
    PriorityBand,
    ResourceSpec,
    TaskState,
    get_job_info,
    lookup_endpoint,
    register_endpoint,
    tpu_device,
)
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.conventions import OK
from iris_ray.errors import (
    EndpointNotFoundError,
    InvalidJobError,
    InvalidRequestError,
    IrisError,
    JobCancelledError,
    UnknownNameError,
)
from iris_ray.logs.stream import FIRST_WORD_S
from iris_ray.testing import SimulatedCluster
from tests.conftest import Terminal
from tests.support.command_line import command_line, environment, iris
from tests.support.gangs import Trace, alive, all_workers
from tests.support.proofs import in_proofs
from tests.support.waiting import wait_until

V4_8, V4_16 = tpu_device("v4-8"), tpu_device("v4-16")


@pytest.fixture
def client(cluster: SimulatedCluster) -> IrisClient:
    return IrisClient()


class Hog:
    """Work outside iris_ray."""

    def ping(self) -> None:
        """It has its resources."""


def me() -> tuple[str, int, int, int, str]:
    info = get_job_info()
    assert info is not None
    return info.task_id, info.task_index, info.num_tasks, info.attempt, info.slice_name


# -- at once --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"name": "a/b"}, InvalidRequestError, "slashes"),
        ({"name": 3}, InvalidRequestError, "name"),
        ({"env": {"A": 1}}, InvalidRequestError, "env"),
        ({"resources": {"cpu": 1}}, InvalidRequestError, "ResourceSpec"),
        ({"resources": ResourceSpec(device=V4_16, replicas=3)}, InvalidJobError, "num_groups"),
        ({"coscheduling": CoschedulingConfig()}, InvalidJobError, "tpu_device"),
        ({"coscheduling": 2}, InvalidJobError, "CoschedulingConfig"),
        (
            {"resources": ResourceSpec(device=V4_16), "coscheduling": CoschedulingConfig("rack")},
            InvalidJobError,
            "group_by",
        ),
        ({"priority": 1}, InvalidJobError, "PriorityBand"),
        ({"max_retries_failure": -1}, InvalidJobError, "max_retries_failure"),
        ({"constraints": ("x",)}, InvalidJobError, "constraints"),
        ({"scheduling_timeout": "soon"}, InvalidJobError, "scheduling_timeout"),
        ({"keep_warm": -1}, InvalidRequestError, "keep_warm"),
        ({"preload": "jax"}, InvalidRequestError, "preload"),
    ],
    ids=str,
)
def test_submit_refuses_bad_input_by_name(
    client: IrisClient, changes: dict[str, Any], error: type[IrisError], said: str
) -> None:
    with pytest.raises(error, match=said):
        client.submit(me, **changes)


def test_remote_while_connected_elsewhere_is_refused(cluster: SimulatedCluster) -> None:
    with pytest.raises(InvalidRequestError, match="already"):
        IrisClient.remote(cluster.address)


# -- jobs of every kind ---------------------------------------------------------------------------------------------


def test_tasks_without_tpu_run_off_slices_with_environment(client: IrisClient, cluster: SimulatedCluster) -> None:
    def task() -> tuple[Any, ...]:
        return (*me(), os.environ["COLOUR"], ray.util.get_node_ip_address())

    job = client.submit(task, "paint", resources=ResourceSpec(cpu=1, replicas=3), env={"COLOUR": "blue"})
    head = cluster.address.rpartition(":")[0]
    assert job.results(120) == [(f"{job.job_id}/task-{i}", i, 3, 1, "", "blue", head) for i in range(3)]
    assert job.wait(30).state is JobState.SUCCEEDED
    assert job.done()
    assert job.job_id.startswith("paint-")


@pytest.mark.long
def test_tasks_go_where_foreign_ray_work_leaves_room(client: IrisClient, cluster: SimulatedCluster) -> None:
    """The head comes first by all other rules, and an actor has all of its CPUs."""
    head = next(node for node in ray.nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"])
    cpus = head["Resources"]["CPU"]

    def free() -> float:
        workers = {worker.node_id: worker for worker in all_workers()}
        return workers[head["NodeID"]].free["CPU"]

    there = NodeAffinitySchedulingStrategy(head["NodeID"], soft=False)
    client.submit(me, resources=ResourceSpec(cpu=1)).results(120)  # starts the Controller, if there is none
    hog = ray.remote(num_cpus=cpus, scheduling_strategy=there)(Hog).remote()
    ray.get(hog.ping.remote())
    wait_until(lambda: free() == 0.0)
    job = client.submit(ray.util.get_node_ip_address, resources=ResourceSpec(cpu=1, replicas=2))
    assert head["NodeManagerAddress"] not in job.results(120)
    ray.kill(hog)
    wait_until(lambda: free() == cpus)


@pytest.mark.long
def test_more_tasks_than_places_run_one_after_another(client: IrisClient, cluster: SimulatedCluster) -> None:
    """Three tasks, two slices of that type: the third gets a slice that is free again."""
    slices = {cluster.add_slice("v4-8") for _ in range(2)}
    job = client.submit(me, resources=ResourceSpec(replicas=3, device=V4_8), keep_warm=0)
    results = job.results(180)
    assert [result[1] for result in results] == [0, 1, 2]
    assert {result[4] for result in results} == slices


def test_job_on_a_slice_of_several_hosts_is_a_gang(client: IrisClient, cluster: SimulatedCluster) -> None:
    job = client.submit(me, resources=ResourceSpec(device=V4_16), keep_warm=0)
    results = job.results(120)
    assert [result[:4] for result in results] == [(f"{job.job_id}/task-{i}", i, 2, 1) for i in range(2)]
    assert len({result[4] for result in results} & set(cluster.slice_names)) == 1
    assert client.job_status(job).device == "v4-16"


@pytest.mark.long
def test_failing_task_is_retried_alone_then_fails_job(client: IrisClient, trace: Trace) -> None:
    def work(facts: dict[str, Any]) -> int:
        if facts["index"] == 1:
            raise ValueError("no")
        time.sleep(600)
        return 0

    job = client.submit(trace.gang(work), resources=ResourceSpec(replicas=2), max_retries_failure=1)
    with pytest.raises(ValueError, match="no"):
        job.results(180)
    assert job.wait().state is JobState.FAILED
    assert [task.state for task in client.list_tasks(job)] == [TaskState.KILLED, TaskState.FAILED]
    assert [(start["index"], start["attempt"]) for start in trace.starts()] == [(0, 1), (1, 1), (1, 2)]
    sleeper = trace.starts()[0]["pid"]
    wait_until(lambda: not alive(sleeper))


@pytest.mark.proof
def test_failures_of_all_tasks_together_end_job(client: IrisClient) -> None:
    def fail() -> None:
        raise ValueError("no")

    job = client.submit(fail, resources=ResourceSpec(replicas=2), max_retries_failure=9, max_task_failures=2)
    with pytest.raises(ValueError, match="no"):
        job.results(120)
    status = job.wait()
    assert (status.state, status.failures) == (JobState.FAILED, 3)


@pytest.mark.proof
def test_job_handle_is_a_future(client: IrisClient) -> None:
    jobs = [client.submit(me, f"f{i}") for i in range(2)]
    done, _ = wait(jobs, timeout=120)
    assert done == set(jobs)
    assert [job.exception() for job in jobs] == [None, None]
    assert not any(job.cancelled() for job in jobs)


# -- what can be asked ----------------------------------------------------------------------------------------------


def test_job_no_host_can_run_says_so_and_can_be_cancelled(client: IrisClient) -> None:
    job = client.submit(me, resources=ResourceSpec(device=tpu_device("v5litepod-16")))
    assert "3 × v4-16" in wait_until(lambda: (s := client.explain(job)).startswith("waiting") and s)
    assert not job.done()
    assert job.cancel()
    with pytest.raises(JobCancelledError):
        job.results(60)
    assert job.cancelled()
    assert not job.cancel()

    async def awaited() -> None:
        await asyncio.wrap_future(job)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(awaited())


@pytest.mark.proof
def test_task_runs_where_its_constraint_allows(client: IrisClient) -> None:
    on_a_slice = Constraint("tpu-name", ConstraintOp.EXISTS)
    job = client.submit(lambda: ray.util.get_node_ip_address(), resources=ResourceSpec(), constraints=[on_a_slice])
    (address,) = job.results(120)
    assert address in {worker.address for worker in client.list_workers() if worker.slice_name}


def test_unknown_job_or_task_is_refused_with_nearest(client: IrisClient) -> None:
    job = client.submit(me, "nearest")
    job.results(120)
    with pytest.raises(UnknownNameError, match=job.job_id):
        client.job_status(job.job_id[:-1])
    with pytest.raises(UnknownNameError, match="task"):
        client.task_status(job, 7)
    assert client.task_status(job, task_index=0).state is TaskState.SUCCEEDED
    with pytest.raises(UnknownNameError, match="int"):
        client.explain(3)  # type: ignore[arg-type]


def test_wait_streams_prints_and_log_stays(client: IrisClient, terminal: Terminal) -> None:
    terminal.listen()

    def speak() -> None:
        info = get_job_info()
        assert info is not None
        print(f"task {info.task_index} attempt {info.attempt}")
        if info.attempt == 1 and info.task_index == 1:
            raise ValueError("once")

    job = client.submit(speak, resources=ResourceSpec(replicas=2), max_retries_failure=1)
    assert job.wait(stream_logs=True).state is JobState.SUCCEEDED
    lines = terminal.lines
    for line in ("task-0| task 0 attempt 1", "task-1| task 1 attempt 1", "task-1| task 1 attempt 2"):
        assert line in lines
    assert client.fetch_task_logs(job, 1, attempt=1).text.splitlines()[0] == "task 1 attempt 1"
    assert client.fetch_task_logs(job, task_index=1).text == "task 1 attempt 2\n"
    before = len(terminal.lines)
    job.wait(stream_task_index=0)
    assert "task 0 attempt 1" in terminal.lines[before:]
    with pytest.raises(UnknownNameError):
        job.wait(stream_task_index=2)
    with pytest.raises(InvalidRequestError, match="timeout"):
        job.wait(1.0, stream_logs=True)


@pytest.mark.long
def test_controller_restart_ends_no_wait_lookup_or_log(
    client: IrisClient, cluster: SimulatedCluster, tmp_path: Path, terminal: Terminal
) -> None:
    terminal.listen()

    def serve_or_ask() -> str:
        info = get_job_info()
        assert info is not None
        if info.task_index == 1:
            register_endpoint("server", "10.0.0.1:80")
        print("up", flush=True)
        while not (tmp_path / "stopped").exists():
            time.sleep(0.02)
        found = lookup_endpoint("server") if info.task_index == 0 else ""
        print(f"found {found}", flush=True)
        while not (tmp_path / "finish").exists():
            time.sleep(0.02)
        return found

    job = client.submit(serve_or_ask, resources=ResourceSpec(replicas=2), max_retries_failure=0)
    printed = tmp_path / "printed"
    with printed.open("wb") as out, ThreadPoolExecutor() as threads:
        following = subprocess.Popen(
            command_line("logs", "-f", job.job_id), stdout=out, stderr=subprocess.STDOUT, env=environment(cluster)
        )
        wait_until(lambda: printed.read_bytes().count(b"| up\n") == 2)
        streaming = threads.submit(job.wait, stream_logs=True)
        ControllerConnection().end()
        waiting = threads.submit(job.wait)
        asked = threads.submit(client.task_status, job, 1)
        (tmp_path / "stopped").touch()
        time.sleep(FIRST_WORD_S + 1.0)  # so that the waiting one has asked in vain
        iris(cluster, "cluster", "controller", "start")
        wait_until(lambda: b"task-0| found 10.0.0.1:80\n" in printed.read_bytes())
        (tmp_path / "finish").touch()
        assert job.results(60) == ["10.0.0.1:80", ""]
        assert following.wait(60) == OK, printed.read_text()
        assert asked.result(60).state is TaskState.RUNNING
        assert [found.result(60).state for found in (waiting, streaming)] == [JobState.SUCCEEDED] * 2
    assert "task-0| found 10.0.0.1:80" in terminal.lines


# -- children and endpoints -----------------------------------------------------------------------------------------


def test_job_submitted_by_task_is_nested_and_ends_with_it(
    client: IrisClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"

    def child() -> None:
        pid_file.write_text(str(os.getpid()))
        time.sleep(600)

    def parent() -> None:
        IrisClient().submit(child, "child").results()

    monkeypatch.setenv("IRIS_USER", "ann")
    job = client.submit(parent, "parent", max_retries_failure=0, priority=PriorityBand.BATCH)
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), 120)
    (below,) = [other for other in client.list_jobs() if other.job_id.startswith(f"{job.job_id}/")]
    assert (below.state, below.user, below.priority) == (JobState.RUNNING, "ann", PriorityBand.BATCH)
    job.cancel()
    wait_until(lambda: not alive(int(pid_file.read_text())), 10)
    wait_until(lambda: client.job_status(below.job_id).state is JobState.KILLED, 10)


@pytest.mark.proof
def test_slice_job_submitted_by_task_has_its_directory(client: IrisClient) -> None:
    def child() -> tuple[str, bool]:
        info = get_job_info()
        assert info is not None
        return info.job_id, Path(info.local_dir).is_dir()

    def parent() -> list[tuple[str, bool]]:
        return IrisClient().submit(child, "child", resources=ResourceSpec(device=V4_16)).results()

    job = client.submit(parent, "parent", max_retries_failure=0)
    (results,) = job.results(180)
    assert all(job_id.startswith(f"{job.job_id}/child") and there for job_id, there in results)


@pytest.mark.proof
def test_endpoint_is_found_by_jobs_tasks_until_attempt_ends(client: IrisClient) -> None:
    def serve_or_ask() -> str:
        info = get_job_info()
        assert info is not None
        if info.task_index == 1:
            first = lookup_endpoint("server", timeout=60)
            register_endpoint("asked", "now")
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    lookup_endpoint("server")
                except EndpointNotFoundError:
                    return first
                time.sleep(0.1)
            return "it did not vanish"
        register_endpoint("server", "10.0.0.1:80")
        return lookup_endpoint("asked", timeout=60)

    job = client.submit(serve_or_ask, resources=ResourceSpec(replicas=2), max_retries_failure=0)
    assert job.results(180) == ["now", "10.0.0.1:80"]


# -- whose end is whose ---------------------------------------------------------------------------------------------

DRIVER = """
    import pathlib, sys, time
    from iris_ray import IrisClient

    address, directory, detached = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3] == "detached"

    def task():
        import os
        (directory / "pid").write_text(str(os.getpid()))
        while not (directory / "finish").exists():
            time.sleep(0.05)

    client = IrisClient.remote(address)
    job = client.submit(task, "lasting", detached=detached)
    (directory / "job").write_text(job.job_id)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["detached", *in_proofs("attached")])
def test_detached_job_outlives_killed_driver_unlike_attached(
    client: IrisClient, cluster: SimulatedCluster, tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    root = str(Path(__file__).parents[2])
    driver = subprocess.Popen(
        [sys.executable, str(script), cluster.address, str(tmp_path), kind], env={**os.environ, "PYTHONPATH": root}
    )
    try:
        pid = int(wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 120))
        job_id = wait_until(lambda: (tmp_path / "job").exists() and (tmp_path / "job").read_text())
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    if kind == "attached":
        wait_until(lambda: not alive(pid), 10)
        wait_until(lambda: client.job_status(job_id).state is JobState.KILLED, 10)
        return
    time.sleep(5.0)  # long enough for Ray to have cleared up after the driver
    assert alive(pid)
    assert client.job_status(job_id).state is JobState.RUNNING
    (tmp_path / "finish").touch()
    wait_until(lambda: client.job_status(job_id).state is JobState.SUCCEEDED)
    wait_until(lambda: not any(a["name"] == f"pool/{job_id}" for a in ray.util.list_named_actors(all_namespaces=True)))
