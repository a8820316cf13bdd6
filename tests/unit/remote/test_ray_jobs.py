"""Jobs of Ray's job API: what is sent, under which name, and what is refused before anything is sent."""

import asyncio
import io
import json
import os
import shlex
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from iris_ray import RayJobConfig, RayJobs, submit_tpu_job_on_ray
from iris_ray.actors.calls import ray_internals
from iris_ray.client.remote_options import read_env_file, sent_variables
from iris_ray.errors import (
    InvalidRequestError,
    NoClusterError,
    RayJobError,
    TokenRefusedError,
    UnknownNameError,
    VersionMismatchError,
)
from iris_ray.remote import variables
from iris_ray.settings import SENT_VARIABLES
from tests.support.command_line import address_of_nobody
from tests.support.dashboard import Dashboard, served

TRAIN = ["python", "train.py"]


@pytest.fixture(autouse=True)
def _ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")  # Ray's own client would prefer it


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large.bin").write_bytes(bytes(20_000))
    (tmp_path / "secret.txt").write_text("x" * 1_000)
    (tmp_path / ".gitignore").write_text("secret.txt\n")
    return tmp_path


@pytest.mark.parametrize("with_secrets", [False, True])
def test_what_looks_like_a_secret_stays_unless_it_is_wanted(
    dashboard: Dashboard, url: str, workspace: Path, capsys: pytest.CaptureFixture[str], with_secrets: bool
) -> None:
    secrets = {".env", "a\nb.pem", "[1] #!*?.key", ".aws/config", "sub/.env"}
    for name in (*secrets, "data/tls.key", ".env.example", "sub/x.py"):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).write_text("1")
    submit_tpu_job_on_ray(RayJobConfig(TRAIN, workspace, ["data/"], with_secrets=with_secrets), url)
    how = "are sent as well" if with_secrets else "are left out"
    said = f"files that look like secrets {how}: .aws/config, .env, [1] #!*?.key, 'a\\nb.pem' and 1 more"
    assert f"iris_ray: {said}\n" in capsys.readouterr().err
    with zipfile.ZipFile(io.BytesIO(dashboard.packages[0])) as package:
        sent = {name for name in package.namelist() if not name.endswith("/")}
    assert sent == {".gitignore", "train.py", ".env.example", "sub/x.py"} | (secrets if with_secrets else set())


def test_command_arrives_unchanged_with_variables_and_directory(
    dashboard: Dashboard, url: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RayJobConfig([*TRAIN, "a b", "$HOME", "it's"], workspace, ["data/"], {"A": "b c"}, pip=["chex"])
    assert submit_tpu_job_on_ray(config, url, "mine") == "mine"
    job = dashboard.jobs["mine"]
    assert job["entrypoint"] == "python train.py 'a b' '$HOME' 'it'\"'\"'s'"
    assert job["runtime_env"]["env_vars"] == {"A": "b c"}
    assert job["runtime_env"]["working_dir"].startswith("gcs://")
    assert job["runtime_env"]["pip"]["packages"] == ["chex"]
    assert f"iris_ray: sending {workspace}: 2 files, 25 bytes\n" in capsys.readouterr().err


def test_variables_of_file_are_in_no_record_of_ray(dashboard: Dashboard, url: str, workspace: Path) -> None:
    (workspace / "variables").write_text("TOKEN=s3cr3t\nA=2\n")
    config = RayJobConfig(TRAIN, workspace, env={"A": "1"}, env_file=workspace / "variables", with_secrets=True)
    submit_tpu_job_on_ray(config, url, "mine")
    job = dashboard.jobs["mine"]
    assert "s3cr3t" not in json.dumps(job)
    assert job["runtime_env"]["env_vars"] == {"A": "1"}
    words = shlex.split(job["entrypoint"])
    assert words[:3] == ["python", "-m", "iris_ray.remote.variables"]
    assert words[4:] == TRAIN
    sent, directory = dashboard.packages
    assert json.loads(sent) == {"TOKEN": "s3cr3t"}
    with zipfile.ZipFile(io.BytesIO(directory)) as package:
        assert "variables" not in package.namelist()


def test_variables_of_job_that_is_refused_are_overwritten(
    dashboard: Dashboard, url: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise RuntimeError("no room")

    (workspace / "variables").write_text("TOKEN=s3cr3t\n")
    jobs = RayJobs(url)
    monkeypatch.setattr(jobs._client, "submit_job", refuse)
    with pytest.raises(RayJobError, match="no room"):
        jobs.submit(RayJobConfig(TRAIN, None, env_file=workspace / "variables"))
    assert dashboard.packages == [b'{"TOKEN": "s3cr3t"}', b""]
    assert len(set(dashboard.changes)) == 1, "under the same name"


def test_sent_variables_reach_command_and_jobs_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, str]] = []
    began: list[tuple[str, ...]] = []

    def take(uri: str, address: str) -> bytes | None:
        taken.append((uri, address))
        return None if len(taken) > 1 else b'{"TOKEN": "s3cr3t"}'

    monkeypatch.setattr(variables, "take_package", take)
    monkeypatch.setattr(os, "execvp", lambda _, words: began.append(words))
    monkeypatch.setattr(os, "environ", {"RAY_ADDRESS": "10.0.0.1:6379"})
    variables.main("gcs://it.zip", *TRAIN)
    assert (taken, began) == ([("gcs://it.zip", "10.0.0.1:6379")], [tuple(TRAIN)])
    assert os.environ["TOKEN"] == "s3cr3t"
    assert sent_variables() == {"TOKEN": "s3cr3t", SENT_VARIABLES: f"{SENT_VARIABLES},TOKEN"}
    with pytest.raises(SystemExit, match="are gone: submit it again"):
        variables.main("gcs://it.zip", *TRAIN)


def test_taken_name_gets_a_number_even_in_a_race(dashboard: Dashboard, url: str) -> None:
    config = RayJobConfig(TRAIN, None)
    assert [RayJobs(url).submit(config, "mine") for _ in range(3)] == ["mine", "mine-1", "mine-2"]
    dashboard.hidden = {"other", "other-1"}
    assert RayJobs(url).submit(config, "other") == "other-2"


def test_unnamed_job_is_called_after_its_script(dashboard: Dashboard, url: str) -> None:
    names = [submit_tpu_job_on_ray(RayJobConfig(["python", "-u", "my train.py"], None), url) for _ in range(2)]
    assert all(name.startswith("my-train-") for name in names)
    assert len(set(names)) == 2


def test_status_lists_jobs_submitted_by_script(dashboard: Dashboard, url: str) -> None:
    dashboard.jobs["mine"] = {}
    dashboard.logs["mine"] = "hello\niris_ray: job train-1\nprinted: iris_ray: job none\niris_ray: job my train-2\n"
    status = RayJobs(url).status("mine")
    assert (status.state, status.message, status.finished) == ("running", "runs", False)
    assert status.job_ids == ("train-1", "my train-2")
    assert RayJobs(url).stop("mine")
    assert dashboard.changes == ["POST /api/jobs/mine/stop"]


def test_reader_leaving_followed_logs_is_not_dashboards_fault(
    dashboard: Dashboard, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pieces(_: str) -> AsyncIterator[str]:
        yield "one"
        yield "two"
        raise ConnectionResetError

    def show(piece: str) -> None:
        seen.append(piece)
        if len(seen) == 1:
            raise BrokenPipeError  # as of `iris-ray logs -f … | head`

    seen: list[str] = []
    dashboard.jobs["mine"] = {}
    jobs = RayJobs(url)
    monkeypatch.setattr(jobs._client, "tail_job_logs", pieces)
    with pytest.raises(BrokenPipeError):
        jobs.follow("mine", show)
    with pytest.raises(NoClusterError, match=r"does not answer \(ConnectionResetError\)"):
        jobs.follow("mine", show)
    assert seen == ["one", "one", "two"]


def test_async_logs_are_followed_in_a_thread(dashboard: Dashboard, url: str) -> None:
    async def follow() -> None:
        jobs.follow("mine", print)

    dashboard.jobs["mine"], jobs = {}, RayJobs(url)
    with pytest.raises(InvalidRequestError, match=r"await asyncio\.to_thread"):
        asyncio.run(follow())


def test_unknown_ray_job_is_reported_as_unknown(url: str) -> None:
    for ask in (RayJobs(url).status, RayJobs(url).stop, RayJobs(url).logs):
        with pytest.raises(UnknownNameError, match=r"has no job 'nobody'.*iris-ray job status nobody --address http"):
            ask("nobody")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": []}, "command is empty"),
        ({"command": "python train.py"}, "command is 'python train.py'; give a list of str"),
        ({"command": TRAIN, "working_dir": "/no/such/place"}, "'/no/such/place', which is not a directory"),
        ({"command": TRAIN, "excludes": "data"}, "excludes is 'data'; give a list"),
        ({"command": TRAIN, "env": {"A": 1}}, "env must be a mapping"),
        ({"command": TRAIN, "env": {"A=": "b"}}, "can't be set"),
        ({"command": TRAIN, "env_file": "/no/such/file"}, "/no/such/file can't be read"),
    ],
)
def test_impossible_job_is_refused_by_name(options: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        RayJobConfig(**options)


def test_oversized_directory_is_refused_with_largest_file_unsent(
    dashboard: Dashboard, url: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_internals, "MOST_PACKAGE_BYTES", 10_000)
    with pytest.raises(InvalidRequestError, match=r"Ray's limit; the largest file so far is .*large\.bin"):
        submit_tpu_job_on_ray(RayJobConfig(TRAIN, workspace), url)
    assert dashboard.changes == []
    submit_tpu_job_on_ray(RayJobConfig(TRAIN, workspace, ["data"]), url)


@pytest.mark.parametrize("address", ["ray://10.0.0.2:10001", "auto", "10.0.0.2", "", None, "http://"])
def test_address_of_wrong_kind_is_refused(address: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give the dashboard's URL, such as http"):
        submit_tpu_job_on_ray(RayJobConfig(TRAIN, None), address)


@pytest.mark.parametrize(
    ("dashboard", "error", "said"),
    [
        (Dashboard(ray_version=None), NoClusterError, "is not the dashboard of a Ray cluster"),
        (Dashboard(ray_version="2.49.1"), VersionMismatchError, r"runs Ray 2.49.1, and Ray 2\..*==2.49.1. here"),
        (Dashboard(refusal=401), TokenRefusedError, "wants a token; set RAY_AUTH_MODE=token"),
    ],
)
def test_unusable_cluster_is_distinguished_from_missing_one(
    dashboard: Dashboard, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with served(dashboard) as url, pytest.raises(error, match=said):
        submit_tpu_job_on_ray(RayJobConfig(TRAIN, None), url)
    assert dashboard.changes == []


@pytest.mark.parametrize("odd", [[], "hello", 7, None, {}, {"ray_version": 2}])
def test_server_that_is_no_dashboard_is_refused(odd: Any) -> None:
    with (
        served(Dashboard(odd={"/api/version": json.dumps(odd)})) as url,
        pytest.raises(NoClusterError, match="is not the dashboard of a Ray cluster") as refused,
    ):
        RayJobs(url)
    assert repr(json.dumps(odd)) in str(refused.value), "it says what came"


@pytest.mark.parametrize("odd", [[], "hello", 7, {}, {"status": "DANCING"}, {"logs": 7}, "<html>"])
@pytest.mark.parametrize("method", ["status", "logs", "stop", "submit"])
def test_senseless_answer_is_reported(dashboard: Dashboard, url: str, odd: Any, method: str) -> None:
    jobs = RayJobs(url)
    call = {
        "status": lambda: jobs.status("mine"),
        "logs": lambda: jobs.logs("mine"),
        "stop": lambda: jobs.stop("mine"),
        "submit": lambda: jobs.submit(RayJobConfig(TRAIN, None), "mine"),
    }[method]
    dashboard.odd["/api/jobs/"] = odd if odd == "<html>" else json.dumps(odd)
    if method == "logs" and odd == {"logs": 7}:
        assert call() == "7"
        return
    with pytest.raises(RayJobError, match="gave an answer that Ray's client can't read"):
        call()


def test_silent_address_is_reported_at_once() -> None:
    with pytest.raises(NoClusterError, match=r"nothing answers at http://.*; give the dashboard's URL"):
        RayJobs(f"http://{address_of_nobody()}")


def test_run_id_ray_cannot_take_is_refused(url: str) -> None:
    for run_id in ("", "a b", "a/b", 7):
        with pytest.raises(InvalidRequestError, match="run_id is"):
            submit_tpu_job_on_ray(RayJobConfig(TRAIN, None), url, run_id)  # type: ignore[arg-type]


def test_env_file_is_read_as_by_docker_without_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "variables"
    monkeypatch.setenv("MINE", "of here")
    path.write_text("# comment\n\nTOKEN=a=b 'c'\nEMPTY=\nMINE\n")
    assert read_env_file(path) == {"TOKEN": "a=b 'c'", "EMPTY": "", "MINE": "of here"}
    config = RayJobConfig(TRAIN, None, env={"MINE": "of the call"}, env_file=path)
    assert config.variables() == {"TOKEN": "a=b 'c'", "EMPTY": "", "MINE": "of the call"}
    assert "of the call" not in repr(config)
    path.write_text("TOKEN=a\n2s3cret=x\n")
    with pytest.raises(InvalidRequestError, match="line 2: give NAME=value") as refused:
        RayJobConfig(TRAIN, None, env_file=path)
    assert "s3cret" not in str(refused.value)
