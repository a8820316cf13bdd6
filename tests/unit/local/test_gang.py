"""Simple and validate: a gang in local processes, without Ray."""

import atexit
import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import Secret, get_job_info, heartbeat, lookup_endpoint, preemption_notice, register_endpoint, run_on_pod
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import InvalidRequestError, RemoteUserError, TaskCrashedError, TaskSetupError
from iris_ray.local import gang as local_gang
from iris_ray.local.process import LocalProcess
from iris_ray.processes.identity import stat_of
from tests.support.proofs import in_long
from tests.support.waiting import wait_until

WATCHED = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "JAX_PLATFORMS", "MINE", "IRIS_RAY_MODE")


@pytest.fixture(autouse=True)
def _without_ray() -> Any:
    yield
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the four tasks of a gang on two slices see."""
    done = tmp_path_factory.mktemp("done")

    def look() -> dict[str, Any]:
        me, files = get_job_info(), TaskFiles.of_this_task()
        assert me is not None
        assert files is not None
        heartbeat(7)
        register_endpoint(f"task-{me.task_index}", f"10.0.0.1:{me.task_index}")
        neighbours = [lookup_endpoint(f"task-{i}", timeout=60) for i in range(me.num_tasks)]
        (done / str(me.task_index)).touch()
        while len(list(done.iterdir())) < me.num_tasks:  # nobody leaves before everybody has found everybody
            time.sleep(0.02)
        return {
            "me": me,
            "pid": os.getpid(),
            "notice": preemption_notice(),
            "heartbeat": files.heartbeat.read_text(),
            "neighbours": neighbours,
            "env": {name: os.environ.get(name) for name in WATCHED},
            "local_dir": Path(me.local_dir).is_dir(),
            "output_dir": Path(os.environ["IRIS_OUTPUT_DIR"]).is_dir(),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_PLATFORMS", raising=False)
        remote = ray.remote(runtime_env={"env_vars": {"MINE": "a b\n'c'"}})(look)
        return run_on_pod(remote, "v4-16", num_slices=2, mode="simple")


def test_each_task_has_own_process_and_position(seen: list[dict[str, Any]]) -> None:
    me = [one["me"] for one in seen]
    assert [info.task_index for info in me] == [0, 1, 2, 3]
    assert [(info.slice_id, info.worker_id, info.slice_name) for info in me] == [
        (0, 0, "v4-16-0"),
        (0, 1, "v4-16-0"),
        (1, 0, "v4-16-1"),
        (1, 1, "v4-16-1"),
    ]
    assert {(info.num_tasks, info.num_slices, info.attempt) for info in me} == {(4, 2, 1)}
    assert len({info.coordinator_address for info in me} | {info.job_id for info in me}) == 2
    assert len({one["pid"] for one in seen} | {os.getpid()}) == 5


def test_task_has_multislice_and_user_variables_and_no_accelerators(seen: list[dict[str, Any]]) -> None:
    assert [one["env"]["MEGASCALE_SLICE_ID"] for one in seen] == ["0", "0", "1", "1"]
    for one in seen:
        assert one["env"]["MEGASCALE_NUM_SLICES"] == "2"
        assert one["env"]["MINE"] == "a b\n'c'"
        assert one["env"]["JAX_PLATFORMS"] == "cpu"
        assert one["env"]["IRIS_RAY_MODE"] == "simple"


def test_heartbeats_notices_endpoints_and_directories_work_locally(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["heartbeat"] == "7"
        assert one["notice"] is None
        assert one["neighbours"] == [f"10.0.0.1:{i}" for i in range(4)]
        assert one["local_dir"]
        assert one["output_dir"]
        assert not Path(one["me"].local_dir).exists(), "it goes with the run"


def test_more_tasks_than_run_at_once_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_gang, "MOST_AT_ONCE", 3)

    def work() -> tuple[int, int, int]:
        me = get_job_info()
        assert me is not None
        mine = tmp_path / str(me.task_index)
        mine.touch()
        time.sleep(0.2)
        together = len(list(tmp_path.iterdir()))
        mine.unlink()
        return me.task_index, me.num_tasks, together

    results = run_on_pod(work, "v4-16", num_slices=[2, 4], mode="simple")
    assert [result[:2] for result in results] == [(index, 4) for index in range(4)]
    assert max(together for *_, together in results) <= 3
    assert "runs in 4 local processes, 3 at a time" in capfd.readouterr().err


def test_endpoint_of_ended_task_is_not_found(tmp_path: Path) -> None:
    def run() -> str:
        me, found = get_job_info(), tmp_path / "found"
        assert me is not None
        if me.task_index == 0:
            register_endpoint("gone", "10.0.0.1:1")
            while not found.exists():
                time.sleep(0.02)
            return ""
        assert lookup_endpoint("gone", timeout=60) == "10.0.0.1:1"
        found.touch()
        while True:
            try:
                lookup_endpoint("gone")
            except LookupError as error:
                return str(error)

    assert "no running task of run-" in run_on_pod(run, "v4-16", mode="simple")[1]


class OwnError(Exception):
    """Takes other arguments than it passes on."""

    def __init__(self, number: int, word: str) -> None:
        super().__init__(f"{number} {word}")
        self.number = number


def test_first_error_ends_local_gang_as_on_cluster(tmp_path: Path) -> None:
    def fail() -> None:
        me = get_job_info()
        assert me is not None
        (tmp_path / f"{me.task_index}").write_text(str(os.getpid()))
        if me.task_index == 1:
            atexit.register((tmp_path / "at exit").write_text, str(os.getpid()))
            raise OwnError(7, "it is")
        time.sleep(600)

    with pytest.raises(OwnError, match="7 it is") as raised:
        run_on_pod(fail, "v4-16", mode="simple", max_retries_failure=3)
    assert isinstance(raised.value, ray.exceptions.RayTaskError)
    assert raised.value.number == 7
    assert "slice 0 (v4-16-0) worker 1: " in str(raised.value)
    assert (tmp_path / "at exit").exists()
    for file in tmp_path.iterdir():
        assert stat_of(int(file.read_text())) is None, "nobody is left, and there was one attempt"


class UntravelledError(Exception):
    """Can't be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not pickled")


def test_unpicklable_error_has_stand_in_with_traceback() -> None:
    def fail() -> None:
        raise UntravelledError("the users own words")

    with pytest.raises(RemoteUserError, match="UntravelledError: the users own words"):
        run_on_pod(fail, "v4-8", mode="simple")


def test_process_ending_silently_is_a_crash_with_exit_code() -> None:
    with pytest.raises(TaskCrashedError, match=r"slice 0 \(v4-8-0\) worker 0: .* exited with code 7"):
        run_on_pod(lambda: os._exit(7), "v4-8", mode="simple")


def test_exit_code_is_failure_and_bare_exit_success() -> None:
    assert run_on_pod(lambda: sys.exit(0), "v4-8", mode="simple") == [None]
    with pytest.raises(TaskCrashedError, match=r"sys.exit\(3\)"):
        run_on_pod(lambda: sys.exit(3), "v4-8", mode="simple")


def test_thread_outliving_function_has_its_grace(tmp_path: Path) -> None:
    def upload_later() -> str:
        import threading

        def upload() -> None:
            time.sleep(0.5)
            (tmp_path / "uploaded").touch()

        threading.Thread(target=upload).start()
        return "done"

    assert run_on_pod(upload_later, "v4-8", mode="simple") == ["done"]
    assert (tmp_path / "uploaded").exists()


def test_unencodable_line_ends_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def talk() -> str:
        for _ in range(100):
            os.write(1, b"caf\xc3\xa9 \xff\n")
            time.sleep(0.002)
        return "done"

    stdout = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run_on_pod(talk, "v4-8", mode="simple") == ["done"]
    stdout.seek(0)
    assert stdout.read().count("café ?") == 100


def test_lines_are_labelled_and_rays_set_up_is_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    def say() -> None:
        print("a line")
        print("no newline", end="", file=sys.stderr)

    run_on_pod(ray.remote(runtime_env={"pip": ["no-such-package"]})(say), "v4-8", mode="simple")
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert [line.partition(" pid=")[0] for line in lines] == ["(say slice=0 worker=0"] * 2
    assert [line.partition(") ")[2] for line in lines] == ["a line", "no newline"]
    assert "runs in 1 local process\n" in err
    assert "iris_ray: pip of the runtime_env left out" in err


def test_validate_prints_plan_and_runs(capfd: pytest.CaptureFixture[str]) -> None:
    remote = ray.remote(num_cpus=2, runtime_env={"env_vars": {"TOKEN": "s3cret"}})(lambda: "ran")
    assert run_on_pod(remote, "v4-16", num_slices=[1, 2], mode="validate", preload=["json"]) == ["ran"] * 4
    err = capfd.readouterr().err
    assert "1 or 2 of v4-16, each of 2 hosts with 4 chips" in err
    assert "4 on 2 slices" in err
    assert "TOKEN" in err
    assert "s3cret" not in err


def test_plan_names_parts(capfd: pytest.CaptureFixture[str]) -> None:
    options = {"topology": "2x4", "num_slices": 2, "failure_domain": "slice"}
    assert run_on_pod(lambda: 1, "v6e-16", mode="validate", **options) == [1] * 4  # type: ignore[arg-type]
    err = capfd.readouterr().err
    assert "2 of v6e-16 in the shape 2x4, each of 2 hosts" in err
    assert "part 1: tasks 2 to 3" in err


def test_host_has_several_local_processes(capfd: pytest.CaptureFixture[str]) -> None:
    def place() -> tuple[int, int, int, str]:
        me = get_job_info()
        assert me is not None
        return me.task_index, me.worker_id, me.local_index, os.environ["TPU_VISIBLE_CHIPS"]

    found = run_on_pod(place, "v4-16", processes_per_host=2, mode="validate")
    assert found == [(0, 0, 0, "0,1"), (1, 0, 1, "2,3"), (2, 1, 0, "0,1"), (3, 1, 1, "2,3")]
    err = capfd.readouterr().err
    assert "4 on 1 slice, 2 processes on each host" in err
    assert "slice 0: tasks 0 to 3" in err


def test_validate_refuses_missing_preload_module() -> None:
    with pytest.raises(InvalidRequestError, match="there is no such module"):
        run_on_pod(lambda: None, "v4-8", mode="validate", preload=["no_such_module.at_all"])


def test_failing_preload_import_is_a_set_up_error() -> None:
    with pytest.raises(TaskSetupError, match="preload='no_such_module' can't be imported"):
        run_on_pod(lambda: None, "v4-8", mode="simple", preload=["no_such_module"])


@pytest.mark.parametrize("number", [signal.SIGINT, *in_long(signal.SIGTERM), signal.SIGKILL], ids=lambda n: n.name)
def test_local_processes_end_with_script(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from iris_ray import run_on_pod\n"
        "def wait():\n"
        "    pathlib.Path(sys.argv[1], str(os.getpid())).touch()\n"
        "    time.sleep(600)\n"
        "directory = sys.argv[1]\n"
        "def task(directory=directory):\n"
        "    sys.argv = ['', directory]\n"
        "    wait()\n"
        "run_on_pod(task, 'v4-16')\n"
    )
    started = tmp_path / "started"
    started.mkdir()
    environ = os.environ | {"IRIS_RAY_MODE": "simple", "TMPDIR": str(tmp_path)}  # what SIGKILL leaves goes there
    with subprocess.Popen([sys.executable, str(script), str(started)], env=environ, stderr=subprocess.DEVNULL) as run:
        wait_until(lambda: len(list(started.iterdir())) == 2)
        run.send_signal(number)
    for file in started.iterdir():
        wait_until(partial(is_gone, int(file.name)))


def is_gone(pid: int) -> bool:
    return stat_of(pid) is None


def test_ended_process_frees_its_numbers_for_others(tmp_path: Path) -> None:
    """A pid is used again, also as the number of a group: what is killed at the end may be somebody else's."""
    process = LocalProcess("sleep_not", tmp_path, os.environ)  # there is no such module: it ends at once
    assert process.wait(60)
    with contextlib.ExitStack() as stack:
        stranger = process_with_pid(process.pid)
        stack.callback(stranger.wait)
        stack.callback(stranger.kill)
        process.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.5)


def process_with_pid(pid: int) -> subprocess.Popen[bytes]:
    """Return a new process that leads a group, with a number that is free. Ask the kernel for the number."""
    for _ in range(100):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"the kernel gives numbers away to root alone: {error}")
        found = subprocess.Popen(["sleep", "600"], start_new_session=True)
        if found.pid == pid:
            return found
        found.kill()
        found.wait()
    pytest.skip("other processes are faster")


def test_what_leaves_the_group_of_a_local_task_ends_with_the_run(tmp_path: Path) -> None:
    def start_daemon(pid_file: str = str(tmp_path / "pid")) -> None:
        import subprocess

        with open(pid_file, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))

    run_on_pod(start_daemon, "v4-8", mode="simple")
    daemon = stat_of(int((tmp_path / "pid").read_text()))
    assert daemon is None or daemon.has_ended  # nobody may reap it here


def test_tasks_need_no_open_files_for_their_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A v4-4096 has 512 tasks with four ports each, and a process has 1,024 open files by default."""
    monkeypatch.setattr(local_gang, "MOST_AT_ONCE", 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.dup(0)]
    while taken[-1] < highest:  # the numbers between those of open files
        taken.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken[-1], highest) + 12, limits[1]))
    try:
        assert run_on_pod(lambda: 1, "v4-32", mode="simple") == [1] * 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in taken:
            os.close(one)


@pytest.mark.proof
def test_local_gang_forms_one_jax_program() -> None:
    def count() -> tuple[int, int]:
        import jax

        import iris_ray.jax

        iris_ray.jax.initialize()
        return jax.process_index(), jax.process_count()

    assert run_on_pod(count, "v4-16", mode="simple") == [(0, 2), (1, 2)]


def test_task_imports_modules_beside_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the directory in which Python itself is, as /usr/src/app, or beside a Path that Python leaves out."""
    (tmp_path / "beside_the_script.py").write_text("def answer():\n    return 42\n")
    odd: Any = Path("/nowhere")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path, odd])
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path.parent))
    from beside_the_script import answer  # type: ignore[import-not-found]

    assert run_on_pod(answer, "v4-8", mode="simple") == [42]


def test_tasks_get_secrets_as_variables_and_files() -> None:
    def read() -> tuple[str, str, int]:
        path = os.environ["CREDENTIALS"]
        return os.environ["KEY"], Path(path).read_text(), os.stat(path).st_mode & 0o777

    secrets = {"KEY": Secret("s3cr3t"), "CREDENTIALS": Secret("of a file", as_file=True)}
    assert run_on_pod(read, "v4-8", mode="simple", secrets=secrets) == [("s3cr3t", "of a file", 0o400)]


@pytest.mark.parametrize(
    ("secrets", "options", "why"),
    [
        ({"LD_PRELOAD": Secret("x")}, {}, "acts when a process starts"),
        ({"JAX_KEY": Secret("x")}, {"preload": ["json"]}, "acts when a process starts"),
        ({"A": "plain"}, {}, "must be a mapping of names to secrets"),
        (
            {"A": Secret.from_store("KEY")},
            {},
            "store .KEY., and mode simple has none; give Secret.from_env",
        ),
    ],
)
def test_secret_that_would_be_seen_is_refused(secrets: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        run_on_pod(lambda: None, "v4-8", mode="simple", secrets=secrets, **options)
