"""The command line: pure functions, what needs no cluster, and the real thing on one."""

import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner, Result

from iris_ray.cli import checks
from iris_ray.cli.checks import Level, check_controller, check_hosts, check_metadata, check_ports, check_user
from iris_ray.cli.exits import FAILED, INTERRUPTED, NO_CLUSTER, OK, USAGE, errors_as_lines, exit_code
from iris_ray.cli.google_checks import check_chips, check_credentials, chip_devices
from iris_ray.cli.jobs import state_in_words
from iris_ray.cli.main import SECTIONS, main
from iris_ray.cli.run import as_task, users_part
from iris_ray.cli.script import Script, find_target
from iris_ray.cli.slices import SliceState, natural, slices_of
from iris_ray.cli.slices import find_target as find_host
from iris_ray.cli.tables import duration, format_table, one_line, plain
from iris_ray.constraints import Constraint, ConstraintOp
from iris_ray.errors import (
    ControllerUnavailableError,
    InvalidFunctionError,
    InvalidRequestError,
    JobCancelledError,
    NoClusterError,
    UnknownTPUTypeError,
)
from iris_ray.jobs import PriorityBand
from iris_ray.lifecycle import JobState, TaskState
from iris_ray.requirement import make_requirement
from iris_ray.status import JobStatus, WorkerStatus
from iris_ray.waiting import Obstacle, Shortage, Waiting, WaitReason

if TYPE_CHECKING:
    from iris_ray.testing import SimulatedCluster
    from tests.gangs import Trace

REPOSITORY = Path(__file__).parents[1]


# -- tables ------------------------------------------------------------------------------------------------------------


def test_table_is_aligned_and_cut_at_the_terminals_edge_in_its_last_column_only() -> None:
    table = format_table(("JOB", "NOTE"), [("a", "x" * 50), ("long-name", "")], width=31)
    assert table.splitlines() == ["JOB        NOTE", "a          " + "x" * 19 + "…", "long-name"]


def test_cell_holds_no_line_ends_and_no_control_characters() -> None:
    assert one_line("a\n  b\x1b[31m\tc") == "a b?[31m c"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.9, "59s"), (60, "1m00s"), (3 * 3600 + 240, "3h04m"), (190_000, "2d04h")]
)
def test_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_json_has_states_by_name_constraints_as_text_and_the_sentence() -> None:
    found = json.loads(json.dumps(plain(job_status(waiting=WAITING))))
    assert (found["state"], found["priority"], found["tasks"]) == ("PENDING", "INTERACTIVE", {"PENDING": 2})
    assert found["waiting"]["sentence"].startswith("waiting for 2 slices")
    assert found["waiting"]["requirement"]["constraints"] == ["tpu-topology == v4-16"]


# -- jobs --------------------------------------------------------------------------------------------------------------

WAITING = Waiting(
    "train-1",
    WaitReason.IN_USE,
    make_requirement(
        "tpu-name", 2, True, (Constraint("tpu-topology", ConstraintOp.EQ, "v4-16"),), (), (), {"TPU": 4.0}, True
    ),
    counts=(2,),
    free=1,
    shortage=Shortage((), (Obstacle("v4-16-0", 2, "in use by other-1", ("other-1",)),), 0, {}),
)


def job_status(**changes: Any) -> JobStatus:
    values = dict.fromkeys(JobStatus.__dataclass_fields__) | {
        "job_id": "train-1",
        "name": "train",
        "user": "ann",
        "priority": PriorityBand.INTERACTIVE,
        "state": JobState.PENDING,
        "submitted_at": 0.0,
        "attempt": 1,
        "tasks": {TaskState.PENDING: 2},
        "groups": (),
    }
    return JobStatus(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"waiting": WAITING}, "waiting for 2 slices"),
        ({}, "it will be looked at in a moment"),
        ({"state": JobState.SUCCEEDED, "error": "an earlier one"}, "it does not wait, it has ended: succeeded"),
        ({"state": JobState.FAILED, "error": "boom"}, "it does not wait, it has ended: failed: boom"),
        ({"state": JobState.RUNNING, "tasks": {TaskState.ASSIGNED: 2}, "groups": ("s",)}, "is being started on s"),
        ({"state": JobState.RUNNING, "tasks": {TaskState.RUNNING: 2}, "groups": ("s",)}, "attempt 1 is running on s"),
    ],
)
def test_why_has_an_answer_for_every_state(changes: dict[str, Any], said: str) -> None:
    assert said in job_status(**changes).explanation


def test_job_that_has_its_slices_and_runs_nowhere_yet_is_starting() -> None:
    assert state_in_words(job_status(state=JobState.RUNNING, tasks={TaskState.ASSIGNED: 2})) == "starting"
    assert state_in_words(job_status(state=JobState.RUNNING, tasks={TaskState.RUNNING: 2})) == "running"


# -- slices and hosts --------------------------------------------------------------------------------------------------


def host(slice_name: str, number: int, **changes: Any) -> WorkerStatus:
    values: dict[str, Any] = {
        "worker_id": f"{number:02x}{slice_name.encode().hex():0<40}",
        "address": f"10.0.{slice_name[-1]}.{number}",
        "slice_name": slice_name,
        "host_number": number,
        "device": "v4-16",
        "resources": {"TPU": 4.0},
        "free": {"TPU": 4.0},
        "attributes": {"tpu-name": slice_name, "tpu-worker-id": number, "tpu-vm-count": 2},
        "tasks": (),
        "unavailable": None,
        "holder": None,
    }
    return WorkerStatus(**(values | changes))


@pytest.mark.parametrize(
    ("hosts", "state", "reason"),
    [
        ([host("s-0", 0), host("s-0", 1)], SliceState.FREE, None),
        ([host("s-0", 0, holder="pool"), host("s-0", 1)], SliceState.WARM, None),
        ([host("s-0", 0), host("s-0", 1, tasks=("a/b/task-0",))], SliceState.BUSY, None),
        ([host("s-0", 0)], SliceState.INCOMPLETE, "host 1 of 2 is missing"),
        ([host("s-0", n, unavailable="taint:drained (disk)") for n in (0, 1)], SliceState.CLOSED, "drained (disk)"),
        ([host("s-0", 0), host("s-0", 1, unavailable="hot")], SliceState.CLOSED, "host 1: hot"),
        ([host("s-0", 0), host("s-0", 1, unavailable="host 1 is hot")], SliceState.CLOSED, "host 1 is hot"),
    ],
)
def test_slice_is_in_the_state_that_its_hosts_make(
    hosts: list[WorkerStatus], state: SliceState, reason: str | None
) -> None:
    (view,) = slices_of(hosts)
    assert (view.state, view.reason) == (state, reason)
    assert view.jobs == (("a/b",) if state is SliceState.BUSY else ())


def test_slices_are_sorted_as_people_count() -> None:
    assert sorted(["s-10", "s-9", "t"], key=natural) == ["s-9", "s-10", "t"]


def test_host_is_found_by_any_of_its_names() -> None:
    hosts = [host("s-0", 0), host("s-0", 1), host("s-1", 0)]
    second = hosts[1].worker_id
    for name in ("s-0/1", "10.0.0.1", second, second[:6]):
        assert find_host(name, hosts) == second
    assert find_host("s-0", hosts) == "s-0"
    assert find_host("nothing", hosts) == "nothing"
    with pytest.raises(InvalidRequestError, match=r"s-0/0, s-1/0"):
        find_host(hosts[0].worker_id[:7], hosts)


# -- exit codes and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownTPUTypeError("x"), USAGE),
        (NoClusterError("x"), NO_CLUSTER),
        (ControllerUnavailableError("x"), NO_CLUSTER),
        (JobCancelledError("x"), FAILED),
        (KeyError("x"), FAILED),
        (KeyboardInterrupt(), INTERRUPTED),
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


def test_codes_are_those_of_the_help() -> None:
    said = " ".join((main.epilog or "").split())
    assert f"{OK} fine; {FAILED} the job or command failed; {USAGE} it can't work" in said
    assert f"{NO_CLUSTER} no cluster" in said
    assert exit_code(NoClusterError()) == NO_CLUSTER


def invoke(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environment)


@pytest.fixture
def nobody() -> str:
    """An address at which nothing answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return f"127.0.0.2:{probe.getsockname()[1]}"


def test_help_lists_every_command_with_a_line() -> None:
    output = invoke("--help").output
    for section, commands in SECTIONS.items():
        assert f"{section}:" in output
        for command in commands:
            assert re.search(rf"^  {command.name} +\w", output, re.MULTILINE)
            assert invoke(command.name or "", "--help").exit_code == 0
    assert set(main.commands) == {command.name for commands in SECTIONS.values() for command in commands}


def test_help_and_completion_need_no_ray() -> None:
    script = "import sys, iris_ray.cli.main; print('ray' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["wokers"], "did you mean workers"),
        (["ls", "--jsn"], "--json"),
        (["ls", "--address", "nonsense"], "HOST:PORT"),
        (["--address", "ray://10.0.0.1:10001", "ls"], "ray job submit"),
        (["run", "nothing.py", "v4-16"], "no script 'nothing.py'"),
        (["run", __file__, "v4-17"], "v4-16"),
        (["run", __file__, "v4-16", "--num-slices", "many"], "2,4"),
        (["run", __file__, "v4-16", "--num-slices", "0"], "at least 1"),
        (["run", __file__, "v4-16", "--steps", "3"], "after --"),
        (["run", __file__, "v4-16", "--env", "1=2"], "NAME=VALUE"),
        (["taint", "v4-16-0", "not a name"], "no name of a taint"),
    ],
)
def test_typo_is_bad_usage_and_the_line_says_how_to_mend_it(arguments: list[str], said: str) -> None:
    done = invoke(*arguments, RAY_ADDRESS=None)
    assert done.exit_code == USAGE, done.output
    assert said in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("command", [["ls"], ["why", "x"], ["workers"], ["controller", "status"], ["drain", "x"]])
def test_no_cluster_is_said_at_once(command: list[str], nobody: str) -> None:
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


# -- run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to work in, and from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", "") and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def call_elsewhere(script: Script, directory: Path) -> list[str]:
    """Run it as a host would, in a process of its own; the lines that it prints."""
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())()"
    import pickle

    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(script), capture_output=True, cwd=directory, env=environment
    )
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode().splitlines()


PRINTS = "import sys\nprint(__name__, __file__, *sys.argv[1:])\n"


def test_script_runs_as_main_where_it_lies_if_the_host_has_it(home: Path, tmp_path_factory: Any) -> None:
    path = home / "train.py"
    path.write_text(PRINTS)
    script = find_target("train.py", ["--steps", "3"])
    assert isinstance(script, Script)
    elsewhere = tmp_path_factory.mktemp("host")
    assert call_elsewhere(script, elsewhere) == [f"__main__ {path} --steps 3"]


def test_script_travels_to_a_host_that_lacks_it_and_leaves_nothing_there(home: Path, tmp_path_factory: Any) -> None:
    path = home / "train.py"
    path.write_text(PRINTS)
    script = find_target(str(path))
    assert isinstance(script, Script)
    path.write_text("raise SystemExit('another version')")
    (line,) = call_elsewhere(script, tmp_path_factory.mktemp("host"))
    name, where = line.split()
    assert (name, Path(where).name) == ("__main__", "train.py")
    assert not Path(where).exists()


def test_script_is_found_in_the_working_directory_that_travels(home: Path, tmp_path_factory: Any) -> None:
    (home / "code").mkdir()
    (home / "code" / "train.py").write_text(PRINTS)
    script = find_target("code/train.py", folder="code")
    assert isinstance(script, Script)
    copy = tmp_path_factory.mktemp("host") / "train.py"
    copy.write_text(PRINTS)
    assert call_elsewhere(script, copy.parent) == [f"__main__ {copy}"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("trian.py", r"did you mean train\.py"),
        ("broken.py", r"broken\.py, line 1"),
        (".", "is a directory"),
        ("nomodule:f", "no module nomodule"),
        ("functions:helo", "did you mean hello"),
        ("functions:NUMBER", "is a int"),
        ("raises:f", "ZeroDivisionError"),
    ],
)
def test_target_that_is_not_there_is_refused_with_the_nearest(home: Path, target: str, said: str) -> None:
    (home / "train.py").write_text("")
    (home / "broken.py").write_text("def f(:")
    (home / "functions.py").write_text("NUMBER = 1\ndef hello(word='x'): return word\n")
    (home / "raises.py").write_text("1 / 0")
    with pytest.raises(InvalidRequestError, match=said):
        find_target(target)


def test_function_travels_by_value_and_gets_the_arguments(home: Path) -> None:
    from ray import cloudpickle

    from iris_ray.launcher import make_request

    (home / "functions.py").write_text("NUMBER = 1\ndef hello(word): return word, NUMBER\n")
    function = find_target("functions:hello")
    task, name = as_task(function, ["word"], {"COLOUR": "blue"}, ship=True)
    made = make_request(task, "v4-16", 1, 0, 0, 0, ())
    assert (name, made.spec.name, made.env) == ("hello", "hello", {"COLOUR": "blue"})
    cloudpickle.unregister_pickle_by_value(sys.modules["functions"])
    del sys.modules["functions"]
    sys.path.remove(str(home))
    assert cloudpickle.loads(made.function)() == ("word", 1)
    with pytest.raises(InvalidFunctionError, match="after --"):
        as_task(function, [], {}, ship=False)


def test_error_of_a_task_is_shown_without_our_own_frames() -> None:
    text = """ray::run_on_pod(train)() (pid=1)
  File "/x/iris_ray/actors/pool.py", line 54, in run
    return await run.run()
ray.exceptions.RayTaskError: slice 0 (v4-16-0) worker 0: ValueError: no
ray::SlicePoolManager() (pid=1)
  File "/x/iris_ray/actors/task_process.py", line 72, in run
    result = f()
  File "<frozen runpy>", line 88, in _run_code
  File "/home/me/train.py", line 6, in <module>
    raise ValueError("no")
ValueError: no"""
    assert users_part(text).splitlines() == [
        "slice 0 (v4-16-0) worker 0: ValueError: no",
        "ray::SlicePoolManager() (pid=1)",
        '  File "/home/me/train.py", line 6, in <module>',
        '    raise ValueError("no")',
        "ValueError: no",
    ]
    assert users_part("something else") == "something else"


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_knows_what_the_rest_of_the_project_says() -> None:
    from iris_ray.actors import task_process

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert any(f"ray[default]>={checks.CHECKED_RAY}" in needed for needed in project["dependencies"])
    assert task_process._PORTS == checks.TASK_PORTS


def test_doctor_without_a_cluster_still_looks_at_this_machine(nobody: str) -> None:
    done = invoke("doctor", "--json", RAY_ADDRESS=nobody, GCE_METADATA_HOST=nobody, IRIS_USER="ann")
    assert done.exit_code == NO_CLUSTER
    levels = {finding["check"]: finding["level"] for finding in json.loads(done.output)}
    assert (levels["cluster"], levels["user"], levels["metadata server"]) == ("ERROR", "OK", "WARNING")
    assert levels["versions"] == "OK"


def test_doctor_asks_the_metadata_server() -> None:
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        finding = check_metadata({"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"})
        server.shutdown()
    assert finding.level is Level.OK


def test_doctor_warns_of_ports_that_the_kernel_gives_away() -> None:
    assert check_ports((32_768, 60_999)).level is Level.OK
    finding = check_ports((15_000, 60_999))
    assert finding.level is Level.WARNING
    assert "ip_local_port_range" in (finding.advice or "")


@pytest.mark.parametrize(
    ("environ", "user", "level"),
    [({"IRIS_USER": "ann"}, "ann", Level.OK), ({}, "ann", Level.OK), ({}, "root", Level.WARNING)],
)
def test_doctor_minds_users_who_are_all_called_the_same(environ: dict[str, str], user: str, level: Level) -> None:
    assert check_user(environ, user).level is level


def test_doctor_compares_versions_with_the_controllers() -> None:
    assert check_controller(None, "", 0).level is Level.INFO
    import iris_ray

    other = check_controller({"version": "0.0.1"}, "epoch 1, iris_ray 0.0.1", 0)
    assert (other.level, "controller upgrade" in (other.advice or "")) == (Level.INFO, True)
    assert check_controller({"version": iris_ray.__version__}, "epoch 1", 4).found == "epoch 1; sees 4 hosts"


def test_doctor_names_who_holds_the_chips(tmp_path: Path) -> None:
    (tmp_path / "accel0").touch()
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "1").touch()
    devices, lock = chip_devices(tmp_path), tmp_path / "lock"
    assert [path.name for path in devices] == ["accel0", "1"]
    with devices[1].open():
        assert f"2 chip devices, held by pid {os.getpid()} (" in check_chips(devices, lock).found
    assert "pid" not in check_chips(devices, lock).found
    with lock.open("w"):
        assert f"held by pid {os.getpid()} (" in check_chips(devices, lock).found
    assert check_chips([]).level is Level.INFO


CREDENTIALS = {
    "type": "authorized_user",
    "client_id": "someone",
    "client_secret": "a secret",
    "refresh_token": "another secret",
    "account": "ann@example.com",
}


def test_doctor_says_whose_credentials_there_are_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps(CREDENTIALS))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "tpus")
    finding = check_credentials(os.environ)
    assert finding.level is Level.OK, finding
    assert finding.found == "oauth2.credentials.Credentials, account ann@example.com, project tpus"
    path.write_text("{}")
    broken = check_credentials(os.environ)
    assert (broken.level, broken.advice) == (Level.WARNING, "mend or unset GOOGLE_APPLICATION_CREDENTIALS")


def test_doctor_without_credentials_says_who_needs_some(
    tmp_path: Path, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", nobody)
    finding = check_credentials(os.environ)
    assert finding.level is Level.INFO
    assert "gcloud auth application-default login" in (finding.advice or "")


def node(name: str | None, number: int, chips: float = 4.0, **changes: Any) -> dict[str, Any]:
    labels = {"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(number), "ray.io/tpu-pod-type": "v4-16"}
    return {
        "NodeID": f"{name}-{number}",
        "Alive": True,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"TPU": chips},
        "Labels": {**labels, **changes} if name else {},
    }


def test_doctor_names_what_is_wrong_with_hosts_and_slices() -> None:
    from iris_ray.actors.node_watch import NodeTable

    nodes = (
        *(node("fine", n) for n in (0, 1)),
        *(node("held", n) for n in (0, 1)),
        *(node("taken", n) for n in (0, 1)),
        node("half", 1, **{"iris/taint.hot": "fan"}),
        node("wrong", 0, **{"ray.io/tpu-pod-type": "v4-x"}),
        node(None, 0),
    )
    in_use = {name: {"TPU": 0.0} for name in ("held-0", "taken-1")}
    table = NodeTable(nodes, {"fine-0": 0}, in_use)
    findings = [(f.level, f.check, f.found) for f in check_hosts(table, {"held-0": 4.0})]
    assert findings[0] == (Level.OK, "TPU hosts", "7 hosts with labels: 4 × v4-16")
    by_check = {check: (level, found) for level, check, found in findings}
    assert by_check["refused host"][0] is Level.ERROR
    assert by_check["unlabelled host"][0] is Level.WARNING
    assert by_check["incomplete slice"] == (Level.WARNING, "half: host 0 of 2 is missing")
    assert by_check["tainted slice"] == (Level.INFO, "half: taint:hot")
    assert by_check["draining host"] == (Level.INFO, "fine: host 0: Ray is draining it")
    assert by_check["slices"] == (Level.INFO, "3 of 4 are complete")
    assert [found for _, check, found in findings if check == "chips in use"] == [
        "taken: 4 chips of host 1 are in use outside iris_ray"
    ]


# -- on a cluster; in this order: the first one wants one without a Controller -----------------------------------------

Done = subprocess.CompletedProcess[str]


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "iris_ray", *arguments]


def environment(cluster: "SimulatedCluster") -> dict[str, str]:
    return {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(REPOSITORY), "IRIS_USER": "ann"}


def iris(cluster: "SimulatedCluster", *arguments: str, code: int = OK) -> Done:
    done = subprocess.run(
        command_line(*arguments), capture_output=True, text=True, timeout=120, env=environment(cluster)
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert code in (OK, FAILED) or done.stderr.count("\n") == 1, done.stderr
    return done


def iris_json(cluster: "SimulatedCluster", *arguments: str) -> Any:
    return json.loads(iris(cluster, *arguments, "--json").stdout)


@pytest.mark.cluster
def test_listing_starts_no_controller_but_says_how(cluster: "SimulatedCluster") -> None:
    assert "iris-ray controller start" in iris(cluster, "ls", code=NO_CLUSTER).stderr
    findings = iris_json(cluster, "doctor")
    assert {f["check"]: f["level"] for f in findings}["Controller"] == "INFO"
    assert "is started: epoch 1" in iris(cluster, "controller", "start").stdout
    assert iris_json(cluster, "ls") == []
    assert iris_json(cluster, "controller", "status")["slices"] == {"free": 3}


@pytest.mark.cluster
def test_script_runs_on_every_host_and_its_end_is_the_commands(cluster: "SimulatedCluster", tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, pathlib, iris_ray\n"
        "me = iris_ray.get_job_info()\n"
        "pathlib.Path(sys.argv[1], f'task-{me.task_index}').write_text(sys.argv[2])\n"
        "if sys.argv[2] == 'fail' and me.task_index == 0: raise ValueError('on purpose')\n"
    )
    iris(cluster, "run", str(script), "v4-16", "--num-slices", "2,9", "--", str(tmp_path), "--fine")
    assert [path.read_text() for path in sorted(tmp_path.glob("task-*"))] == ["--fine"] * 4
    failed = iris(
        cluster, "run", str(script), "v4-16", "--max-retries-failure", "0", "--", str(tmp_path), "fail", code=FAILED
    )
    assert "train failed: ValueError: on purpose" in failed.stderr
    assert 'train.py", line 4' in failed.stderr
    assert "iris_ray/actors" not in failed.stderr
    jobs = iris_json(cluster, "ls", "--all", "--user", "ann")
    assert [(job["name"], job["state"]) for job in jobs] == [("train", "SUCCEEDED"), ("train", "FAILED")]


@pytest.mark.cluster
def test_why_status_tasks_and_cancel_of_a_job_that_waits(cluster: "SimulatedCluster", trace: "Trace") -> None:
    import ray

    from iris_ray import run_on_pod_ray
    from tests.gangs import wait_until

    running = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=3)
    trace.wait_for_tasks(6)
    waiting = run_on_pod_ray.remote(trace.gang(), "v4-16")
    jobs = wait_until(lambda: len(found := iris_json(cluster, "ls")) == 2 and found)
    first, second = (job["job_id"] for job in jobs)
    assert f"in use by {first}" in iris(cluster, "why", second).stdout
    assert "it does not wait" in iris(cluster, "why", first).stdout
    assert re.search(r"tasks: +2 pending", iris(cluster, "status", second).stdout)
    tasks = iris_json(cluster, "tasks", first)
    assert [(task["state"], task["group"]) for task in tasks[:2]] == [("RUNNING", "v4-16-0")] * 2
    slices = iris_json(cluster, "workers")
    assert [(view["state"], view["jobs"]) for view in slices] == [("BUSY", [first])] * 3 + [("FREE", [])]
    assert f"did you mean {second}" in iris(cluster, "cancel", second[:-1], code=USAGE).stderr
    iris(cluster, "cancel", second)
    with pytest.raises(Exception, match="cancelled by ann"):
        ray.get(waiting, timeout=60)
    assert "had already ended: killed" in iris(cluster, "cancel", second).stdout

    iris(cluster, "controller", "stop")
    iris(cluster, "ls", code=NO_CLUSTER)
    trace.finish()
    assert len(ray.get(running, timeout=60)) == 6
    iris(cluster, "controller", "start")  # unless the job's end was faster
    assert iris_json(cluster, "controller", "status")["epoch"] > 1
    wait_until(lambda: iris_json(cluster, "status", first)["state"] == "SUCCEEDED")


@pytest.mark.cluster
def test_running_job_does_not_notice_an_upgrade_of_the_controller(cluster: "SimulatedCluster", trace: "Trace") -> None:
    import ray

    from iris_ray import run_on_pod_ray

    running = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    trace.wait_for_tasks(4)
    before = iris_json(cluster, "controller", "status")
    said = iris(cluster, "controller", "upgrade").stdout
    assert "taken over 1 job: 1 running" in said
    after = iris_json(cluster, "controller", "status")
    assert after["epoch"] > before["epoch"]
    assert after["pid"] != before["pid"]
    trace.finish()
    assert [task["index"] for task in ray.get(running, timeout=60)] == [0, 1, 2, 3]
    assert len(trace.starts()) == 4


@pytest.mark.cluster
def test_controller_that_does_not_answer_can_be_stopped(cluster: "SimulatedCluster") -> None:
    pid = iris_json(cluster, "controller", "status")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        iris(cluster, "controller", "stop")
    finally:
        os.kill(pid, signal.SIGKILL)
    iris(cluster, "controller", "start")
    assert iris_json(cluster, "controller", "status")["pid"] != pid


@pytest.mark.cluster
def test_upgrade_that_could_not_go_on_from_the_records_leaves_the_controller(cluster: "SimulatedCluster") -> None:
    from iris_ray.actors.ray_internals import ClusterStore

    before = iris_json(cluster, "controller", "status")
    key = f"job/{before['epoch']}/of-another-version"
    ClusterStore().put(key, b"iris_ray job record 99\n")
    try:
        said = iris(cluster, "controller", "upgrade", code=FAILED).stderr
    finally:
        ClusterStore().delete(key)
    assert "stays as it is" in said
    assert "record 99" in said
    assert iris_json(cluster, "controller", "status")["pid"] == before["pid"]


@pytest.mark.cluster
def test_other_protocol_is_refused_with_both_versions_and_what_to_do(
    cluster: "SimulatedCluster", trace: "Trace"
) -> None:
    import ray

    from iris_ray import run_on_pod_ray

    def of_protocol(number: int, *arguments: str) -> Done:
        script = (
            f"import iris_ray.protocol; iris_ray.protocol.PROTOCOL_VERSION = {number}\n"
            "from iris_ray.cli.main import main; main()"
        )
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(cluster))

    for number, advice in ((0, "install iris_ray 0.1.0 here"), (2, "`iris-ray controller upgrade`")):
        refused = of_protocol(number, "ls")
        assert refused.returncode == FAILED
        assert f"(protocol 1), and this is iris_ray 0.1.0 (protocol {number})" in refused.stderr
        assert advice in refused.stderr
    (found,) = [f for f in json.loads(of_protocol(2, "doctor", "--json").stdout) if f["check"] == "Controller"]
    assert (found["level"], "controller upgrade" in found["found"]) == ("ERROR", True)
    running = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    refused = of_protocol(2, "controller", "upgrade")
    assert "the processes of 1 job speak protocol 1" in refused.stderr
    trace.finish()
    assert len(ray.get(running, timeout=60)) == 2


@pytest.mark.cluster
def test_drained_slice_takes_no_new_jobs_until_it_may_again(cluster: "SimulatedCluster") -> None:
    from iris_ray import release

    release()
    assert "2 hosts" in iris(cluster, "drain", "v4-16-1", "--reason", "a fan").stdout
    iris(cluster, "taint", "v4-16-2/0", "big")
    states = {view["slice"]: (view["state"], view["reason"]) for view in iris_json(cluster, "workers")}
    assert states["v4-16-1"] == ("CLOSED", "drained (a fan)")
    assert states["v4-16-2"] == ("CLOSED", "host 0: big (by ann)")
    iris(cluster, "undrain", "v4-16-1")
    iris(cluster, "untaint", "v4-16-2/0", "big")
    assert {view["state"] for view in iris_json(cluster, "workers")} == {"FREE"}
    assert "did you mean" in iris(cluster, "drain", "v4-16-7", code=USAGE).stderr


@pytest.mark.cluster
def test_ctrl_c_cancels_the_job(cluster: "SimulatedCluster", tmp_path: Path) -> None:
    from tests.gangs import free_chips, wait_until

    script = tmp_path / "sleep.py"
    script.write_text("import sys, time, pathlib\npathlib.Path(sys.argv[1], 'runs').touch()\ntime.sleep(600)\n")
    run = subprocess.Popen(
        command_line("run", str(script), "v4-16", "--", str(tmp_path)),
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(cluster),
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "runs").exists())
    run.send_signal(signal.SIGINT)
    _, printed = run.communicate(timeout=60)
    assert run.returncode == INTERRUPTED
    assert "sleep is cancelled" in printed
    assert not re.search("^Traceback", printed, re.MULTILINE)
    (job,) = [job for job in iris_json(cluster, "ls", "--all") if job["name"] == "sleep"]
    assert job["state"] == "KILLED"
    wait_until(lambda: free_chips() == 24.0)


@pytest.mark.cluster
def test_submitted_job_goes_on_without_its_command_and_is_followed_by_another(
    cluster: "SimulatedCluster", tmp_path: Path
) -> None:
    script = tmp_path / "work.py"
    script.write_text(
        "import sys, pathlib, time, iris_ray\n"
        "print('hello', iris_ray.get_job_info().task_index, flush=True)\n"
        "while not pathlib.Path(sys.argv[1], 'finish').exists(): time.sleep(0.05)\n"
        "sys.exit(3 if sys.argv[2] == 'fail' else 0)\n"
    )
    job_id = iris(cluster, "submit", str(script), "--cpu", "0.5", "--replicas", "2", "--", str(tmp_path), "fine").stdout
    job_id = job_id.strip()
    from tests.gangs import wait_until

    wait_until(lambda: [t["state"] for t in iris_json(cluster, "tasks", job_id)] == ["RUNNING"] * 2)
    assert {"RUNNING"} == {job["state"] for job in iris_json(cluster, "ls") if job["job_id"] == job_id}
    (tmp_path / "finish").touch()
    followed = iris(cluster, "logs", "-f", job_id).stdout.splitlines()
    assert sorted(followed) == ["task-0| hello 0", "task-1| hello 1"]
    on_a_slice = iris(cluster, "submit", str(script), "--tpu", "v4-16", "--follow", "--", str(tmp_path), "fine")
    assert sorted(on_a_slice.stdout.splitlines()[1:]) == ["task-0| hello 0", "task-1| hello 1"]
    fails = ("submit", str(script), "--max-retries-failure", "0", "--follow", "--", str(tmp_path), "fail")
    assert "has ended: failed" in iris(cluster, *fails, code=FAILED).stderr


@pytest.mark.cluster
def test_ctrl_c_leaves_a_submitted_job_running_if_nobody_is_asked(cluster: "SimulatedCluster", tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text("import time; print('up', flush=True); time.sleep(600)")
    running = subprocess.Popen(
        command_line("submit", str(script), "-f"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(cluster),
    )  # fmt: skip
    assert running.stdout is not None
    job_id = running.stdout.readline().strip()
    assert running.stdout.readline() == "task-0| up\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, f"{job_id} goes on" in said) == (INTERRUPTED, True)
    assert {job["state"] for job in iris_json(cluster, "ls") if job["job_id"] == job_id} == {"RUNNING"}
    iris(cluster, "cancel", job_id)
