"""``iris-ray rerun``: the command, the flags and the code of another run."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from iris_ray.cli.conventions import USAGE
from iris_ray.cli.rerun import TypedCommand, _about_job
from iris_ray.cli.script import find_target
from iris_ray.dev.checkout import keep_record, record_of
from iris_ray.model.options import PriorityBand
from iris_ray.settings import CODE
from tests.support.controller_in_process import ControllerInProcess


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a clone with a changed script."""
    path = tmp_path / "clone"
    path.mkdir()
    (path / "work.py").write_text("print('committed')\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=path, check=True)
    (path / "work.py").write_text("print('changed')\n")
    monkeypatch.chdir(path)
    monkeypatch.setenv(CODE.name, "1")
    return path


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The text of each script that was submitted."""
    texts: list[bytes] = []

    def find(*arguments: Any) -> Any:
        found: Any = find_target(*arguments)
        texts.append(found.text)
        return found

    monkeypatch.setattr("iris_ray.cli.submit.find_target", find)
    return texts


def submitted(world: ControllerInProcess, *flags: str) -> str:
    return world.iris("submit", "work.py", "--tpu", "v4-16", *flags).stdout.strip()


def test_rerun_takes_over_command_and_other_flags(world: ControllerInProcess, clone: Path) -> None:
    job = submitted(world, "--priority", "batch", "--spares", "1", "--json", "--", "--steps", "10").split('"')[3]
    again = world.iris("rerun", job, "--priority", "production", "--name", "again").stdout.strip()
    spec = world.spec(again)
    assert (spec.priority, spec.spares, spec.device, spec.name) == (PriorityBand.PRODUCTION, 1, "v4-16", "again")
    shown = world.iris("rerun", job, "--dry-run", "--tpu", "v4-32", "--", "--steps", "20").stdout.strip()
    assert shown == "iris-ray submit work.py --tpu v4-16 --priority batch --spares 1 --tpu v4-32 -- --steps 20"
    assert world.iris("rerun", again, "--dry-run").stdout.rstrip().endswith("--name again -- --steps 10")


def test_rerun_runs_the_code_of_that_time(world: ControllerInProcess, clone: Path, sent: list[bytes]) -> None:
    job = submitted(world)
    (clone / "work.py").write_text("print('of today')\n")
    again = world.iris("rerun", job).stdout.strip()
    assert record_of(again) == record_of(job) != None  # noqa: E711
    now = world.iris("rerun", job, "--current-code").stdout.strip()
    assert sent == [b"print('changed')\n", b"print('changed')\n", b"print('of today')\n"]
    assert record_of(now) != record_of(job)
    assert (clone / "work.py").read_text() == "print('of today')\n"


def test_rerun_restores_a_script_that_was_named_by_its_whole_path(
    world: ControllerInProcess, clone: Path, sent: list[bytes], tmp_path: Path
) -> None:
    job = world.iris("submit", str(clone / "work.py"), "--tpu", "v4-16").stdout.strip()
    (clone / "work.py").write_text("print('of today')\n")
    assert "not restored" not in world.iris("rerun", job).stderr
    assert sent == [b"print('changed')\n"] * 2

    (tmp_path / "apart.py").write_text("print('apart')\n")
    job = world.iris("submit", "../apart.py", "--tpu", "v4-16").stdout.strip()
    assert "../apart.py is not restored" in world.iris("rerun", job).stderr
    assert sent[3] == b"print('apart')\n"


def test_rerun_with_a_directory_sends_it_in_place_of_the_code_of_that_time(
    world: ControllerInProcess, clone: Path, sent: list[bytes]
) -> None:
    job = submitted(world)
    (clone / "work.py").write_text("print('of today')\n")
    assert "--working-dir=." in world.iris("rerun", job, "--working-dir=.").stderr
    assert sent[1] == b"print('of today')\n"


def test_rerun_of_a_directory_sent_through_the_dashboard_says_what_is_missing(
    world: ControllerInProcess, clone: Path
) -> None:
    job = submitted(world)
    assert "files that git ignores" not in world.iris("rerun", job).stderr
    record = record_of(job)
    assert record is not None
    keep_record(job, record.of_whole_directory())
    assert "files that git ignores, and files that look like secrets, are missing" in world.iris("rerun", job).stderr
    assert "; sent all of --working-dir" in world.iris("job", "status", job).stdout


def test_rerun_reads_the_files_of_secrets_of_its_own_directory(
    world: ControllerInProcess, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (clone / "token.txt").write_text("s3cr3t\n")  # travels in no checkout
    job = submitted(world, "--secret", "HF_TOKEN=token.txt")
    again = world.iris("rerun", job, "--secret=OTHER=token.txt").stdout.strip()
    assert again != job
    (clone / "token.txt").unlink()
    assert f"{clone / 'token.txt'} can't be read" in world.iris("rerun", job, code=USAGE, quotes=True).stderr

    monkeypatch.setenv(CODE.name, "0")
    job = submitted(world)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("s3cr3t\n")
    assert world.iris("rerun", job, "--secret", "HF_TOKEN=mine.txt").stdout.strip()


def test_variables_and_secrets_replace_those_of_the_same_name(
    world: ControllerInProcess, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (clone / name for name in ("old.txt", "new.txt"))
    old.write_text("s3cr3t\n")
    new.write_text("an0ther\n")
    job = submitted(world, "--secret", f"KEY={old}", "--secret=TOKEN=old.txt", "--env", "MODE=test")
    old.unlink()  # what is replaced is not read
    monkeypatch.delenv("MODE", raising=False)
    given = "--secret", f"KEY={new}", "--env", "TOKEN=open", f"--secret=MODE={new}"
    again = world.iris("rerun", job, *given).stdout.strip()
    shown = world.iris("rerun", again, "--dry-run", "-eKEY=1").stdout.strip()
    assert shown == f"iris-ray submit work.py --tpu v4-16 --env TOKEN --secret=MODE={new} -eKEY=1"


def test_rerun_elsewhere_says_which_commit_is_missing(
    world: ControllerInProcess, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(world)
    monkeypatch.chdir(tmp_path)
    refused = world.iris("rerun", job, code=USAGE, quotes=True)
    assert "the job ran commit" in refused.stderr
    assert "--current-code" in refused.stderr


def test_job_of_a_program_can_not_be_run_again(world: ControllerInProcess) -> None:
    job = world.start("train-1a2b3c4d")
    assert "was not submitted by `iris-ray submit`" in world.iris("rerun", job, code=USAGE).stderr
    assert "did you mean" in world.iris("rerun", job[:-1], code=USAGE).stderr
    assert "give JOB first" in world.iris("rerun", "--tpu", "v4-16", job, code=USAGE).stderr


def test_words_that_are_no_flags_are_refused(world: ControllerInProcess, clone: Path) -> None:
    job = submitted(world)
    for words, meant in ((["v4-32"], "--tpu v4-32"), (["--spares", "1", "other"], "-- other")):
        assert f"did you mean rerun {job} {meant}?" in world.iris("rerun", job, *words, code=USAGE).stderr
    unknown = world.iris("rerun", job, "--max-retries", "5", code=USAGE, quotes=True).stderr
    assert "--max-retries-failure" in unknown
    assert "is not a flag" not in unknown
    assert "-fe A=1" in world.iris("rerun", job, "--dry-run", "-fe", "A=1").stdout


def test_values_of_variables_are_not_kept() -> None:
    words = ["a.py", "--env", "KEY=s3cret", "-e", "B=s3cret", "--env=C=s3cret", "-eD=s3cret", "--address", "h:1", "-f"]
    kept = list(_about_job([*words, "--json", "--", "--env", "E=shown"]))
    assert kept == ["a.py", "--env", "KEY", "-e", "B", "--env", "C", "--env", "D", "--", "--env", "E=shown"]
    assert list(_about_job(["-fe", "KEY=s3cret", "a.py", "-feB=s3cret", "-ff", "--", "-feC=shown"])) == [
        *("-e", "KEY", "a.py", "--env", "B", "--", "-feC=shown")
    ]
    typed = TypedCommand("submit", tuple(kept), "/")
    assert typed.again(["-fe", "KEY=new"], [])[1:3] == ["-e", "B"]
    assert typed.again(["--env", "KEY=new"], []) == ["a.py", "-e", "B", "--env", "C", "--env", "D", "--env", "KEY=new"]
    assert typed.again(["-eKEY=new"], []) == ["a.py", "-e", "B", "--env", "C", "--env", "D", "-eKEY=new"]
    assert typed.again(["--constraint", "KEY=new"], [])[1:3] == ["--env", "KEY"], "a value of another flag"


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["a.py", "v4-32", "--name", "x"], ["a.py", "--name", "x", "--tpu", "v4-64"]),
        (
            ["--name", "v4-32", "a.py", "v4-32", "--", "v4-8"],
            ["--name", "v4-32", "a.py", "--tpu", "v4-64", "--", "v4-8"],
        ),
        (["a.py", "--tpu", "v4-32"], ["a.py", "--tpu", "v4-32", "--tpu", "v4-64"]),
    ],
)
def test_other_type_replaces_one_that_was_an_argument(words: list[str], again: list[str]) -> None:
    assert TypedCommand("run", tuple(words), "/").again(["--tpu", "v4-64"], None) == again
    assert TypedCommand("run", tuple(words), "/").again([], None) == words


@pytest.mark.parametrize(
    ("command", "words", "again"),
    [
        ("run", ["a.py", "v4-32", "x", "--name", "y", "z"], ["a.py", "v4-32", "--name", "y", "--", "new"]),
        ("run", ["--tpu", "v4-32", "a.py", "x"], ["--tpu", "v4-32", "a.py", "--", "new"]),
        ("run", ["a.py", "v4-32", "x", "--", "old"], ["a.py", "v4-32", "--", "new"]),
        (
            "submit",
            ["a.py", "x", "--follow", "--tpu=v4-32", "--", "old"],
            ["a.py", "--follow", "--tpu=v4-32", "--", "new"],
        ),
        ("submit", ["--ray-job", "a.py", "x"], ["--ray-job", "a.py", "--", "new"]),
    ],
)
def test_other_arguments_replace_those_typed_without_dashes(command: str, words: list[str], again: list[str]) -> None:
    typed = TypedCommand(command, tuple(words), "/")
    assert typed.again([], ["new"]) == again
    assert typed.again([], None) == words
    assert typed.again([], []) == again[:-2]


@pytest.mark.parametrize(
    ("command", "words", "again"),
    [
        ("submit", ["--tpu", "v4-8", "--", "a.py", "x"], ["--tpu", "v4-8", "a.py", "--tpu", "v4-64", "--", "new"]),
        ("run", ["--tpu", "v4-8", "--", "a.py", "x"], ["--tpu", "v4-8", "a.py", "--tpu", "v4-64", "--", "new"]),
        ("run", ["--", "a.py", "v4-8", "x"], ["a.py", "--tpu", "v4-64", "--", "new"]),
        ("run", ["a.py", "--", "v4-8", "x"], ["a.py", "--tpu", "v4-64", "--", "new"]),
        ("run", ["a.py", "--tpu", "v4-8", "--", "v4-8"], ["a.py", "--tpu", "v4-8", "--tpu", "v4-64", "--", "new"]),
    ],
)
def test_script_and_type_after_dashes_are_no_arguments_of_the_script(
    command: str, words: list[str], again: list[str]
) -> None:
    assert TypedCommand(command, tuple(words), "/").again(["--tpu", "v4-64"], ["new"]) == again


def test_type_and_arguments_are_replaced_together() -> None:
    typed = TypedCommand("run", ("a.py", "v4-32", "x"), "/")
    assert typed.again(["--tpu", "v4-64"], ["new"]) == ["a.py", "--tpu", "v4-64", "--", "new"]
    assert typed.again(["--tpu=v4-64"], None) == ["a.py", "x", "--tpu=v4-64"]
