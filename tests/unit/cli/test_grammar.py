"""One grammar of all commands: how they are told a TPU type, a task and a duration, and what ``--all`` means."""

import re

import click
import pytest

from iris_ray.cli.conventions import USAGE
from iris_ray.cli.tasks import TaskNumber, named
from iris_ray.cli.times import Duration, Time
from iris_ray.client.connection import new_job_id
from tests.support.command_line import COMMANDS, invoke
from tests.support.controller_in_process import ControllerInProcess

LEAVES = {path: command for path, command in COMMANDS.items() if not isinstance(command, click.Group)}


def flags(command: click.Command) -> dict[str, click.Parameter]:
    return {name: one for one in command.params for name in one.opts if name.startswith("-")}


@pytest.mark.parametrize("path", LEAVES)
def test_tpu_type_is_called_tpu_everywhere(path: str) -> None:
    found = flags(LEAVES[path])
    assert "--type" not in found
    assert "--cluster" not in found
    for name, parameter in found.items():
        metavar = parameter.make_metavar(click.Context(LEAVES[path]))
        assert ("TPU_TYPE" in metavar) == (name == "--tpu")


@pytest.mark.parametrize("path", LEAVES)
def test_durations_have_one_form_and_one_wording(path: str) -> None:
    command = LEAVES[path]
    for name, parameter in flags(command).items():
        metavar = parameter.make_metavar(click.Context(command))
        assert not re.fullmatch(r"SECONDS|MINUTES|HOURS|DAYS", metavar), f"{name} {metavar}"
        assert name not in ("--seconds", "--minutes", "--hours", "--days")
    text = " ".join(invoke(*path.split(), "--help").output.split())
    for kind in (Duration, Time):
        times = sum(isinstance(one.type, kind) for one in command.params)
        assert text.count(kind.note) == bool(times)


@pytest.mark.parametrize("path", LEAVES)
def test_all_means_finished_jobs_too(path: str) -> None:
    found = flags(LEAVES[path])
    assert ("--all" in found) == (path in ("ls", "job ls"))
    assert ("-a" in found) == ("--all" in found)


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_that_takes_a_task_takes_both_forms(path: str) -> None:
    command = LEAVES[path]
    usage = command.get_usage(click.Context(command))
    assert ("[/TASK]" in usage) == ("[TASK]" in usage)
    if "[/TASK]" in usage:
        assert " ".join(invoke(*path.split(), "--help").output.split()).count(TaskNumber.note) == 1


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("train",), ("train", None)),
        (("train/3",), ("train", 3)),
        (("train/task-3",), ("train", 3)),
        (("train", 3), ("train", 3)),
        (("prepare/tokens",), ("prepare/tokens", None)),
        (("prepare/tokens/0",), ("prepare/tokens", 0)),
        (("prepare/3", 0), ("prepare/3", 0)),
    ],
)
def test_task_is_named_with_a_slash_or_apart(given: tuple[str, int], meant: tuple[str, int | None]) -> None:
    assert named(*given) == meant


@pytest.mark.parametrize("name", ["task", "task-"])
def test_no_new_job_id_reads_as_a_task_of_its_parent(name: str) -> None:
    ids = [f"train-1a2b3c4d/{new_job_id(name)}" for _ in range(2000)]  # 1 in 43 had no letter in its eight digits
    assert [job for job in ids if named(job) != (job, None)] == []


def test_logs_of_a_task_are_had_in_both_forms(world: ControllerInProcess) -> None:
    job = world.start("train-1a2b3c4d")
    world.prints(job, 1, "of task 1\n")
    assert world.iris("logs", f"{job}/1").stdout == world.iris("logs", job, "1").stdout == "of task 1\n"
    assert "there is no task" in world.iris("logs", f"{job}/7", code=USAGE).stderr
    assert "not a whole number" in world.iris("logs", job, "one", code=USAGE).stderr


def test_short_and_long_durations_are_refused_with_the_limit() -> None:
    asked = ("cluster", "selftest", "--tpu", "v4-8", "--timeout")
    assert "0 is too short; give more than 0s" in invoke(*asked, "0").stderr
    notice = ("host", "give-notice", "here", "--in")
    assert "8d is too long; give at most 1w" in invoke(*notice, "8d").stderr
    assert "'soon' is not a duration; give one such as 90, 90s, 15m, 2h, 7d or 1h30m" in invoke(*notice, "soon").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list", "--help"), "iris-ray ls"),
        (("ps", "--help"), "iris-ray ls"),
        (("top", "--help"), "iris-ray ls"),
        (("status", "--help"), "iris-ray job status"),
        (("describe", "--help"), "iris-ray job status"),
        (("ssh", "--help"), "iris-ray shell"),
        (("job", "list", "--help"), "iris-ray job ls"),
        (("host", "list", "--help"), "iris-ray host ls"),
        (("slots", "ps", "--help"), "iris-ray slots ls"),
        (("dev", "list", "--help"), "iris-ray dev ls"),
    ],
    ids=" ".join,
)
def test_other_tools_names_do_what_people_mean(words: tuple[str, ...], said: str) -> None:
    output = invoke(*words).output.replace("main", "iris-ray", 1)
    assert output.startswith(f"Usage: {said} ")
    assert words[-2] in output.partition("Also: ")[2] or words == ("status", "--help")


@pytest.mark.parametrize("words", [("host", "top"), ("slots", "status"), ("cluster", "ssh")], ids=" ".join)
def test_other_name_without_such_a_command_is_unknown(words: tuple[str, ...]) -> None:
    done = invoke(*words)
    assert done.exit_code == USAGE
    assert f"there is no command {words[1]!r}" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(shell: str) -> None:
    done = invoke("completion", shell)
    assert f"_IRIS_RAY_COMPLETE={shell}_complete" in done.stdout
    assert "'nosuch' is not one of" in invoke("completion", "nosuch").stderr
