"""``iris-ray submit --ray-job``, and status, logs and cancel with the address of a dashboard."""

import json
from pathlib import Path

import pytest

from iris_ray.cli.conventions import OK, USAGE
from tests.support.command_line import invoke
from tests.support.dashboard import Dashboard


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('hello')")
    Path("sub").mkdir()
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_script_and_programs_are_submitted_with_arguments(dashboard: Dashboard, url: str) -> None:
    done = invoke("submit", "--ray-job", "--address", url, "--run-id", "mine", "train.py", "--", "--steps", "a b")
    assert (done.exit_code, done.stdout) == (OK, "mine\n")
    assert dashboard.jobs["mine"]["entrypoint"] == "python train.py --steps 'a b'"
    done = invoke(
        "submit", "--ray-job", "--run-id", "other", "--json", "--", "bash", "x.sh", RAY_API_SERVER_ADDRESS=url
    )
    assert json.loads(done.stdout) == {"run_id": "other"}
    assert dashboard.jobs["other"]["entrypoint"] == "bash x.sh"


@pytest.mark.parametrize(("named", "how"), [((), "are left out"), (("--working-dir", "."), "are sent as well")])
def test_directory_that_is_named_is_sent_with_its_secrets(
    dashboard: Dashboard, url: str, named: tuple[str, ...], how: str
) -> None:
    Path("tls.key").write_text("key")
    done = invoke("submit", "--ray-job", "--address", url, "--run-id", "mine", *named, "train.py")
    assert done.exit_code == OK, done.output
    assert f"files that look like secrets {how}: tls.key\n" in done.stderr
    assert (b"tls.key" in dashboard.packages[0]) == bool(named)


def test_variables_come_from_names_or_file(dashboard: Dashboard, url: str) -> None:
    Path("variables").write_text("TOKEN=s3cret\n")
    arguments = ["--env", "MINE", "--env-file", "variables", "--working-dir", "."]
    done = invoke("submit", "--ray-job", "--address", url, "--run-id", "mine", *arguments, "train.py", MINE="of here")
    assert done.exit_code == OK, done.output
    assert dashboard.jobs["mine"]["runtime_env"]["env_vars"] == {"MINE": "of here"}
    assert b'{"TOKEN": "s3cret"}' in dashboard.packages
    assert "s3cret" not in done.output
    assert ": 1 file, " in done.stderr


def test_job_commands_use_id_at_same_address(dashboard: Dashboard, url: str) -> None:
    dashboard.jobs["mine"], dashboard.logs["mine"] = {}, "hello\niris_ray: job train-1\n"
    assert json.loads(invoke("job", "status", "mine", "--address", url, "--json").stdout)["job_ids"] == ["train-1"]
    assert "train-1" in invoke("job", "status", "mine", "--address", url).stdout
    assert invoke("logs", "mine", RAY_ADDRESS=url).stdout == "hello\niris_ray: job train-1\n"
    assert "mine is being stopped" in invoke("cancel", "mine", "--yes", "--address", url).stdout
    assert dashboard.changes == ["POST /api/jobs/mine/stop"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ray-job", "train.py"], "give the url of its dashboard: --address http://"),
        (["--ray-job", "trian.py", "--address", "http://x:1"], "did you mean train.py"),
        (["--ray-job", "../train.py", "--working-dir", "sub", "--address", "http://x:1"], "there is no script"),
        (["--ray-job", "train.py", "--working-dir", "sub", "--address", "http://x:1"], "train.py is not in sub"),
        (["--ray-job", "train.py", "--tpu", "v4-8"], "--tpu is not for --ray-job"),
        (["--ray-job", "train.py", "--json", "--follow", "--address", "http://x:1"], "leave out --follow"),
        (["--exclude", "data", "train.py"], "--exclude is for --ray-job"),
        (["--exclude", "data", "--tpu", "v4-8", "train.py", "--address", "http://x:1"], "give that as well"),
        (["--env-file", "x", "train.py"], "--env-file is for --ray-job"),
        (["--ray-job", "train.py", "--env-file", "nothing", "--address", "http://x:1"], "nothing can't be read"),
    ],
)
def test_contradictory_options_are_refused(arguments: list[str], said: str) -> None:
    done = invoke("submit", *arguments)
    assert done.exit_code == USAGE, done.output
    assert said in done.stderr.lower()
