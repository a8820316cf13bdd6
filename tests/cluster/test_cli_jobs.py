"""Jobs from the command line, on a cluster: run, submit, why, logs, cancel, Ctrl-C, drain."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest
import ray
from click.shell_completion import ShellComplete

from iris_ray import release, run_on_pod_ray
from iris_ray.cli import completion
from iris_ray.cli.exits import FAILED, INTERRUPTED, NO_CLUSTER, OK, USAGE
from iris_ray.cli.main import main
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import address_of_nobody, command_line, environment, iris, iris_json
from tests.support.gangs import Trace, free_chips, wait_until

pytestmark = pytest.mark.cluster


def test_script_runs_on_every_host_and_its_end_is_the_commands(cluster: SimulatedCluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, pathlib, iris_ray\n"
        "me = iris_ray.get_job_info()\n"
        "pathlib.Path(sys.argv[1], f'task-{me.task_index}').write_text(sys.argv[2])\n"
        "if sys.argv[2] == 'fail' and me.task_index == 0: raise ValueError('on purpose')\n"
    )
    iris(cluster, "run", str(script), "v4-16", "--num-slices", "2,9", "--", str(tmp_path), "--fine")
    assert [path.read_text() for path in sorted(tmp_path.glob("task-*"))] == ["--fine"] * 4
    named = ("--name", "again", "--priority", "batch", "--max-retries-failure", "0")
    failed = iris(cluster, "run", str(script), "--tpu", "v4-16", *named, "--", str(tmp_path), "fail", code=FAILED)
    assert "again failed: ValueError: on purpose" in failed.stderr
    assert 'train.py", line 4' in failed.stderr
    assert "iris_ray/actors" not in failed.stderr
    jobs = iris_json(cluster, "ls", "--all", "--user", "ann")
    assert [(job["name"], job["priority"], job["state"]) for job in jobs] == [
        ("train", "INTERACTIVE", "SUCCEEDED"),
        ("again", "BATCH", "FAILED"),
    ]


def test_why_status_tasks_and_cancel_of_a_job_that_waits(cluster: SimulatedCluster, trace: Trace) -> None:
    running = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=3)
    trace.wait_for_tasks(6)
    waiting = run_on_pod_ray.remote(trace.gang(), "v4-16")
    jobs = wait_until(lambda: len(found := iris_json(cluster, "ls")) == 2 and found)
    first, second = (job["job_id"] for job in jobs)
    assert f"in use by {first}" in iris(cluster, "why", second).stdout
    assert "it does not wait" in iris(cluster, "why", first).stdout
    assert re.search(r"tasks: +2 pending", iris(cluster, "status", second).stdout)
    tasks = iris_json(cluster, "tasks", first)
    assert [(task["state"], task["group"]) for task in tasks[:2]] == [("RUNNING", "v4-16-0")] * 2
    slices = iris_json(cluster, "workers")
    assert [(view["state"], view["jobs"]) for view in slices] == [("BUSY", [first])] * 3 + [("FREE", [])]
    assert f"did you mean {second}" in iris(cluster, "cancel", second[:-1], code=USAGE).stderr
    cancelled = iris_json(cluster, "cancel", second)
    assert cancelled == {"job_id": second, "cancelled": True, "state_before": "PENDING"}
    with pytest.raises(Exception, match="cancelled by ann"):
        ray.get(waiting, timeout=60)
    assert "had already ended: killed" in iris(cluster, "cancel", second).stdout
    assert not iris_json(cluster, "cancel", second)["cancelled"]

    assert iris_json(cluster, "controller", "stop") == {"running": False}
    iris(cluster, "ls", code=NO_CLUSTER)
    trace.finish()
    assert len(ray.get(running, timeout=60)) == 6
    iris(cluster, "controller", "start")  # unless the job's end was faster
    assert iris_json(cluster, "controller", "status")["epoch"] > 1
    wait_until(lambda: iris_json(cluster, "status", first)["state"] == "SUCCEEDED")


def test_drained_slice_takes_no_new_jobs_until_it_may_again(cluster: SimulatedCluster) -> None:
    release()
    assert "2 hosts" in iris(cluster, "drain", "v4-16-1", "--reason", "a fan").stdout
    iris(cluster, "taint", "v4-16-2/0", "big")
    states = {view["slice"]: (view["state"], view["reason"]) for view in iris_json(cluster, "workers")}
    assert states["v4-16-1"] == ("CLOSED", "drained (a fan)")
    assert states["v4-16-2"] == ("CLOSED", "host 0: big (by ann)")
    hosts = {view["slice"]: [host["node_id"] for host in view["hosts"]] for view in iris_json(cluster, "workers")}
    both = iris_json(cluster, "taint", "v4-16-2", "large")
    assert both == {"target": "v4-16-2", "taint": "large", "hosts": sorted(hosts["v4-16-2"]), "jobs_still_there": []}
    lifted = iris_json(cluster, "untaint", "v4-16-2", "large")
    assert lifted["still_closed"] == {hosts["v4-16-2"][0]: "big (by ann)"}
    assert iris_json(cluster, "drain", "v4-16-1", "--reason", "a fan")["taint"] == "drained"
    assert iris_json(cluster, "undrain", "v4-16-1")["hosts"] == sorted(hosts["v4-16-1"])
    iris(cluster, "untaint", "v4-16-2/0", "big")
    assert {view["state"] for view in iris_json(cluster, "workers")} == {"FREE"}
    assert "did you mean" in iris(cluster, "drain", "v4-16-7", code=USAGE).stderr


def test_ctrl_c_cancels_the_job(cluster: SimulatedCluster, tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import sys, time, pathlib\npathlib.Path(sys.argv[1], 'runs').touch()\ntime.sleep(600)\n")
    run = subprocess.Popen(
        command_line("run", str(script), "v4-16", "--", str(tmp_path)),
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(cluster),
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "runs").exists())
    run.send_signal(signal.SIGINT)
    _, printed = run.communicate(timeout=60)
    assert run.returncode == INTERRUPTED
    assert "sleep is cancelled" in printed
    assert not re.search("^Traceback", printed, re.MULTILINE)
    (job,) = [job for job in iris_json(cluster, "ls", "--all") if job["name"] == "sleep"]
    assert job["state"] == "KILLED"
    wait_until(lambda: free_chips() == 24.0)


def test_submitted_job_goes_on_without_its_command_and_is_followed_by_another(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    script = tmp_path / "work.py"
    script.write_text(
        "import sys, pathlib, time, iris_ray\n"
        "print('hello', iris_ray.get_job_info().task_index, flush=True)\n"
        "while not pathlib.Path(sys.argv[1], 'finish').exists(): time.sleep(0.05)\n"
        "sys.exit(3 if sys.argv[2] == 'fail' else 0)\n"
    )
    job_id = iris(cluster, "submit", str(script), "--cpu", "0.5", "--replicas", "2", "--", str(tmp_path), "fine").stdout
    job_id = job_id.strip()
    wait_until(lambda: [t["state"] for t in iris_json(cluster, "tasks", job_id)] == ["RUNNING"] * 2)
    assert {"RUNNING"} == {job["state"] for job in iris_json(cluster, "ls") if job["job_id"] == job_id}
    (tmp_path / "finish").touch()
    followed = iris(cluster, "logs", "-f", job_id).stdout.splitlines()
    assert sorted(followed) == ["task-0| hello 0", "task-1| hello 1"]
    on_a_slice = iris(cluster, "submit", str(script), "--tpu", "v4-16", "--follow", "--", str(tmp_path), "fine")
    assert sorted(on_a_slice.stdout.splitlines()[1:]) == ["task-0| hello 0", "task-1| hello 1"]
    fails = ("submit", str(script), "--max-retries-failure", "0", "--follow", "--", str(tmp_path), "fail")
    assert "has ended: failed" in iris(cluster, *fails, code=FAILED).stderr


def test_shell_completes_jobs_and_slices_of_a_cluster_that_answers(
    cluster: SimulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(*words: str) -> list[str]:
        found = ShellComplete(main, {}, "iris-ray", "").get_completions(list(words[:-1]), words[-1])
        return [item.value for item in found]

    script = tmp_path / "tabbed.py"
    script.write_text("")
    job_id = iris(cluster, "submit", str(script)).stdout.strip()
    wait_until(lambda: state_of(cluster, job_id) == "SUCCEEDED")
    monkeypatch.setattr(completion, "PATIENCE_S", 60.0)  # machines that run tests are slow
    monkeypatch.setenv("RAY_ADDRESS", address_of_nobody())
    at = ("--address", cluster.address)
    assert completed("logs", *at, "tab") == completed("status", *at, "tab") == [job_id]
    assert completed("why", *at, "tab") == []
    assert completed("drain", *at, "v4-16-1") == ["v4-16-1"]
    assert completed("logs", "tab") == []
    monkeypatch.setattr(completion, "PATIENCE_S", 0.01)
    assert completed("logs", *at, "tab") == []


def test_submitting_for_what_the_cluster_has_not_says_what_it_has(cluster: SimulatedCluster, tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text("pass")
    for need, said in (
        (("--tpu", "v5p-16"), "which has 3 × v4-16"),
        (("--tpu", "v4-16", "--num-slices", "9"), "waiting for 9 slices"),
    ):
        done = iris(cluster, "submit", str(script), *need)
        job_id = done.stdout.strip()
        assert f"{job_id} can't run on the cluster as it is: " in done.stderr
        assert said in done.stderr
        iris(cluster, "cancel", job_id)
    release()
    done = iris(cluster, "submit", str(script), "--tpu", "v4-16", "--num-slices", "3", "--json")
    assert done.stderr == ""
    job_id = json.loads(done.stdout)["job_id"]
    wait_until(lambda: iris_json(cluster, "status", job_id)["state"] == "SUCCEEDED")


def test_ctrl_c_leaves_a_submitted_job_running_if_nobody_is_asked(cluster: SimulatedCluster, tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text("import time; print('up', flush=True); time.sleep(600)")
    running = subprocess.Popen(
        command_line("submit", str(script), "-f"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(cluster),
    )  # fmt: skip
    assert running.stdout is not None
    job_id = running.stdout.readline().strip()
    assert running.stdout.readline() == "task-0| up\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, f"{job_id} goes on" in said) == (INTERRUPTED, True)
    assert {job["state"] for job in iris_json(cluster, "ls") if job["job_id"] == job_id} == {"RUNNING"}
    iris(cluster, "cancel", job_id)


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


def state_of(cluster: SimulatedCluster, job_id: str) -> str:
    return str(iris_json(cluster, "status", job_id)["state"])


def test_ctrl_c_on_a_terminal_asks_once_and_each_answer_does_what_the_help_says(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    script = tmp_path / "work.py"
    script.write_text("import time; print('up', flush=True); time.sleep(600)")

    submitted = Terminal(cluster, "submit", str(script), "-f")
    submitted.says("task-0| up")
    submitted.press_ctrl_c()
    submitted.says("Cancel the job? No: leave it running. [y/N]")
    submitted.type("\n")
    submitted.says("goes on")
    assert submitted.end() == INTERRUPTED
    (job_id,) = [job["job_id"] for job in iris_json(cluster, "ls") if job["name"] == "work"]

    for pressed, code, says in ((None, INTERRUPTED, "interrupted"), ("n\n", FAILED, "nothing is done")):
        asking = Terminal(cluster, "cancel", job_id)
        asking.says(f"Cancel {job_id} of ann, running")
        asking.says("? [y/N]")
        asking.type(pressed) if pressed else asking.press_ctrl_c()
        asking.says(says)
        assert asking.end() == code
        assert state_of(cluster, job_id) == "RUNNING"

    follows = Terminal(cluster, "submit", str(script), "-f")
    follows.says("task-0| up")
    follows.press_ctrl_c()
    follows.says("[y/N]")
    follows.type("y\n")
    follows.says("is cancelled")
    assert follows.end() == INTERRUPTED
    assert [job["job_id"] for job in iris_json(cluster, "ls") if job["name"] == "work"] == [job_id]
    asking = Terminal(cluster, "cancel", job_id)
    asking.says("[y/N]")
    asking.type("y\n")
    asking.says("is cancelled")
    assert asking.end() == OK

    waits = Terminal(cluster, "run", str(script), "v4-16")
    waits.says("up")
    waits.press_ctrl_c()
    waits.says("Cancel the job? No: go on waiting for it. [Y/n]")
    waits.type("n\n")
    (job_id,) = [job["job_id"] for job in iris_json(cluster, "ls") if job["name"] == "work"]
    assert state_of(cluster, job_id) == "RUNNING"
    waits.press_ctrl_c()
    waits.says("[Y/n]")
    waits.press_ctrl_c()
    waits.says("work is cancelled")
    assert waits.end() == INTERRUPTED
    assert state_of(cluster, job_id) == "KILLED"
