"""What the process of a task does with a container: exit codes, output, SIGTERM, notices, and what it leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.host.exit_status import ProgramExit
from iris_ray.actors.host.user_code import exited
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.docker.core import ContainerSpec
from iris_ray.docker.host import ContainerRecord, ContainerState, container_exit, end_container
from iris_ray.model.outcomes import EndKind
from iris_ray.settings import CONTAINER_ENGINE
from tests.support.containers import StandIn
from tests.support.gangs import alive
from tests.support.processes import NOTICE
from tests.support.waiting import wait_until
from tests.unit.model.test_job_info import INFO

# For each line that it reads, a forked process runs a container as a task does, and writes how the task ended.
TASKS = """
import json, os, signal, sys
from iris_ray.docker.host import run_in_container
from iris_ray.actors.protocol.task_files import survive_notices
from iris_ray.actors.host.user_code import run_function
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.docker.core import ContainerSpec
from ray import cloudpickle

def task(env, spec, output):
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.environ.update(env)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    files = TaskFiles.of_this_task()
    survive_notices(files)
    function = cloudpickle.dumps(lambda: run_in_container(ContainerSpec(**spec)))
    end = run_function(function, files)
    with open(output + ".end", "w") as file:
        json.dump([end.kind.name, end.exit_code, end.error], file)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        task(**json.loads(line))
        os._exit(0)
    print(pid, flush=True)
"""
NAME = "iris-train-1f-task-5-attempt-3"
SLEEPS = "echo runs; trap 'echo told; exit {code}' TERM; while :; do sleep 0.05; done"


class Task:
    """A process of a task that runs a container."""

    def __init__(
        self,
        forge: "subprocess.Popen[str]",
        directory: Path,
        engine: StandIn,
        spec: dict[str, Any],
        files: dict[str, str],
    ) -> None:
        (directory / "tasks").mkdir(exist_ok=True)
        self.files = TaskFiles(str(directory / "tasks" / "77"))
        self._output = directory / "output"
        env = {**INFO.to_env(), TaskFiles.VARIABLE: self.files.prefix, CONTAINER_ENGINE.name: str(engine.path)}
        env |= files
        assert forge.stdin is not None
        assert forge.stdout is not None
        forge.stdin.write(json.dumps({"env": env, "spec": spec, "output": str(self._output)}) + "\n")
        forge.stdin.flush()
        self.pid = int(forge.stdout.readline())

    @property
    def said(self) -> list[str]:
        return self._output.read_text().splitlines() if self._output.exists() else []

    def says(self, line: str) -> None:
        wait_until(lambda: line in self.said)

    def end(self) -> list[Any]:
        """How it ended: kind, exit code, words."""
        written = self._output.with_name("output.end")
        end: list[Any] = wait_until(lambda: written.exists() and json.loads(written.read_text() or "null"))
        return end


Run = Callable[..., Task]


@pytest.fixture(scope="module")
def forge() -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TASKS], stdin=pipe, stdout=pipe, text=True) as forge:
        yield forge
        assert forge.stdin is not None
        forge.stdin.close()


@pytest.fixture
def run(forge: "subprocess.Popen[str]", tmp_path: Path, engine: StandIn) -> Iterator[Run]:
    """Starts a task that runs a command in a container."""
    started: list[Task] = []

    def run(*command: str, image: str = "busybox", secrets: dict[str, str] | None = None, **env: str) -> Task:
        names = [*(secrets or {})]
        spec = {"image": image, "command": command, "env": {"PATH": os.environ["PATH"], **env}, "secrets": names}
        started.append(Task(forge, tmp_path, engine, spec, secrets or {}))
        return started[-1]

    yield run
    for task in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(task.pid, signal.SIGKILL)


def test_program_prints_with_variables_and_its_success_counts(run: Run, engine: StandIn) -> None:
    odd = "a b\"c'd\n$e\\ ü"
    look = "import json, os; print(json.dumps(dict(os.environ)))"
    task = run(sys.executable, "-c", look, ODD=odd, TOKEN="s3cret")
    assert task.end()[:2] == ["RETURNED", 0]
    seen = json.loads(task.said[-1])
    assert (seen["ODD"], seen["TOKEN"]) == (odd, "s3cret")
    assert INFO.to_env().items() <= seen.items()
    assert "s3cret" not in json.dumps(engine.calls("run"))
    assert engine.containers() == []
    assert ContainerRecord.read(task.files) is None


def secrets_in_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("iris-ray-secrets-*"))


def test_program_reads_secrets_from_private_files_that_go(run: Run, engine: StandIn, tmp_path: Path) -> None:
    (tmp_path / "of-task").write_text("s3cret\n")
    before = secrets_in_memory()
    look = 'cat "$KEY"; stat -c %a "$KEY" "$(dirname "$KEY")"; echo "$KEY"; sleep 60'
    task = run("sh", "-c", look, secrets={"KEY": str(tmp_path / "of-task")})
    (directory,) = wait_until(lambda: secrets_in_memory() - before)
    task.says(f"{directory}/KEY")
    assert task.said == ["s3cret", "400", "700", f"{directory}/KEY"]
    record = ContainerRecord.read(task.files)
    assert record is not None
    assert record.secrets == str(directory)
    kept = [path.read_bytes() for path in (tmp_path / "engine-docker").rglob("*") if path.is_file()]
    assert kept
    assert not any(b"s3cret" in data for data in kept)
    os.kill(task.pid, signal.SIGKILL)
    assert directory.exists()
    assert end_container(task.files) == []  # as its host does
    assert not directory.exists()


def test_failed_program_leaves_no_secrets(run: Run, tmp_path: Path) -> None:
    (tmp_path / "of-task").write_text("s3cret")
    before = secrets_in_memory()
    assert run("false", secrets={"KEY": str(tmp_path / "of-task")}).end()[:2] == ["EXITED", 1]
    assert secrets_in_memory() == before


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("exit 3", ["EXITED", 3, "the container's program exited with code 3"]),
        ("kill -9 $$", ["CRASHED", 137, "the container's program was killed by SIGKILL"]),
    ],
)
def test_exit_code_of_program_is_the_tasks(run: Run, script: str, end: list[object]) -> None:
    assert run("sh", "-c", script).end() == end


def test_program_killed_for_memory_is_named_so(run: Run, engine: StandIn) -> None:
    engine.kill_for_memory()
    assert run("sh", "-c", "kill -9 $$").end()[:2] == ["OUT_OF_MEMORY", 137]


def test_unstartable_container_reports_engines_code_and_words(run: Run) -> None:
    task = run("true", image="no-such-image")
    assert task.end()[:2] == ["EXITED", 125]
    assert "Unable to find image 'no-such-image'" in task.said


def test_host_without_engine_raises_its_own_error(run: Run, engine: StandIn) -> None:
    engine.break_down()
    kind, code, error = run("true").end()
    assert (kind, code) == ("RAISED", 1)
    assert "ContainerEngineError: no container engine answers on this host" in error


def test_sigterm_without_notice_reaches_program(run: Run) -> None:
    task = run("sh", "-c", SLEEPS.format(code=7))
    task.says("runs")
    os.kill(task.pid, signal.SIGTERM)
    assert task.end() == ["EXITED", 7, "the container's program exited with code 7"]
    assert task.said == ["runs", "told"]


@pytest.mark.parametrize("code", [0, 143])
def test_program_succeeding_after_notice_has_saved(run: Run, engine: StandIn, code: int) -> None:
    task = run("sh", "-c", SLEEPS.format(code=code))
    task.says("runs")
    task.files.write_notice(NOTICE)
    os.kill(task.pid, signal.SIGTERM)
    wait_until(task.files.saved.exists)
    assert task.said == ["runs", "told"]
    assert alive(task.pid), "it waits for its end"
    assert engine.containers() == []


def test_program_failing_after_notice_has_not_saved(run: Run) -> None:
    task = run("sh", "-c", SLEEPS.format(code=1))
    task.says("runs")
    task.files.write_notice(NOTICE)
    os.kill(task.pid, signal.SIGTERM)
    assert task.end()[:2] == ["EXITED", 1]
    assert not task.files.saved.exists()


def test_notice_before_listening_reaches_program_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    TaskFiles(str(tmp_path / "tasks" / "77")).write_notice(NOTICE)
    task = run("sh", "-c", "trap 'echo told' TERM; while [ ! -e $0/go ]; do sleep 0.05; done", str(tmp_path))
    task.says("told")
    os.kill(task.pid, signal.SIGTERM)  # of the same notice
    (tmp_path / "go").touch()
    wait_until(task.files.saved.exists)
    assert task.said == ["told"]


def test_running_container_is_recorded(run: Run, engine: StandIn) -> None:
    task = run("sh", "-c", SLEEPS.format(code=0))
    task.says("runs")
    assert ContainerRecord.read(task.files) == ContainerRecord(str(engine.path), NAME)
    os.kill(task.pid, signal.SIGTERM)
    assert task.end()[0] == "RETURNED"


EXITED, CRASHED = EndKind.EXITED, EndKind.CRASHED


@pytest.mark.parametrize(
    ("client", "state", "kind", "code", "words"),
    [
        (0, ContainerState("exited", 0, False), EXITED, 0, "exited with code 0"),
        (125, ContainerState("exited", 125, False), EXITED, 125, "program exited with code 125"),
        (127, ContainerState("created", 127, False), EXITED, 127, "docker could not start the container"),
        (125, None, EXITED, 125, "docker could not start the container"),
        (-9, None, EXITED, 125, "docker could not start the container"),
        (-9, ContainerState("running", 0, False), EXITED, 1, "docker's client was killed by SIGKILL though its"),
        (134, ContainerState("exited", 134, False), CRASHED, 134, "was killed by SIGABRT"),
        (255, ContainerState("exited", 255, False), EXITED, 255, "exited with code 255"),
        (137, ContainerState("stopped", 137, True), EndKind.OUT_OF_MEMORY, 137, "memory was used up"),
    ],
)
def test_container_end_has_name_and_number(
    client: int, state: ContainerState | None, kind: EndKind, code: int, words: str
) -> None:
    stop = container_exit("docker", client, state)
    assert isinstance(stop, ProgramExit)
    assert words in stop.words
    end = exited(stop)
    assert (stop.code, stop.kind) == (code, kind)
    if code:
        assert (end.kind, end.exit_code) == (kind, code)


def test_container_spec_survives_pickling() -> None:
    from ray import cloudpickle

    spec = ContainerSpec("busybox", ["true"], {"A": "b"})
    assert cloudpickle.loads(cloudpickle.dumps(spec)) == spec
