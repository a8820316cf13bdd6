"""``iris-ray controller`` on a cluster; the first test wants one without a Controller."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

import iris_ray
from iris_ray import release, run_on_pod_ray
from iris_ray.actors.wire.protocol import PROTOCOL_VERSION
from iris_ray.actors.wire.ray_internals import ClusterStore
from iris_ray.cli.exits import FAILED, NO_CLUSTER
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import Done, command_line, environment, iris, iris_json
from tests.support.gangs import Trace, free_chips, wait_until

pytestmark = pytest.mark.cluster


def test_listing_starts_no_controller_but_says_how(cluster: SimulatedCluster) -> None:
    assert "iris-ray controller start" in iris(cluster, "ls", code=NO_CLUSTER).stderr
    findings = iris_json(cluster, "doctor")
    assert {f["check"]: f["level"] for f in findings}["Controller"] == "INFO"
    assert "is started: epoch 1" in iris(cluster, "controller", "start").stdout
    assert iris_json(cluster, "ls") == []
    assert not iris_json(cluster, "controller", "start")["started"]
    assert iris_json(cluster, "controller", "status")["slices"] == {"free": 3}


def test_running_job_does_not_notice_an_upgrade_of_the_controller(cluster: SimulatedCluster, trace: Trace) -> None:
    running = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    trace.wait_for_tasks(4)
    before = iris_json(cluster, "controller", "status")
    said = iris(cluster, "controller", "upgrade").stdout
    assert "taken over 1 job: 1 running" in said
    again = iris_json(cluster, "controller", "upgrade")
    assert (again["jobs"], again["version_before"]) == ({"running": 1}, iris_ray.__version__)
    after = iris_json(cluster, "controller", "status")
    assert after["epoch"] > before["epoch"]
    assert after["pid"] != before["pid"]
    trace.finish()
    assert [task["index"] for task in ray.get(running, timeout=60)] == [0, 1, 2, 3]
    assert len(trace.starts()) == 4


def test_controller_that_does_not_answer_can_be_stopped(cluster: SimulatedCluster) -> None:
    pid = iris_json(cluster, "controller", "status")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        iris(cluster, "controller", "stop")
    finally:
        os.kill(pid, signal.SIGKILL)
    iris(cluster, "controller", "start")
    assert iris_json(cluster, "controller", "status")["pid"] != pid


def test_upgrade_that_could_not_go_on_from_the_records_leaves_the_controller(cluster: SimulatedCluster) -> None:
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


def test_records_of_another_version_are_refused_at_the_start_as_clients_see_too(
    cluster: SimulatedCluster, trace: Trace
) -> None:
    """Nothing is lost: a Controller that can read them goes on."""
    running = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    wait_until(lambda: unfinished(cluster) == ["RUNNING"])
    key = f"job/{iris_json(cluster, 'controller', 'status')['epoch']}/of-another-version"
    ClusterStore().put(key, b"iris_ray job record 99\n")
    submit = "from iris_ray import IrisClient; import ray; ray.init('auto'); IrisClient().submit(lambda: 1, 'refused')"
    try:
        iris(cluster, "controller", "stop")
        for command in (command_line("controller", "start"), [sys.executable, "-c", submit]):
            refused = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(cluster))
            assert refused.returncode != 0
            assert "record 99" in refused.stderr
            assert "use the version that wrote them until its jobs have ended" in refused.stderr
            assert "ControllerUnavailableError" in refused.stderr or refused.returncode == NO_CLUSTER
    finally:
        ClusterStore().delete(key)
    iris(cluster, "controller", "start")
    assert unfinished(cluster) == ["RUNNING"]
    trace.finish()
    assert len(ray.get(running, timeout=60)) == 2
    assert len(trace.starts()) == 2


def unfinished(cluster: SimulatedCluster) -> list[str]:
    """The states of jobs that are not over."""
    return sorted(job["state"] for job in iris_json(cluster, "ls") if job["state"] in ("PENDING", "RUNNING"))


def other_version(directory: Path, version: str, changes: dict[str, tuple[str, str]]) -> dict[str, str]:
    """A checkout of another version of iris_ray, changed file by file; the variables that have it used."""
    package = Path(iris_ray.__file__).parent
    shutil.copytree(package, directory / "iris_ray", ignore=shutil.ignore_patterns("__pycache__"))
    for file, (old, new) in {"__init__.py": ('"0.1.0"', f'"{version}"'), **changes}.items():
        path = directory / "iris_ray" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
    return {"PYTHONPATH": str(directory)}


@pytest.mark.parametrize(
    "changes",
    [
        {"actors/controller.py": ("_journal.begin()", "_journal.begin(1 / 0)")},  # its start raises
        {"actors/log_desk.py": ("LogMemory()\n", "LogMemory(1 / 0)\n")},  # its constructor raises
        {"actors/bootstrap.py": ("def main(", "import no_such_module\n\n\ndef main(")},  # nothing gets that far
    ],
    ids=["start", "constructor", "bootstrap"],
)
def test_upgrade_to_a_controller_that_does_not_start_loses_no_job_and_says_what_to_do(
    cluster: SimulatedCluster, trace: Trace, tmp_path: Path, changes: dict[str, tuple[str, str]]
) -> None:
    """The jobs' own version comes back with the next thing that one of them has to say."""
    running = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    trace.wait_for_tasks(4)
    waiting = run_on_pod_ray.remote(lambda: "its turn", "v4-16", num_slices=3)
    wait_until(lambda: unfinished(cluster) == ["PENDING", "RUNNING"])
    broken = environment(cluster) | other_version(tmp_path / "new", "0.2.0", changes)
    refused = subprocess.run(
        command_line("controller", "upgrade"),
        capture_output=True, text=True, timeout=240, env=broken, cwd=tmp_path,
    )  # fmt: skip
    trace.finish()
    assert refused.returncode == NO_CLUSTER, refused.stderr
    assert "The Controller of iris_ray 0.1.0 is ended, and the new one, of iris_ray 0.2.0" in refused.stderr
    assert "`iris-ray controller start` with iris_ray 0.1.0" in refused.stderr
    assert [task["index"] for task in ray.get(running, timeout=120)] == [0, 1, 2, 3]
    assert ray.get(waiting, timeout=120) == ["its turn"] * 6
    assert len(trace.starts()) == 4
    assert iris_json(cluster, "controller", "status")["version"] == "0.1.0"


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION])
def test_upgrade_overtaken_by_an_older_controller_says_so_and_works_the_next_time(
    cluster: SimulatedCluster, trace: Trace, tmp_path: Path, protocol: int
) -> None:
    """Between the old Controller's end and the new one's start, a job of another version starts one of its own."""
    release()
    wait_until(lambda: free_chips() == 24.0)  # nobody here has anything to say that would need a Controller
    older = other_version(
        tmp_path / "old",
        "0.0.9",
        {"protocol.py": (f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n", f"PROTOCOL_VERSION = {protocol}\n")},
    )
    iris(cluster, "controller", "start")
    running = run_on_pod_ray.remote(trace.gang(), "v4-16") if protocol == PROTOCOL_VERSION else None
    if running:
        trace.wait_for_tasks(2)
        wait_until(lambda: unfinished(cluster) == ["RUNNING"])
    script = (
        "import os, subprocess, sys\n"
        "import iris_ray.cli.controller as command\n"
        "start = command._start\n"
        "def overtaken():\n"
        "    bootstrap = [sys.executable, '-m', 'iris_ray.actors.controller.bootstrap', os.environ['RAY_ADDRESS']]\n"
        f"    subprocess.run(bootstrap, env=os.environ | {older!r}, cwd='/', check=True)\n"
        "    start()\n"
        "command._start = overtaken\n"
        "from iris_ray.cli.main import main; main()"
    )
    overtaken = subprocess.run(
        [sys.executable, "-c", script, "controller", "upgrade"],
        capture_output=True, text=True, timeout=240, env=environment(cluster),
    )  # fmt: skip
    trace.finish()
    assert overtaken.returncode == NO_CLUSTER, overtaken.stderr
    assert "a job of iris_ray 0.0.9 was faster" in overtaken.stderr
    assert "try again" in overtaken.stderr
    if running:
        assert len(ray.get(running, timeout=120)) == 2
    assert "it was iris_ray 0.0.9" in iris(cluster, "controller", "upgrade").stdout
    assert iris_json(cluster, "controller", "status")["version"] == "0.1.0"


def test_other_protocol_is_refused_with_both_versions_and_what_to_do(cluster: SimulatedCluster, trace: Trace) -> None:
    def of_protocol(number: int, *arguments: str) -> Done:
        script = (
            f"import iris_ray.actors.wire.protocol; iris_ray.actors.wire.protocol.PROTOCOL_VERSION = {number}\n"
            "from iris_ray.cli.main import main; main()"
        )
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(cluster))

    ours, newer = PROTOCOL_VERSION, PROTOCOL_VERSION + 1
    for number, advice in ((ours - 1, "install iris_ray 0.1.0 here"), (newer, "`iris-ray controller upgrade`")):
        refused = of_protocol(number, "ls")
        assert refused.returncode == FAILED
        assert f"(protocol {ours}), and this is iris_ray 0.1.0 (protocol {number})" in refused.stderr
        assert advice in refused.stderr
    (found,) = [f for f in json.loads(of_protocol(newer, "doctor", "--json").stdout) if f["check"] == "Controller"]
    assert (found["level"], "controller upgrade" in found["found"]) == ("ERROR", True)
    running = run_on_pod_ray.remote(trace.gang(), "v4-16")
    trace.wait_for_tasks(2)
    refused = of_protocol(newer, "controller", "upgrade")
    assert f"the processes of 1 job speak protocol {ours}" in refused.stderr
    trace.finish()
    assert len(ray.get(running, timeout=60)) == 2
