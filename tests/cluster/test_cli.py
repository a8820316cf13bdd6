"""Every command of ``iris-ray`` once as people run it: a process of its own, a real cluster, a real terminal.

What the commands say in all other cases is tested in tests/unit/cli, with the Controller in the test's own process.
`demo` is an example (test_examples.py), and `provision` needs Google's API (test_cloud.py).
"""

import contextlib
import os
import pty
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from click.shell_completion import ShellComplete

import iris_ray
from iris_ray import CoschedulingConfig, IrisClient, ResourceSpec, run_on_pod_ray, tpu_device
from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.actors.wire.controller_connection import ControllerConnection, find_controller
from iris_ray.cli import completion
from iris_ray.cli.exits import FAILED, INTERRUPTED, NO_CLUSTER, OK, USAGE
from iris_ray.cli.host_checks import ask_hosts, tpu_hosts
from iris_ray.cli.main import main
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import address_of_nobody, command_line, environment, iris, iris_json
from tests.support.gangs import Trace, free_chips, wait_until

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Job:
    """A gang of two tasks that run until the module's end.

    Attributes:
        job_id: its id.
        slice_name: the slice that it has.
    """

    job_id: str
    slice_name: str


@pytest.fixture(scope="module")
def running(cluster: SimulatedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Each task has printed a line. Whatever the commands do, it is never started again."""
    trace = Trace(tmp_path_factory.mktemp("running"))
    directory = trace.directory

    def says(facts: dict[str, Any]) -> int:
        import time

        print("at work, task", facts["index"], flush=True)
        while not (directory / "finish").exists():
            time.sleep(0.05)
        return facts["attempt"]

    results = run_on_pod_ray.remote(trace.gang(says), "v4-16", keep_warm=0, max_retries_preemption=0)
    (first, _) = trace.wait_for_tasks(2)
    yield Job(first["job"], first["slice"])
    trace.finish()
    assert ray.get(results, timeout=60) == [1, 1]


def waiting_job(name: str) -> str:
    """A job for more slices than there are."""
    need = ResourceSpec(device=tpu_device("v4-16"))
    return IrisClient().submit(lambda: 1, name, resources=need, coscheduling=CoschedulingConfig(num_groups=9)).job_id


def idle_slices(cluster: SimulatedCluster, running: Job) -> list[str]:
    return [name for name in cluster.slice_names if name != running.slice_name]


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_ls_status_tasks_and_workers_show_a_running_job(cluster: SimulatedCluster, running: Job) -> None:
    assert running.job_id in iris(cluster, "ls").stdout
    assert iris_json(cluster, "status", running.job_id)["groups"] == [running.slice_name]
    tasks = iris_json(cluster, "tasks", running.job_id)
    assert [(task["state"], task["group"]) for task in tasks] == [("RUNNING", running.slice_name)] * 2
    busy = {view["slice"]: view["jobs"] for view in iris_json(cluster, "workers") if view["state"] == "BUSY"}
    assert busy == {running.slice_name: [running.job_id]}


def test_why_and_cancel_of_a_job_that_waits(cluster: SimulatedCluster, running: Job) -> None:
    job_id = waiting_job("waits")
    assert "waiting for 9 slices" in iris(cluster, "why", job_id).stdout
    assert f"did you mean {job_id}" in iris(cluster, "cancel", job_id[:-1], code=USAGE).stderr
    assert f"{job_id} is cancelled; it was pending" in iris(cluster, "cancel", job_id, user="bob").stdout
    assert iris_json(cluster, "status", job_id)["error"] == "cancelled by bob"


def test_logs_prints_a_tasks_lines_and_ctrl_c_ends_its_following(
    cluster: SimulatedCluster, running: Job, tmp_path: Path
) -> None:
    assert iris(cluster, "logs", running.job_id, "1").stdout == "at work, task 1\n"
    printed = tmp_path / "printed"
    with printed.open("wb") as file:
        follows = subprocess.Popen(
            command_line("logs", "-f", running.job_id), stdout=file, stderr=file, env=environment(cluster)
        )
    wait_until(lambda: {f"task-{n}| at work, task {n}" for n in (0, 1)} <= set(printed.read_text().splitlines()))
    follows.send_signal(signal.SIGINT)
    assert follows.wait(60) == INTERRUPTED


def test_shell_completes_jobs_of_a_cluster_that_answers(
    cluster: SimulatedCluster, running: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "PATIENCE_S", 60.0)  # machines that run tests are slow
    monkeypatch.setenv("RAY_ADDRESS", address_of_nobody())
    words = ["logs", "--address", cluster.address]
    found = ShellComplete(main, {}, "iris-ray", "").get_completions(words, running.job_id[:-2])
    assert [item.value for item in found] == [running.job_id]


# -- run and submit ----------------------------------------------------------------------------------------------------


class Terminal:
    """A command on a terminal of its own: what it prints there, and somebody who answers."""

    def __init__(self, cluster: SimulatedCluster, *arguments: str) -> None:
        self._ours, its = pty.openpty()
        self._printed = b""
        self.process = subprocess.Popen(
            command_line(*arguments), stdin=its, stdout=its, stderr=its, env=environment(cluster)
        )
        os.close(its)
        os.set_blocking(self._ours, False)

    def says(self, text: str) -> None:
        """Returns when it has said that, since the last time."""

        def said() -> bool:
            with contextlib.suppress(BlockingIOError, OSError):  # OSError: it has ended
                self._printed += os.read(self._ours, 65536)
            return text.encode() in self._printed

        wait_until(said)
        self._printed = self._printed.partition(text.encode())[2]

    def press_ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        """Its exit code."""
        code = self.process.wait(60)
        os.close(self._ours)
        return code


WORK = """
import pathlib, sys, time, iris_ray
me, directory = iris_ray.get_job_info(), pathlib.Path(sys.argv[1])
(directory / f'task-{me.task_index}').write_text(sys.argv[2])
print('up', flush=True)
if sys.argv[2] == '--fail' and me.task_index == 1: raise ValueError('on purpose')
while not (directory / sys.argv[2]).exists(): time.sleep(0.05)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """It writes down its second argument, prints "up", and fails, or waits for a file of that name."""
    (tmp_path / "work.py").write_text(WORK)
    return str(tmp_path / "work.py")


def test_run_passes_the_scripts_arguments_on_and_its_end_is_the_commands(
    cluster: SimulatedCluster, running: Job, script: str, tmp_path: Path
) -> None:
    """The first run is asked about Ctrl-C and goes on to its end, the second fails, the third is cancelled."""
    asked = Terminal(cluster, "run", script, "v4-16", "--", str(tmp_path), "--fine")
    asked.says("up")
    asked.press_ctrl_c()
    asked.says("Cancel the job? No: go on waiting for it. [Y/n]")
    asked.type("n\n")
    (tmp_path / "--fine").touch()
    assert asked.end() == OK
    assert [path.read_text() for path in sorted(tmp_path.glob("task-*"))] == ["--fine"] * 2

    once = ("--name", "once", "--max-retries-failure", "0")
    failed = iris(cluster, "run", script, "--tpu", "v4-16", *once, "--", str(tmp_path), "--fail", code=FAILED)
    assert "once failed: ValueError: on purpose" in failed.stderr
    assert 'work.py", line 6' in failed.stderr
    assert "iris_ray/actors" not in failed.stderr

    unasked = subprocess.Popen(
        command_line("run", script, "v4-16", "--", str(tmp_path), "never"),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(cluster),
    )  # fmt: skip
    wait_until(lambda: [path.read_text() for path in tmp_path.glob("task-*")] == ["never"] * 2)
    unasked.send_signal(signal.SIGINT)
    _, printed = unasked.communicate(timeout=60)
    assert unasked.returncode == INTERRUPTED
    assert "work is cancelled" in printed
    assert not re.search("^Traceback", printed, re.MULTILINE)
    wait_until(lambda: free_chips() == 16.0)
    jobs = [job for job in iris_json(cluster, "ls", "--all", "--user", "ann") if job["name"] in ("work", "once")]
    assert [job["state"] for job in jobs[-3:]] == ["SUCCEEDED", "FAILED", "KILLED"]


def test_submitted_job_goes_on_without_its_command_and_is_followed_by_another(
    cluster: SimulatedCluster, running: Job, script: str, tmp_path: Path
) -> None:
    arguments = ("--cpu", "0.5", "--replicas", "2", "-f", "--", str(tmp_path), "fine")
    submitted = Terminal(cluster, "submit", script, *arguments)
    submitted.says("task-1| up")
    submitted.press_ctrl_c()
    submitted.says("Cancel the job? No: leave it running. [y/N]")
    submitted.type("\n")
    submitted.says("goes on")
    assert submitted.end() == INTERRUPTED
    (job_id,) = [job["job_id"] for job in iris_json(cluster, "ls") if job["name"] == "work"]
    (tmp_path / "fine").touch()
    assert sorted(iris(cluster, "logs", "-f", job_id).stdout.splitlines()) == ["task-0| up", "task-1| up"]
    assert iris_json(cluster, "status", job_id)["state"] == "SUCCEEDED"


# -- slices and hosts --------------------------------------------------------------------------------------------------


def test_drain_and_undrain_close_and_open_a_slice(cluster: SimulatedCluster, running: Job) -> None:
    name = idle_slices(cluster, running)[0]
    assert "2 hosts" in iris(cluster, "drain", name, "--reason", "a fan").stdout
    states = {view["slice"]: (view["state"], view["reason"]) for view in iris_json(cluster, "workers")}
    assert states[name] == ("CLOSED", "drained (a fan)")
    assert len(iris_json(cluster, "undrain", name)["hosts"]) == 2


def test_taint_and_untaint_close_and_open_a_host(cluster: SimulatedCluster, running: Job) -> None:
    name = idle_slices(cluster, running)[0]
    tainted = iris_json(cluster, "taint", f"{name}/1", "big")
    assert tainted["hosts"] == [cluster.node_id(name, 1)]
    assert iris_json(cluster, "untaint", f"{name}/1", "big")["still_closed"] == {}


# -- the cluster -------------------------------------------------------------------------------------------------------


def test_doctor_asks_every_host_and_a_frozen_one_keeps_nobody_waiting(cluster: SimulatedCluster, running: Job) -> None:
    """Somebody holds chips of two idle hosts: their device file of one, libtpu's lock of the other."""
    first, second = idle_slices(cluster, running)
    device, lock = cluster.host_dir(first, 1) / "dev" / "accel0", cluster.host_dir(second, 0) / "lock"
    with device.open(), (lock / "libtpu_lockfile").open("w"):
        found = {(f["level"], f["check"]): f["found"] for f in iris_json(cluster, "doctor")}
    held = found["WARNING", "chips held"]
    assert re.match(rf"v4-16-\d host [01] \(127.*\): pid {os.getpid()} \(\w+\), and nobody has claimed", held)
    assert found["OK", "silent hosts"] == "none; all 6 TPU hosts answered"
    assert found["INFO", "metadata server of hosts"] == "answers on none of 6 hosts"
    assert found["OK", "versions on hosts"].startswith("the same on all: python 3.")

    hosts = tpu_hosts(NodeTable.read())
    with device.open(), (lock / "libtpu_lockfile").open("w"):
        looks = ask_hosts(hosts)  # from here on a process waits on each of them
    holding = {host.node_id for host, look in looks.items() if not isinstance(look, str) and look["holders"]}
    assert holding == {cluster.node_id(first, 1), cluster.node_id(second, 0)}
    cluster.freeze_host(first, 1)
    try:
        answers = ask_hosts(hosts, timeout_s=3)
    finally:
        cluster.thaw_host(first, 1)
    silent = {host.node_id: answer for host, answer in answers.items() if isinstance(answer, str)}
    assert silent == {cluster.node_id(first, 1): "no answer within 3 s"}


def test_controller_start_and_status(cluster: SimulatedCluster, running: Job) -> None:
    if find_controller() is not None:
        ControllerConnection().end()
    assert "iris-ray controller start" in iris(cluster, "ls", code=NO_CLUSTER).stderr
    assert "the Controller is started: epoch" in iris(cluster, "controller", "start").stdout
    status = iris_json(cluster, "controller", "status")
    assert (status["jobs"]["running"], status["slices"], status["hosts"]) == (1, {"busy": 1, "free": 2}, 7)


def test_controller_stop_ends_one_that_does_not_answer(cluster: SimulatedCluster, running: Job) -> None:
    pid = iris_json(cluster, "controller", "start")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert iris_json(cluster, "controller", "stop") == {"running": False}
    finally:
        os.kill(pid, signal.SIGKILL)
    assert iris_json(cluster, "controller", "start")["pid"] != pid


def broken_version(directory: Path) -> dict[str, str]:
    """A checkout of iris_ray 0.2.0 whose Controller can't be made; the variables that have it used."""
    shutil.copytree(
        Path(iris_ray.__file__).parent, directory / "iris_ray", ignore=shutil.ignore_patterns("__pycache__")
    )
    version = directory / "iris_ray" / "__init__.py"
    assert version.read_text().count('"0.1.0"') == 1
    version.write_text(version.read_text().replace('"0.1.0"', '"0.2.0"'))
    with (directory / "iris_ray" / "actors" / "controller" / "controller.py").open("a") as controller:
        controller.write("\n\nController.__init__ = lambda self: 1 / 0\n")
    return {"PYTHONPATH": str(directory)}


def test_controller_upgrade_goes_unnoticed_and_a_broken_one_loses_no_job(
    cluster: SimulatedCluster, running: Job, trace: Trace, tmp_path: Path
) -> None:
    before = iris_json(cluster, "controller", "start")
    assert "taken over 1 job: 1 running" in iris(cluster, "controller", "upgrade").stdout
    after = iris_json(cluster, "controller", "status")
    assert after["epoch"] > before["epoch"]
    assert after["pid"] != before["pid"]

    results = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    refused = subprocess.run(
        command_line("controller", "upgrade"),
        capture_output=True, text=True, timeout=240, env=environment(cluster) | broken_version(tmp_path / "new"),
        cwd=tmp_path,
    )  # fmt: skip
    assert refused.returncode == NO_CLUSTER, refused.stderr
    assert "The Controller of iris_ray 0.1.0 is ended, and the new one, of iris_ray 0.2.0" in refused.stderr
    trace.finish()  # the job's word of its end brings its own version back
    assert [task["attempt"] for task in ray.get(results, timeout=120)] == [1, 1]
    assert iris_json(cluster, "controller", "status")["version"] == "0.1.0"
