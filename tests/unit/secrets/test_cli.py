"""``iris-ray cluster secrets``, and jobs that use the store: what they get, what they are told, and who sees values."""

import gzip
import time
import urllib.error
import urllib.request
from pathlib import Path
from unittest import mock

import pytest

from iris_ray import IrisClient, JobGroup, Secret
from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.errors import SecretNotFoundError
from iris_ray.model.lifecycle import JobState
from iris_ray.state import attempt_ends
from tests.support.command_line import Terminal
from tests.support.controller_in_process import ControllerInProcess
from tests.support.dashboard_pages import served
from tests.support.leaks import unpacked
from tests.support.waiting import wait_until

VALUE = "s3cr3t-value"


@pytest.fixture
def world(bare_cluster: ControllerInProcess, tmp_path: Path) -> ControllerInProcess:
    """A cluster with a store."""
    bare_cluster.history = tmp_path / "head"
    bare_cluster.start_controller()
    return bare_cluster


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "work.py"
    path.write_text("pass")
    return str(path)


def put(world: ControllerInProcess, value: str = VALUE, name: str = "KEY", *more: str) -> str:
    return world.iris("cluster", "secrets", "set", name, *more, input=f"{value}\n".encode(), user="olga").output


def submit(world: ControllerInProcess, script: str, *more: str) -> str:
    found: str = world.json("submit", script, "--tpu", "v4-16", "--secret", "KEY=store:", *more)["job_id"]
    return found


def page(url: str) -> str:
    """Return what the dashboard answers; nothing if that is an error."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            data: bytes = answer.read()
            return (gzip.decompress(data) if answer.headers["Content-Encoding"] == "gzip" else data).decode()
    except urllib.error.HTTPError as error:
        error.close()
        return ""


def values(world: ControllerInProcess, job: str) -> list[str]:
    return [launch.env["KEY"] for launch in world.launches if launch.info.job_id == job]


# -- the commands ------------------------------------------------------------------------------------------------------


def test_secrets_are_listed_without_values(world: ControllerInProcess, script: str, tmp_path: Path) -> None:
    assert "the store has no secrets" in world.iris("cluster", "secrets", "ls").output
    assert put(world) == "KEY is set, revision 1\n"
    assert put(world).startswith("KEY is set, revision 2; it replaces what olga set on 20")
    (tmp_path / "file").write_text(VALUE)
    for_some = "--user", "ann", "--team", "research"
    world.iris("cluster", "secrets", "set", "FILE", "--from-file", str(tmp_path / "file"), *for_some)
    job = submit(world, script)
    file, key = world.json("cluster", "secrets", "ls")
    assert (key["secret"]["name"], key["secret"]["set_by"], key["secret"]["revision"]) == ("KEY", "olga", 2)
    assert abs(key["secret"]["set_at"] - time.time()) < 600
    assert (key["jobs"], file["jobs"], file["secret"]["users"]) == ([job], [], ["ann"])
    shown = world.iris("cluster", "secrets", "ls").output
    assert all(said in shown for said in ("KEY", "olga", "all jobs", "user ann, team research"))
    assert "s3cr3t" not in shown


def test_person_types_value_unseen(world: ControllerInProcess) -> None:
    with mock.patch("click.termui.hidden_prompt_func", return_value=VALUE):
        person = Terminal()
        assert world.on_terminal("cluster", "secrets", "set", "KEY", person=person) == 0
    assert "KEY is set, revision 1" in person.printed
    assert VALUE not in person.printed


@pytest.mark.parametrize(
    ("arguments", "value", "said"),
    [
        (("KEY", VALUE), b"", "the value can't be an argument, as the shell's history and ps show"),
        (("a/b",), b"x", "'a/b' is not a valid name for a secret"),
        (("KEY",), b"", "0 characters"),
        (("KEY",), b"\xff", "not text in UTF-8"),
        (("KEY",), b"x" * 100_000, "16,384 characters at most"),
        (("KEY", "--from-file", "/no/such/file"), b"x", "/no/such/file can't be read: No such file"),
        (("KEY", "--user", "a b"), b"x", "'a b' is not a valid name for a user"),
    ],
)
def test_bad_secret_is_refused_without_showing_it(
    world: ControllerInProcess, arguments: tuple[str, ...], value: bytes, said: str
) -> None:
    shown = world.iris("cluster", "secrets", "set", *arguments, input=value, code=USAGE).output
    assert said in shown
    assert "s3cr3t" not in shown
    assert world.json("cluster", "secrets", "ls") == []


def test_only_operators_set_and_remove(world: ControllerInProcess) -> None:
    put(world)
    world.iris("cluster", "settings", "set", "operators=olga", user="olga")
    refused = world.iris("cluster", "secrets", "set", "KEY", input=b"x", code=FAILED)
    assert "only operators may set secrets, and ann is not an operator" in refused.stderr
    assert "only operators may remove" in world.iris("cluster", "secrets", "rm", "KEY", code=FAILED).stderr
    assert [one["secret"]["revision"] for one in world.json("cluster", "secrets", "ls")] == [1]


def test_removal_asks_if_jobs_use_it(world: ControllerInProcess, script: str) -> None:
    put(world)
    job = submit(world, script)
    person = Terminal((f"1 job uses it, and can't start again without it: {job}", "n"))
    assert world.on_terminal("cluster", "secrets", "rm", "KEY", person=person) == FAILED
    assert "nothing is done" in person.printed
    assert "KEY is removed" in world.iris("cluster", "secrets", "rm", "KEY", "--yes").output
    assert "there is no secret 'KEY'" in world.iris("cluster", "secrets", "rm", "KEY", code=USAGE).stderr


def test_unsafe_directory_is_said_to_whoever_asks(world: ControllerInProcess, script: str) -> None:
    assert world.history is not None
    put(world)
    (world.history / "secrets").chmod(0o755)
    for command in (("ls",), ("rm", "KEY")):
        assert "mode 0755" in world.iris("cluster", "secrets", *command, code=FAILED).stderr
    given = ("submit", script, "--tpu", "v4-16", "--secret", "KEY=store:")
    assert "the store of secrets is not used" in world.iris(*given, code=FAILED).stderr
    assert world.jobs() == []
    world.iris("submit", script, "--tpu", "v4-16")


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_stored_value_is_only_in_tasks_and_file(
    world: ControllerInProcess, script: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    shown = [put(world)]
    job = submit(world, script, "--secret", "OTHER=store:KEY", "--max-retries-failure", "0")
    world.wait_for_attempt(job, 1)
    launches = [launch for launch in world.launches if launch.info.job_id == job]
    assert [(launch.env["KEY"], launch.env["OTHER"]) for launch in launches] == [(VALUE, VALUE)] * 2
    assert world.spec(job).stored_secrets == ("KEY",)
    export = tmp_path / "export.jsonl"
    world.iris("cluster", "controller", "export", str(export), "--variables")
    assert '"from_store": {"KEY": ["KEY", false], "OTHER": ["KEY", false]}' in export.read_text()
    world.fail(job, 0)
    world.wait_for_state(job, JobState.FAILED)
    shown += [world.iris(*words).output for words in (
        ("cluster", "secrets", "ls", "--json"), ("job", "status", job, "--json"), ("job", "tasks", job, "--json"),
        ("job", "events", job), ("history", job, "--json"), ("logs", job, "--json"),
    )]  # fmt: skip
    with served() as url:
        wait_until(lambda: page(f"{url}/readyz"))
        pages = [page(f"{url}/api/{path}") for path in ("snapshot", "cluster", "goodput", "jobs", f"jobs/{job}")]
    assert all(pages)
    assert job in pages[0]
    assert not any("s3cr3t" in text for text in (*shown, *pages, caplog.text, str(launches)))
    have = [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert have == [tmp_path / "head" / "secrets" / "KEY"]
    recorded = [data for value in world.recorded().values() if value for data in unpacked(value)]
    assert any(b"KEY" in data for data in recorded)
    assert not any(b"s3cr3t" in data for data in recorded)


def test_next_attempt_gets_new_value_also_from_next_controller(world: ControllerInProcess, script: str) -> None:
    put(world, "old")
    job = submit(world, script, "--max-retries-failure", "2")
    world.wait_for_attempt(job, 1)
    put(world, "new")
    world.fail(job, 0)
    world.wait_for_attempt(job, 2)
    world.iris("cluster", "controller", "upgrade")
    world.fail(job, 0)
    world.wait_for_attempt(job, 3)
    assert values(world, job) == ["old"] * 2 + ["new"] * 4


def test_job_without_its_secret_is_refused_with_advice(world: ControllerInProcess, script: str) -> None:
    put(world, name="KEYS")
    given = ("submit", script, "--tpu", "v4-16", "--secret", "KEY=store:")
    said = world.iris(*given, code=USAGE).stderr
    assert "there is no secret 'KEY'; did you mean KEYS?" in said
    assert "iris-ray cluster secrets set KEY" in said
    secrets = {"KEY": Secret.from_store("KEY")}
    with pytest.raises(SecretNotFoundError, match="did you mean KEYS"):
        IrisClient().submit(print, secrets=secrets).results()
    group = JobGroup("rl").add(print, "one").add(print, "two", secrets=secrets)
    with pytest.raises(SecretNotFoundError, match="did you mean KEYS"):
        IrisClient().submit_group(group)
    wait_until(lambda: all(world.state(job).finished for job in world.jobs()))


def test_secret_of_others_is_refused(world: ControllerInProcess, script: str) -> None:
    put(world, VALUE, "KEY", "--user", "bob")
    given = ("submit", script, "--tpu", "v4-16", "--secret", "KEY=store:")
    assert "the secret KEY is for jobs of users bob only, and not for ann" in world.iris(*given, code=FAILED).stderr
    job = world.iris(*given, user="bob").stdout.strip()
    world.wait_for_attempt(job, 1)
    assert "note: it was for user bob only, and is for all jobs now" in put(world)


def test_job_whose_secret_is_gone_waits_and_goes_on_with_it(world: ControllerInProcess, script: str) -> None:
    """Hosts are not blamed, and it gets the same ones again."""
    put(world)
    job = submit(world, script, "--max-retries-failure", "1")
    world.wait_for_attempt(job, 1)
    world.iris("cluster", "secrets", "rm", "KEY")
    world.fail(job, 0)
    wait_until(lambda: "there is no secret 'KEY'" in world.iris("why", job).stdout)
    assert "An operator sets it" in world.iris("job", "status", job).stdout
    assert world.status(job).state is JobState.PENDING
    assert not world.has_avoided_hosts(job)
    put(world, "again")
    world.wait_for_state(job, JobState.RUNNING)
    assert values(world, job) == [VALUE] * 2 + ["again"] * 2


def test_job_that_never_ran_ends_if_its_secret_stays_away(world: ControllerInProcess, script: str) -> None:
    put(world)
    world.start("runs", slices=(3,))
    job = submit(world, script)
    world.iris("cluster", "secrets", "rm", "KEY")
    with mock.patch.multiple(attempt_ends, MOST_FAILED_LAUNCHES=2, MOST_LAUNCHES_BEFORE_A_RUN=2):
        world.succeed("runs")
        world.wait_for_state(job, JobState.UNSCHEDULABLE)
    assert "2 launches in a row failed; the last one: there is no secret 'KEY'" in (world.status(job).error or "")
    assert values(world, job) == []
