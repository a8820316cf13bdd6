"""Jobs and actors of Fray's on a simulated cluster, where Fray is installed: `make marin`."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import IrisClient, get_job_info
from iris_ray.errors import InvalidRequestError
from iris_ray.fray import ActorGroup, Client, JobHandle
from iris_ray.fray.client import unfinished_job
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Trace
from tests.support.waiting import wait_until

types = pytest.importorskip("fray.types", reason="needs Fray: make marin")
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


def test_tasks_without_tpu_run_singly_and_are_logged(client: Client, tmp_path: Path) -> None:
    tasks = client.submit(job("tokenise", write_place, tmp_path, replicas=3))
    program = types.Entrypoint.from_binary(sys.executable, ["-c", "print('a\\nb c\\nd')"])
    printed = client.submit(types.JobRequest("print", program, CPU))
    statuses = fray_client.wait_all([tasks, printed], timeout=120)
    assert statuses == [STATUS.SUCCEEDED] * 2
    assert places(tmp_path) == ["3 1 False"] * 3
    assert printed.logs() == ("a", "b c", "d")
    assert printed.logs(max_lines=2) == ("b c", "d")


def test_failure_raises_frays_error_unless_status_is_wanted(client: Client) -> None:
    program = types.Entrypoint.from_binary(sys.executable, ["-c", "import sys; sys.exit(3)"])
    handle = client.submit(types.JobRequest("fails", program, CPU))
    with pytest.raises(fray_client.JobFailed) as failed:
        handle.wait(120)
    assert (failed.value.job_id, failed.value.failed_status) == (handle.job_id, STATUS.FAILED)
    assert "exit status 3" in "".join(failed.value.__notes__)
    assert handle.wait(raise_on_failure=False) is STATUS.FAILED


def divide(by: int) -> float:
    print("dividing")
    return 1 / by


def test_failure_has_traceback_of_task_in_note(client: Client) -> None:
    handle = client.submit(job("divides", divide, 0, replicas=2))
    with pytest.raises(fray_client.JobFailed) as failed:
        handle.wait(120)
    (note,) = failed.value.__notes__
    assert "dividing" not in note
    assert "return 1 / by" in note
    assert note.endswith("ZeroDivisionError: division by zero")


@pytest.mark.usefixtures("no_shared_cluster")
def test_child_goes_to_region_of_its_parent(tmp_path: Path) -> None:
    def child(name: str) -> None:
        (tmp_path / name).write_text(ray.get_runtime_context().get_node_labels().get("iris/region", "none"))

    def parent() -> None:
        from fray.current_client import current_client

        for name, regions in (("inherits", None), ("chooses", ["west"])):
            asked = types.ResourceConfig(cpu=1, ram="100m", regions=regions)
            current_client().submit(job(name, child, name, resources=asked)).wait(120)

    with SimulatedCluster({}, quiet=True) as cluster:
        for region in ("west", "east", "west"):
            cluster.add_hosts(1, labels={"iris/region": region})
        asked = types.ResourceConfig(cpu=1, ram="100m", regions=["east"])
        assert Client().submit(job("parent", parent, resources=asked)).wait(240) is STATUS.SUCCEEDED
    assert [(tmp_path / name).read_text() for name in ("inherits", "chooses")] == ["east", "west"]


def test_job_is_found_by_name_until_terminated(client: Client) -> None:
    handle = client.submit(job("long", sleep, resources=V4_16))
    wait_until(lambda: handle.status() is STATUS.RUNNING)
    assert Client().submit(job("long", sleep, resources=V4_16)).job_id == handle.job_id
    with pytest.raises(fray_client.JobAlreadyExists) as refused:
        client.submit(job("long", sleep), adopt_existing=False)
    found = refused.value.handle
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s: it does not wait: attempt 1 is"):
        found.wait(0.1)
    assert found.wait(0.1, raise_on_failure=False) is STATUS.RUNNING
    found.terminate()
    assert handle.wait(60, raise_on_failure=False) is STATUS.STOPPED
    with pytest.raises(fray_client.JobFailed):
        handle.wait()
    again = client.submit(job("long", print, resources=V4_16))
    assert again.job_id != handle.job_id
    assert again.wait(60) is STATUS.SUCCEEDED


def test_restarted_task_finds_its_jobs_again_by_name(cluster: SimulatedCluster, tmp_path: Path) -> None:
    def step(name: str) -> None:
        (tmp_path / f"{name}-{os.getpid()}").touch()
        wait_until(lambda: name == "quick" or (tmp_path / "finish").exists(), 120)

    def parent() -> None:
        from fray.current_client import current_client

        me = get_job_info()
        assert me is not None
        handles = [current_client().submit(job(name, step, name)) for name in ("quick", "long", "long")]
        assert handles[0].wait(120) is STATUS.SUCCEEDED
        (tmp_path / f"parent-{me.attempt}").write_text(" ".join([str(os.getpid()), *(h.job_id for h in handles)]))
        wait_until(lambda: (tmp_path / "finish").exists(), 120)
        assert handles[1].wait(120) is STATUS.SUCCEEDED

    def written(attempt: int) -> list[str]:
        file = tmp_path / f"parent-{attempt}"
        return wait_until(lambda: file.exists() and file.read_text().split(), 120)

    handle = Client(children="adopt").submit(job("parent", parent, max_retries_failure=1))
    pid, *job_ids = written(1)
    assert job_ids[1] == job_ids[2]
    os.kill(int(pid), signal.SIGKILL)
    assert written(2)[1:] == job_ids
    (tmp_path / "finish").touch()
    assert handle.wait(120) is STATUS.SUCCEEDED
    assert len(list(tmp_path.glob("quick-*"))) == len(list(tmp_path.glob("long-*"))) == 1


def test_preempted_gang_starts_again(client: Client, cluster: SimulatedCluster, trace: Trace) -> None:
    handle = client.submit(job("train", trace.gang(), resources=V4_16))
    cluster.preempt_slice(trace.wait_for_tasks(2)[0]["slice"])
    trace.wait_for_tasks(2, attempt=2)
    trace.finish()
    assert handle.wait(120) is STATUS.SUCCEEDED
    assert IrisClient().job_status(handle.job_id).preemptions == 1


def test_task_submits_jobs_with_ambient_client_in_every_thread(client: Client, tmp_path: Path) -> None:
    def parent() -> None:
        from concurrent.futures import ThreadPoolExecutor

        from fray.current_client import current_client

        def step(name: str) -> str:
            handle = current_client().submit(job(name, write_place, tmp_path / name, environment=None))
            assert handle.wait(120) is STATUS.SUCCEEDED
            return handle.job_id

        with ThreadPoolExecutor(2) as threads:
            ids = list(threads.map(step, ["one", "two"]))
        (tmp_path / "ids").write_text(" ".join(ids))

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    handle = client.submit(job("steps", parent))
    assert handle.wait(240) is STATUS.SUCCEEDED
    one, two = (tmp_path / "ids").read_text().split()
    assert one.startswith(f"{handle.job_id}/one-")
    assert two.startswith(f"{handle.job_id}/two-")
    assert places(tmp_path / "one") == places(tmp_path / "two") == ["1 1 False"]


def test_jobs_variables_reach_tasks_which_cannot_leave_jobs_behind(client: Client, tmp_path: Path) -> None:
    def task() -> None:
        lines = [os.environ["COLOUR"], os.environ["JAX_PLATFORMS"]]
        try:
            Client(detached=True)
        except InvalidRequestError as refused:
            lines.append(str(refused).partition(":")[0])
        (tmp_path / "seen").write_text("\n".join(lines))

    env = types.EnvironmentConfig(workspace=".", env_vars={"COLOUR": "blue green"})
    handle = client.submit(job("paint", task, environment=env))
    assert handle.wait(120) is STATUS.SUCCEEDED
    assert (tmp_path / "seen").read_text().splitlines() == [
        "blue green",
        "cpu",
        f"detached=True in {handle.job_id}/task-0",
    ]


def test_detached_job_is_found_by_another_process(cluster: SimulatedCluster, tmp_path: Path) -> None:
    script = f"""
import ray, time
from fray.types import Entrypoint, JobRequest, ResourceConfig
from iris_ray.fray import ActorGroup, Client, JobHandle
ray.init({cluster.address!r}, log_to_driver=False)
def wait():
    import pathlib, time
    while not pathlib.Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.1)
job = JobRequest("stays", Entrypoint.from_callable(wait), ResourceConfig(cpu=1, ram="100m"))
print(Client(detached=True).submit(job).job_id)
"""
    first = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    handle = Client().submit(job("stays", sleep))
    assert handle.job_id == first.stdout.split()[-1]
    (tmp_path / "go").touch()
    assert handle.wait(120) is STATUS.SUCCEEDED


class Tally:
    """An actor that counts its calls, and passes them on to another one."""

    def __init__(self, start: int, total: Any = None) -> None:
        from fray.actor import current_actor

        self.me = current_actor()
        self.count, self.total = start, total

    def add(self) -> tuple[int, int]:
        self.count += 1
        if self.total is not None:
            self.total.add()
        return self.me.index, self.count

    def where(self) -> tuple[str, int]:
        task = get_job_info()
        assert task is not None
        return task.slice_name, task.attempt

    def sleep(self) -> None:
        sleep()

    def finish(self, why: Exception | None = None) -> None:
        if why is not None:
            self.me.fail(why)
        self.me.shutdown_event.set()


def test_actors_of_group_are_called_from_outside_and_each_other(client: Client) -> None:
    total = client.host_actor(Tally, 100, name="total")
    group = client.create_actor_group(Tally, 0, total=total.handle, name="tally", count=2, resources=CPU)
    (early,) = group.wait_ready(1, timeout=120)
    index, count = early.add()
    assert count == 1
    first, second = group.wait_ready(timeout=120)
    assert group.ready_count == 2
    assert group.discover_new() == []
    copy = pickle.loads(pickle.dumps(group))
    assert len(copy.discover_new()) == 2
    calls = [handle.add.remote() for handle in (first, second, second, first)]
    assert sorted(call.result(60) for call in calls) == [
        (i, n + 1 + (i == index)) for i in range(2) for n in range(2)
    ], "calls that are sent without waiting may run in any order"
    assert total.handle.add() == (0, 106)
    for handle in (first, second):
        handle.finish()
    wait_until(group.is_done)
    for said in ("has no answer", "does not run now"):  # the first call still knows the address
        with pytest.raises(RuntimeError, match=said):
            first.add()
    with pytest.raises(RuntimeError, match="have ended: succeeded"):
        group.wait_ready(1)
    total.shutdown()


def test_failing_actor_says_why_and_comes_back_if_allowed(client: Client) -> None:
    config = types.ActorConfig(max_task_retries=1)
    actor = client.create_actor(Tally, 0, name="fails", resources=CPU, actor_config=config)
    job_id = unfinished_job("fails")
    assert job_id is not None
    assert actor.where() == ("", 1)
    actor.finish(ValueError("out of luck"))
    wait_until(lambda: IrisClient().job_status(job_id).attempt == 2)
    (again,) = ActorGroup(job_id, "fails", 1).wait_ready(timeout=120)
    assert again.where() == ("", 2)
    again.finish(ValueError("out of luck"))
    with pytest.raises(fray_client.JobFailed) as failed:
        JobHandle(job_id).wait(60)
    assert "out of luck" in failed.value.__notes__[0]


class Fragile(Tally):
    """An actor whose second one can't be made."""

    def __init__(self) -> None:
        super().__init__(0)
        if self.me.index == 1:
            raise ValueError("no second one")


def test_failing_constructor_leaves_other_actors_alone(client: Client) -> None:
    group = client.create_actor_group(Fragile, name="fragile", count=3, resources=CPU)
    first, third = group.wait_ready(2, timeout=120)
    with pytest.raises(RuntimeError, match=r"1 of 3 actors .* have ended, so 3 can't be ready.*no second one"):
        group.wait_ready(timeout=120)
    assert (first.add(), third.add()) == ((0, 1), (2, 1))
    assert not group.is_done()
    group.shutdown()
    assert JobHandle(group.job_id).wait(60) is STATUS.SUCCEEDED


def test_group_that_is_shut_down_has_succeeded_unless_busy(client: Client) -> None:
    calm = client.create_actor_group(Tally, 0, name="calm", count=2, resources=CPU)
    busy = client.create_actor_group(Tally, 0, name="busy", count=1, resources=CPU)
    calm.wait_ready(timeout=120)
    busy.wait_ready(timeout=120)[0].sleep.remote()
    for group in (calm, busy):
        group.shutdown()
        assert group.is_done()
    assert [JobHandle(group.job_id).status() for group in (calm, busy)] == [STATUS.SUCCEEDED, STATUS.STOPPED]


def test_actor_on_preempted_slice_returns_and_peer_stays(client: Client, cluster: SimulatedCluster) -> None:
    for _ in range(2):
        cluster.add_slice("v4-8")
    resources = types.ResourceConfig.with_tpu("v4-8", cpu=1, ram="100m")
    environment = types.EnvironmentConfig(workspace=".", env_vars={"JAX_PLATFORMS": "cpu"})
    group = client.create_actor_group(Tally, 0, name="v4", count=2, resources=resources, environment=environment)
    stays, goes = group.wait_ready(timeout=120)
    assert stays.add() == (0, 1)
    assert goes.add() == (1, 1)
    cluster.preempt_slice(goes.where()[0])
    with pytest.raises(RuntimeError, match=r"has no answer|does not run now"):
        goes.add()
    assert stays.add() == (0, 2)
    new = cluster.add_slice("v4-8")
    wait_until(lambda: IrisClient().task_status(group.job_id, 1).attempt == 2)
    group.wait_ready(timeout=120)
    assert goes.where() == (new, 2)
    assert (stays.add(), goes.add()) == ((0, 3), (1, 1))
    client.shutdown()
    assert group.is_done()


def test_actor_that_finds_no_room_says_why(client: Client) -> None:
    large = types.ResourceConfig(cpu=1000, ram="100m")
    group = client.create_actor_group(Tally, 0, name="large", count=1, resources=large)
    with pytest.raises(TimeoutError, match=r"0 of 1 actors of large-\w+ are ready after 1 s: .*a task needs 1,000"):
        group.wait_ready(timeout=1)
    group.shutdown()


def words(line: str) -> list[tuple[str, int]]:
    return [(word, 1) for word in line.split()]


def test_zephyr_counts_words_with_coordinator_and_workers(client: Client, tmp_path: Path) -> None:
    """Marin's data pipelines, as they are: a job that hosts an actor, submits a group of actors, and ends them."""
    zephyr = pytest.importorskip("zephyr.context", reason="needs Zephyr: make marin")
    dataset = pytest.importorskip("zephyr.dataset")
    context = zephyr.ZephyrContext(
        client,
        max_workers=2,
        resources=CPU,
        coordinator_resources=types.ResourceConfig(cpu=0.1, ram="100m", preemptible=False),
        chunk_storage_prefix=str(tmp_path),
        name="words",
        max_execution_retries=0,
    )
    lines = dataset.Dataset.from_list(["a b a", "b c", "a d", "c c c"])
    counts = lines.flat_map(words).group_by(
        lambda pair: pair[0], reducer=lambda word, pairs: (word, sum(n for _, n in pairs)), num_output_shards=2
    )
    assert sorted(context.execute(counts).results) == [("a", 3), ("b", 2), ("c", 4), ("d", 1)]
