"""Commands with the address of a dashboard: which ones the head runs, and which ones run here."""

import os
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import click
import pytest

from iris_ray.cli import streams
from iris_ray.cli.address import ON_HEAD
from iris_ray.cli.conventions import FAILED, OK, USAGE
from iris_ray.dev.checkout import CodeRecord
from iris_ray.remote import cli, laptop_end
from iris_ray.remote.calls import HeadCall
from iris_ray.remote.cli import DashboardHead
from iris_ray.remote.seal import Seal
from iris_ray.sessions.core import CommandLine, Size
from tests.support.command_line import COMMANDS, REPOSITORY, invoke
from tests.support.dashboard import Dashboard
from tests.unit.dev.test_code_directory import git

URL = "http://10.0.0.2:8265"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the head was asked to run; each command ends with code 0 and prints its words."""
    found: list[list[str]] = []

    def run(
        _: DashboardHead,
        words: Sequence[str],
        to: IO[bytes] | None,
        takes_input: bool = False,
        *__: bool,
        **___: object,
    ) -> int:
        found.append([*words, *(["<stdin"] if takes_input else [])])
        if to is not None:
            to.write(" ".join(words).encode())
        return OK

    monkeypatch.setattr(DashboardHead, "_code", run)
    return found


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        (["ls", "--all"], ["ls", "--all"]),
        (["why", "train-1"], ["why", "train-1"]),
        (["job", "tasks", "train-1", "--json"], ["job", "tasks", "train-1", "--json"]),
        (["job", "notifications", "ls", "train-1"], ["job", "notifications", "ls", "train-1"]),
        (["job", "notifications", "test", "slack:HOOK"], ["job", "notifications", "test", "slack:HOOK"]),
        (["host", "ls"], ["host", "ls"]),
        (["doctor", "--json"], ["doctor", "--json"]),
        (["history", "--sql", "SELECT 1"], ["history", "--sql", "SELECT 1"]),
        (["report", "--month", "2026-11"], ["report", "--month", "2026-11"]),
        (["logs", "train-1", "--grep", "nan"], ["logs", "train-1", "--grep", "nan"]),
        (["exec", "train-1", "--", "df", "--address", "x"], ["exec", "train-1", "--", "df", "--address", "x"]),
        (["exec", "-i", "train-1", "--", "cat"], ["exec", "train-1", "--stdin", "--", "cat", "<stdin"]),
    ],
)
@pytest.mark.parametrize("where", ["before", "after", "equals", "variable"])
def test_head_runs_what_was_typed(asked: list[list[str]], typed: list[str], runs: list[str], where: str) -> None:
    name = 3 if "notifications" in typed else 2 if typed[0] in ("job", "host") else 1
    words = {
        "before": ["--address", URL, *typed],
        "after": [*typed[:name], "--address", URL, *typed[name:]],
        "equals": [f"--address={URL}", *typed],
        "variable": typed,
    }[where]
    done = invoke(*words, RAY_ADDRESS=URL if where == "variable" else None)
    assert (done.exit_code, asked) == (OK, [runs]), done.output


ON_A_NODE = {
    "cluster controller export": ["new-file"],
    "cluster controller import": [str(REPOSITORY / "tests/data/export-format-1.jsonl")],
    "cluster controller start": [],
    "cluster controller stop": ["--yes"],
    "cluster controller upgrade": [],
    "cluster dashboard": [],
    "cluster provision": [
        "--tpu",
        "v6e-16",
        "--max",
        "1",
        "--runtime-version",
        "v2-alpha-tpuv6e",
        "--head",
        "10.0.0.3:6379",
    ],
    "cluster secrets rm": ["KEY"],
    "cluster secrets set": ["KEY"],
    "cluster selftest": ["--tpu", "v4-8"],
    "job rerun": ["train-1"],
    "serve": ["models.toml"],
    "slots evict": ["slot"],
    "slots prewarm": ["model"],
    "team apply": ["teams.toml"],
}
"""Commands that need this machine, or whose input must not travel, with arguments."""
MODELS = """
[[hosts]]
kind = "gpu"
count = 1
devices = 1
memory_gb = 80
[models.llama]
command = "serve --port {port}"
memory_gb = 10
"""


@pytest.mark.parametrize("command", ON_A_NODE)
def test_what_needs_this_machine_or_must_not_travel_is_refused(asked: list[list[str]], command: str) -> None:
    Path("teams.toml").write_text("")
    Path("models.toml").write_text(MODELS)
    done = invoke(*command.split(), *ON_A_NODE[command], "--address", URL, input=b"value")
    assert done.exit_code == USAGE, done.output
    assert "dashboard" in done.output
    assert asked == []


def test_help_of_address_says_which_commands_take_a_dashboard() -> None:
    for name, command in COMMANDS.items():
        helps = [one.help or "" for one in command.params if isinstance(one, click.Option) and "--address" in one.opts]
        if helps and not isinstance(command, click.Group):
            takes_it = not {name, f"job {name}"} & ON_A_NODE.keys()
            assert ("takes no URL" not in helps[0]) is takes_it, name
            assert command.callback is not None
            module = sys.modules[command.callback.__module__]
            assert takes_it is (name.removeprefix("job ") in ON_HEAD or hasattr(module, "head_of_dashboard")), name


@pytest.mark.parametrize("command", ["logs", "status", "cancel"])
def test_job_that_is_none_of_rays_is_the_clusters(
    asked: list[list[str]], dashboard: Dashboard, url: str, command: str
) -> None:
    words = ["job", "status", "train-1"] if command == "status" else [command, "train-1"]
    more = ["--yes"] if command == "cancel" else []  # it is asked here
    assert invoke(*words, "--address", url).exit_code == OK
    assert asked == [[*words, *more]]
    child = [*words[:-1], "train-1/child"]
    assert invoke(*child, "--address", url).exit_code == OK
    assert asked.pop() == [*child, *more]
    dashboard.jobs["mine"], dashboard.logs["mine"] = {}, "of Ray's"
    assert invoke(*words[:-1], "mine", "--address", url).exit_code == OK
    assert len(asked) == 1, "that one is"


@pytest.mark.parametrize("code", [OK, USAGE])
def test_jobs_of_rays_are_stopped_once_head_has_cancelled_the_others(
    dashboard: Dashboard, url: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    dashboard.jobs["mine"] = {}

    def run(_: DashboardHead, words: Sequence[str], __: None) -> int:
        assert words == ["cancel", "train-1", "--yes"]
        assert dashboard.changes == []
        return code

    monkeypatch.setattr(DashboardHead, "_code", run)
    done = invoke("cancel", "mine", "train-1", "--address", url)
    assert done.exit_code == code
    assert dashboard.changes == (["POST /api/jobs/mine/stop"] if code == OK else [])
    assert ("mine is being stopped" in done.output) is (code == OK)


def test_files_of_commands_come_here_or_not_at_all(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("bug-report", "train-1", "--address", URL).exit_code == OK
    report = Path("train-1.report.txt")
    assert report.read_text() == "bug-report train-1 --output -"
    assert report.stat().st_mode & 0o077 == 0
    assert invoke("job", "profile", "train-1", "3", "--duration", "2s", "-o", "x.svg", "--address", URL).exit_code == OK
    assert Path("x.svg").read_text() == "job profile train-1 3 --duration 2 --format flamegraph --output -"

    def fail(_: DashboardHead, words: Sequence[str], to: IO[bytes]) -> int:
        to.write(b"part")
        return 1

    monkeypatch.setattr(DashboardHead, "_code", fail)
    assert invoke("bug-report", "other", "--address", URL).exit_code == 1
    assert sorted(os.listdir()) == ["train-1.report.txt", "x.svg"]


def test_traces_come_as_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: DashboardHead, words: Sequence[str], to: IO[bytes]) -> int:
        assert " ".join(words) == "job profile train-1 --all-tasks --xprof --duration 3 --output -"
        with tarfile.open(fileobj=to, mode="w|") as packed:
            entry = tarfile.TarInfo("plugins/profile/now/task-0.xplane.pb")
            entry.size = 5
            packed.addfile(entry, BytesIO(b"trace"))
        return OK

    monkeypatch.setattr(DashboardHead, "_code", run)
    done = invoke("job", "profile", "train-1", "--xprof", "--all-tasks", "--address", URL)
    assert done.exit_code == OK
    assert "xprof train-1-xprof" in done.output
    assert Path("train-1-xprof/plugins/profile/now/task-0.xplane.pb").read_bytes() == b"trace"


def test_port_and_shell_are_left_to_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def tell(_: DashboardHead, *said: object) -> None:
        told.append(said)
        raise click.exceptions.Exit(OK)

    monkeypatch.setattr(DashboardHead, "forward", tell)
    assert invoke("port-forward", "train-1/2", "8080:6006", "--address", URL).exit_code == OK
    assert told == [(["port-forward", "train-1", "2", "0:6006"], 8080, 6006)]
    assert "needs a terminal" in invoke("shell", "train-1", "--address", URL).output


# -- directories that are sent -----------------------------------------------------------------------------------------


@pytest.fixture
def tunnelled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that went through a tunnel, whose head end has begun at once. Each ends with code 0."""
    commands: list[tuple[str, ...]] = []

    class EndlessTunnel(laptop_end.Tunnel):
        async def __aenter__(self) -> "EndlessTunnel":
            return self

        async def __aexit__(self, *_: object) -> None: ...

        def run(self, command: CommandLine) -> Any:
            commands.append(command.words or ())
            return self

    async def follow(*_: object) -> int:
        return OK

    monkeypatch.setattr(HeadCall, "answer", lambda *_: ("a-node", Seal(is_head=True).public))
    monkeypatch.setattr(cli, "Tunnel", EndlessTunnel)
    monkeypatch.setattr("iris_ray.sessions.client.follow", follow)
    return commands


@pytest.mark.parametrize("command", ["submit", "run"])
def test_checkout_goes_through_dashboard_with_its_record(
    dashboard: Dashboard, url: str, tunnelled: list[tuple[str, ...]], command: str
) -> None:
    Path("train.py").write_text("print(1)")
    Path(".env").write_text("KEY=s3cr3t")
    with open("data.bin", "wb") as file:
        file.truncate(65_000_000)
    git(Path(), "init", "--quiet")
    git(Path(), "add", "train.py")
    git(Path(), "commit", "--quiet", "-m", "first")
    Path("train.py").write_text("print(2)")
    words = ["run", "train.py", "v4-8"] if command == "run" else ["submit", "train.py", "--tpu", "v4-8"]
    done = invoke(*words, "--env", "MINE", "--env=OTHER=hidden, too", "--address", url, MINE="its value")
    assert done.exit_code == OK, done.output
    assert tunnelled == [(*words, "--env", "MINE", "--env", "OTHER")]
    assert "left out: .env (looks like a secret), data.bin (65.0 MB)" in done.output
    zips = [zipfile.ZipFile(BytesIO(data)) for data in dashboard.packages if data.startswith(b"PK")]
    sent = {name: package.read(name) for package in zips for name in package.namelist()}
    assert {"train.py", "iris_ray_sent_code/record"} <= sent.keys()
    assert not {".env", "data.bin"} & sent.keys()
    record = CodeRecord.of_bytes(sent["iris_ray_sent_code/record"])
    assert "+print(2)" in record.difference
    assert "s3cr3t" not in record.difference
    assert b'{"MINE": "its value", "OTHER": "hidden, too"}' in dashboard.packages
    assert "its value" not in str(dashboard.jobs)


@pytest.mark.parametrize("command", [("dev", "hold", "v4-8"), ("dev", "run", "mine")])
def test_variable_that_is_passed_on_reaches_the_head(
    dashboard: Dashboard, url: str, tunnelled: list[tuple[str, ...]], command: Sequence[str]
) -> None:
    rest = ["--", "true"] if "run" in command else []
    done = invoke(*command, "--env", "MINE", "-eOTHER=hidden, too", "--address", url, *rest, MINE="its value")
    assert done.exit_code == OK, done.output
    (job,) = dashboard.jobs.values()
    assert tunnelled == [(*command, "--env", "MINE", "--env", "OTHER", *rest)]
    assert b'{"MINE": "its value", "OTHER": "hidden, too"}' in dashboard.packages
    assert "its value" not in str(job)
    assert ("working_dir" in job["runtime_env"]) == ("run" in command)


def test_named_directory_travels_with_options_of_the_job(
    dashboard: Dashboard, url: str, tunnelled: list[tuple[str, ...]]
) -> None:
    Path("train.py").write_text("print(1)")
    Path("tls.key").write_text("key")
    Path("variables").write_text("TOKEN=s3cret\n")
    Path("data").write_text("1")
    sent = ["--run-id=mine", "--working-dir", ".", "--exclude", "data", "--env-file", "variables"]
    words = ["--tpu", "v4-8", "--json", "-e", "A", "./train.py", "--", "--address", "x y"]
    done = invoke("--address", url, "submit", *sent, *words, A="a value", IRIS_USER="ann", TZ="UTC0")
    assert done.exit_code == OK, done.output
    assert tunnelled == [("submit", *("train.py" if word == "./train.py" else word for word in words))]
    assert "files that look like secrets are sent as well: tls.key\n" in done.output
    job = dashboard.jobs["mine"]
    assert " env IRIS_USER=ann TZ=UTC0 python -m iris_ray.remote.calls " in job["entrypoint"]
    assert "a value" not in str(job)
    sent_apart = [data for data in dashboard.packages if data.startswith(b"{")]
    assert sent_apart == [b'{"TOKEN": "s3cret", "A": "a value"}']
    zipped = [data for data in dashboard.packages if data not in sent_apart]
    assert not any(name in data for data in zipped for name in (b"variables", b"data"))


@pytest.mark.parametrize("on_terminal", [True, False])
def test_command_with_directory_has_this_terminal(
    url: str, tunnelled: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    async def follow(_: object) -> int:
        return 7

    Path("train.py").write_text("print(1)")
    monkeypatch.setattr(cli, "on_a_terminal", lambda: on_terminal)
    monkeypatch.setattr("os.isatty", lambda _: True)
    monkeypatch.setattr(streams, "terminal_size", lambda: Size(24, 80))
    monkeypatch.setattr(streams, "follow_on_terminal", follow)
    assert invoke("submit", "--address", url, "-f", "train.py").exit_code == (7 if on_terminal else OK)
    assert tunnelled == [("submit", "-f", "train.py")]


def test_dashboard_without_the_service_is_an_error_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.client.transport.REMOTE", "taken_out")
    done = invoke("ls", "--address", URL)
    assert done.exit_code == FAILED
    assert "iris-ray: there is no service 'taken_out' here" in done.output
