"""What people see of a job that runs on real Ray nodes: its words, its stacks, its profile, where its time went."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from iris_ray import get_job_info, heartbeat, report_status, run_on_pod_ray, unproductive
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.cli.conventions import FAILED
from iris_ray.inspection.chip_metrics import DUTY_CYCLE, MEMORY_TOTAL, MEMORY_USED, PORTS_VARIABLE
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris, iris_json
from tests.support.gangs import Trace, all_jobs
from tests.support.libtpu_metrics import metrics_service
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.proof]

STEPS_S = 0.2
NAMED, VALUE = "MY_VARIABLE", "a value that no report has"


def training(directory: Path) -> Callable[[], int]:
    def trains_here() -> int:
        me = get_job_info()
        assert me is not None
        with unproductive("checkpoint_restore"):
            time.sleep(1.0)
        step = 0
        while not (directory / "finish").exists():
            heartbeat(step)
            report_status(f"task {me.task_index} at {step}")
            began = time.monotonic()
            while time.monotonic() < began + STEPS_S:
                pass
            if step == 20 and me.attempt == 1 and me.task_index == 1:
                raise SystemExit(3)
            step += 1
        return step

    return trains_here


def test_traces_of_all_tasks_and_use_of_chips_are_brought(cluster: SimulatedCluster, tmp_path: Path) -> None:
    def computes() -> None:
        import jax

        me = get_job_info()
        assert me is not None
        multiply = jax.jit(lambda x: x @ x)
        x = jax.numpy.ones((64, 64))
        multiply(x).block_until_ready()
        (tmp_path / f"computes-{me.task_index}").touch()
        while not (tmp_path / "finish").exists():
            with jax.profiler.TraceAnnotation(f"step of task {me.task_index}"):
                multiply(x).block_until_ready()
            time.sleep(0.001)

    gibibyte = 1 << 30
    memory = {MEMORY_USED: {0: 3 * gibibyte}, MEMORY_TOTAL: {0: 32 * gibibyte}}
    with metrics_service({DUTY_CYCLE: {0: 97.0}, **memory}) as port:
        variables = {PORTS_VARIABLE: str(port), "JAX_PLATFORMS": "cpu", NAMED: VALUE}
        gang = ray.remote(max_calls=1, runtime_env={"env_vars": variables})
        results = run_on_pod_ray.remote(gang(computes), "v4-16", keep_warm=0)
        try:
            wait_until(lambda: len([*tmp_path.glob("computes-*")]) == 2, 120)
            (job,) = (job.job_id for job in all_jobs() if not job.state.finished)
            there = tmp_path / "there"
            done = iris(cluster, "job", "profile", job, "--xprof", "--all-tasks", "--duration", "1", "-o", str(there))
            assert f"xprof {there}" in done.stderr
            row = iris(cluster, "job", "chips", job, "1").stdout.splitlines()[1]
            assert " ".join(row.split()).endswith("host 1 0 97 % 3.0 of 32.0 GiB")
            assert [one["chips"][0]["duty_cycle"] for one in iris_json(cluster, "job", "chips", job)] == [97.0, 97.0]
            report = iris(cluster, "bug-report", job, "-o", "-").stdout
            assert NAMED in report.partition("names of the variables of a task")[2]
            assert VALUE not in report
            assert f"== iris-ray job stacks {job}" in report
        finally:
            (tmp_path / "finish").touch()
            ray.get(results, timeout=60)
    first, second = sorted(there.glob("plugins/profile/*/task-*.xplane.pb"))
    assert (first.name, second.name, first.parent) == ("task-0.xplane.pb", "task-1.xplane.pb", second.parent)
    steps = b"step of task 0", b"step of task 1"
    assert [[step in one.read_bytes() for step in steps] for one in (first, second)] == [[True, False], [False, True]]


def test_task_without_jax_says_so_and_goes_on(cluster: SimulatedCluster, tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    results = run_on_pod_ray.remote(trace.gang(), "v4-16", keep_warm=0)
    task, _ = trace.wait_for_tasks(2)
    done = iris(cluster, "job", "profile", task["job"], "--xprof", "-o", str(tmp_path / "there"), code=FAILED)
    assert "task 0: no process of it uses JAX" in done.stderr
    assert not (tmp_path / "there").exists()
    assert "UNAVAILABLE" in iris(cluster, "job", "chips", task["job"], code=FAILED).stderr
    trace.finish()
    ray.get(results, timeout=60)


@pytest.mark.long
def test_job_insight_shows_activity_and_goodput(cluster: SimulatedCluster, tmp_path: Path) -> None:
    results = run_on_pod_ray.remote(training(tmp_path), "v4-16", max_retries_failure=1, keep_warm=0)
    try:
        job = look_at(cluster, tmp_path)
    finally:
        (tmp_path / "finish").touch()
        done = ray.get(results, timeout=60)
    tells_what_became_of_it(cluster, job, done[0])


def look_at(cluster: SimulatedCluster, tmp_path: Path) -> str:
    """Look at the second attempt of the job while it runs; returns its id."""
    wait_until(find_controller, 60)
    controller = ControllerConnection()
    wait_until(
        lambda: any(
            job.attempt == 2 and (job.step or 0) > 20 for job in controller.ask_all(ControllerInterface.list_jobs)
        ),
        120,
    )
    (job,) = (
        job.job_id
        for job in controller.ask_all(ControllerInterface.list_jobs)
        if job.attempt == 2 and not job.state.finished
    )
    assert "task 0 at " in iris_json(cluster, "job", "status", job)["status"]
    stacks = iris(cluster, "job", "stacks", job).stdout
    assert "trains_here" in stacks
    picture = tmp_path / "profile.txt"
    iris(cluster, "job", "profile", job, "1", "--duration", "2s", "--format", "raw", "-o", str(picture))
    assert "trains_here" in picture.read_text()
    return job


def tells_what_became_of_it(cluster: SimulatedCluster, job: str, steps: int) -> None:
    found = iris_json(cluster, "job", "goodput", job)
    assert found["attempts"] == 2
    seconds = found["seconds"]
    # A second for each attempt. The first one's is not known if its host was too busy to answer at the end.
    restored = seconds["unproductive_checkpoint_restore_time"]
    assert restored == pytest.approx(2.0, abs=0.5) or restored == pytest.approx(1.0, abs=0.2)
    assert seconds["productive"] == pytest.approx(STEPS_S * steps, rel=0.3)
    assert seconds["wasted_progress_from_disruption"] == pytest.approx(STEPS_S * 20, rel=0.3)
    assert seconds["infrastructure_recovery_from_disruption"] > 0.0
    told = [event["what"] for event in iris_json(cluster, "job", "events", job)]
    assert any("charged as a failure" in what and "worker 1" in what for what in told)
