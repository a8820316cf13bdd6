"""``iris-ray logs``: which lines of which attempt it prints. The Controller reads real log files."""

import pytest

from iris_ray.cli.exits import INTERRUPTED, OK, USAGE
from tests.support.command_line import CTRL_C, Terminal
from tests.support.controller_in_process import ControllerInProcess, wait_until


def attempt_ran(cluster: ControllerInProcess, job: str, attempt: int) -> None:
    for index in (0, 1):
        cluster.prints(job, index, f"attempt {attempt} of task {index}\n")


@pytest.fixture
def job(cluster: ControllerInProcess) -> str:
    """A gang of two tasks; task 1 has failed once, and the second attempt is over."""
    job = cluster.start("train-1a2b3c4d", max_retries_failure=1)
    attempt_ran(cluster, job, 1)
    cluster.fail(job, 1)
    cluster.wait_for_attempt(job, 2)
    attempt_ran(cluster, job, 2)
    cluster.succeed(job)
    return job


def test_command_prints_an_attempt_and_names_what_is_there(cluster: ControllerInProcess, job: str) -> None:
    assert cluster.iris("logs", job).stdout == "attempt 2 of task 0\n"
    assert cluster.iris("logs", job, "1", "--attempt", "1").stdout == "attempt 1 of task 1\n"
    assert cluster.iris("logs", job, "1", "--tail", "0").stdout == ""
    assert sorted(cluster.iris("logs", job, "--all-tasks").stdout.splitlines()) == [
        f"task-{n}| attempt 2 of task {n}" for n in (0, 1)
    ]
    found = cluster.json("logs", job, "1", "--attempt", "1")
    assert (found["text"], found["attempt"], found["latest_attempt"]) == ("attempt 1 of task 1\n", 1, 2)
    assert "there is no attempt" in cluster.iris("logs", job, "--attempt", "9", code=USAGE).stderr
    assert "there is no task" in cluster.iris("logs", job, "7", code=USAGE).stderr
    assert "did you mean" in cluster.iris("logs", "-f", job[:-1], code=USAGE).stderr


def test_command_prints_the_last_lines(cluster: ControllerInProcess) -> None:
    job = cluster.start("train")
    cluster.prints(job, 1, "first\nsecond\nthird\n")
    assert cluster.iris("logs", job, "1", "--tail", "2").stdout == "second\nthird\n"


def test_command_follows_all_tasks_through_attempts(cluster: ControllerInProcess) -> None:
    job = cluster.start("train", max_retries_failure=1)
    attempt_ran(cluster, job, 1)
    person = Terminal()

    def ends() -> None:
        wait_until(lambda: "task-1| attempt 1 of task 1\n" in person.printed)
        cluster.fail(job, 1)
        cluster.wait_for_attempt(job, 2)
        attempt_ran(cluster, job, 2)
        wait_until(lambda: "task-1| attempt 2 of task 1\n" in person.printed)
        cluster.succeed(job)

    with cluster.meanwhile(ends):
        assert cluster.on_terminal("logs", "-f", job, person=person) == OK
    for index in (0, 1):
        mine = [line for line in person.printed.splitlines() if line.startswith(f"task-{index}| ")]
        assert mine == [f"task-{index}| attempt {attempt} of task {index}" for attempt in (1, 2)]
    assert "iris-ray: task 1: attempt 2 of task 1\n" in person.printed, "it says that a new one begins"


def test_ctrl_c_ends_the_following_and_leaves_the_job_alone(cluster: ControllerInProcess) -> None:
    job = cluster.start("train")
    attempt_ran(cluster, job, 1)
    person = Terminal(("attempt 1 of task 0\n", CTRL_C))
    assert cluster.on_terminal("logs", "-f", job, "0", person=person) == INTERRUPTED
    assert "task-1" not in person.printed
    assert cluster.state(job).name == "RUNNING"


def test_of_a_job_that_failed_the_task_that_failed_is_shown(cluster: ControllerInProcess) -> None:
    job = cluster.start("train")
    cluster.prints(job, 1, "farewell\n")
    cluster.fail(job, 1)
    assert cluster.iris("logs", job).stdout == "farewell\n"


def test_followed_job_that_waits_says_why(cluster: ControllerInProcess) -> None:
    first, second = cluster.start("train", slices=(3,)), cluster.submit("eval")
    person = Terminal((f"in use by {first}", CTRL_C))
    assert cluster.on_terminal("logs", "-f", second, person=person) == INTERRUPTED


def test_lost_hosts_log_is_replaced_by_a_word_about_it(cluster: ControllerInProcess) -> None:
    job = cluster.start("train")
    cluster.prints(job, 1, "gone with its host\n")
    cluster.kill_host("v4-16-0", 1)
    cluster.wait_for_no_host("v4-16-0", 1)
    done = cluster.iris("logs", job, "1", "--attempt", "1")
    assert (done.stdout, "its host is gone" in done.stderr) == ("", True)


def test_everybody_may_read(cluster: ControllerInProcess) -> None:
    job = cluster.start("train", slices=(2,), user="ann")
    cluster.prints(job, 3, "ann at work, task 3\n")
    assert cluster.iris("logs", job, "3", user="bob").stdout == "ann at work, task 3\n"


@pytest.mark.parametrize(
    ("more", "said"), [(("-f", "--json"), "--json is for one task"), (("0", "--all-tasks"), "not both")]
)
def test_options_that_exclude_each_other_are_refused(
    cluster: ControllerInProcess, job: str, more: tuple[str, ...], said: str
) -> None:
    assert said in cluster.iris("logs", job, *more, code=USAGE).stderr
