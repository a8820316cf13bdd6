"""run_on_pod on a healthy cluster: who runs where, what comes back, and what is refused."""

import functools
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from iris_ray import (
    Secret,
    get_job_info,
    preemption_notice,
    release,
    run_on_pod,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
    run_on_pod_ray,
    run_on_pod_resumable,
)
from iris_ray.errors import (
    InvalidRequestError,
    JobCancelledError,
    ResultNotPicklableError,
    TaskCrashedError,
    TaskSetupError,
)
from iris_ray.testing import SimulatedCluster
from tests.support.clusters import ZYGOTE, processes_of
from tests.support.gangs import Trace, alive, free_chips, job_view
from tests.support.proofs import in_proofs
from tests.support.waiting import wait_until

CHIPS = 3 * 2 * 4


class OutOfTea(Exception):
    """A user's exception, with more to it than a message."""

    def __init__(self, cups: int, message: str = "out of tea") -> None:
        super().__init__(cups, message)
        self.cups = cups


def index() -> int:
    me = get_job_info()
    assert me is not None
    return me.task_index


# -- who runs where ------------------------------------------------------------------------------------------------


def test_results_come_in_slice_and_worker_order(cluster: SimulatedCluster, trace: Trace) -> None:
    trace.finish()
    results = run_on_pod(trace.gang(), "v4-16", num_slices=2)
    assert [(r["slice_id"], r["worker_id"], r["index"]) for r in results] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
    ]
    first, _, second, _ = slices = [r["slice"] for r in results]
    assert slices == [first, first, second, second]
    assert {first, second} < set(cluster.slice_names)
    assert len({r["pid"] for r in results}) == 4
    assert all(r["main_thread"] for r in results)


def test_multislice_tasks_agree_on_reachable_coordinator(cluster: SimulatedCluster, trace: Trace) -> None:
    trace.finish()
    results = run_on_pod(trace.gang(), "v4-16", num_slices=2)
    address = next(
        n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == cluster.node_id(results[0]["slice"], 0)
    )
    port = results[0]["megascale"]["MEGASCALE_PORT"]
    for result in results:
        megascale = result["megascale"]
        assert megascale["MEGASCALE_COORDINATOR_ADDRESS"] == f"{address}:{port}"
        assert megascale["MEGASCALE_NUM_SLICES"] == "2"
        assert megascale["MEGASCALE_SLICE_ID"] == str(result["slice_id"])
        assert megascale["MEGASCALE_DEBUG_PORT"] not in (port, "8081")
        assert result["coordinator"] == results[0]["coordinator"] != f"{address}:{port}"


@pytest.mark.proof
def test_single_slice_drops_users_megascale_variable(cluster: SimulatedCluster, trace: Trace) -> None:
    trace.finish()
    stale = {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1:8080", "MEGASCALE_EXTRA": "x"}
    function = ray.remote(runtime_env={"env_vars": stale})(trace.gang())
    assert [r["megascale"] for r in run_on_pod(function, "v4-16")] == [{}, {}]


@pytest.mark.proof
def test_every_attempt_gets_own_ports(cluster: SimulatedCluster, trace: Trace) -> None:
    def fail_twice(facts: dict[str, Any]) -> str:
        if facts["attempt"] < 3:
            raise OutOfTea(facts["attempt"])
        return facts["coordinator"]

    run_on_pod(trace.gang(fail_twice), "v4-16", max_retries_failure=2)
    assert len({start["coordinator"] for start in trace.starts()}) == 3


@pytest.mark.proof
def test_flexible_count_starts_at_largest_free(cluster: SimulatedCluster, trace: Trace) -> None:
    """[2, 4] with three slices free runs on two at once, and does not wait for the fourth."""
    trace.finish()
    assert len(run_on_pod(trace.gang(), "v4-16", num_slices=(2, 4))) == 4


@pytest.mark.parametrize(
    ("function", "options", "tasks"),
    [
        (run_on_pod_multislice_resumable, {"num_slices": [1, 2]}, 4),
        *in_proofs((run_on_pod_resumable, {}, 2), (run_on_pod_multislice, {"num_slices": 1}, 2)),
    ],
)
def test_every_function_of_the_run_on_pod_family_runs(
    cluster: SimulatedCluster, function: Callable[..., list[int]], options: dict[str, Any], tasks: int
) -> None:
    assert function(index, "v4-16", **options) == list(range(tasks))


class Adder:
    def __call__(self) -> int:
        return 40 + index()


@pytest.mark.parametrize(
    ("function", "results"),
    [*in_proofs((Adder(), [40, 41]), (ray.remote(max_calls=1)(index), [0, 1]))],
    ids=["object", "remote"],
)
def test_callable_of_every_kind_runs(cluster: SimulatedCluster, function: Any, results: list[int]) -> None:
    assert run_on_pod(function, "v4-16") == results


@pytest.mark.long
def test_concurrent_jobs_of_driver_share_its_slices(cluster: SimulatedCluster) -> None:
    refs = [run_on_pod_ray.remote(index, "v4-16", num_slices=n) for n in (2, 1, 2)]
    assert [len(results) for results in ray.get(refs)] == [4, 2, 4]


@pytest.mark.parametrize("start", ["fork", "actor"])
def test_user_code_joins_the_drivers_cluster_and_namespace(cluster: SimulatedCluster, start: str) -> None:
    """An actor is in the driver's Ray job as well. A fork has a job of its own, and its tasks are in that."""

    @ray.remote(num_cpus=1)
    def nested() -> str:
        return ray.get_runtime_context().get_job_id()

    def use_ray() -> tuple[str, str, str]:
        context = ray.get_runtime_context()
        return context.get_job_id(), context.namespace, ray.get(nested.remote())

    mine = ray.get_runtime_context()
    for own, namespace, of_its_task in run_on_pod(use_ray, "v4-16", start=start):
        assert (namespace, of_its_task) == (mine.namespace, own)
        assert (own == mine.get_job_id()) == (start == "actor")


# -- what a remote function asks for -------------------------------------------------------------------------------


def test_remote_functions_environment_acts_at_process_start(cluster: SimulatedCluster) -> None:
    @ray.remote(runtime_env={"env_vars": {"TEA": "green", "PYTHONHASHSEED": "7"}})
    def look() -> tuple[str, str, int]:
        return os.environ["TEA"], os.environ["PYTHONHASHSEED"], hash("tea")

    out = subprocess.run(
        [sys.executable, "-c", "print(hash('tea'))"], env={"PYTHONHASHSEED": "7"}, capture_output=True, check=True
    )
    assert run_on_pod(look, "v4-16") == [("green", "7", int(out.stdout))] * 2


@pytest.mark.proof
def test_environment_of_one_job_does_not_reach_the_next(cluster: SimulatedCluster) -> None:
    def tea() -> str | None:
        return os.environ.get("TEA")

    assert run_on_pod(ray.remote(runtime_env={"env_vars": {"TEA": "green"}})(tea), "v4-16") == ["green"] * 2
    assert run_on_pod(tea, "v4-16") == [None, None]


@pytest.mark.proof
def test_working_dir_of_a_remote_function_is_honoured(cluster: SimulatedCluster, tmp_path: Any) -> None:
    (tmp_path / "kitchen").mkdir()
    (tmp_path / "kitchen" / "recipe.txt").write_text("boil water")
    archive = shutil.make_archive(str(tmp_path / "kitchen"), "zip", tmp_path, "kitchen")

    @ray.remote(runtime_env={"working_dir": f"file://{archive}"})
    def read() -> str:
        with open("recipe.txt") as recipe:
            return recipe.read()

    assert run_on_pod(read, "v4-16") == ["boil water"] * 2


def test_failing_runtime_environment_is_a_typed_error(cluster: SimulatedCluster) -> None:
    broken = ray.remote(runtime_env={"working_dir": "file:///nowhere/to/be/found.zip"})(index)
    with pytest.raises(TaskSetupError, match="nowhere/to/be"):
        run_on_pod(broken, "v4-16", max_retries_failure=0)


@pytest.mark.proof
def test_remote_functions_resources_are_reserved_on_every_host(cluster: SimulatedCluster, trace: Trace) -> None:
    def cpus_free(facts: dict[str, Any]) -> tuple[str | None, float]:
        return os.environ.get("OMP_NUM_THREADS"), ray.available_resources()["CPU"]

    before = ray.available_resources()["CPU"]
    results = run_on_pod(ray.remote(num_cpus=3)(trace.gang(cpus_free)), "v4-16")
    assert results == [("3", before - 6)] * 2
    assert run_on_pod(lambda: os.environ.get("OMP_NUM_THREADS"), "v4-16") == [None, None]


# -- failures of the user's own ------------------------------------------------------------------------------------


def test_users_exception_comes_back_unchanged_after_retries(cluster: SimulatedCluster, trace: Trace) -> None:
    """A crash runs once per attempt and host, not Ray's three times more."""

    directory = trace.directory

    def fail(facts: dict[str, Any]) -> None:
        if facts["index"] == 1:
            while not (directory / f"start-{facts['attempt']}-0.json").exists():
                pass
            raise OutOfTea(3, "the connection timed out")  # no word of a message makes it a preemption
        import time

        time.sleep(60)

    with pytest.raises(OutOfTea) as caught:
        run_on_pod(trace.gang(fail), "v4-16", max_retries_failure=1)
    assert isinstance(caught.value, RayTaskError)
    assert isinstance(caught.value.cause, OutOfTea)
    assert caught.value.cups == 3
    assert "raise OutOfTea" in str(caught.value)
    assert [(s["attempt"], s["index"]) for s in trace.starts()] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    view = job_view(trace.starts()[0]["job"])
    assert (view.failures, view.preemptions) == (2, 0)


class Awkward(Exception):
    """Its __init__ takes more than it passes on, so that plain pickling can't rebuild it."""

    def __init__(self, what: str, how_much: int) -> None:
        super().__init__(what)
        self.how_much = how_much


@pytest.mark.proof
def test_exception_with_own_constructor_comes_back_unchanged(cluster: SimulatedCluster) -> None:
    def fail() -> None:
        raise Awkward("spilt", 2)

    with pytest.raises(Awkward, match="spilt") as caught:
        run_on_pod(fail, "v4-16", max_retries_failure=0)
    assert caught.value.how_much == 2


@pytest.mark.proof
def test_untransportable_exception_is_reported_with_traceback(cluster: SimulatedCluster) -> None:
    def fail() -> None:
        class Local(Exception):
            def __init__(self) -> None:
                import threading

                super().__init__("kept a lock")
                self.lock = threading.Lock()

        raise Local

    with pytest.raises(RayTaskError, match="kept a lock"):
        run_on_pod(fail, "v4-16", max_retries_failure=0)


def test_untransportable_result_is_a_typed_error(cluster: SimulatedCluster) -> None:
    def lock() -> Any:
        import threading

        return threading.Lock()

    with pytest.raises(ResultNotPicklableError, match="lock"):
        run_on_pod(lock, "v4-16", max_retries_failure=0)


@pytest.mark.parametrize(
    ("end", "words"),
    [*in_proofs((os.abort, "SIGABRT"), (lambda: sys.exit("no more"), "sys.exit")), (lambda: os._exit(3), "code 3")],
)
def test_crash_on_healthy_host_is_failure_naming_its_end(
    cluster: SimulatedCluster, trace: Trace, end: Any, words: str
) -> None:
    with pytest.raises(TaskCrashedError, match=words):
        run_on_pod(trace.gang(lambda facts: end()), "v4-16", max_retries_failure=0)
    view = job_view(trace.starts()[0]["job"])
    assert (view.failures, view.preemptions) == (1, 0)


def test_sys_exit_zero_is_a_return(cluster: SimulatedCluster) -> None:
    assert run_on_pod(lambda: sys.exit(0), "v4-16") == [None, None]


def test_exit_handlers_find_children_that_end_with_task(cluster: SimulatedCluster, trace: Trace) -> None:
    directory = trace.directory

    def touch_later(path: Path) -> None:
        time.sleep(0.5)
        path.touch()

    def has_content(path: Path, content: bytes) -> bool:
        return path.exists() and path.read_bytes() == content

    def leave_things_behind(facts: dict[str, Any]) -> tuple[int, int]:
        import atexit
        import threading

        uploaded = directory / f"uploaded-{facts['index']}"
        tracker = subprocess.Popen(["tee", uploaded], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        atexit.register(tracker.communicate, b"the last step")
        threading.Thread(target=touch_later, args=(directory / f"thread-{facts['index']}",)).start()
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
        told = directory / f"daemon-{facts['index']}"
        without_a_trace = f"echo $$ > {told}.new; mv {told}.new {told}; exec sleep 600"
        subprocess.run(["env", "-i", "setsid", "--fork", "sh", "-c", without_a_trace], check=True)
        while not told.exists():
            time.sleep(0.01)
        return daemon.pid, int(told.read_text())

    daemons = [pid for pids in run_on_pod(trace.gang(leave_things_behind), "v4-16") for pid in pids]
    for index in range(2):
        wait_until(functools.partial(has_content, directory / f"uploaded-{index}", b"the last step"), 15)
        assert (directory / f"thread-{index}").exists(), "threads are waited for before exit handlers run"
    wait_until(lambda: not any(map(alive, daemons)), 15)


@pytest.mark.parametrize("start", ["fork", "actor"])
def test_exit_handlers_run_after_an_exception(cluster: SimulatedCluster, trace: Trace, start: Any) -> None:
    directory = trace.directory

    def fail(facts: dict[str, Any]) -> None:
        import atexit

        atexit.register((directory / f"flushed-{facts['attempt']}").touch)
        if facts["index"] == 1:
            raise ValueError("the loss is not a number")
        time.sleep(600)

    with pytest.raises(ValueError, match="not a number"):
        run_on_pod(trace.gang(fail), "v4-16", max_retries_failure=1, start=start)
    assert sorted(path.name for path in directory.glob("flushed-*")) == ["flushed-1", "flushed-2"]


# -- ends ----------------------------------------------------------------------------------------------------------


def test_cancelling_the_reference_stops_the_gang(cluster: SimulatedCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    pids = [start["pid"] for start in trace.wait_for_tasks(4)]
    ray.cancel(ref)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(ref)
    assert not any(map(alive, pids))
    job_id = run_on_pod_ray.job_id(ref)
    assert job_id == trace.starts()[0]["job"]
    assert job_view(job_id).state.name == "KILLED"


def test_cancelled_waiting_job_leaves_queue(cluster: SimulatedCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(index, "v4-16", num_slices=7)
    behind = run_on_pod_ray.remote(index, "v4-16")
    assert ray.get(behind) == [0, 1], "a job that can't run now does not block those behind it"
    ray.cancel(ref)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(ref)


@pytest.mark.proof
def test_release_gives_everything_back(cluster: SimulatedCluster) -> None:
    release()
    assert run_on_pod(index, "v4-16") == [0, 1]
    wait_until(lambda: free_chips() == CHIPS - 8)  # idle slices stay reserved
    release()
    wait_until(lambda: free_chips() == CHIPS, 15)
    assert run_on_pod(index, "v4-16") == [0, 1], "and the next call starts afresh"


@pytest.mark.long
def test_release_during_call_costs_no_retry(cluster: SimulatedCluster) -> None:
    """An order for a slice that is just being given back gets it afresh."""
    run_on_pod(index, "v4-16")
    for pause in (0.0, 0.02):
        ref = run_on_pod_ray.remote(index, "v4-16", max_retries_failure=0, max_retries_preemption=0)
        time.sleep(pause)
        release()
        assert ray.get(ref) == [0, 1]


@pytest.mark.proof
def test_jobs_without_keep_warm_take_turns(cluster: SimulatedCluster) -> None:
    refs = [run_on_pod_ray.remote(index, "v4-16", num_slices=2, keep_warm=0) for _ in range(2)]
    assert [len(results) for results in ray.get(refs)] == [4, 4]


@pytest.mark.proof
def test_zygote_dead_before_a_launch_costs_no_retry(cluster: SimulatedCluster, trace: Trace) -> None:
    release()
    wait_until(lambda: not processes_of(cluster, ZYGOTE))
    run_on_pod(index, "v4-16", keep_warm=600)
    for process in wait_until(lambda: len(found := processes_of(cluster, ZYGOTE)) == 2 and found):
        process.kill()
    trace.finish()
    results = run_on_pod(trace.gang(), "v4-16", max_retries_failure=0, max_retries_preemption=0)
    view = job_view(results[0]["job"])
    assert (view.failures, view.preemptions, view.attempt) == (0, 0, 1)


@pytest.mark.proof
def test_runs_in_a_row_have_fresh_processes_of_one_zygote(cluster: SimulatedCluster) -> None:
    release()
    wait_until(lambda: not processes_of(cluster, ZYGOTE))
    used = [run_on_pod(os.getpid, "v4-16", num_slices=2, keep_warm=600) for _ in range(3)]
    assert len({pid for pids in used for pid in pids}) == 12
    assert len(processes_of(cluster, ZYGOTE)) == 4
    release()


@pytest.mark.proof
def test_failing_preload_is_a_typed_error(cluster: SimulatedCluster) -> None:
    with pytest.raises(TaskSetupError, match="no_such_module"):
        run_on_pod(index, "v4-16", preload=["no_such_module"], max_retries_failure=0)


@pytest.mark.proof
def test_keep_warm_zero_returns_everything_with_the_call(cluster: SimulatedCluster) -> None:
    release()
    wait_until(lambda: free_chips() == CHIPS, 15)
    assert run_on_pod(index, "v4-16", keep_warm=0) == [0, 1]
    wait_until(lambda: free_chips() == CHIPS, 5)  # Ray's own view of its resources lags a little


@pytest.mark.proof
def test_idle_slices_return_after_keep_warm(cluster: SimulatedCluster) -> None:
    assert run_on_pod(index, "v4-16", keep_warm=1.5) == [0, 1]
    wait_until(lambda: free_chips() == CHIPS, 20)


@pytest.mark.proof
def test_failing_job_without_keep_warm_returns_everything(cluster: SimulatedCluster) -> None:
    def fail() -> None:
        raise OutOfTea(1)

    with pytest.raises(OutOfTea):
        run_on_pod(fail, "v4-16", keep_warm=0, max_retries_failure=1)
    wait_until(lambda: free_chips() == CHIPS, 5)


def test_bad_input_is_refused_before_acquiring_anything(cluster: SimulatedCluster) -> None:
    def needs_an_argument(argument: int) -> int:
        return argument

    release()
    wait_until(lambda: free_chips() == CHIPS, 15)
    with pytest.raises(InvalidRequestError):
        run_on_pod(index, "v4-17")
    with pytest.raises(InvalidRequestError):
        run_on_pod(needs_an_argument, "v4-16")
    assert free_chips() == CHIPS


# -- what the driver's terminal shows ------------------------------------------------------------------------------


def test_driver_sees_labelled_prints_and_wait_reason(cluster: SimulatedCluster) -> None:
    script = """
        import sys, ray
        from iris_ray import run_on_pod, run_on_pod_ray
        ray.init(address=sys.argv[1])

        @ray.remote(runtime_env={"env_vars": {"TEA_TOKEN": "hunter2"}})
        def greet():
            print("good morning")

        run_on_pod(greet, "v4-16", num_slices=2)
        waiting = run_on_pod_ray.remote(greet, "v5p-16")
        ray.wait([waiting], timeout=4)
        """
    release()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), cluster.address],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"},
    )
    assert done.returncode == 0, done.stderr
    seen = done.stdout + done.stderr
    for slice_id in (0, 1):
        for worker in (0, 1):
            assert any(
                f"greet slice={slice_id} worker={worker}" in line and "good morning" in line
                for line in seen.splitlines()
            ), seen
    assert "none like that in the cluster, which has 3 × v4-16" in seen
    assert "hunter2" not in seen, "the value of a user's variable reached a log (defect 11)"


# -- limits and secrets of a job ---------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.usefixtures("cluster")
def test_tasks_and_their_programs_read_secrets() -> None:
    def read() -> tuple[str, str, int, bool]:
        path = os.environ["CREDENTIALS"]
        program = subprocess.run(["cat", path], capture_output=True, text=True, check=True)
        mode = os.stat(path).st_mode & 0o777
        return os.environ["KEY"], program.stdout, mode, "s3cr3t" in Path("/proc/self/environ").read_text()

    secrets = {"KEY": Secret("s3cr3t"), "CREDENTIALS": Secret("of a file", as_file=True)}
    assert run_on_pod(read, "v4-16", secrets=secrets) == [("s3cr3t", "of a file", 0o400, False)] * 2


@pytest.mark.proof
@pytest.mark.usefixtures("cluster")
def test_run_ends_at_its_time_limit_after_a_notice() -> None:
    def until_told() -> str:
        while (notice := preemption_notice()) is None:
            time.sleep(0.05)
        return notice.kind

    assert run_on_pod(until_told, "v4-16", max_runtime=6) == ["time_limit"] * 2
    with pytest.raises(JobCancelledError, match="its max_runtime of 4 s is over"):
        run_on_pod(lambda: time.sleep(60), "v4-16", max_runtime=4)
