"""``iris-ray run`` and ``submit``: what becomes of a job, of its command, and of Ctrl-C. Its tasks are made up."""

import re
from pathlib import Path

import pytest

from iris_ray.cli.exits import FAILED, INTERRUPTED, OK
from iris_ray.model.job_spec import PriorityBand
from iris_ray.model.lifecycle import JobState
from tests.support.command_line import CTRL_C, Terminal
from tests.support.controller_in_process import ControllerInProcess, wait_until


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "work.py"
    path.write_text("pass")
    return str(path)


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_waits_for_its_job_and_has_passed_its_options_on(cluster: ControllerInProcess, script: str) -> None:
    seen = []

    def ends() -> None:
        wait_until(cluster.has_running_job)
        seen.append(cluster.status(cluster.only_job()))
        cluster.succeed(cluster.only_job())

    named = ("--name", "again", "--priority", "batch", "--max-retries-failure", "0", "--max-retries-preemption", "7")
    with cluster.meanwhile(ends):
        cluster.iris("run", script, "v4-16", "--num-slices", "2,9", *named)
    (job,) = seen
    assert (job.name, job.priority, job.user, job.device) == ("again", PriorityBand.BATCH, "ann", "v4-16")
    assert (job.max_retries_failure, job.max_retries_preemption) == (0, 7)
    assert job.groups == ("v4-16-0", "v4-16-1")
    assert [j["state"] for j in cluster.json("ls", "--all")] == ["SUCCEEDED"]


def test_run_ends_as_its_job_does(cluster: ControllerInProcess, script: str) -> None:
    def ends() -> None:
        wait_until(cluster.has_running_job)
        cluster.fail(cluster.only_job(), 1, "exited with code 3")

    with cluster.meanwhile(ends):
        refused = cluster.iris("run", script, "v4-16", "--max-retries-failure", "0", code=FAILED)
    assert "exited with code 3" in refused.stderr
    assert [(job["name"], job["state"]) for job in cluster.json("ls", "--all")] == [("work", "FAILED")]


def test_ctrl_c_without_a_terminal_cancels_what_runs(cluster: ControllerInProcess, script: str) -> None:
    cluster.ray.has_pressed_ctrl_c = Terminal((cluster.has_running_job, CTRL_C)).has_pressed_ctrl_c
    done = cluster.iris("run", script, "v4-16", code=INTERRUPTED, quotes=True)
    assert "work is cancelled" in done.stderr
    assert not re.search("^Traceback", done.output, re.MULTILINE)
    wait_until(lambda: [job["state"] for job in cluster.json("ls", "--all")] == ["KILLED"])
    wait_until(lambda: {view["state"] for view in cluster.json("workers")} == {"FREE"})


def test_ctrl_c_on_a_terminal_asks_and_a_second_one_cancels_what_runs(
    cluster: ControllerInProcess, script: str
) -> None:
    goes_on = []

    def still_runs() -> bool:
        goes_on.append(cluster.has_running_job())
        return True

    question = "Cancel the job? No: go on waiting for it. [Y/n]"
    person = Terminal(
        (cluster.has_running_job, CTRL_C), (question, "n\n"), (still_runs, CTRL_C), (question, CTRL_C)
    )  # fmt: skip
    assert cluster.on_terminal("run", script, "v4-16", person=person) == INTERRUPTED
    assert goes_on == [True]
    assert "work is cancelled" in person.printed
    wait_until(lambda: [job["state"] for job in cluster.json("ls", "--all")] == ["KILLED"])


def test_run_on_a_terminal_goes_on_after_no_to_its_end(cluster: ControllerInProcess, script: str) -> None:
    person = Terminal((cluster.has_running_job, CTRL_C), ("[Y/n]", "n\n"))

    def ends() -> None:
        wait_until(lambda: "[Y/n]" in person.printed)
        cluster.succeed(cluster.only_job())

    with cluster.meanwhile(ends):
        assert cluster.on_terminal("run", script, "v4-16", person=person) == OK


# -- submit ------------------------------------------------------------------------------------------------------------


def test_submitted_job_goes_on_without_its_command(cluster: ControllerInProcess, script: str) -> None:
    job = cluster.iris("submit", script, "--cpu", "0.5", "--replicas", "2").stdout.strip()
    wait_until(lambda: [task["state"] for task in cluster.json("tasks", job)] == ["RUNNING"] * 2)
    assert [(j["job_id"], j["state"]) for j in cluster.json("ls")] == [(job, "RUNNING")]
    for index in (0, 1):
        cluster.prints(job, index, f"hello {index}\n")
    cluster.succeed(job)
    followed = cluster.iris("logs", "-f", job).stdout.splitlines()
    assert sorted(followed) == ["task-0| hello 0", "task-1| hello 1"]


def test_followed_job_is_its_command_to_the_end(cluster: ControllerInProcess, script: str) -> None:
    def works() -> None:
        wait_until(cluster.has_running_job)
        job = cluster.only_job()
        for index in (0, 1):
            cluster.prints(job, index, f"hello {index}\n")
        cluster.succeed(job)

    with cluster.meanwhile(works):
        done = cluster.iris("submit", script, "--tpu", "v4-16", "--follow")
    job, *lines = done.stdout.splitlines()
    assert sorted(lines) == ["task-0| hello 0", "task-1| hello 1"]
    assert cluster.json("status", job)["state"] == "SUCCEEDED"


def test_followed_job_that_fails_is_the_commands_failure(cluster: ControllerInProcess, script: str) -> None:
    def fails() -> None:
        wait_until(cluster.has_running_job)
        cluster.fail(cluster.only_job(), 0, "exited with code 3")

    with cluster.meanwhile(fails):
        done = cluster.iris("submit", script, "--max-retries-failure", "0", "--follow", code=FAILED)
    assert "has ended: failed: task 0 on 10.0.0.1: the task process exited with code 3" in done.stderr


@pytest.mark.parametrize(
    ("need", "said"),
    [
        (("--tpu", "v5p-16"), "which has 3 × v4-16"),
        (("--tpu", "v4-16", "--num-slices", "9"), "waiting for 9 slices"),
    ],
)
def test_submitting_for_what_the_cluster_has_not_says_what_it_has(
    cluster: ControllerInProcess, script: str, need: tuple[str, ...], said: str
) -> None:
    done = cluster.iris("submit", script, *need)
    job = done.stdout.strip()
    assert f"{job} can't run on the cluster as it is: " in done.stderr
    assert said in done.stderr
    assert cluster.json("status", job)["state"] == "PENDING"


def test_submitting_for_what_the_cluster_has_says_nothing_more(cluster: ControllerInProcess, script: str) -> None:
    cluster.start("train", slices=(3,))
    done = cluster.iris("submit", script, "--tpu", "v4-16", "--num-slices", "3", "--json")
    assert done.stderr == ""
    assert re.fullmatch(r'\{\s*"job_id": "work-[0-9a-f]{8}"\s*\}\s*', done.stdout)


def print_up(cluster: ControllerInProcess) -> None:
    """The only job prints a word as soon as it runs."""
    wait_until(cluster.has_running_job)
    cluster.prints(cluster.only_job(), 0, "up\n")


def test_ctrl_c_without_a_terminal_leaves_a_submitted_job_running(cluster: ControllerInProcess, script: str) -> None:
    pressed = Terminal((lambda: cluster.ray.calls["fetch_logs"] > 1, CTRL_C))  # it follows the job by then
    cluster.ray.has_pressed_ctrl_c = pressed.has_pressed_ctrl_c
    done = cluster.iris("submit", script, "-f", code=INTERRUPTED, quotes=True)
    job = done.stdout.strip()
    assert f"{job} goes on" in done.stderr
    assert cluster.state(job) is JobState.RUNNING


@pytest.mark.parametrize(
    ("answer", "said", "state"),
    [
        ("\n", "goes on", JobState.RUNNING),
        (CTRL_C, "goes on", JobState.RUNNING),
        ("n\n", "goes on", JobState.RUNNING),
        ("y\n", "is cancelled", JobState.KILLED),
    ],
    ids=["Enter", "Ctrl-C", "n", "y"],
)
def test_ctrl_c_on_a_terminal_leaves_a_submitted_job_running_unless_the_answer_is_yes(
    cluster: ControllerInProcess, script: str, answer: str, said: str, state: JobState
) -> None:
    person = Terminal(("task-0| up\n", CTRL_C), ("Cancel the job? No: leave it running. [y/N]", answer))
    with cluster.meanwhile(lambda: print_up(cluster)):
        assert cluster.on_terminal("submit", script, "-f", person=person) == INTERRUPTED
    (job,) = cluster.jobs()
    assert f"{job} {said}" in person.printed
    assert cluster.state(job) is state
