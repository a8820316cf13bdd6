"""``iris-ray cluster controller``: start, stop, status, upgrade, and what is in the way. The Controllers are real."""

import json
import pickle
from collections.abc import Callable

import pytest
from ray.exceptions import RayTaskError

import iris_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.controller import bootstrap
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.version import PROTOCOL_VERSION, package_directory, versions_here
from iris_ray.cli.conventions import FAILED, NO_CLUSTER
from iris_ray.errors import ControllerUnavailableError, VersionMismatchError
from iris_ray.model.lifecycle import JobState
from iris_ray.state.records import HEADER
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until

UNREADABLE = b"iris_ray job record 99\n"


def unfinished(world: ControllerInProcess) -> list[str]:
    """The states of jobs that have not ended."""
    return sorted(job["state"] for job in world.json("ls"))


def test_listing_starts_no_controller_but_says_how(bare_cluster: ControllerInProcess) -> None:
    world = bare_cluster
    assert "iris-ray cluster controller start" in world.iris("ls", code=NO_CLUSTER).stderr
    assert world.json("cluster", "controller", "status", code=NO_CLUSTER) == {"running": False}
    assert "is started: epoch 1" in world.iris("cluster", "controller", "start").stdout
    assert world.json("ls") == []
    assert "runs already: epoch 1" in world.iris("cluster", "controller", "start").stdout
    again = world.json("cluster", "controller", "start")
    assert (again["running"], again["started"], again["version"]) == (True, False, iris_ray.__version__)
    assert world.json("cluster", "controller", "status")["slices"] == {"free": 3}


def test_hosts_are_listed_from_ray_without_controller(bare_cluster: ControllerInProcess) -> None:
    shown = bare_cluster.iris("host", "ls", "--json")
    assert "no Controller runs" in shown.stderr
    seen = json.loads(shown.stdout)
    assert bare_cluster.json("cluster", "controller", "status", code=NO_CLUSTER) == {"running": False}, "it starts none"
    bare_cluster.start_controller()
    again = bare_cluster.iris("host", "ls", "--json")
    assert json.loads(again.stdout) == seen
    assert again.stderr == ""
    assert [(view["slice"], view["state"]) for view in seen[:3]] == [(f"v4-16-{i}", "FREE") for i in range(3)]


def test_status_counts_jobs_slices_and_hosts(world: ControllerInProcess) -> None:
    world.start("train", slices=(2,))
    world.submit("eval", slices=(3,))
    found = world.json("cluster", "controller", "status")
    assert (found["jobs"], found["slices"], found["hosts"]) == ({"running": 1, "pending": 1}, {"busy": 2, "free": 1}, 7)
    said = world.iris("cluster", "controller", "status").stdout
    assert "1 pending, 1 running" in said
    assert "2 busy, 1 free" in said


def test_running_job_does_not_notice_controller_upgrade(world: ControllerInProcess) -> None:
    job = world.start("train", slices=(2,))
    before = world.json("cluster", "controller", "status")
    assert "taken over 1 job: 1 running" in world.iris("cluster", "controller", "upgrade").stdout
    again = world.json("cluster", "controller", "upgrade")
    assert (again["jobs"], again["version_before"]) == ({"running": 1}, iris_ray.__version__)
    assert world.json("cluster", "controller", "status")["epoch"] == before["epoch"] + 2
    world.succeed(job)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.json("job", "status", job)["attempt"] == 1


def test_jobs_go_on_while_controller_is_stopped(world: ControllerInProcess) -> None:
    job = world.start("train")
    assert world.json("cluster", "controller", "stop") == {"running": False}
    world.iris("ls", code=NO_CLUSTER)
    world.succeed(job)  # the job's own word of it starts another one
    assert world.json("cluster", "controller", "status")["epoch"] == 2
    assert world.json("job", "status", job)["state"] == "SUCCEEDED"
    assert "the Controller is stopped; running jobs continue" in world.iris("cluster", "controller", "stop").stdout


def test_silent_controller_can_be_stopped(world: ControllerInProcess) -> None:
    world.freeze_controller()
    world.iris("cluster", "controller", "stop")
    world.iris("cluster", "controller", "start")
    assert world.json("cluster", "controller", "status")["epoch"] == 2


def test_upgrade_that_cannot_read_records_keeps_controller(world: ControllerInProcess) -> None:
    world.store.put("job/1/of-another-version", UNREADABLE)
    said = world.iris("cluster", "controller", "upgrade", code=FAILED).stderr
    assert "stays as it is" in said
    assert "record 99" in said
    assert world.json("cluster", "controller", "status")["epoch"] == 1


def test_records_of_other_version_are_refused_at_start(world: ControllerInProcess) -> None:
    """Nothing is lost: a Controller that can read them goes on."""
    job = world.start("train")
    world.store.put("job/1/of-another-version", UNREADABLE)
    world.iris("cluster", "controller", "stop")
    refused = world.iris("cluster", "controller", "start", code=NO_CLUSTER, quotes=True)
    with pytest.raises(RayTaskError) as client:
        world.submit("refused")
    assert isinstance(client.value.cause, ControllerUnavailableError)
    for said in (refused.stderr, str(client.value.cause)):
        assert "record 99" in said
        assert "use the version that wrote them until its jobs have ended" in said
    world.store.delete("job/1/of-another-version")
    world.iris("cluster", "controller", "start")
    assert unfinished(world) == ["RUNNING"]
    world.succeed(job)
    assert world.json("job", "status", job)["attempt"] == 1


def test_upgrade_to_other_records_needs_only_that_all_jobs_have_ended(world: ControllerInProcess) -> None:
    """The ended jobs are forgotten, and what operators have set stays."""
    world.iris("cluster", "settings", "set", "evictions_per_job=7")
    job = world.start("train")
    in_another_version(world)
    assert "record 99" in world.iris("cluster", "controller", "upgrade", code=FAILED).stderr
    world.succeed(job)
    wait_until(lambda: in_another_version(world).endswith(b", over"))
    world.iris("cluster", "controller", "upgrade")
    assert world.json("cluster", "controller", "status")["epoch"] == 2
    assert world.json("ls", "--all") == []
    assert world.json("cluster", "settings")["evictions_per_job"]["value"] == "7"
    world.succeed(world.start("next"))


def in_another_version(world: ControllerInProcess) -> bytes:
    """Have all job records look like those of another version. Return the header of the one that was written last."""
    values, header = world.store.values, b""
    logged = {key: pickle.loads(value) for key, value in values.items() if key.startswith("log/") and value}
    entries = sorted(logged, key=lambda key: int(key.rpartition("/")[2]))
    for place in (values, *map(logged.__getitem__, entries)):
        for key in [key for key, value in place.items() if key.startswith("job/") and value]:
            header, _, rest = place[key].partition(b"\n")
            place[key] = header.replace(HEADER, b"iris_ray job record 99") + b"\n" + rest
    values.update({key: pickle.dumps(entry) for key, entry in logged.items()})
    return header


# -- upgrades that fail ------------------------------------------------------------------------------------------------


def start_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "begin", lambda _: 1 / 0)


def constructor_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "__init__", lambda *_: 1 / 0)


def bootstrap_that_gets_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(address: str) -> None:
        raise ModuleNotFoundError("No module named 'no_such_module'")

    monkeypatch.setattr(bootstrap, "main", main)


@pytest.mark.parametrize("broken", [start_that_raises, constructor_that_raises, bootstrap_that_gets_nowhere])
def test_upgrade_to_broken_controller_loses_no_job(
    world: ControllerInProcess, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Once the head has a version that works, the next thing that a job has to say starts its Controller."""
    running = world.start("train", slices=(2,))
    waiting = world.submit("eval", slices=(3,))
    with pytest.MonkeyPatch.context() as of_the_new_version:
        of_the_new_version.setattr(iris_ray, "__version__", "0.2.0")
        broken(of_the_new_version)
        refused = world.iris("cluster", "controller", "upgrade", code=NO_CLUSTER, quotes=True).stderr
    assert "The Controller of iris_ray 0.1.0 is ended, and the new one, of iris_ray 0.2.0" in refused
    assert "Install iris_ray 0.1.0 on the head again, then run `iris-ray cluster controller start` there" in refused
    world.succeed(running)
    world.wait_for_state(waiting, JobState.RUNNING)
    assert world.json("job", "status", running)["attempt"] == 1
    assert world.json("cluster", "controller", "status")["version"] == "0.1.0"


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION])
def test_upgrade_overtaken_by_older_controller_says_so(world: ControllerInProcess, protocol: int) -> None:
    """Between the old Controller's end and the new one's start, a job of another version starts one of its own."""
    job = world.start("train") if protocol == PROTOCOL_VERSION else None
    ours = world.makes_controller

    def overtaken() -> None:
        world.before_bootstrap = lambda: None
        world.makes_controller = lambda: world.controller_of("0.0.9", protocol)
        bootstrap.main("the same cluster")
        world.makes_controller = ours

    world.before_bootstrap = overtaken
    refused = world.iris("cluster", "controller", "upgrade", code=NO_CLUSTER).stderr
    assert "a job of iris_ray 0.0.9 was faster" in refused
    assert "try again" in refused
    assert "it was iris_ray 0.0.9" in world.iris("cluster", "controller", "upgrade").stdout
    assert world.json("cluster", "controller", "status")["version"] == "0.1.0"
    if job is not None:
        world.succeed(job)
        assert world.json("job", "status", job)["attempt"] == 1


@pytest.mark.parametrize(
    ("protocol", "advice"),
    [
        (PROTOCOL_VERSION + 1, "install iris_ray 7.0 here"),
        (PROTOCOL_VERSION - 1, "`iris-ray cluster controller upgrade`"),
    ],
)
def test_other_protocol_is_refused_with_versions_and_advice(
    bare_cluster: ControllerInProcess, protocol: int, advice: str
) -> None:
    world = bare_cluster
    world.makes_controller = lambda: world.controller_of("7.0", protocol)
    world.start_controller()
    refused = world.iris("ls", code=FAILED).stderr
    assert f"iris_ray 7.0 (protocol {protocol}), and this is iris_ray 0.1.0 (protocol {PROTOCOL_VERSION}) " in refused
    assert advice in refused


def test_successor_of_other_protocol_is_refused_at_any_time(world: ControllerInProcess) -> None:
    """A dashboard asks on and on while the Controller is replaced."""
    connection = ControllerConnection()
    ControllerConnection(any_version=True).end()
    world.makes_controller = lambda: world.controller_of("7.0", PROTOCOL_VERSION + 1)
    world.start_controller()
    for _ in range(2):
        with pytest.raises(VersionMismatchError, match=r"install iris_ray 7\.0 here"):
            connection.ask_all(ControllerInterface.list_jobs)


def test_upgrade_across_protocols_waits_for_existing_jobs(world: ControllerInProcess) -> None:
    job = world.start("train")
    world.iris("cluster", "controller", "stop")
    ours, older = world.makes_controller, PROTOCOL_VERSION - 1
    world.makes_controller = lambda: world.controller_of("0.0.9", older)
    world.start_controller()
    world.makes_controller = ours
    refused = world.iris("cluster", "controller", "upgrade", code=FAILED).stderr
    assert f"the processes of 1 job speak protocol {older}" in refused
    assert "of iris_ray 0.0.9" in refused
    assert job in world.store.keys("job/2/")[0]


# -- the version on the head -------------------------------------------------------------------------------------------


def test_job_of_other_protocol_than_heads_starts_no_controller(bare_cluster: ControllerInProcess) -> None:
    """A Controller of the job's own version would refuse all others."""
    world = bare_cluster
    world.installed_on_head = versions_here() | {
        "version": "7.0",
        "protocol": PROTOCOL_VERSION + 1,
        "package": "/opt/i",
    }
    with pytest.raises(RayTaskError) as refused:
        world.submit("train")
    assert isinstance(refused.value.cause, VersionMismatchError)
    said = str(refused.value.cause)
    assert f"on the cluster's head is iris_ray 7.0 (protocol {PROTOCOL_VERSION + 1}) from /opt/i on" in said
    assert f"and this is iris_ray 0.1.0 (protocol {PROTOCOL_VERSION}) from {package_directory()} on" in said
    assert "install iris_ray 7.0 here" in said
    assert not world.store.keys("epoch/")


def test_upgrade_to_version_not_on_head_changes_nothing(world: ControllerInProcess) -> None:
    world.installed_on_head = versions_here() | {"version": "0.0.9"}
    tried = world.iris("cluster", "controller", "upgrade", "--dry-run")
    assert "can replace the Controller" in tried.stdout
    assert tried.stderr.startswith("iris-ray: not yet: installed on the head is iris_ray 0.0.9 (")
    assert tried.stderr.endswith("; install iris_ray 0.1.0 on the head, then upgrade\n")
    assert world.json("cluster", "controller", "upgrade", "--dry-run")["version_on_head"] == "0.0.9"
    refused = world.iris("cluster", "controller", "upgrade", code=FAILED).stderr
    assert "stays as it is" in refused
    assert "install iris_ray 0.1.0 on the head, then upgrade" in refused
    world.installed_on_head = versions_here()
    assert world.json("cluster", "controller", "status")["epoch"] == 1
    assert world.iris("cluster", "controller", "upgrade", "--dry-run").stderr == ""
    assert world.json("cluster", "controller", "upgrade", "--dry-run")["dry_run"] is True
    assert world.json("cluster", "controller", "upgrade")["epoch"] == 2


def test_status_says_where_controllers_code_is(world: ControllerInProcess) -> None:
    assert package_directory() in world.iris("cluster", "controller", "status").stdout
