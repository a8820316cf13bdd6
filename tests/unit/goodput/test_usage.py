"""How the command line is used: help, typos, exit codes, no cluster. Without Ray."""

import contextlib
import difflib
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click
import pytest

from iris_ray import testing
from iris_ray.cli.conventions import (
    FAILED,
    INTERRUPTED,
    NO_CLUSTER,
    OK,
    OTHER_NAMES,
    USAGE,
    confirm,
    errors_as_lines,
    exit_code,
)
from iris_ray.cli.main import Commands, main
from iris_ray.cli.run import run
from iris_ray.cli.submit import submit
from iris_ray.client import run_on_pod
from iris_ray.errors import (
    ControllerUnavailableError,
    JobCancelledError,
    NoClusterError,
    TokenRefusedError,
    UnknownTPUTypeError,
)
from iris_ray.model.checks import unknown
from iris_ray.model.options import JobOptions, PodOptions, options_of
from iris_ray.model.topology import get_tpu_config
from iris_ray.selftest.cli import SelfTest
from tests.support.command_line import COMMANDS, address_of_nobody, command_line, invoke

COMPLETION = "_IRIS_RAY_COMPLETE"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownTPUTypeError("x"), USAGE),
        (NoClusterError("x"), NO_CLUSTER),
        (ControllerUnavailableError("x"), NO_CLUSTER),
        (TokenRefusedError("x"), NO_CLUSTER),
        (JobCancelledError("x"), FAILED),
        (KeyError("x"), FAILED),
        (KeyboardInterrupt(), INTERRUPTED),
        (click.Abort(), INTERRUPTED),
        (click.UsageError("x"), USAGE),
    ],
    ids=repr,
)
def test_error_becomes_one_line_and_an_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.exceptions.Exit) as stop, errors_as_lines():
        raise error
    assert stop.value.exit_code == code
    printed = capsys.readouterr().err
    assert printed.startswith("iris-ray: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(("command", "group"), [(run, PodOptions), (submit, JobOptions)])
def test_command_has_each_options_flag_and_default(command: click.Command, group: type) -> None:
    shown = {parameter.name: parameter for parameter in command.params}
    for name, option in options_of(group).items():
        if option.flag:
            assert option.flag in shown[name].opts
            as_words = isinstance(shown[name].type, click.Choice)
            default = str(option.default) if as_words and option.default is not None else option.default
            assert shown[name].default in (default, "interactive", "5m")


@pytest.mark.parametrize(
    "flag",
    [
        ("--host-silence", "1"),
        ("--stall-timeout", "x"),
        ("--exit-grace", "nan"),
        ("--spares", "-1"),
        ("--prefer", "="),
    ],
    ids=" ".join,
)
def test_value_that_an_option_does_not_take_is_bad_usage(flag: tuple[str, str]) -> None:
    assert invoke("run", __file__, "v4-8", *flag).exit_code == USAGE


def test_who_has_closed_stdin_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as with <&-
    confirm("Really?", yes=False)


def test_codes_are_those_of_the_help() -> None:
    said = " ".join((main.epilog or "").split())
    assert f"{OK} fine; {FAILED} the job or command failed; {USAGE} it can't work" in said
    assert f"{NO_CLUSTER} no cluster" in said
    assert exit_code(NoClusterError()) == NO_CLUSTER


GROUPS = {path: command for path, command in {"": main, **COMMANDS}.items() if isinstance(command, Commands)}


@pytest.mark.parametrize("path", GROUPS)
def test_help_lists_every_command_with_a_line(path: str) -> None:
    output = invoke(*path.split(), "--help").output
    for section, entries in GROUPS[path].sections.items():
        assert f"{section}:" in output
        for name, entry in entries.items():
            assert re.search(rf"^  {name} +{re.escape(entry.does.split()[0])}", output, re.MULTILINE)
            assert invoke(*path.split(), name, "--help").exit_code == 0
            assert COMMANDS[f"{path} {name}".strip()].name == name


def test_list_of_commands_fits_on_a_screen() -> None:
    assert len(main.entries) + len(main.sections) <= 30


def examples() -> Iterator[str]:
    """Every command line in the help of any command; tests/docs has those of the documents."""
    for command in ("", *COMMANDS):
        for line in invoke(*command.split(), "--help").output.splitlines():
            if line.strip().startswith("iris-ray "):
                yield re.split(r"  +| \| ", line.strip())[0]


def test_every_example_is_a_command_with_options_that_it_has() -> None:
    shown = [called(shlex.split(example)[1:]) for example in sorted(set(examples()))]
    commands = {path: one for path, one in COMMANDS.items() if not isinstance(one, click.Group)}
    assert [path for path, command in commands.items() if command not in shown] == []


def called(words: list[str]) -> click.Command:
    """The command of `COMMANDS` that is called so; fails unless it takes the rest of the words."""
    command: click.Command = main
    while isinstance(command, click.Group) and words:
        name, *words = words
        inner = command.get_command(click.Context(command), name)
        assert inner is not None, name
        command = inner
    command.make_context(name, list(words))
    return command


def test_help_leads_to_finished_job_in_dozen_lines() -> None:
    story = invoke("--help").output.partition("From nothing to a finished job:")[2].partition("Options:")[0]
    commands = re.findall(r"^ +iris-ray (\w+)", story, re.MULTILINE)
    assert commands == ["demo", "doctor", "run", "submit", "ls", "why", "logs", "cancel", "host"]
    assert len(story.strip().splitlines()) <= 12
    assert story.count("RAY_ADDRESS") == 1


def test_other_tools_names_lead_to_commands_that_exist() -> None:
    assert set(OTHER_NAMES.values()) <= set(COMMANDS) | {path.split()[-1] for path in COMMANDS}
    assert not set(OTHER_NAMES) & set(COMMANDS)


def test_help_and_completion_need_none_of_the_slow_libraries() -> None:
    slow = {"ray", "rich", "grpc", "tenacity", "iris_ray.model"}
    script = f"import sys, iris_ray.cli.main; print({slow} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("host dr", "drain"),
        ("logs --fol", "--follow"),
        ("cluster controller u", "upgrade"),
        ("run x.py v5p-25", "v5p-256"),
        ("submit x.py --tpu v4-1", "v4-16"),
    ],
)
def test_shell_completes_commands_and_options(typed: str, wanted: str) -> None:
    asked = {"COMP_WORDS": f"iris-ray {typed}", "COMP_CWORD": str(len(typed.split()))}
    done = subprocess.run(
        command_line(), capture_output=True, text=True, env={**os.environ, **asked, COMPLETION: "bash_complete"}
    )
    assert f"plain,{wanted}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stauts"], "did you mean job status"),
        (["workers"], "did you mean host ls?"),
        (["untaint", "v4-16-0"], "did you mean host undrain?"),
        (["simulate", "fleet.toml"], "did you mean study?"),
        (["host", "taint"], "did you mean drain?"),
        (["jobs"], "did you mean ls?"),
        (["kill", "x"], "did you mean cancel?"),
        (["cluster", "controller", "strat"], "did you mean start or status"),
        (["cluster", "controller", "jobs"], "there is no command 'jobs'. See"),
        (["ls", "--jsn"], "--json"),
        (["logs", "x", "first"], "'first' is not a whole number"),
        (["ls", "--address", "nonsense"], "HOST:PORT"),
        (["doctor", "--address", "nonsense"], "HOST:PORT"),
        (["doctor", "--json", "--address", "ray://10.0.0.1:10001"], "the URL of its dashboard"),
        (["--address", "ray://10.0.0.1:10001", "ls"], "the URL of its dashboard"),
        (["run", "nothing.py", "v4-16"], "no script 'nothing.py'"),
        (["run", __file__, "v4-17"], "v4-16"),
        (["run", __file__, "v4-16", "--num-slices", "many"], "2,4"),
        (["run", __file__, "v4-16", "--num-slices", "0"], "at least 1"),
        (["run", __file__, "v4-16", "--steps", "3"], "after --"),
        (["run", __file__], f"on which TPU type? Such as: iris-ray run {__file__} v4-32"),
        (["run", __file__, "v4-16", "--tpu", "v4-32"], "given twice"),
        (["run", __file__, "--tpu", "v4-17"], "v4-16"),
        (["run", "v4-16", __file__], "v4-16 is a TPU type, and the script comes first"),
        (["submit", "v4-16", __file__], "v4-16 is a TPU type, and the script comes first"),
        (["run", __file__, "v4-16", "--priority", "high"], "interactive"),
        (["run", __file__, "v4-16", "--name", "x" * 101], "the limit is 100"),
        (["submit", __file__, "v4-16"], "--tpu v4-16"),
        (["submit", __file__, "--num-slices", "2"], "--tpu"),
        (["submit", __file__, "--tpu", "v4-17"], "v4-16"),
        (["submit", __file__, "--max-task-failures", "-1"], "-1 is not in the range"),
        (["submit", __file__, "--json", "--follow"], "leave out --follow"),
        (["run", __file__, "v4-16", "--env", "1=2"], "NAME=VALUE"),
        (["host", "drain", "v4-16-0", "not a name"], "is not the name of a taint"),
        (["run", __file__, "v4-16", "--env", "=2"], "--env =…: no name of a variable"),
        (["run", "python", __file__, "v4-16"], "python is left out: give a script"),
        (["run", "/usr/bin/python3.12", __file__, "v4-16"], "/usr/bin/python3.12 is left out: give a script"),
        (["run", __file__, "v4-16", "--steps=3"], "If it is the script's own, write it after --: ... -- --steps=3 ..."),
        (["exec", "job-1", "ls", "-la"], "If it is the command's own, write it after --: ... -- -la ..."),
        (["shell", "job-1", "-x"], "If it is the command's own, write it after --: ... -- -x ..."),
        (["dev", "run", "mine", "python", "-V"], "If it is the command's own, write it after --: ... -- -V ..."),
        (["dev", "hold", "v4-16", "--namme", "mine"], "'--namme'. Did you mean one of: '--name', '--team'? See"),
        (["dev", "hodl", "v4-16"], "there is no command 'hodl'; did you mean hold?"),
        (["dev", "v4-1"], "'v4-1' is not a TPU type"),
        (["logs", "job-1", "first"], "Invalid value for TASK: 'first' is not a whole number"),
        (["serve", "nothing.toml"], "nothing.toml can't be read: No such file or directory\n"),
    ],
)
def test_typo_is_bad_usage_and_the_line_says_how_to_mend_it(arguments: list[str], said: str) -> None:
    done = invoke(*arguments, RAY_ADDRESS=address_of_nobody())  # what slips through reaches no cluster
    assert done.exit_code == USAGE, done.output
    assert said in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("given", [["v4-16"], ["--tpu", "v4-16"], ["--tpu", "v4-16", "--", "v4-16"]])
def test_type_is_taken_as_second_argument_and_as_an_option(given: list[str]) -> None:
    done = invoke("run", __file__, *given, RAY_ADDRESS=address_of_nobody())
    assert (done.exit_code, "nothing answers" in done.output) == (NO_CLUSTER, True)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("train-1a2b3c4e", "train-1a2b3c4d"), ("train", "train-1a2b3c4d"), ("trian", "train-1a2b3c4d"), ("bgi", "big-22")],
)
def test_nearest_job_is_found_by_its_name_too(name: str, meant: str) -> None:
    assert f"did you mean {meant}?" in str(unknown("job", name, ["train-1a2b3c4d", "big-22", "other-7"]))


def test_name_is_compared_closely_with_a_few_of_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close look at 10,000 names takes a second, in which the Controller would answer nobody."""
    compared: list[int] = []
    closely = difflib.get_close_matches

    def counted(name: str, names: list[str], **options: Any) -> list[str]:
        compared.append(len(names))
        return closely(name, names, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    jobs = [f"{kind}-{number:08x}" for number in range(5000) for kind in ("train", "evaluate")]
    assert "did you mean train-00000387 or " in str(unknown("job", "train-00000387x", jobs))
    assert "there are" in str(unknown("job", "other", jobs))
    assert sum(compared) < 2000


@pytest.mark.parametrize("command", [["ls"], ["why", "x"], ["host", "ls"], ["host", "drain", "x"]])
def test_no_cluster_is_said_at_once(command: list[str]) -> None:
    nobody = address_of_nobody()
    done = invoke(*command, RAY_ADDRESS=nobody)
    assert done.exit_code == NO_CLUSTER
    assert done.output.startswith(f"iris-ray: nothing answers at {nobody}")
    assert "iris-ray demo" in done.output


def test_address_of_something_else_is_said_to_be_none_of_rays() -> None:
    """Ray itself would try for two minutes."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        done = invoke("ls", "--address", f"127.0.0.2:{server.getsockname()[1]}")
    assert done.exit_code == NO_CLUSTER
    assert "6379" in done.output


@pytest.mark.parametrize("mode", ["simple", "simulate", "nonsense"])
def test_commands_about_cluster_ignore_mode_variable(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    seen: list[object] = []

    def begins(request: object, mode: object) -> list[object]:
        seen.append(mode)
        raise NoClusterError("enough")

    monkeypatch.setattr(run_on_pod, "start_request", begins)
    monkeypatch.setattr(run_on_pod, "run_request", begins)
    monkeypatch.setattr(testing, "SimulatedCluster", contextlib.nullcontext)
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")  # the demo sets it, and the other tests are to do without
    assert "enough" in invoke("demo", IRIS_RAY_MODE=mode).stderr
    monkeypatch.setenv("IRIS_RAY_MODE", mode)
    (found,) = SelfTest(get_tpu_config("v4-16"), 1, 10.0).run(await_notice_s=0.0)
    assert found.found.startswith("enough")
    assert seen == [None] * 2
