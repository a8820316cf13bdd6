"""From outside of a cluster to a slice by Ray's job API: on a real head with its dashboard, with a token and without.

The head is a process of its own, as `ray start --head` makes it, and knows nothing of this process.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from iris_ray.cli.conventions import FAILED, INTERRUPTED, OK, USAGE
from tests.cluster.sessions.test_beside import Person
from tests.support.notebooks import Notebook
from tests.support.proofs import in_long
from tests.support.ray_head import RayHead, ray_head
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof
TOKEN = "a-token-of-more-than-sixteen-characters"
TRAIN = """
import os, sys, time
import beside
from iris_ray import get_job_info, run_on_pod

def train():
    import beside
    me = get_job_info()
    if "fail" in ARGUMENTS:
        raise ValueError("as asked")
    if "wait" in ARGUMENTS:
        print("waits", flush=True)
        time.sleep(600)
    return me.slice_name, beside.WORD, os.environ["SECRET"]

ARGUMENTS = sys.argv[1:]
if __name__ == "__main__":
    print("arguments", ARGUMENTS)
    print("results", run_on_pod(train, "v4-8", keep_warm=0, max_retries_failure=0))
"""
SECRET = "a b'$c\""
CLIENT = """
import sys, time
from iris_ray import IrisClient, JobGroup, ResourceSpec, lookup_endpoint, register_endpoint, tpu_device
from iris_ray.errors import JobCancelledError

def train():
    import beside
    print("trains", flush=True)
    return beside.WORD

def wait():
    time.sleep(600)

def learn():
    return lookup_endpoint("ready", timeout=120, member="sampler")

def sample():
    register_endpoint("ready", "go")
    time.sleep(600)

need = ResourceSpec(device=tpu_device("v4-8"))
with IrisClient.remote(sys.argv[1], workspace=".") as client:
    if sys.argv[2] == "run":
        print("results", client.run(train, resources=need))
    elif sys.argv[2] == "group":
        group = JobGroup("rl", main="trainer").add(learn, "trainer", resources=need).add(sample, "sampler")
        print("results", client.submit_group(group).results())
    else:
        job = client.submit(wait, resources=need, detached=True)
        print("finished:", client.job_status(job).state.finished, "cancelled:", job.cancel())
        try:
            job.results(60)
        except JobCancelledError as error:
            print(error)
        print("left", client.submit(wait).job_id)
"""


@pytest.fixture(scope="module", params=[*in_long(None), TOKEN], ids=["open", "token"])
def head(request: pytest.FixtureRequest) -> Iterator[RayHead]:
    with (
        tempfile.TemporaryDirectory(prefix="head", ignore_cleanup_errors=True) as directory,
        ray_head(Path(directory), request.param) as head,
    ):
        yield head


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "beside.py").write_text("WORD = 'blue'")
    (tmp_path / "variables").write_text(f"SECRET={SECRET}\n")
    return tmp_path


def iris(head: RayHead, workspace: Path, *arguments: str, code: int = OK, **variables: str) -> str:
    """What a command on a laptop prints, errors included."""
    command = [sys.executable, "-m", "iris_ray", "--address", head.dashboard, *arguments]
    done = subprocess.run(
        command, env={**head.environ, **variables}, cwd=workspace, capture_output=True, text=True, timeout=200
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


@pytest.mark.way_in
def test_sent_script_runs_on_slice_with_known_jobs(head: RayHead, workspace: Path) -> None:
    submit = [
        "submit",
        "--ray-job",
        "--follow",
        "--exclude",
        "variables",
        "--env-file",
        "variables",
        "--run-id",
        "mine",
    ]
    output = iris(head, workspace, *submit, "train.py", "--", "x y")
    assert f"sending {workspace}: 2 files, " in output
    assert "arguments ['x y']" in output
    assert f"results {[('my-slice', 'blue', SECRET)]}" in output
    status = json.loads(iris(head, workspace, "job", "status", "mine", "--json"))
    (job,) = status["job_ids"]
    assert status["state"] == "succeeded"
    assert f"iris_ray: job {job}" in iris(head, workspace, "logs", "mine")


@pytest.mark.long
def test_failing_script_is_failure_and_its_name_gets_number(head: RayHead, workspace: Path) -> None:
    submit = ["submit", "--ray-job", "--run-id", "fails", "--env-file", "variables", "-f", "train.py", "--", "fail"]
    assert "ValueError: as asked" in iris(head, workspace, *submit, code=FAILED)
    assert "fails-1 has ended: failed" in iris(head, workspace, *submit, code=FAILED)


@pytest.mark.long
def test_stopped_job_gives_slice_back(head: RayHead, workspace: Path) -> None:
    submit = ["submit", "--ray-job", "--run-id", "waits", "--env-file", "variables", "train.py", "--", "wait"]
    assert iris(head, workspace, *submit).splitlines()[0] == "waits"
    while "waits" not in iris(head, workspace, "logs", "waits").rpartition("arguments ['wait']")[2]:
        assert "failed" not in iris(head, workspace, "job", "status", "waits")
    assert "is being stopped" in iris(head, workspace, "cancel", "waits", "--yes")
    again = ["submit", "--ray-job", "--env-file", "variables", "-f", "train.py"]
    assert "results [('my-slice'" in iris(head, workspace, *again)


@pytest.mark.way_in
def test_plain_ray_job_submit_runs_the_same_script(head: RayHead, workspace: Path) -> None:
    environ = json.dumps({"env_vars": {"SECRET": SECRET}})
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "job",
        "submit",
        "--address",
        head.dashboard,
        "--working-dir",
    ]
    done = subprocess.run(
        [*command, str(workspace), "--runtime-env-json", environ, "--", "python", "train.py"],
        env=dict(head.environ),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert f"results {[('my-slice', 'blue', SECRET)]}" in done.stdout, done.stdout + done.stderr


def test_missing_or_wrong_token_is_refused_before_sending(head: RayHead, workspace: Path) -> None:
    submit = ["submit", "--ray-job", "--run-id", "nobody", "train.py"]
    if "RAY_AUTH_TOKEN_PATH" in head.environ:
        output = iris(head, workspace, *submit, code=FAILED, RAY_AUTH_MODE="disabled")
        assert "wants a token" in output
        assert "sending" not in output
        output = iris(head, workspace, *submit, code=FAILED, RAY_AUTH_TOKEN="another-token-of-many-characters")
        assert "refuses this token" in output
        assert "sending" not in output
    assert "there is no job 'nobody'" in iris(head, workspace, "job", "status", "nobody", code=USAGE)


def laptop(head: RayHead, workspace: Path, what: str) -> list[str]:
    """What a script with a client prints, on a machine that is in no cluster."""
    (workspace / "laptop.py").write_text(CLIENT)
    command = [sys.executable, "laptop.py", head.dashboard, what]
    done = subprocess.run(command, env=dict(head.environ), cwd=workspace, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.way_in
def test_client_through_dashboard_runs_function(head: RayHead, workspace: Path) -> None:
    assert laptop(head, workspace, "run") == ["task-0| trains", "results ['blue']"]


def test_client_through_dashboard_runs_group(head: RayHead, workspace: Path) -> None:
    assert laptop(head, workspace, "group") == ["results {'trainer': ['go'], 'sampler': None}"]


def test_client_through_dashboard_cancels_and_ends_jobs(head: RayHead, workspace: Path) -> None:
    first, second, last = laptop(head, workspace, "cancel")
    assert first == "finished: False cancelled: True"
    assert "was cancelled: cancelled by" in second
    words = ["submit", "--ray-job", "--follow", "iris-ray", "--", "job", "status", last.split()[1]]
    assert "killed" in iris(head, workspace, *words)


def test_held_slice_runs_directory_sent_through_dashboard(head: RayHead, workspace: Path) -> None:
    assert "iris-ray dev run mine" in iris(
        head, workspace, "dev", "hold", "v4-8", "--name", "mine", "--preload", "json"
    )
    (workspace / ".env").write_text("SECRET=x")
    words = (
        "dev",
        "run",
        "mine",
        "--",
        "python",
        "-c",
        "import beside, os; print(beside.WORD, os.path.exists('.env'))",
    )
    assert "blue False" in iris(head, workspace, *words)
    (workspace / "beside.py").write_text("WORD = 'red'")
    assert "red False" in iris(head, workspace, *words)
    assert "is given back" in iris(head, workspace, "dev", "stop", "mine")


SERVES = """
import http.server, os, threading, time

class Says(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"beside the task" * 100_000)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Says)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("serves at", server.server_address[1], flush=True)
time.sleep(600)
"""


@pytest.mark.way_in
def test_people_look_inside_through_dashboard(head: RayHead, workspace: Path) -> None:
    (workspace / "serve.py").write_text(SERVES)
    (workspace / ".env").write_text("KEY=s3cr3t")
    for words in (("init", "--quiet"), ("add", "serve.py"), ("commit", "--quiet", "-m", "first")):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=workspace, check=True)
    said = iris(head, workspace, "submit", "serve.py", "--tpu", "v4-8", "--env", "MINE", MINE="of the user")
    assert re.search("sending commit .*left out: .env", said)
    job = said.splitlines()[0] if said.startswith("serve-") else re.findall(r"^serve-[0-9a-f]{8}$", said, re.M)[0]

    def printed() -> re.Match[str] | None:
        return re.search(r"serves at (\d+)", iris(head, workspace, "logs", job))

    port = wait_until(printed, 120)[1]
    assert job in iris(head, workspace, "ls")
    assert "changed lines" in iris(head, workspace, "job", "status", job)
    assert "serves at" in iris(head, workspace, "logs", job, "--grep", "serves")
    assert "+WORD = 'blue'" in iris(head, workspace, "job", "status", job, "--difference")
    command = [sys.executable, "-m", "iris_ray", "--address", head.dashboard]
    environ = dict(head.environ)

    done = subprocess.run(
        [*command, "exec", "-i", job, "--", "sh", "-c", "cat; echo $MINE >&2; exit 5"],
        input=b"\x00\xffbytes", capture_output=True, env=environ, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (5, b"\x00\xffbytes")
    assert done.stderr.endswith(b"of the user\n")

    person = Person([*command, "shell", job, "--", "bash", "--norc", "-i"], environ)
    person.waits_for("bash-")
    person.type("echo $MINE, $TERM, $((40 + 2)); stty size\n")
    person.waits_for("of the user, xterm-256color, 42")
    person.waits_for("24 80")
    person.type("sleep 100\n")
    person.waits_for("sleep 100")
    person.type("\x03")  # Ctrl-C ends the sleep, not the shell
    person.waits_for("^C")
    person.waits_for("bash-")
    person.type("echo still $((6 * 7))\n")
    person.waits_for("still 42")
    person.type("exit 7\n")
    assert person.process.wait(60) == 7
    person.close()

    with subprocess.Popen(
        [*command, "port-forward", job, f"0:{port}"], stderr=subprocess.PIPE, text=True, env=environ
    ) as forward:
        assert forward.stderr is not None
        line = next(line for line in forward.stderr if "is port" in line)
        for _ in range(3):
            with urlopen(line.split()[0], timeout=60) as answer:
                assert answer.read() == b"beside the task" * 100_000
        forward.send_signal(2)
        assert forward.wait(60) == INTERRUPTED
    assert "is cancelled" in iris(head, workspace, "cancel", job, "--yes")


def test_person_who_follows_is_asked_at_ctrl_c(head: RayHead, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    (workspace / "wait.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    words = ["--address", head.dashboard, "submit", "-f", "wait.py", "--tpu", "v4-8"]
    person = Person([sys.executable, "-m", "iris_ray", *words], dict(head.environ))
    person.waits_for("| waits")
    person.type("\x03")
    person.waits_for("Cancel the job?")
    person.type("y\n")
    person.waits_for("is cancelled")
    assert person.process.wait(60) == INTERRUPTED
    person.close()


@pytest.mark.filterwarnings("default")  # Jupyter's
def test_notebook_runs_cells_through_dashboard(head: RayHead, workspace: Path, tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    iris(head, workspace, "dev", "hold", "v4-8", "--name", "cells", "--preload", "json")
    with Notebook.opened(workspace, tmp_path, {**head.environ, "RAY_ADDRESS": head.dashboard}) as notebook:
        is_well, out, err = notebook.run("%%slice cells\nimport beside\nx = beside.WORD\nx")
        assert is_well, err
        assert out == "my-slice/0| 'blue'\n"
        assert "sent " in err
        assert notebook.run("%%slice cells\nx * 2")[1] == "my-slice/0| 'blueblue'\n"
        assert notebook.run("%slice cells --end")[0]
    iris(head, workspace, "dev", "stop", "cells")
