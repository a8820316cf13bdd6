"""``iris-ray run`` and ``submit``: what becomes of a job, of its command, and of Ctrl-C. Its tasks are made up."""

import os
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from iris_ray.actors.calls import controller_connection
from iris_ray.actors.protocol import services
from iris_ray.cli.conventions import FAILED, INTERRUPTED, NO_CLUSTER, OK, USAGE
from iris_ray.cli.options import in_flags
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import PriorityBand
from tests.support.command_line import CTRL_C, Terminal, address_of_nobody, invoke
from tests.support.controller_in_process import ControllerInProcess
from tests.support.leaks import unpacked
from tests.support.waiting import wait_until


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "work.py"
    path.write_text("pass")
    return str(path)


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_waits_for_job_and_passes_options_on(world: ControllerInProcess, script: str) -> None:
    seen, before = [], world.start("prepare-1a2b3c4d")
    world.succeed(before)

    def ends() -> None:
        wait_until(world.has_running_job)
        seen.append(world.status(world.only_job()))
        assert world.spec(world.only_job()).after == {before: "started"}
        world.succeed(world.only_job())

    chosen = ("--constraint", "tpu-topology in (v4-16, v4-32)", "--prefer", "spot=true", "--tolerate", "hot")
    named = (
        *chosen,
        "--scheduling-timeout",
        "60",
        "--after",
        f"{before}=started",
        "--name",
        "again",
        "--priority",
        "batch",
        "--max-retries-failure",
        "0",
        "--max-retries-preemption",
        "7",
    )
    with world.meanwhile(ends):
        world.iris("run", script, "v4-16", "--num-slices", "2,9", *named)
    (job,) = seen
    assert (job.name, job.priority, job.user, job.device) == ("again", PriorityBand.BATCH, "ann", "v4-16")
    assert (job.max_retries_failure, job.max_retries_preemption) == (0, 7)
    assert job.groups == ("v4-16-0", "v4-16-1")
    assert [j["state"] for j in world.json("ls", "--all")] == ["SUCCEEDED"] * 2


def test_local_run_uses_working_directory(world: ControllerInProcess, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("found")
    script = tmp_path / "reads.py"
    script.write_text("print(open('data.txt').read())")
    before = Path.cwd()
    world.iris("run", str(script), "v4-8", "--mode", "simple", "--working-dir", str(tmp_path))
    assert Path.cwd() == before


def test_run_exits_as_its_job_does(world: ControllerInProcess, script: str) -> None:
    def ends() -> None:
        wait_until(world.has_running_job)
        world.fail(world.only_job(), 1, "exited with code 3")

    retries = ("--max-retries-failure", "0", "--max-retries-preemption", "0")
    with world.meanwhile(ends):
        refused = world.iris("run", script, "v4-16", *retries, code=FAILED)
    assert "ends as preempted if it loses a host" in refused.stderr
    assert "exited with code 3" in refused.stderr
    assert [(job["name"], job["state"]) for job in world.json("ls", "--all")] == [("work", "FAILED")]


def test_ctrl_c_without_terminal_cancels_running_job(world: ControllerInProcess, script: str) -> None:
    world.ray.has_pressed_ctrl_c = Terminal((world.has_running_job, CTRL_C)).has_pressed_ctrl_c
    done = world.iris("run", script, "v4-16", code=INTERRUPTED, quotes=True)
    assert "work is cancelled" in done.stderr
    assert not re.search("^Traceback", done.output, re.MULTILINE)
    wait_until(lambda: [job["state"] for job in world.json("ls", "--all")] == ["KILLED"])
    wait_until(lambda: {view["state"] for view in world.json("host", "ls")} == {"FREE"})


def test_second_ctrl_c_on_terminal_cancels_running_job(world: ControllerInProcess, script: str) -> None:
    goes_on = []

    def still_runs() -> bool:
        goes_on.append(world.has_running_job())
        return True

    question = "Cancel the job? No: go on waiting for it. [Y/n]"
    person = Terminal(
        (world.has_running_job, CTRL_C), (question, "n\n"), (still_runs, CTRL_C), (question, CTRL_C)
    )  # fmt: skip
    assert world.on_terminal("run", script, "v4-16", person=person) == INTERRUPTED
    assert goes_on == [True]
    assert "work is cancelled" in person.printed
    wait_until(lambda: [job["state"] for job in world.json("ls", "--all")] == ["KILLED"])


def test_run_on_terminal_continues_after_no(world: ControllerInProcess, script: str) -> None:
    person = Terminal((world.has_running_job, CTRL_C), ("[Y/n]", "n\n"))

    def ends() -> None:
        wait_until(lambda: "[Y/n]" in person.printed)
        world.succeed(world.only_job())

    with world.meanwhile(ends):
        assert world.on_terminal("run", script, "v4-16", person=person) == OK


# -- both --------------------------------------------------------------------------------------------------------------

JOINED = "iris-ray: joined the Ray cluster at 10.0.0.1:6379, found on this machine (--address chooses another)\n"


def test_cluster_that_was_found_is_named(world: ControllerInProcess, script: str) -> None:
    assert world.iris("submit", script, "--tpu", "v4-16").stderr == JOINED
    assert "joined" not in world.iris("ls").stderr


@pytest.mark.parametrize("command", [["submit"], ["job", "submit"], ["run"]])
def test_option_without_value_points_to_help_of_its_command(command: list[str], script: str) -> None:
    refused = invoke(*command, script, "--tpu")
    assert refused.exit_code == USAGE
    assert refused.stderr.endswith(f"Option '--tpu' requires an argument. See: main {' '.join(command)} --help\n")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """The current directory, whose commit would travel with a job."""
    for words in (("init", "--quiet"), ("add", script), ("commit", "--quiet", "-m", "first")):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IRIS_RAY_CODE", "")
    return tmp_path


@pytest.mark.parametrize("words", [("run", "work.py", "v4-16"), ("submit", "work.py")], ids=" ".join)
def test_nothing_is_sent_if_no_cluster_answers(checkout: Path, words: tuple[str, ...]) -> None:
    refused = invoke(*words, "--address", address_of_nobody())
    assert refused.exit_code == NO_CLUSTER
    assert "sending" not in refused.stderr


def test_checkout_is_sent_once_the_cluster_answers(world: ControllerInProcess, checkout: Path) -> None:
    said = world.iris("submit", "work.py").stderr
    assert re.search(r"^iris-ray: sending commit [0-9a-f]{12} ", said)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ("--after", "foo=done"),
            "--after 'foo=done': 'done' is not a condition; give JOB (which means JOB=succeeded)",
        ),
        (("--after", "a b"), "--after 'a b' does not begin with the id of a job; give JOB"),
        (("--secret", "A B=/x"), "--secret does not begin with the name of a variable"),
        (("--team", "a b"), "--team is 'a b'; give the name of a team, such as 'research/vision'"),
        (("--notify", "irc:x"), "CHANNEL is one of http, slack, googlechat, email, command"),
        (("--processes-per-host", "3"), "'3' is not one of '1', '2', '4'"),
        (("--num-slices", "0"), "--num-slices holds 0; a job needs at least 1 slice"),
        (("--num-slices", "2,2"), "--num-slices names a number twice: [2, 2]"),
        (("--replicas", "0"), "0 is not in the range x>=1"),
        (("--replicas", "3"), "ask for several slices: coscheduling=CoschedulingConfig(num_groups=…), --num-slices"),
        (("--group-by", "rack"), "--constraint rack=…"),
        (("--gpu", "-1"), "-1 is not in the range x>=0"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_refusal_speaks_of_what_was_typed(script: str, given: tuple[str, ...], says: str) -> None:
    refused = invoke("submit", script, "--tpu", "v4-16", *given, "--address", address_of_nobody())
    assert refused.exit_code == USAGE
    assert says in refused.stderr
    for word in ("None", "mapping", "can't be read"):
        assert word not in refused.stderr


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("num_slices is [2]; give max_retries_failure=0", "--num-slices is [2]; give --max-retries-failure=0"),
        ("name is 'a/b'; give a name", "--name is 'a/b'; give a name"),
        ("the name is 'num_slices'; see num_slices.py", "the name is 'num_slices'; see num_slices.py"),
        ("no slices (num_slices=0), spares=1", "no slices (--num-slices=0), --spares=1"),
        ("--num-slices is 2, and as_json", "--num-slices is 2, and --json"),
    ],
)
def test_refusals_name_flags(message: str, shown: str) -> None:
    names = ("num_slices", "max_retries_failure", "name", "spares")
    flags = {name: f"--{name.replace('_', '-')}" for name in names} | {"as_json": "--json"}
    assert in_flags(message, flags) == shown


def test_run_names_flags_in_refusals(script: str) -> None:
    refused = invoke("run", script, "v4-16", "--num-slices", "0", "--address", address_of_nobody())
    assert refused.exit_code == USAGE
    assert refused.stderr == "iris-ray: --num-slices holds 0; a job needs at least 1 slice\n"


@pytest.mark.parametrize(
    ("terminal", "no_color", "chosen", "colours"),
    [(True, "", None, None), (False, "", None, "0"), (True, "1", None, "0"), (False, "", "1", "1")],
)
def test_ray_colours_its_prefixes_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str, chosen: str | None, colours: str | None
) -> None:
    with mock.patch.dict(os.environ, {"NO_COLOR": no_color}):
        os.environ.pop("RAY_COLOR_PREFIX", None)
        if chosen is not None:
            os.environ["RAY_COLOR_PREFIX"] = chosen
        if terminal:
            assert Terminal().run("--version") == OK
        else:
            assert invoke("--version").exit_code == OK
        assert os.environ.get("RAY_COLOR_PREFIX") == colours


# -- submit ------------------------------------------------------------------------------------------------------------


def test_follow_without_the_service_of_logs_is_refused_before_there_is_a_job(
    world: ControllerInProcess, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(one for one in services.installed_services() if one.name != "logs")
    monkeypatch.setattr(services, "installed_services", lambda: others)
    refused = invoke("submit", script, "--cpu", "0.5", "--follow")
    assert "there is no service 'logs' here" in refused.stderr, refused.output
    assert world.json("ls") == []


def test_submitted_job_outlives_its_command(world: ControllerInProcess, script: str) -> None:
    job = world.iris("submit", script, "--cpu", "0.5", "--replicas", "2").stdout.strip()
    wait_until(lambda: [task["state"] for task in world.json("job", "tasks", job)] == ["RUNNING"] * 2)
    assert [(j["job_id"], j["state"]) for j in world.json("ls")] == [(job, "RUNNING")]
    for index in (0, 1):
        world.prints(job, index, f"hello {index}\n")
    world.succeed(job)
    followed = world.iris("logs", "-f", job).stdout.splitlines()
    assert sorted(followed) == ["task-0| hello 0", "task-1| hello 1"]


def test_named_directory_travels_with_its_secrets_named(world: ControllerInProcess, script: str) -> None:
    Path(script).with_name(".env").write_text("KEY=1")
    directory = str(Path(script).parent)
    done = world.iris("submit", "--tpu", "v4-16", "--working-dir", directory, script)
    assert "iris-ray: files that look like secrets are sent as well: .env\n" in done.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--priority", "system"), "needs a reason"),
        (("--name", "a/b"), "without slashes"),
        (("--tpu", "v6e-16", "--topology", "3x3"), "2x2, 2x4"),
    ],
)
def test_submit_refuses_what_can_not_work_before_it_joins(
    world: ControllerInProcess, script: str, given: tuple[str, ...], says: str
) -> None:
    refused = world.iris("submit", script, *given, code=USAGE, quotes=True)
    assert says in refused.stderr
    assert "joined" not in refused.stderr


def test_following_submit_waits_to_the_end(world: ControllerInProcess, script: str) -> None:
    def works() -> None:
        wait_until(world.has_running_job)
        job = world.only_job()
        for index in (0, 1):
            world.prints(job, index, f"hello {index}\n")
        world.succeed(job)

    with world.meanwhile(works):
        done = world.iris("submit", script, "--tpu", "v4-16", "--follow")
    job, *lines = done.stdout.splitlines()
    assert sorted(lines) == ["task-0| hello 0", "task-1| hello 1"]
    assert world.json("job", "status", job)["state"] == "SUCCEEDED"


def test_following_submit_of_failing_job_fails(world: ControllerInProcess, script: str) -> None:
    def fails() -> None:
        wait_until(world.has_running_job)
        world.fail(world.only_job(), 0, "exited with code 3")

    with world.meanwhile(fails):
        done = world.iris("submit", script, "--max-retries-failure", "0", "--follow", code=FAILED)
    assert "has ended: failed: task 0 on 10.0.0.1: the task process exited with code 3" in done.stderr


@pytest.mark.parametrize(
    ("need", "said"),
    [(("--tpu", "v5p-16"), "which has 3 × v4-16"), (("--tpu", "v4-16", "--num-slices", "9"), "waiting for 9 slices")],
)
def test_submit_for_missing_resources_says_what_cluster_has(
    world: ControllerInProcess, script: str, need: tuple[str, ...], said: str
) -> None:
    done = world.iris("submit", script, *need)
    job = done.stdout.strip()
    assert f"{job} can't run on the cluster as it is: " in done.stderr
    assert said in done.stderr
    assert world.json("job", "status", job)["state"] == "PENDING"


@pytest.mark.parametrize("command", [("run", "v4-16"), ("submit", "--tpu=v4-16")], ids=str)
@pytest.mark.parametrize(("written", "timeout"), [("60", 60.0), ("2m", 120.0), ("0", None)])
def test_placement_options_arrive_by_both_commands(
    world: ControllerInProcess, script: str, command: tuple[str, str], written: str, timeout: float | None
) -> None:
    def ends() -> None:
        wait_until(world.has_running_job)
        specs.append(world.spec(world.only_job()))
        world.succeed(world.only_job())

    specs: list[JobSpec] = []
    chosen = ("--constraint", "tpu-worker-id<4", "--prefer", "spot=true", "--tolerate", "hot", "--priority", "batch")
    with world.meanwhile(ends):
        world.iris(command[0], script, *command[1:], *chosen, "--scheduling-timeout", written)
    (spec,) = specs
    assert Constraint("tpu-worker-id", ConstraintOp.LT, 4) in spec.constraints
    assert (spec.preferences, spec.tolerations) == ((Constraint("spot", ConstraintOp.EQ, True),), ("hot",))
    assert (spec.priority, spec.scheduling_timeout) == (PriorityBand.BATCH, timeout)


def test_rack_gang_is_submitted_whole_if_a_rack_suffices(world: ControllerInProcess, script: str) -> None:
    for rack, number in (("a", 0), ("b", 0), ("b", 1)):
        world.add_node(world.node_id(rack, number), f"10.9.{number}.1", {"CPU": 8.0}, {"rack": rack})
    job = world.iris("submit", script, "--cpu", "1", "--replicas", "2", "--group-by", "rack").stdout.strip()
    world.wait_for_attempt(job, 1)
    assert [task["group"] for task in world.json("job", "tasks", job)] == ["b", "b"]
    world.succeed(job)
    large = world.iris("submit", script, "--replicas", "3", "--group-by", "rack")
    assert "can't run on the cluster as it is: waiting for 1 group by rack" in large.stderr
    assert "b: has 2 hosts, the job needs 3" in large.stderr


def test_submitted_tasks_get_requested_gpus(world: ControllerInProcess, script: str) -> None:
    world.add_node(world.node_id("gpus", 0), "10.9.0.1", {"CPU": 8.0, "GPU": 4.0}, {})
    job = world.iris("submit", script, "--gpu", "2", "--replicas", "2").stdout.strip()
    world.wait_for_attempt(job, 1)
    assert [task["address"] for task in world.json("job", "tasks", job)] == ["10.9.0.1"] * 2
    hosts = world.iris("host", "ls", "--hosts").stdout.splitlines()
    assert ["0/4", "free"] in [line.split()[6:8] for line in hosts if "10.9.0.1" in line]
    assert any("4 GPU" in line for line in world.iris("host", "ls").stdout.splitlines())
    world.succeed(job)


def test_rack_gang_on_slices_is_refused(world: ControllerInProcess, script: str) -> None:
    refused = world.iris("submit", script, "--tpu", "v4-16", "--group-by", "rack", code=USAGE, quotes=True)
    assert "gangs on TPU hosts run on slices" in refused.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            (),
            "1 task with 1 CPU on any host with room, without a TPU; for slices, add --tpu with a type, such as v4-32",
        ),
        (("--cpu", "0.5", "--replicas", "2"), "2 tasks with 0.5 CPU on any hosts with room, without a TPU"),
        (("--memory-gb", "2.5"), "1 task with 2.5 GB of memory on any host with room, without a TPU"),
        (
            ("--cpu", "1", "--replicas", "2", "--group-by", "rack"),
            "2 tasks with 1 CPU on hosts with one rack, without a TPU",
        ),
    ],
)
def test_submit_without_a_type_says_what_the_tasks_get(
    world: ControllerInProcess, script: str, given: tuple[str, ...], says: str
) -> None:
    """A user who forgot --tpu would wait for a job that trains on a CPU."""
    assert f"\niris-ray: {says}\n" in world.iris("submit", script, *given).stderr


def test_submit_for_existing_resources_prints_nothing_more(world: ControllerInProcess, script: str) -> None:
    world.start("train", slices=(3,))
    done = world.iris("submit", script, "--tpu", "v4-16", "--num-slices", "3", "--json")
    assert done.stderr == JOINED
    assert re.fullmatch(r'\{\s*"job_id": "work-[0-9a-f]{8}"\s*\}\s*', done.stdout)


def print_up(world: ControllerInProcess) -> None:
    """The only job prints a word as soon as it runs."""
    wait_until(world.has_running_job)
    world.prints(world.only_job(), 0, "up\n")


def test_submitted_job_is_followed_while_controller_is_replaced(
    world: ControllerInProcess, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_connection, "RESTART_S", 0.2)
    person = Terminal()

    def ends() -> None:
        print_up(world)
        wait_until(lambda: "task-0| up\n" in person.printed)
        world.replace_controller(lambda: "iris-ray: waiting for the Controller" in person.printed)
        world.succeed(world.only_job())

    with world.meanwhile(ends):
        assert world.on_terminal("submit", script, "-f", person=person) == OK


def test_ctrl_c_without_terminal_leaves_submitted_job_running(world: ControllerInProcess, script: str) -> None:
    pressed = Terminal((lambda: world.ray.calls["read"] > 1, CTRL_C))  # it follows the job by then
    world.ray.has_pressed_ctrl_c = pressed.has_pressed_ctrl_c
    done = world.iris("submit", script, "-f", code=INTERRUPTED, quotes=True)
    job = done.stdout.strip()
    assert f"{job} goes on" in done.stderr
    assert world.state(job) is JobState.RUNNING


@pytest.mark.parametrize(
    ("answer", "said", "state"),
    [
        ("\n", "goes on", JobState.RUNNING),
        (CTRL_C, "goes on", JobState.RUNNING),
        ("n\n", "goes on", JobState.RUNNING),
        ("y\n", "is cancelled", JobState.KILLED),
    ],
    ids=["Enter", "Ctrl-C", "n", "y"],
)
def test_ctrl_c_on_terminal_asks_before_cancelling_submitted_job(
    world: ControllerInProcess, script: str, answer: str, said: str, state: JobState
) -> None:
    person = Terminal(("task-0| up\n", CTRL_C), ("Cancel the job? No: leave it running. [y/N]", answer))
    with world.meanwhile(lambda: print_up(world)):
        assert world.on_terminal("submit", script, "-f", person=person) == INTERRUPTED
    (job,) = world.jobs()
    assert f"{job} {said}" in person.printed
    assert world.state(job) is state


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_secret_is_nowhere_but_with_the_tasks(
    world: ControllerInProcess, script: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("s3cr3t-value\n")
    world.history, export = tmp_path / "history", tmp_path / "export.jsonl"
    world.restart_controller()
    caplog.set_level(0)
    given = "--max-retries-failure", "0", "--secret", f"KEY={tmp_path / 'key'}"
    job = world.json("submit", script, "--tpu", "v4-16", *given)["job_id"]
    world.wait_for_attempt(job, 1)
    world.iris("cluster", "controller", "export", str(export), "--variables")
    assert '"KEY": null' in export.read_text()
    launches = [launch for launch in world.launches if launch.info.job_id == job]
    assert [launch.env["KEY"] for launch in launches] == ["s3cr3t-value"] * 2
    world.fail(job, 0)
    world.wait_for_state(job, JobState.FAILED)
    shown = [world.iris(*words).output for words in (
        ("job", "status", job, "--json"), ("job", "tasks", job, "--json"), ("job", "events", job),
        ("history", job, "--json"), ("logs", job, "--json"),
    )]  # fmt: skip
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "key"]
    assert files
    for text in (*shown, caplog.text, str(launches)):
        assert "s3cr3t" not in text
    recorded = [data for value in world.recorded().values() if value for data in unpacked(value)]
    assert any(job.encode() in data for data in recorded)
    for data in (*files, *recorded):
        assert b"s3cr3t" not in data


def test_secret_does_not_go_through_the_dashboards_port(world: ControllerInProcess, script: str) -> None:
    for command in (("submit", script), ("run", script, "v4-16"), ("dev", "hold", "v4-16")):
        given = *command, "--secret", "HOME", "--address", "http://10.0.0.2:8265"
        said = world.iris(*given, code=USAGE).stderr
        assert "the value of HOME does not go through Ray's job API" in said
        assert "--secret HOME=store:" in said
    there = "--working-dir", str(Path(script).parent), "--address", f"http://{address_of_nobody()}"
    world.iris("submit", script, "--secret", "HOME=store:", *there, code=NO_CLUSTER)
    assert "is not set here" in world.iris("run", script, "v4-16", "--secret", "NO_SUCH", code=USAGE).stderr
