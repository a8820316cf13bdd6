"""``iris-ray logs``: which lines of which attempt it prints. The Controller reads real log files."""

import re
import time
from pathlib import Path

import pytest

from iris_ray.actors.calls import controller_connection
from iris_ray.cli.conventions import FAILED, INTERRUPTED, NO_CLUSTER, OK, USAGE
from iris_ray.logs.archive import copy
from iris_ray.logs.core import LastLines
from iris_ray.logs.files import AttemptLog, logs_directory
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.settings import LOG_ARCHIVE
from tests.support.command_line import CTRL_C, Terminal, invoke
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until


def attempt_ran(world: ControllerInProcess, job: str, attempt: int) -> None:
    for index in (0, 1):
        world.prints(job, index, f"attempt {attempt} of task {index}\n")


@pytest.fixture
def job(world: ControllerInProcess) -> str:
    """A gang of two tasks; task 1 has failed once, and the second attempt is over."""
    job = world.start("train-1a2b3c4d", max_retries_failure=1)
    attempt_ran(world, job, 1)
    world.fail(job, 1)
    world.wait_for_attempt(job, 2)
    attempt_ran(world, job, 2)
    world.succeed(job)
    return job


def test_logs_prints_an_attempt_and_names_others(world: ControllerInProcess, job: str) -> None:
    assert world.iris("logs", job).stdout == "attempt 2 of task 0\n"
    assert world.iris("logs", job, "1", "--attempt", "1").stdout == "attempt 1 of task 1\n"
    assert world.iris("logs", job, "1", "--tail", "0").stdout == ""
    assert sorted(world.iris("logs", job, "--all-tasks").stdout.splitlines()) == [
        f"task-{n}| attempt 2 of task {n}" for n in (0, 1)
    ]
    found = world.json("logs", job, "1", "--attempt", "1")
    assert (found["text"], found["attempt"], found["latest_attempt"]) == ("attempt 1 of task 1\n", 1, 2)
    assert "there is no attempt" in world.iris("logs", job, "--attempt", "9", code=USAGE).stderr
    assert "there is no task" in world.iris("logs", job, "7", code=USAGE).stderr
    assert "did you mean" in world.iris("logs", "-f", job[:-1], code=USAGE).stderr


def test_logs_prints_the_task_that_failed_first(world: ControllerInProcess) -> None:
    """Not the one with the lowest number: tasks of several gangs fail by themselves."""
    job = world.start("train", slices=(2,), failure_domain="slice", max_task_failures=1)
    for index in (0, 2):
        world.prints(job, index, f"the end of task {index}\n")
    world.fail(job, 2)
    wait_until(lambda: world.status(job).tasks.get(TaskState.FAILED, 0) > 0)
    world.fail(job, 0)
    world.wait_for_state(job, JobState.FAILED)
    assert world.iris("logs", job).stdout == "the end of task 2\n"


def test_timestamps_stand_before_lines(world: ControllerInProcess, job: str) -> None:
    a_time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
    assert re.fullmatch(f"{a_time} attempt 2 of task 1\n", world.iris("logs", job, "1", "--timestamps").stdout)
    for line in world.iris("logs", job, "--all-tasks", "-t").stdout.splitlines():
        assert re.fullmatch(rf"task-(\d)\| {a_time} attempt 2 of task \1", line)
    (came_at,) = world.json("logs", job, "1", "--timestamps")["times"]
    assert 0 <= time.time() - came_at < 3600
    assert world.json("logs", job, "1")["times"] is None
    assert world.iris("logs", job, "1", "--since", "1h").stdout == "attempt 2 of task 1\n"
    assert world.iris("logs", job, "1", "--since", "2999-01-01").stdout == ""
    assert world.iris("logs", job, "--all-tasks", "--since", "2999-01-01").stdout == ""


def test_grep_searches_all_tasks_and_attempts_on_hosts(world: ControllerInProcess, job: str) -> None:
    found = world.iris("logs", job, "--grep", "of task").stdout.splitlines()
    assert found == [f"task-{n}.attempt-{a}| attempt {a} of task {n}" for n in (0, 1) for a in (1, 2)]
    assert world.iris("logs", job, "1", "--attempt", "1", "--grep", "^att").stdout == (
        "task-1.attempt-1| attempt 1 of task 1\n"
    )
    assert world.iris("logs", job, "--grep", "nothing", code=FAILED, quotes=True).stdout == ""
    assert world.iris("logs", job, "--grep", "of", "--since", "2999-01-01", code=FAILED, quotes=True).stdout == ""


def test_grep_shows_lines_around_each_match(world: ControllerInProcess) -> None:
    job = world.start("train")
    world.prints(job, 0, "".join(f"step {n}\n" for n in range(20)))
    shown = world.iris("logs", job, "0", "--grep", "step 1?5$", "-C", "1").stdout.splitlines()
    steps = [line.removeprefix("task-0| ") for line in shown]
    assert steps == ["step 4", "step 5", "step 6", "--", "step 14", "step 15", "step 16"]


def test_grep_finds_last_words_of_lost_host(world: ControllerInProcess) -> None:
    job = world.start("train", max_retries_preemption=1)
    last = LastLines(job, 1, 1, world.node_id("v4-16-0", 1), 19, b"the disk is broken\n")
    world._in_loop(world.part_of_controller("logs")._memory.remember, last)
    world.kill_host("v4-16-0", 1)
    world.wait_for_attempt(job, 2)
    done = world.iris("logs", job, "--grep", "broken", quotes=True)
    assert done.stdout == "task-1.attempt-1| the disk is broken\n"
    assert "its host is gone; these are the last lines" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grep", "a(b"), "not a regular expression"),
        (("--grep", "a", "-f"), "without --follow"),
        (("-C", "3"), "for --grep"),
        (("--since", "1h", "--tail", "3"), "not both"),
        (("--grep", "a", "--timestamps"), "without --follow"),
        (("--grep", "a", "--since", "soon"), "is not a time"),
        (("9", "--grep", "a"), "there is no task"),
    ],
)
def test_grep_that_can_not_work_is_refused(world: ControllerInProcess, words: tuple[str, ...], said: str) -> None:
    assert said in world.iris("logs", world.start("train"), *words, code=USAGE).stderr


def test_invalid_pattern_is_refused_before_the_cluster_is_joined() -> None:
    result = invoke("logs", "train", "--grep", "a(b", "--address", "127.0.0.1:1")
    assert result.exit_code == USAGE
    assert "--grep 'a(b' is not a regular expression" in result.output


def test_logs_prints_last_lines(world: ControllerInProcess) -> None:
    job = world.start("train")
    world.prints(job, 1, "first\nsecond\nthird\n")
    assert world.iris("logs", job, "1", "--tail", "2").stdout == "second\nthird\n"


def test_logs_cuts_no_character_in_two(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.logs.cli.PIECE_BYTES", 4)
    job, person = world.start("train"), Terminal()
    world.prints(job, 0, "€€€\n")
    assert world.on_terminal("logs", job, "0", person=person) == OK
    assert person.printed == "€€€\n"


def test_logs_follows_all_tasks_through_attempts(world: ControllerInProcess) -> None:
    job = world.start("train", max_retries_failure=1)
    attempt_ran(world, job, 1)
    person = Terminal()

    def ends() -> None:
        wait_until(lambda: "task-1| attempt 1 of task 1\n" in person.printed)
        world.fail(job, 1)
        world.wait_for_attempt(job, 2)
        attempt_ran(world, job, 2)
        wait_until(lambda: "task-1| attempt 2 of task 1\n" in person.printed)
        world.succeed(job)

    with world.meanwhile(ends):
        assert world.on_terminal("logs", "-f", job, person=person) == OK
    for index in (0, 1):
        mine = [line for line in person.printed.splitlines() if line.startswith(f"task-{index}| ")]
        assert mine == [f"task-{index}| attempt {attempt} of task {index}" for attempt in (1, 2)]
    assert "iris-ray: task 1: attempt 2 of task 1\n" in person.printed, "it says that a new one begins"


def test_ctrl_c_ends_following_but_not_the_job(world: ControllerInProcess) -> None:
    job = world.start("train")
    attempt_ran(world, job, 1)
    person = Terminal(("attempt 1 of task 0\n", CTRL_C))
    assert world.on_terminal("logs", "-f", job, "0", person=person) == INTERRUPTED
    assert "task-1" not in person.printed
    assert world.state(job).name == "RUNNING"


def test_following_goes_on_with_the_next_controller(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_connection, "RESTART_S", 0.2)
    job, person = world.start("train"), Terminal()
    attempt_ran(world, job, 1)

    def ends() -> None:
        wait_until(lambda: "task-1| attempt 1 of task 1\n" in person.printed)
        world.replace_controller(lambda: "iris-ray: waiting for the Controller" in person.printed)
        world.prints(job, 1, "the next one\n")
        wait_until(lambda: "task-1| the next one\n" in person.printed)
        world.succeed(job)

    with world.meanwhile(ends):
        assert world.on_terminal("logs", "-f", job, person=person) == OK
    assert person.printed.count("waiting for the Controller") == 1


def test_following_is_patient_from_its_first_question_on(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_connection, "RESTART_S", 0.2)
    job, person = world.start("train"), Terminal()
    attempt_ran(world, job, 1)
    world.succeed(job)

    def connected() -> controller_connection.ControllerConnection:
        found = controller_connection.ControllerConnection()
        world.ray.kill(world.controller())
        return found

    monkeypatch.setattr("iris_ray.logs.cli.ControllerConnection", connected)

    def comes_back() -> None:
        wait_until(lambda: "iris-ray: waiting for the Controller" in person.printed)
        world.start_controller()

    with world.meanwhile(comes_back):
        assert world.on_terminal("logs", "-f", job, person=person) == OK


def test_following_without_controller_ends_at_once(bare_cluster: ControllerInProcess) -> None:
    began = time.monotonic()
    assert "no Controller runs" in bare_cluster.iris("logs", "-f", "train", code=NO_CLUSTER).stderr
    assert time.monotonic() < began + 15.0


def test_logs_of_failed_job_show_failed_task(world: ControllerInProcess) -> None:
    job = world.start("train")
    world.prints(job, 1, "farewell\n")
    world.fail(job, 1)
    assert world.iris("logs", job).stdout == "farewell\n"


def test_following_waiting_job_says_why_it_waits(world: ControllerInProcess) -> None:
    first, second = world.start("train", slices=(3,)), world.submit("eval")
    person = Terminal((f"in use by {first}", CTRL_C))
    assert world.on_terminal("logs", "-f", second, person=person) == INTERRUPTED


def test_lost_hosts_log_is_replaced_by_a_notice(world: ControllerInProcess) -> None:
    job = world.start("train")
    world.prints(job, 1, "gone with its host\n")
    world.kill_host("v4-16-0", 1)
    world.wait_for_no_host("v4-16-0", 1)
    done = world.iris("logs", job, "1", "--attempt", "1")
    assert (done.stdout, "its host is gone" in done.stderr) == ("", True)


def test_lost_hosts_log_is_read_from_the_archive(
    world: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "archive").mkdir()
    monkeypatch.setenv(LOG_ARCHIVE.name, str(tmp_path / "archive"))
    job = world.start("train")
    world.prints(job, 1, "first\nlast words\n")
    (task,) = (task for task in world.tasks_of(job) if task.info.task_index == 1)
    log = AttemptLog(logs_directory(task.host.directory), job, 1, 1)
    copy((path for _, path in log.files()), tmp_path / "archive")
    world.kill_host("v4-16-0", 1)
    world.wait_for_no_host("v4-16-0", 1)
    done = world.iris("logs", job, "1", "--attempt", "1", "--tail", "1")
    assert done.stdout == "last words\n"
    assert "its host is gone; this is from the archive" in done.stderr
    found = world.iris("logs", job, "1", "--grep", "words").stdout
    assert found == "task-1| last words\n"


def test_anybody_may_read_logs(world: ControllerInProcess) -> None:
    job = world.start("train", slices=(2,), user="ann")
    world.prints(job, 3, "ann at work, task 3\n")
    assert world.iris("logs", job, "3", user="bob").stdout == "ann at work, task 3\n"


@pytest.mark.parametrize(
    ("more", "said"), [(("-f", "--json"), "--json is for one task"), (("0", "--all-tasks"), "not both")]
)
def test_mutually_exclusive_options_are_refused(
    world: ControllerInProcess, job: str, more: tuple[str, ...], said: str
) -> None:
    assert said in world.iris("logs", job, *more, code=USAGE).stderr
