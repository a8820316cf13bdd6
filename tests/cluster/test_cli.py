"""Every command of ``iris-ray`` once as people run it: a process of its own, a real cluster, a real terminal.

What the commands say in all other cases is tested in tests/unit/cli, with the Controller in the test's own process.
`demo` is an example (test_examples.py), and `provision` needs Google's API (test_cloud.py).
"""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from click.shell_completion import ShellComplete
from ray._private import services

from iris_ray import CoschedulingConfig, IrisClient, ResourceSpec, run_on_pod_ray, tpu_device
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.cli import completion
from iris_ray.cli.conventions import FAILED, INTERRUPTED, NO_CLUSTER, OK, TERMINATED, UNREAD
from iris_ray.cli.main import main
from iris_ray.doctor.hosts import ask_hosts, tpu_hosts
from iris_ray.model.lifecycle import JobState
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import address_of_nobody, command_line, environment, iris, iris_json
from tests.support.gangs import Trace, all_jobs, all_workers, controller_pid, free_chips, the_controller
from tests.support.odd_hosts import CONTAINER
from tests.support.terminal import Terminal as LiveTerminal
from tests.support.terminal import python
from tests.support.waiting import wait_until

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


TOGETHER = """
import json, sys
from click.testing import CliRunner
from iris_ray.cli.main import main
done = [CliRunner().invoke(main, command) for command in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in done]))
"""


def together(cluster: SimulatedCluster, *commands: tuple[str, ...], user: str = "ann") -> list[str]:
    """Run commands one after the other in one process, which imports Ray once; return what each prints to stdout."""
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, json.dumps(commands)],
        capture_output=True, text=True, timeout=240, env=environment(cluster, user),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    assert [code for code, _, _ in ends] == [OK] * len(commands), ends
    return [out for _, out, _ in ends]


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_ls_status_tasks_logs_and_workers_show_a_running_job(cluster: SimulatedCluster, running: Job) -> None:
    job, name = running.job_id, running.slice_name
    assert job in iris(cluster, "ls").stdout
    status, tasks, logs, workers = together(
        cluster,
        ("job", "status", job, "--json"),
        ("job", "tasks", job, "--json"),
        ("logs", job, "1"),
        ("host", "ls", "--json"),
    )
    assert json.loads(status)["groups"] == [name]
    assert [(task["state"], task["group"]) for task in json.loads(tasks)] == [("RUNNING", name)] * 2
    assert logs == "at work, task 1\n"
    assert {view["slice"]: view["jobs"] for view in json.loads(workers) if view["state"] == "BUSY"} == {name: [job]}


def test_why_and_cancel_of_a_job_that_waits(cluster: SimulatedCluster, running: Job) -> None:
    job_id = waiting_job("waits")
    why, cancelled = together(cluster, ("why", job_id), ("cancel", job_id), user="bob")
    assert "waiting for 9 slices" in why
    assert f"{job_id} is cancelled; it was pending" in cancelled
    assert the_controller().ask(ControllerInterface.job_status, job_id).error == "cancelled by bob"


@pytest.mark.skipif(not hasattr(services, "find_node_ids"), reason="this Ray compares IP addresses")
def test_machine_without_ray_node_is_refused_at_once(cluster: SimulatedCluster) -> None:
    elsewhere = [*CONTAINER, *command_line("ls", "--address", cluster.address)]  # sees no process of the cluster
    refused = subprocess.run(elsewhere, capture_output=True, text=True, timeout=50)  # Ray would wait for 60 s
    assert refused.returncode == NO_CLUSTER, refused.stderr
    assert "no Ray node runs on this machine" in refused.stderr


def test_shell_completes_jobs_of_answering_cluster(
    cluster: SimulatedCluster, running: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "PATIENCE_S", 60.0)  # machines that run tests are slow
    monkeypatch.setenv("RAY_ADDRESS", address_of_nobody())
    words = ["logs", "--address", cluster.address]
    found = ShellComplete(main, {}, "iris-ray", "").get_completions(words, running.job_id[:-2])
    assert [item.value for item in found] == [running.job_id]


def test_terminal_shows_wait_reason_and_is_clean_after_ctrl_c(cluster: SimulatedCluster, running: Job) -> None:
    """A script that waits in `run_on_pod`, and `iris-ray submit --follow`."""
    need = "num_slices=9" if len(cluster.slice_names) < 9 else "num_slices=99"
    script = f"import ray, iris_ray; ray.init({cluster.address!r}); iris_ray.run_on_pod(print, 'v4-16', {need})"
    with LiveTerminal(python(script), columns=160) as terminal:
        why = re.compile(r"waiting for 9+ slices.*\d:\d\d$")
        screen = terminal.wait_for(lambda lines: any(map(why.search, lines[-1:])))
        assert screen[-1].startswith("print-")
        terminal.press_ctrl_c()
        screen = terminal.end()
    assert any("KeyboardInterrupt" in line for line in screen)  # Ray may print what its actors have said after it
    assert not any(re.search(r"\d:\d\d$", line) for line in screen)


# -- run and submit ----------------------------------------------------------------------------------------------------


class Terminal:
    """A command on a terminal of its own: what it prints there, and what a person types."""

    def __init__(self, cluster: SimulatedCluster, *arguments: str) -> None:
        self._ours, its = pty.openpty()
        self._printed = b""
        self.process = subprocess.Popen(
            command_line(*arguments), stdin=its, stdout=its, stderr=its, env=environment(cluster)
        )
        os.close(its)
        os.set_blocking(self._ours, False)

    def says(self, text: str) -> str:
        """Return, when it has said that, all that it has said since the last time."""

        def said() -> bool:
            with contextlib.suppress(BlockingIOError, OSError):  # OSError: it has ended
                self._printed += os.read(self._ours, 65536)
            return text.encode() in self._printed

        wait_until(lambda: said() or self.process.poll() is not None)
        assert said(), f"{text!r} never came; since the last time it printed {self._printed.decode()!r}"
        before, _, self._printed = self._printed.partition(text.encode())
        return before.decode()

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
(directory / f'task-{sys.argv[2]}-{me.task_index}').write_text(sys.argv[2])
print('up', flush=True)
if sys.argv[2] == '--fail' and me.task_index == 1: raise ValueError('on purpose')
while not (directory / 'asked').exists() and not (directory / sys.argv[2]).exists(): time.sleep(0.05)
print('goes on', flush=True)
while not (directory / sys.argv[2]).exists(): time.sleep(0.05)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """It writes down its second argument, prints "up", and fails, or waits for a file of that name."""
    (tmp_path / "work.py").write_text(WORK)
    return str(tmp_path / "work.py")


def test_run_passes_script_arguments_and_exit_code(
    cluster: SimulatedCluster, running: Job, script: str, tmp_path: Path
) -> None:
    """Two runs at the same time: one fails, one goes on after Ctrl-C until it is pressed again, and twice."""
    once = ("--name", "once", "--max-retries-failure", "0")
    fails = subprocess.Popen(
        command_line("run", script, "--tpu", "v4-16", *once, "--", str(tmp_path), "--fail"),
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(cluster),
    )  # fmt: skip
    asked = Terminal(cluster, "run", script, "v4-16", "--", str(tmp_path), "never")
    _, printed = fails.communicate(timeout=120)
    assert fails.returncode == FAILED
    assert "once failed: ValueError: on purpose" in printed
    assert 'work.py", line 6' in printed
    assert "iris_ray/actors" not in printed
    assert {path.read_text() for path in tmp_path.glob("task---fail-*")} == {"--fail"}  # one may end the other early

    question = "Cancel the job? No: go on waiting for it. [Y/n]"
    asked.says("up")
    asked.press_ctrl_c()
    asked.says(question)
    asked.type("n\n")
    asked.says("still waiting for work")
    (tmp_path / "asked").touch()
    asked.says("goes on")
    asked.press_ctrl_c()
    asked.says(question)
    asked.press_ctrl_c()
    assert "\nTraceback" not in asked.says("work is cancelled")
    assert asked.end() == INTERRUPTED
    wait_until(lambda: free_chips() == 16.0)


def test_sigterm_cancels_run_without_a_question(cluster: SimulatedCluster, script: str, tmp_path: Path) -> None:
    terminated = Terminal(cluster, "run", script, "v4-16", "--", str(tmp_path), "never")
    terminated.says("up")
    terminated.process.terminate()
    assert "SIGTERM received" not in terminated.says("work is cancelled"), "Ray prints a stack of native code"
    assert terminated.end() == TERMINATED


def test_unread_run_is_cancelled(cluster: SimulatedCluster, tmp_path: Path) -> None:
    """As in `iris-ray run … | head -1`. A thread of Ray prints what tasks print."""
    (tmp_path / "talks.py").write_text("import time\nwhile True: print(time.time(), flush=True); time.sleep(0.2)\n")
    command = command_line("run", str(tmp_path / "talks.py"), "v4-16")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment(cluster), cwd=tmp_path, **pipes) as unread:  # type: ignore[call-overload]
        assert unread.stdout.readline().startswith("(talks slice=0")
        unread.stdout.close()
        said = unread.stderr.read()
    assert unread.returncode == UNREAD, said
    assert said.endswith("iris-ray: talks is cancelled\n")
    assert "Error" not in said
    assert [job.state for job in all_jobs() if job.name == "talks"] == [JobState.KILLED]


@pytest.mark.long
def test_run_prints_results_and_ends_with_tasks(cluster: SimulatedCluster, running: Job) -> None:
    printed = iris(cluster, "run", "platform:system", "v4-16").stdout.splitlines()
    assert {"task 0: 'Linux'", "task 1: 'Linux'"} <= set(printed)


@pytest.mark.proof
def test_submitted_job_outlives_command_and_is_followed_later(
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
    (job_id,) = [job.job_id for job in all_jobs() if job.name == "work" and not job.state.finished]
    (tmp_path / "fine").touch()
    assert sorted(iris(cluster, "logs", "-f", job_id).stdout.splitlines()) == [
        "task-0| goes on",
        "task-0| up",
        "task-1| goes on",
        "task-1| up",
    ]
    assert the_controller().ask(ControllerInterface.job_status, job_id).state is JobState.SUCCEEDED


# -- slices and hosts --------------------------------------------------------------------------------------------------


def test_drain_and_taint_close_hosts_until_undone(cluster: SimulatedCluster, running: Job) -> None:
    drained, tainted = idle_slices(cluster, running)
    said, told = together(
        cluster,
        ("host", "drain", drained, "--reason", "a fan"),
        ("host", "drain", f"{tainted}/1", "big", "--json"),
    )
    assert "2 hosts" in said
    assert json.loads(told)["hosts"] == [cluster.node_id(tainted, 1)]
    closed = {w.node_id: w.unavailable for w in all_workers() if w.unavailable}
    assert closed == {
        cluster.node_id(drained, 0): "taint:drained (a fan)",
        cluster.node_id(drained, 1): "taint:drained (a fan)",
        cluster.node_id(tainted, 1): "taint:big (by ann)",
    }
    together(cluster, ("host", "undrain", drained), ("host", "undrain", f"{tainted}/1", "big"))
    assert not [worker for worker in all_workers() if worker.unavailable]


# -- the cluster -------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_doctor_asks_every_host_without_waiting_for_frozen_one(cluster: SimulatedCluster, running: Job) -> None:
    """This process holds the chips of two idle hosts: the device file of one, libtpu's lock of the other."""
    first, second = idle_slices(cluster, running)
    device, lock = cluster.host_dir(first, 1) / "dev" / "accel0", cluster.host_dir(second, 0) / "lock"
    with device.open(), (lock / "libtpu_lockfile").open("w"):
        found = {(f["level"], f["check"]): f["found"] for f in iris_json(cluster, "doctor")}
    held = found["WARNING", "chips held"]
    assert re.match(rf"v4-16-\d+ host [01] \(127.*\): pid {os.getpid()} \(\w+\), but no Ray task or actor has", held)
    assert found["OK", "silent hosts"] == "none; all 6 TPU hosts answered"
    assert found["OK", "metadata server of hosts"] == "answers on 6 hosts"
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


@pytest.mark.proof
def test_controller_start_and_status(cluster: SimulatedCluster, running: Job) -> None:
    if find_controller() is not None:
        ControllerConnection().end()
    assert "iris-ray cluster controller start" in iris(cluster, "ls", code=NO_CLUSTER).stderr
    assert "the Controller is started: epoch" in iris(cluster, "cluster", "controller", "start").stdout
    status = iris_json(cluster, "cluster", "controller", "status")
    assert (status["jobs"]["running"], status["slices"], status["hosts"]) == (1, {"busy": 1, "free": 2}, 7)


@pytest.mark.long
def test_controller_stop_ends_silent_controller(cluster: SimulatedCluster, running: Job) -> None:
    pid = controller_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert iris_json(cluster, "cluster", "controller", "stop") == {"running": False}
    finally:
        os.kill(pid, signal.SIGKILL)
    assert iris_json(cluster, "cluster", "controller", "start")["pid"] != pid


@pytest.mark.proof
def test_running_job_does_not_notice_controller_upgrade(cluster: SimulatedCluster, running: Job) -> None:
    before = the_controller().ask(ControllerInterface.about)
    assert "taken over 1 job: 1 running" in iris(cluster, "cluster", "controller", "upgrade").stdout
    after = the_controller().ask(ControllerInterface.about)
    assert after["epoch"] > before["epoch"]
    assert after["pid"] != before["pid"]
