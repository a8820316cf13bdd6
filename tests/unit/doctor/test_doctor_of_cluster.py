"""What ``iris-ray doctor`` says about a cluster that answers. What hosts see of themselves is made up."""

from collections.abc import Sequence
from typing import Any

import pytest

from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.actors.protocol.version import PROTOCOL_VERSION, package_directory, versions_here
from iris_ray.capacity.autoscaler import AutoscalerDemand
from iris_ray.cli.conventions import FAILED
from iris_ray.doctor import cli as doctor
from iris_ray.doctor.host_look import versions
from iris_ray.doctor.hosts import Answer, Host, claimed_nodes, tpu_hosts
from iris_ray.settings import GCS_BOUNDS
from tests.support.command_line import address_of_nobody
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until

SOUND: dict[str, Any] = {
    "holders": [],
    "hidden": 0,
    "foreign_lock": None,
    "disks": [],
    "metadata": "nothing",
    "versions": versions(),
}


class Hosts:
    """What each host answers, by name; all others are sound. And the variables of the GCS."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.gcs: dict[str, str | None] | None = {name: str(bound) for name, bound in GCS_BOUNDS.items()}

    def ask(self, hosts: Sequence[Host]) -> dict[Host, Answer]:
        return {host: self.answers.get(host.name.partition(" (")[0], SOUND) for host in hosts}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    hosts = Hosts()
    monkeypatch.setattr(doctor, "ask_hosts", hosts.ask)
    monkeypatch.setattr(doctor, "ask_head", lambda: hosts.gcs)
    monkeypatch.setenv("GCE_METADATA_HOST", address_of_nobody())
    return hosts


def found_by(world: ControllerInProcess, **expected: int) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in world.json("doctor", **expected)}


def test_doctor_names_the_bounds_that_the_gcs_lacks(world: ControllerInProcess, hosts: Hosts) -> None:
    assert found_by(world)["memory of Ray's GCS"]["level"] == "OK"
    unset, large, *_ = GCS_BOUNDS
    hosts.gcs = {**dict.fromkeys(GCS_BOUNDS, "2000"), unset: None, large: "100000"}
    found = found_by(world)["memory of Ray's GCS"]
    assert found["level"] == "WARNING"
    assert found["advice"].endswith(f": {unset}=1000 {large}=1000")
    hosts.gcs = None
    assert found_by(world)["memory of Ray's GCS"]["level"] == "INFO"


def test_doctor_accepts_healthy_cluster(world: ControllerInProcess, hosts: Hosts) -> None:
    found = {(f["level"], f["check"]): f["found"] for f in world.json("doctor")}
    assert found["OK", "silent hosts"] == "none; all 6 TPU hosts answered"
    assert found["INFO", "metadata server of hosts"] == "answers on none of 6 hosts"
    assert found["OK", "versions on hosts"].startswith("the same on all: python 3.")
    assert found["OK", "TPU hosts"] == "6 hosts with labels: 3 × v4-16"
    assert found["OK", "slices"] == "3 of 3 are complete"
    assert found["OK", "chips in use"] == "none outside iris_ray"
    assert found["OK", "Controller"].endswith("sees 7 hosts")
    assert "7 nodes" in found["OK", "cluster"]
    printed = world.iris("doctor").stdout
    assert "silent hosts: none; all 6 TPU hosts answered" in printed


def test_doctor_starts_no_controller(bare_cluster: ControllerInProcess, hosts: Hosts) -> None:
    finding = found_by(bare_cluster)["Controller"]
    assert (finding["level"], finding["found"]) == ("INFO", "none runs")
    assert not bare_cluster.store.values


def test_doctor_names_host_whose_idle_chips_are_held(world: ControllerInProcess, hosts: Hosts) -> None:
    hosts.answers["v4-16-1 host 1"] = {**SOUND, "holders": ["pid 7 (python)"]}
    finding = found_by(world)["chips held"]
    assert finding["level"] == "WARNING"
    assert finding["found"].startswith("v4-16-1 host 1 (10.0.3.1): pid 7 (python), but no Ray task or actor has")


def test_claimed_chips_may_be_held(world: ControllerInProcess, hosts: Hosts) -> None:
    assert claimed_nodes(NodeTable.read()) == set()
    hosts.answers["v4-16-1 host 1"] = {**SOUND, "holders": ["pid 7 (python)"]}
    world.start("train", slices=(2,))
    assert claimed_nodes(NodeTable.read()) == {
        world.node_id(f"v4-16-{number}", host) for number in (0, 1) for host in (0, 1)
    }
    found = found_by(world)["chips held"]["found"]
    assert found == "by no process without a claim, 4 hosts with claimed ones left aside"
    world.succeed("train")
    wait_until(lambda: claimed_nodes(NodeTable.read()) == set())


def test_doctor_names_silent_hosts_and_incomplete_slices(world: ControllerInProcess, hosts: Hosts) -> None:
    hosts.answers["v4-16-0 host 1"] = "no answer within 30 s"
    world.kill_host("v4-16-2", 0)
    found = found_by(world)
    assert found["silent host"]["found"].startswith("v4-16-0 host 1 (10.0.1.1): no answer within 30 s")
    assert found["incomplete slice"]["found"] == "v4-16-2: host 0 of 2 is missing"
    assert found["slices"]["found"] == "2 of 3 are complete"
    assert len(tpu_hosts(NodeTable.read())) == 5


def test_doctor_reports_controller_of_other_protocol_with_advice(
    bare_cluster: ControllerInProcess, hosts: Hosts
) -> None:
    world = bare_cluster
    world.makes_controller = lambda: world.controller_of("0.0.9", PROTOCOL_VERSION - 1)
    world.start_controller()
    finding = found_by(world, code=FAILED)["Controller"]
    assert (finding["level"], "controller upgrade" in finding["found"]) == ("ERROR", True)


def test_doctor_advises_upgrade_of_controller_of_other_version(bare_cluster: ControllerInProcess, hosts: Hosts) -> None:
    world = bare_cluster
    world.makes_controller = lambda: world.controller_of("0.0.9")
    world.start_controller()
    finding = found_by(world)["Controller"]
    assert (finding["level"], "controller upgrade" in finding["advice"]) == ("INFO", True)


@pytest.mark.parametrize(
    ("installed", "level", "said"),
    [
        (None, "WARNING", "which a job has brought"),
        ({"version": "0.2.0"}, "WARNING", "and on the head is iris_ray 0.2.0"),
        ({}, "OK", "as it is installed on the head"),
    ],
)
def test_doctor_says_where_controllers_code_is_from(
    world: ControllerInProcess, hosts: Hosts, installed: dict[str, str] | None, level: str, said: str
) -> None:
    world.installed_on_head = None if installed is None else versions_here() | installed
    finding = found_by(world)["Controller's code"]
    assert (finding["level"], said in finding["found"]) == (level, True)
    assert package_directory() in finding["found"]


@pytest.mark.parametrize(
    ("problem", "level", "said"),
    [
        (None, "OK", "asked for by placement groups"),
        ("403 forbidden", "WARNING", "which miscounts slices on KubeRay: 4"),
    ],
)
def test_doctor_says_how_missing_slices_are_asked_for(
    world: ControllerInProcess, hosts: Hosts, problem: str | None, level: str, said: str
) -> None:
    assert "missing slices" not in found_by(world)
    demand = AutoscalerDemand(has_autoscaler=True)
    demand.problem = problem
    part = world.part_of_controller("capacity")
    part._demand = demand
    part._publish()
    finding = found_by(world)["missing slices"]
    assert (finding["level"], said in finding["found"]) == (level, True)
