"""What a gang is told before it has to move, and how it moves: after a notice, to a spare, to more slices."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from iris_ray import release, run_on_pod, run_on_pod_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.goodput.calls import GoodputCalls
from iris_ray.model.time_lost import FailureCause, TimeLost
from iris_ray.model.topology import get_tpu_config
from iris_ray.settings import HOST_DIR
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import command_line
from tests.support.gangs import Trace, actor_pid, all_jobs, controller_pid, job_view, pool_pid, slice_of_this_task
from tests.support.proofs import in_long, in_proofs
from tests.support.waiting import wait_until

PREEMPTED = "the metadata server of the host says that it is being preempted"


class Stranger:
    """Uses half of a host's CPUs."""

    def there(self) -> None:
        """Answers when it runs."""


def steps(directory: Path, when_told: Callable[[Any, dict[str, Any], int], Any]) -> Callable[[dict[str, Any]], Any]:
    """A task that counts steps, goes on where the latest save was, and does something when it is told to move.

    Every step leaves a line, so that nothing that was done twice can hide.
    """

    def work(facts: dict[str, Any]) -> list[int]:
        import iris_ray

        saved = directory / f"saved-{facts['index']}"
        start = int(saved.read_text()) if saved.exists() else 0
        for step in range(start, 10_000):
            iris_ray.heartbeat(step)
            with (directory / f"steps-{facts['index']}").open("a") as lines:
                lines.write(f"{facts['attempt']} {step}\n")
            time.sleep(0.02)
            if (directory / "finish").exists():
                return [facts["attempt"], start]
            if notice := iris_ray.preemption_notice():
                when_told(notice, facts, step)
        raise AssertionError("the test never said that it is over")

    return work


def lines(directory: Path, index: int) -> list[tuple[int, int]]:
    text = (directory / f"steps-{index}").read_text().splitlines()
    return [(int(attempt), int(step)) for attempt, step in map(str.split, text)]


def test_noticed_gang_saves_moves_and_repeats_no_step(cluster: SimulatedCluster, trace: Trace) -> None:
    directory = trace.directory

    def save(notice: Any, facts: dict[str, Any], step: int) -> None:
        assert 0 < notice.seconds_left < 60, notice
        assert "Ray is draining it" in notice.reason or "preempt" in notice.reason, notice
        (directory / f"saved-{facts['index']}").write_text(str(step + 1))
        notice.saved()

    ref = run_on_pod_ray.remote(trace.gang(steps(directory, save)), "v4-16", num_slices=2, max_retries_failure=0)
    first = trace.wait_for_tasks(4)
    preemption = cluster.preempt_slice(first[0]["slice"], notice_s=60)
    second = trace.wait_for_tasks(4, attempt=2, timeout_s=40)
    assert {task["slice"] for task in second} & {first[0]["slice"], first[2]["slice"]} == {first[2]["slice"]}
    trace.finish()
    results = ray.get(ref)
    for index in range(4):
        done = [step for _, step in lines(directory, index)]
        assert done == list(range(len(done))), "every step once, and in order"
        assert results[index][0] == 2
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)
    preemption.cancel()


def test_hook_of_ending_pod_tells_tasks_while_controller_hangs(cluster: SimulatedCluster, trace: Trace) -> None:
    """The hook runs with the environment of its pod, as Kubernetes starts it."""
    directory = trace.directory

    def save(notice: Any, facts: dict[str, Any], step: int) -> None:
        (directory / f"told-{facts['index']}").write_text(f"{time.time()} {notice.reason}")
        (directory / f"saved-{facts['index']}").write_text(str(step + 1))
        notice.saved()

    ref = run_on_pod_ray.remote(trace.gang(steps(directory, save)), "v4-16", max_retries_failure=0)
    first = trace.wait_for_tasks(2)
    slice_name, controller = first[0]["slice"], controller_pid()
    os.kill(controller, signal.SIGSTOP)
    try:
        began = time.time()
        hook = command_line("host", "give-notice", "here", "--in", "12s", "--reason", "the pod ends")
        pod = {**os.environ, HOST_DIR.name: str(cluster.host_dir(slice_name, 1))}
        told = subprocess.Popen(hook, env=pod, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_until(lambda: len(list(directory.glob("told-*"))) == 2, 10)
        print("told after", *(float(p.read_text().split()[0]) - began for p in directory.glob("told-*")), "s")
        assert f"{slice_name} host 1: the pod ends" in (directory / "told-0").read_text()
    finally:
        os.kill(controller, signal.SIGCONT)
    second = trace.wait_for_tasks(2, attempt=2, timeout_s=40)
    assert second[0]["slice"] != slice_name
    said, _ = told.communicate(timeout=30)
    left = ("all tasks have left", "no job has tasks there; no new ones will start")  # before Ray drained the node
    assert (told.returncode, said.splitlines()[-1] in left) == (0, True), said
    trace.finish()
    assert [attempt for attempt, _ in ray.get(ref)] == [2, 2]
    assert (job_view(first[0]["job"]).failures, job_view(first[0]["job"]).preemptions) == (0, 1)


@pytest.mark.parametrize(
    ("stopped", "tpu_type"),
    [("SlicePoolManager", "v4-16"), *in_proofs(("Controller", "v4-16")), *in_long(("SliceActor", "v4-32"))],
)
def test_notice_of_one_host_reaches_gang_whatever_hangs(
    cluster: SimulatedCluster, trace: Trace, stopped: str, tpu_type: str
) -> None:
    """The gang has two slices of two hosts, or one slice of four, whose SliceActor is a process of its own.

    It saves, and goes on elsewhere once what hangs runs again.
    """
    directory, num_slices = trace.directory, 4 // get_tpu_config(tpu_type).vm_count
    for _ in range(0 if tpu_type == "v4-16" else 2):
        cluster.add_slice(tpu_type)

    def save(notice: Any, facts: dict[str, Any], step: int) -> None:
        with (directory / f"told-{facts['index']}").open("a") as told:
            told.write(f"{time.time()} {notice.seconds_left} {notice.reason}")
        (directory / f"saved-{facts['index']}").write_text(str(step + 1))
        notice.saved()

    ref = run_on_pod_ray.remote(
        trace.gang(steps(directory, save)), tpu_type, num_slices=num_slices, max_retries_failure=0
    )
    first = trace.wait_for_tasks(4)
    here = first[0]["slice"]
    find = {
        "Controller": controller_pid,
        "SlicePoolManager": pool_pid,
        "SliceActor": lambda: actor_pid(cluster, here, 0, "SliceActor"),
    }
    time.sleep(1.0)  # the hosts know each other by then
    hangs = psutil.Process(find[stopped]())
    hangs.suspend()
    try:
        began = time.time()
        cluster._host(here, 1).metadata.preempt()
        wait_until(lambda: len([told for told in directory.glob("told-*") if told.stat().st_size]) == 4, 10)
    finally:
        hangs.resume()
    told = [(directory / f"told-{index}").read_text().split(" ", 2) for index in range(4)]
    after = [float(at) - began for at, _, _ in told]
    print(f"{stopped}: told after", *(f"{seconds:.2f}" for seconds in after), "s")
    assert max(after) < 2.0
    assert all(25 < float(seconds) <= 30 and reason == f"{here} host 1: {PREEMPTED}" for _, seconds, reason in told)
    trace.wait_for_tasks(4, attempt=2, timeout_s=60)
    trace.finish()
    assert [attempt for attempt, _ in ray.get(ref)] == [2] * 4
    assert (job_view(first[0]["job"]).failures, job_view(first[0]["job"]).preemptions) == (0, 1)
    cluster.preempt_slice(here)


@pytest.mark.long
def test_drain_reaches_gang_whose_slice_actor_hangs(cluster: SimulatedCluster, trace: Trace) -> None:
    directory = trace.directory
    for _ in range(2):
        cluster.add_slice("v4-32")  # its SliceActor is a process of its own

    def save(notice: Any, facts: dict[str, Any], step: int) -> None:
        (directory / f"told-{facts['index']}").touch()
        (directory / f"saved-{facts['index']}").write_text(str(step + 1))
        notice.saved()

    ref = run_on_pod_ray.remote(trace.gang(steps(directory, save)), "v4-32", max_retries_failure=0)
    name = trace.wait_for_tasks(4)[0]["slice"]
    time.sleep(1.0)  # the hosts know each other by then
    hangs = psutil.Process(actor_pid(cluster, name, 0, "SliceActor"))
    hangs.suspend()
    try:
        preemption = cluster.preempt_slice(name, notice_s=60, heard_by="ray")
        wait_until(lambda: len(list(directory.glob("told-*"))) == 4, 4)
    finally:
        hangs.resume()
    trace.wait_for_tasks(4, attempt=2, timeout_s=60)
    trace.finish()
    assert [attempt for attempt, _ in ray.get(ref)] == [2] * 4
    preemption.cancel()


@pytest.mark.proof
def test_callback_and_sigterm_tell_notice_and_bare_process_survives(cluster: SimulatedCluster, trace: Trace) -> None:
    directory = trace.directory

    def work(facts: dict[str, Any]) -> str:

        import iris_ray

        if facts["index"] == 0:
            signal.signal(signal.SIGTERM, lambda *_: (directory / f"sigterm-{facts['attempt']}").touch())
        else:
            iris_ray.on_preemption(lambda notice: (directory / "called").write_text(notice.kind.value))
        while not (directory / "finish").exists():
            time.sleep(0.02)
        return facts["slice"]

    ref = run_on_pod_ray.remote(trace.gang(work), "v4-16", max_retries_failure=0)
    first = trace.wait_for_tasks(2)
    preemption = cluster.preempt_slice(first[0]["slice"], notice_s=30)
    wait_until(lambda: (directory / "sigterm-1").exists() and (directory / "called").exists())
    assert (directory / "called").read_text() == "preemption"
    time.sleep(0.5)
    trace.finish()
    assert ray.get(ref) == [first[0]["slice"]] * 2, "a gang that does not ask to move stays until the deadline"
    assert job_view(first[0]["job"]).preemptions == 0
    preemption.cancel()


@pytest.mark.long
def test_task_ended_by_sigterm_on_staying_host_costs_no_failure(cluster: SimulatedCluster, trace: Trace) -> None:
    """Every task of the gang gets the signal, on whichever host; it must not look like a crash of its own."""
    directory = trace.directory

    def work(facts: dict[str, Any]) -> int:
        import signal

        if facts["index"] == 3:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
        while not (directory / "finish").exists():
            time.sleep(0.02)
        return facts["attempt"]

    ref = run_on_pod_ray.remote(trace.gang(work), "v4-16", 2, max_retries_failure=0)
    first = trace.wait_for_tasks(4)
    doomed = next(facts["slice"] for facts in first if facts["index"] == 0)
    preemption = cluster.preempt_slice(doomed, notice_s=40)
    trace.wait_for_tasks(4, attempt=2)
    trace.finish()
    assert ray.get(ref) == [2] * 4
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)
    preemption.cancel()


@pytest.mark.long
def test_spare_takes_over_with_started_processes(cluster: SimulatedCluster, trace: Trace) -> None:
    release()  # nothing else is warm
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_failure=0, spares=1)
    first = trace.wait_for_tasks(2)

    def ready() -> Any:
        jobs = [job for job in all_jobs() if job.job_id.startswith(first[0]["job"] + "/spare")]
        return [job.groups[0] for job in jobs if job.state.name == "RUNNING"]

    (spare,) = wait_until(ready)
    cluster.kill_host(first[0]["slice"], 1)
    second = trace.wait_for_tasks(2, attempt=2)
    assert {task["slice"] for task in second} == {spare}
    trace.finish()
    ray.get(ref)
    wait_until(lambda: not [job for job in all_jobs() if "/spare" in job.job_id])


@pytest.mark.long
def test_spare_ray_does_not_reserve_is_tried_again(cluster: SimulatedCluster, trace: Trace) -> None:
    """Somebody outside iris_ray uses the CPUs. The Controller learns of it, and waits until they are free."""
    release()
    warm, _ = run_on_pod(slice_of_this_task, "v4-16", keep_warm=600)
    others = [name for name in cluster.slice_names if name != warm and 1 in cluster.worker_ids(name)]
    remote_stranger = ray.remote(num_cpus=2)(Stranger)
    places = [{"ray.io/node-id": cluster.node_id(name, 1)} for name in others]
    strangers = [remote_stranger.options(label_selector=place).remote() for place in places]
    ray.get([stranger.there.remote() for stranger in strangers])
    remote = ray.remote(num_cpus=3)(trace.gang())
    ref = run_on_pod_ray.remote(remote, "v4-16", max_retries_failure=0, spares=1)
    (first, _) = trace.wait_for_tasks(2)
    assert first["slice"] == warm

    def spare() -> Any:
        (found,) = [job for job in all_jobs() if job.job_id.startswith(first["job"] + "/spare")]
        return found

    def waits_for_others() -> bool:
        return "by work outside iris_ray" in str(spare().waiting)

    # On a busy machine the Controller may learn of the others before it has tried.
    wait_until(lambda: "Ray did not reserve" in (spare().error or "") or waits_for_others())
    wait_until(waits_for_others)
    for stranger in strangers:
        ray.kill(stranger)
    wait_until(lambda: spare().state.name == "RUNNING")
    trace.finish()
    ray.get(ref)


@pytest.mark.long
def test_gang_grows_back_and_may_save_before(cluster: SimulatedCluster, trace: Trace) -> None:
    directory = trace.directory

    def save(notice: Any, facts: dict[str, Any], step: int) -> None:
        with (directory / "notices").open("a") as notices:
            notices.write(f"{notice.kind.value}\n")
        (directory / f"saved-{facts['index']}").write_text(str(step + 1))
        notice.saved()

    ref = run_on_pod_ray.remote(
        trace.gang(steps(directory, save)), "v4-16", num_slices=[1, 3], max_retries_failure=0, grow_after=3600.0
    )  # a number: after a loss it grows back at once
    first = trace.wait_for_tasks(6)
    cluster.preempt_slice(first[0]["slice"])
    trace.wait_for_tasks(2, attempt=2)
    cluster.add_slice("v4-16")
    trace.wait_for_tasks(6, attempt=3, timeout_s=90)
    wait_until(lambda: FailureCause.GROWN in time_lost(first[0]["job"]), 30)
    trace.finish()
    assert [attempt for attempt, _ in ray.get(ref)] == [3] * 6
    assert set((directory / "notices").read_text().split()) == {"growth"}
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1), "to grow is free"
    lost = {cause: (found.count, found.worst_s < 30.0) for cause, found in time_lost(first[0]["job"]).items()}
    assert lost == {FailureCause.LOST: (1, True), FailureCause.GROWN: (1, True)}


def time_lost(job_id: str) -> Mapping[FailureCause, TimeLost]:
    return ControllerConnection().ask(GoodputCalls.job_goodput, job_id).time_lost


@pytest.mark.proof
def test_handler_that_saves_and_exits_is_neither_success_nor_failure(cluster: SimulatedCluster, trace: Trace) -> None:
    """As scripts do that were written for other schedulers; each task takes another time to save."""
    directory = trace.directory

    def work(facts: dict[str, Any]) -> int:
        import sys

        def save_and_leave(*_: object) -> None:
            time.sleep(0.5 * facts["index"])
            (directory / f"saved-{facts['attempt']}-{facts['index']}").touch()
            sys.exit(143 * facts["index"])

        signal.signal(signal.SIGTERM, save_and_leave)
        while not (directory / "finish").exists():
            time.sleep(0.02)
        return facts["attempt"]

    ref = run_on_pod_ray.remote(trace.gang(work), "v4-16", max_retries_failure=0)
    first = trace.wait_for_tasks(2)
    preemption = cluster.preempt_slice(first[0]["slice"], notice_s=40)
    trace.wait_for_tasks(2, attempt=2)
    assert all((directory / f"saved-1-{index}").exists() for index in range(2))
    trace.finish()
    assert ray.get(ref) == [2, 2]
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)
    preemption.cancel()
