"""What ``iris-ray doctor`` makes of what it finds. Without a cluster."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import iris_ray
from iris_ray.actors.calls.service_parts import ServiceHealth
from iris_ray.actors.host.chips import Devices, find_holders, host_devices
from iris_ray.actors.protocol.status import HostCondition, WorkerStatus
from iris_ray.cli.conventions import NO_CLUSTER
from iris_ray.cli.printing import Level
from iris_ray.doctor import host_look, machine
from iris_ray.doctor.cluster import (
    check_about,
    check_controller,
    check_hosts,
    check_quarantine,
)
from iris_ray.doctor.hosts import Host, check_answers, named
from iris_ray.doctor.machine import check_chips, check_credentials, check_metadata, check_ports, check_user
from iris_ray.metadata.watch import HOST_VARIABLES, WELL_KNOWN_HOSTS
from iris_ray.model.containment import SetAside
from tests.support.command_line import REPOSITORY, address_of_nobody, invoke


def test_doctor_constants_agree_with_rest_of_project() -> None:
    from iris_ray.actors.host.task_environment import PORTS

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (major, oldest), (_, newest) = machine.OLDEST_RAY, machine.NEWEST_RAY
    assert f"ray[default]>={major}.{oldest},<{major}.{newest + 1}" in project["dependencies"]
    assert PORTS == machine.TASK_PORTS


def test_doctor_without_cluster_checks_this_machine() -> None:
    nobody = address_of_nobody()
    done = invoke("doctor", "--json", RAY_ADDRESS=nobody, GCE_METADATA_HOST=nobody, IRIS_USER="ann")
    assert done.exit_code == NO_CLUSTER
    levels = {finding["check"]: finding["level"] for finding in json.loads(done.output)}
    assert (levels["cluster"], levels["user"], levels["metadata server"]) == ("ERROR", "OK", "WARNING")
    assert levels["versions"] == "OK"


@pytest.mark.parametrize(
    ("status", "level", "found"),
    [(200, Level.OK, "this is Google Cloud"), (404, Level.INFO, "announces no preemptions")],
)
def test_doctor_asks_metadata_server_about_preemptions(status: int, level: Level, found: str) -> None:
    with metadata_server(status) as address:
        finding = check_metadata({"GCE_METADATA_HOST": address})
    assert finding.level is level
    assert found in finding.found


@contextmanager
def metadata_server(status: int) -> Iterator[str]:
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/computeMetadata/v1/instance/preempted" else 400)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_doctor_looks_for_metadata_server_where_hosts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts have notices from the second place, too, such as in a container that can't resolve the name."""
    nobody = address_of_nobody()
    assert (host_look.METADATA_VARIABLES, host_look.METADATA_HOSTS) == (HOST_VARIABLES, WELL_KNOWN_HOSTS)
    with metadata_server(200) as address:
        variables = {"IRIS_RAY_TEST_METADATA_HOST": address, "GCE_METADATA_HOST": nobody}
        assert host_look.metadata_tells(variables) == "preemptions"
        monkeypatch.setattr(host_look, "METADATA_HOSTS", (nobody, address))
        assert host_look.metadata_tells({}) == "preemptions"
    finding = check_metadata({"IRIS_RAY_TEST_METADATA_HOST": nobody})
    assert (finding.level, "IRIS_RAY_TEST_METADATA_HOST names it" in (finding.advice or "")) == (Level.WARNING, True)


@pytest.mark.parametrize("host", ["127.0.0.1:none", "no host"])
def test_doctor_finds_no_metadata_server_at_invalid_address(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_metadata({"GCE_METADATA_HOST": host}).level is Level.WARNING
    assert capsys.readouterr().err == ""


def test_doctor_ignores_other_service_at_metadata_address(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(b"220 mail.example.com\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=[listener])
        answering.start()
        finding = check_metadata({"GCE_METADATA_HOST": f"127.0.0.1:{listener.getsockname()[1]}"})
        answering.join()
    assert (finding.level, capsys.readouterr().err) == (Level.WARNING, "")


def test_doctor_warns_of_ports_in_ephemeral_range() -> None:
    assert check_ports((32_768, 60_999)).level is Level.OK
    finding = check_ports((15_000, 60_999))
    assert finding.level is Level.WARNING
    assert "ip_local_port_range" in (finding.advice or "")


@pytest.mark.parametrize(
    ("environ", "user", "level"),
    [({"IRIS_USER": "ann"}, "ann", Level.OK), ({}, "ann", Level.OK), ({}, "root", Level.WARNING)],
)
def test_doctor_warns_of_users_sharing_one_name(environ: dict[str, str], user: str, level: Level) -> None:
    assert check_user(environ, user).level is level


def test_doctor_names_latest_clock_jump_for_a_day() -> None:
    now = time.time()
    (found,) = check_about({"clock_jumps": [(now - 7200.0, -30.0), (now - 60.0, 3600.0)]})
    assert found.level is Level.WARNING
    assert "jumped by +3600 s, 1m00s ago" in found.found
    assert not list(check_about({"clock_jumps": [(now - 90_000.0, 3600.0)]}))


def test_doctor_names_services_that_fail_or_block() -> None:
    health = [
        ServiceHealth("history", "ValueError: broken", failures=2, last_error="ValueError: broken"),
        ServiceHealth("secrets", longest_step_s=0.5),
        ServiceHealth("logs"),
    ]
    failing, slow = check_about({"service_health": health})
    assert "history is failing (2 failures): ValueError: broken" in failing.found
    assert failing.level is Level.WARNING
    assert "secrets has blocked the Controller for 0.50 s" in slow.found
    assert slow.level is Level.INFO


def test_doctor_says_that_history_is_not_written() -> None:
    about = {"path": "/mnt/history.sqlite", "trouble": "OperationalError: database or disk is full", "lost": 3}
    (found,) = check_about({"services": {"history": about}})
    assert "disk is full; 3 records are lost" in found.found
    assert not list(check_about({"services": {"history": about | {"trouble": None}}}))
    assert not list(check_about({})), "an older Controller says nothing of it"


def test_notifications_that_wait_are_counted() -> None:
    (found,) = check_about({"services": {"notify": {"waiting": 3, "trouble": None}}})
    assert (found.level, found.found) == (Level.INFO, "3 notifications not sent yet")
    (found,) = check_about({"services": {"notify": {"waiting": 0, "trouble": "no space left"}}})
    assert (found.level, "no space left" in found.found) == (Level.WARNING, True)


def test_doctor_compares_versions_with_controller() -> None:
    assert check_controller(None, "", 0).level is Level.INFO
    other = check_controller({"version": "0.0.1"}, "epoch 1, iris_ray 0.0.1", 0)
    assert (other.level, "controller upgrade" in (other.advice or "")) == (Level.INFO, True)
    assert check_controller({"version": iris_ray.__version__}, "epoch 1", 4).found == "epoch 1; sees 4 hosts"


def test_doctor_names_chip_holders(tmp_path: Path) -> None:
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    for chip in ("accel0", "vfio/1", "vfio/vfio"):
        (tmp_path / "dev" / chip).touch()
    devices = host_devices({"IRIS_RAY_HOST_DIR": str(tmp_path)})
    assert [path.name for path in devices.chips] == ["accel0", "1"]
    with devices.chips[1].open():
        assert f"2 chip devices, held by pid {os.getpid()} (" in check_chips(devices).found
    assert "pid" not in check_chips(devices).found
    assert check_chips(Devices(devices.lock, ())).level is Level.INFO


CREDENTIALS = {
    "type": "authorized_user",
    "client_id": "someone",
    "client_secret": "a secret",
    "refresh_token": "another secret",
    "account": "ann@example.com",
}


def test_doctor_names_credentials_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps(CREDENTIALS))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "tpus")
    finding = check_credentials(os.environ)
    assert finding.level is Level.OK, finding
    assert finding.found == "oauth2.credentials.Credentials, account ann@example.com, project tpus"
    path.write_text("{}")
    broken = check_credentials(os.environ)
    assert (broken.level, broken.advice) == (Level.WARNING, "correct or unset GOOGLE_APPLICATION_CREDENTIALS")


def test_doctor_without_credentials_says_who_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", address_of_nobody())
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


def test_doctor_names_faulty_hosts_and_slices() -> None:
    from iris_ray.actors.controller.node_table import NodeTable

    nodes = (
        *(node("fine", n) for n in (0, 1)),
        *(node("held", n) for n in (0, 1)),
        *(node("taken", n) for n in (0, 1)),
        node("half", 1, 4.0, **{"iris/taint.hot": "fan"}),
        node("wrong", 0, 4.0, **{"ray.io/tpu-pod-type": "v4-x"}),
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


# -- every TPU host ----------------------------------------------------------------------------------------------------

HERE = {"python": "3.11.7", "ray": "2.60.0", "iris_ray": "0.1.0", "jax": None}
HOSTS = [Host(f"s-0 host {number} (10.0.0.{number})", f"node-{number}") for number in range(3)]


def look(**changes: Any) -> dict[str, Any]:
    """What a host answers at which all is well."""
    fine = {
        "holders": [],
        "hidden": 0,
        "foreign_lock": None,
        "disks": [],
        "metadata": "preemptions",
        "lockable": None,
        "versions": HERE | {"jax": "0.10.2"},
    }
    return fine | changes


def findings(*answers: Any, claimed: frozenset[str] = frozenset()) -> list[tuple[Level, str, str]]:
    hosts = dict(zip(HOSTS, answers, strict=False))
    return [(f.level, f.check, f.found) for f in check_answers(hosts, set(claimed), HERE)]


def test_doctor_accepts_healthy_hosts() -> None:
    found = findings(look(), look(), look())
    assert {level for level, _, _ in found} == {Level.OK}
    assert found[-1][2] == "the same on all: python 3.11.7, ray 2.60.0, iris_ray 0.1.0, jax 0.10.2"
    assert findings() == []


def test_doctor_names_silent_hosts() -> None:
    found = findings(look(), "no answer within 30 s", look())
    assert found[0] == (Level.WARNING, "silent host", "s-0 host 1 (10.0.0.1): no answer within 30 s")
    assert [check for _, check, _ in findings("x", "x")] == ["silent host"] * 2


def test_doctor_reports_holders_only_of_unclaimed_chips() -> None:
    held = look(holders=["pid 7 (python)"])
    (warning,) = [f for f in findings(held, held, claimed=frozenset({"node-0"})) if f[1] == "chips held"]
    assert warning[0] is Level.WARNING
    assert warning[2].startswith("s-0 host 1 (10.0.0.1): pid 7 (python), but no Ray task or actor has")
    (fine,) = [f for f in findings(held, look(), claimed=frozenset({"node-0"})) if f[1] == "chips held"]
    assert fine == (Level.OK, "chips held", "by no process without a claim, 1 host with claimed ones left aside")
    (unsure,) = [f for f in findings(look(hidden=2), look()) if f[1] == "chips held"]
    assert (unsure[0], HOSTS[0].name in unsure[2]) == (Level.INFO, True)


def test_doctor_reports_lock_file_ray_cannot_open() -> None:
    (found,) = [f for f in findings(look(foreign_lock="bob"), look()) if f[1] == "lock file"]
    assert (found[0], "belongs to bob" in found[2]) == (Level.WARNING, True)


def test_doctor_names_hosts_with_full_disks() -> None:
    found = findings(look(), look(disks=["0 MB are left in /tmp/ray", "/mnt/iris is read-only"]), look())
    said = "s-0 host 1 (10.0.0.1): 0 MB are left in /tmp/ray; /mnt/iris is read-only"
    assert [one for one in found if one[1] == "disks of hosts"] == [(Level.WARNING, "disks of hosts", said)]


def test_doctor_names_hosts_of_v5e_that_lock_too_little_memory() -> None:
    """Others need little."""
    answers = {
        replace(HOSTS[0], type="v5litepod-16"): look(lockable=64 << 10),
        replace(HOSTS[1], type="v5litepod-16"): look(lockable=64 << 30),
        replace(HOSTS[2], type="v6e-16"): look(lockable=64 << 10),
    }
    found = [f for f in check_answers(answers, set(), HERE) if f.check == "locked memory"]
    assert [(f.level, f.found.partition(",")[0]) for f in found] == [
        (Level.WARNING, "only 64 kB may be locked on s-0 host 0 (10.0.0.0)")
    ]


def test_full_disk_is_distinguished_from_one_with_room(tmp_path: Path) -> None:
    assert host_look.disk_trouble(Path("/proc")) == "0 MB are left in /proc"
    assert "No such file" in (host_look.disk_trouble(tmp_path / "missing") or "")
    assert host_look.kept_in({"IRIS_RAY_HOST_DIR": str(tmp_path)}) == [tmp_path]


def test_doctor_names_set_aside_jobs_with_times() -> None:
    now = time.time()
    aside = SetAside("poison", "a defect", now - 120.5, now + 480.5), SetAside("the taints", "damaged")
    found = [finding.found for finding in check_about({"set_aside": aside})]
    assert found == ["poison, 2m00s ago, tried again in 8m00s: a defect", "the taints: damaged"]


def test_doctor_names_quarantined_hosts() -> None:
    attributes = {"taint:quarantined": "3 task processes failed there within an hour, the last one: no space left"}
    status = WorkerStatus(
        "n-1", "10.0.0.1", "s-0", 1, "v4-16", {}, {}, attributes, (), None, None, HostCondition.QUARANTINED
    )
    (finding,) = check_quarantine([replace(status, attributes={}), status])
    assert finding.found == f"s-0 host 1: {attributes['taint:quarantined']}"
    assert finding.advice is not None
    assert "iris-ray host undrain n-1 quarantined" in finding.advice


def test_doctor_expects_metadata_server_on_all_hosts_or_none() -> None:
    def levels(*answers: str) -> tuple[Level, str]:
        ((level, _, found),) = [f for f in findings(*(look(metadata=a) for a in answers)) if "metadata" in f[1]]
        return level, found

    assert levels("preemptions", "preemptions") == (Level.OK, "answers on 2 hosts")
    assert levels("nothing", "nothing") == (Level.INFO, "answers on none of 2 hosts")
    assert levels("preemptions", "nothing") == (Level.WARNING, f"does not answer on {HOSTS[1].name}")
    assert levels("no preemptions", "nothing") == (Level.WARNING, f"does not answer on {HOSTS[1].name}")
    assert levels("no preemptions", "no preemptions") == (Level.INFO, "announces no preemptions on all 2 hosts")


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ([{}, {"ray": "2.59.0"}], "ray 2.59.0 on s-0 host 1 (10.0.0.1), 2.60.0 here"),
        ([{"iris_ray": None}] * 2, "iris_ray is missing on all 2 hosts, 0.1.0 here"),
        ([{}, {}, {"jax": "0.9"}], "jax 0.9 on s-0 host 2 (10.0.0.2), 0.10.2 on the others"),
        ([{}, {}, {"jax": None}], "jax is missing on s-0 host 2 (10.0.0.2), 0.10.2 on the others"),
    ],
)
def test_doctor_names_differing_versions(versions: list[dict[str, Any]], said: str) -> None:
    answers = [look(versions=look()["versions"] | changes) for changes in versions]
    assert (Level.WARNING, "versions on hosts", said) in findings(*answers)


def test_long_lists_of_hosts_are_cut() -> None:
    hosts = [Host(f"h{number}", "") for number in range(9)]
    assert named(hosts[:6], hosts) == "h0, h1, h2, h3 and 2 more"
    assert named(hosts, hosts) == "all 9 hosts"
    assert named(hosts[:1], hosts[:1]) == "h0"


def test_host_check_needs_no_iris_ray_on_host() -> None:
    from ray import cloudpickle

    travelling = [sys.modules[name] for name in host_look.TRAVELS]
    for module in travelling:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps(host_look.look_around)
    finally:
        for module in travelling:
            cloudpickle.unregister_pickle_by_value(module)
    code = (
        "import sys, pickle, json; sys.modules['iris_ray'] = None\n"
        "print(json.dumps(pickle.loads(sys.stdin.buffer.read())()))"
    )
    environment = {**os.environ, "GCE_METADATA_HOST": address_of_nobody()}
    run = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True, env=environment)
    seen = json.loads(run.stdout)
    assert (seen["metadata"], seen["versions"]["iris_ray"]) == ("nothing", None)
    assert seen["versions"]["python"] == host_look.versions()["python"]


def test_holder_with_undecodable_name_is_named_approximately(tmp_path: Path) -> None:
    """The kernel cuts names off after 15 bytes, which may be in the middle of a character."""
    chip = tmp_path / "accel0"
    chip.touch()
    code = (
        "import sys; chip = open(sys.argv[1]); open('/proc/self/comm', 'wb').write('обучение.py'.encode())\n"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(chip)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        (found,) = find_holders(Devices(tmp_path / "lock", (chip,))).seen
        holder.communicate()
    assert str(found) == f"pid {holder.pid} (обучени\ufffd)"
