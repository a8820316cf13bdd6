"""SimulatedCluster: what its hosts look like, what can happen to them, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import requests

from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing import Preemption, SimulatedCluster
from iris_ray.testing.machine import Machine
from iris_ray.testing.tpu_host import TPUHost

# ------------------------------------------------------------------------------------------- without a cluster


@pytest.mark.parametrize(
    ("slices", "words"),
    [
        (["v4-8"], "maps TPU types"),
        ({"v4-8": -1}, "0 or more"),
        ({"v4-8": True}, "not True"),
        ({"v4-8": 1.0}, "must be an int"),
        ({"v4-8": "2"}, "must be an int"),
    ],
)
def test_constructor_impossible_slices_refused(slices: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SimulatedCluster(slices)


def test_constructor_unknown_type_refused() -> None:
    with pytest.raises(UnknownTPUTypeError):
        SimulatedCluster({"v4-9": 1})


@pytest.mark.parametrize("cpus", [0, True, 1.5])
def test_constructor_impossible_cpus_refused(cpus: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cpus_per_host"):
        SimulatedCluster(cpus_per_host=cpus)


def test_not_started_cluster_says_so() -> None:
    cluster = SimulatedCluster({"v4-8": 1})
    assert cluster.slice_names == []
    with pytest.raises(InvalidRequestError, match="not running"):
        _ = cluster.address
    with pytest.raises(InvalidRequestError, match="not running"):
        cluster.kill_host("v4-8-0", 0)
    cluster.shutdown()


def a_host(tpu_type: str, worker_id: int) -> TPUHost:
    return TPUHost("my-slice", worker_id, get_tpu_config(tpu_type), "ab" * 28, "127.1.2.3", Path("/tmp/nowhere"))


def test_host_resources_head_resource_only_on_worker_0() -> None:
    assert a_host("v4-32", 0).resources() == {
        "TPU": 4,
        "accelerator_type:TPU-V4": 1,
        "my-slice": 1,
        "TPU-v4-32-head": 1,
    }
    assert a_host("v4-32", 3).resources() == {"TPU": 4, "accelerator_type:TPU-V4": 1, "my-slice": 1}
    assert a_host("v6e-8", 0).resources()["TPU"] == 8


def test_host_describes_itself_as_ray_on_a_tpu_vm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same environment, read by Ray's own detection, gives the same labels and resources."""
    from ray._private.accelerators import TPUAcceleratorManager

    for tpu_type in ("v4-32", "v5litepod-16", "v6e-8", "v7x-16"):
        host = a_host(tpu_type, 0)
        for name, value in host.environment(["127.1.2.3"]).items():
            if name.startswith("TPU_"):
                monkeypatch.setenv(name, value)
        labels = TPUAcceleratorManager.get_current_node_accelerator_labels()
        accelerator = TPUAcceleratorManager.get_current_node_accelerator_type()
        assert host.labels() == {**labels, "ray.io/accelerator-type": accelerator}
        found = TPUAcceleratorManager.get_current_node_additional_resources()
        assert host.resources() == {"TPU": host.config.chips_per_vm, f"accelerator_type:{accelerator}": 1, **found}


def test_host_environment_drops_what_describes_the_drivers_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "elsewhere")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    monkeypatch.setenv("JAX_PLATFORMS", "mine")
    monkeypatch.setenv("MY_OWN", "kept")
    environment = a_host("v4-16", 1).environment(["127.1.2.2", "127.1.2.3"])
    assert not {"TPU_VISIBLE_CHIPS", "MEGASCALE_COORDINATOR_ADDRESS", "RAY_ADDRESS"} & environment.keys()
    assert environment["JAX_PLATFORMS"] == "mine"
    assert environment["MY_OWN"] == "kept"
    assert environment["TPU_WORKER_HOSTNAMES"] == "127.1.2.2,127.1.2.3"


def test_preemption_cancelled_leaves_the_hosts() -> None:
    killed: list[str] = []
    preemption = Preemption("s", 60.0, lambda: killed.append("s"))
    preemption.start()
    preemption.cancel()
    assert not killed
    assert not preemption.done
    assert not preemption.wait(0)


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def a_machine(script: str, directory: Path, lifeline: int) -> Machine:
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(script)]
    return Machine(command, env=os.environ, cwd=directory, log=directory / "log", lifeline=lifeline)


FAMILY = """
    import os, time
    if os.fork() == 0:          # a grandchild that escapes from its session, its parent and its environment
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    open("ready", "w").close()
    time.sleep(1000)
"""


def test_machine_kill_ends_daemons_too(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(FAMILY, tmp_path, lifeline[1])
    eventually(lambda: len(machine.pids()) == 2 and (tmp_path / "ready").exists())
    pids = machine.pids()
    machine.kill()
    assert not machine.running
    assert machine.pids() == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    machine.kill()  # a second time is harmless


def test_machine_freeze_stops_all_and_thaw_continues(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(FAMILY, tmp_path, lifeline[1])
    eventually(lambda: len(machine.pids()) == 2 and (tmp_path / "ready").exists())
    machine.freeze()
    assert {psutil.Process(pid).status() for pid in machine.pids()} == {psutil.STATUS_STOPPED}
    machine.thaw()
    eventually(lambda: {psutil.Process(pid).status() for pid in machine.pids()} == {psutil.STATUS_SLEEPING})
    machine.freeze()
    machine.kill()
    assert not machine.running


def test_machine_ends_with_its_command(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(FAMILY.replace("time.sleep(1000)", "time.sleep(0.2)"), tmp_path, lifeline[1])
    eventually(lambda: not machine.running)
    assert machine.pids() == []


def test_machine_unknown_program_says_so_in_its_log(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    log = tmp_path / "log"
    machine = Machine(["/no/such/program"], env=os.environ, cwd=tmp_path, log=log, lifeline=lifeline[1])
    eventually(lambda: not machine.running)
    assert "cannot run /no/such/program" in log.read_text()


# ------------------------------------------------------------------------------------------------ with a cluster

SLICE = "v4-16"  # two hosts


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with SimulatedCluster({SLICE: 1}, quiet=True) as running:
        yield running


@pytest.fixture
def fresh_slice(cluster: SimulatedCluster) -> Iterator[str]:
    """A slice of the test's own, to be mistreated."""
    name = cluster.add_slice(SLICE)
    yield name
    cluster.preempt_slice(name)


@ray.remote(num_cpus=0)
class Inhabitant:
    """Lives on a host and tells about it."""

    def __init__(self) -> None:
        # A child that has left its process group, and has no environment to be recognised by.
        self._child = subprocess.Popen(["setsid", "sleep", "1000"], env={"PATH": os.environ["PATH"]})

    def look(self) -> dict[str, Any]:
        return {
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "pids": [os.getpid(), self._child.pid],
            "address": ray.util.get_node_ip_address(),
        }


def inhabit(slice_name: str, worker_id: int) -> Any:
    # A pinch of a resource matters: Ray has a random node start an actor that asks for none, possibly one that is dead
    # and not yet known to be, and the actor dies with it.
    labels = {"ray.io/tpu-slice-name": slice_name, "ray.io/tpu-worker-id": str(worker_id)}
    return Inhabitant.options(label_selector=labels, resources={slice_name: 0.001}).remote()


def metadata_of(look: dict[str, Any]) -> dict[str, str]:
    """What the metadata server of an inhabitant's host says."""
    server = f"http://{look['env']['IRIS_RAY_METADATA_HOST']}/computeMetadata/v1"
    keys = ("instance/preempted", "instance/attributes/agent-worker-number", "instance/attributes/instance-id")
    flavor = {"Metadata-Flavor": "Google"}
    return {key: requests.get(f"{server}/{key}", headers=flavor, timeout=10).text for key in keys}


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> float:
    """Waits until the condition holds. Returns how long that took, in seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it never happened"
        time.sleep(0.02)
    return time.monotonic() - began


def is_alive(cluster: SimulatedCluster, slice_name: str, worker_id: int) -> bool:
    node_id = cluster.node_id(slice_name, worker_id)
    (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
    return bool(node["Alive"])


@pytest.mark.cluster
def test_nodes_look_like_a_slice(cluster: SimulatedCluster) -> None:
    (name,) = cluster.slice_names
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    for worker_id in (0, 1):
        node = nodes[cluster.node_id(name, worker_id)]
        tpu_labels = {key: value for key, value in node["Labels"].items() if key.startswith("ray.io/tpu-")}
        assert tpu_labels == {
            "ray.io/tpu-slice-name": name,
            "ray.io/tpu-worker-id": str(worker_id),
            "ray.io/tpu-pod-type": SLICE,
            "ray.io/tpu-topology": "2x2x2",
        }
        assert node["Resources"]["TPU"] == 4
        assert node["Resources"][name] == 1
        assert node["Resources"].get(f"TPU-{SLICE}-head", 0) == (worker_id == 0)
    assert len({node["NodeManagerAddress"] for node in nodes.values()}) == len(nodes)


@pytest.mark.cluster
def test_driver_is_on_the_head_which_has_no_tpu(cluster: SimulatedCluster) -> None:
    (mine,) = (node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id())
    assert "TPU" not in mine["Resources"]
    assert not any(label.startswith("ray.io/tpu") for label in mine["Labels"])


@pytest.mark.cluster
def test_host_environment_is_its_own(cluster: SimulatedCluster) -> None:
    (name,) = cluster.slice_names
    seen = ray.get([inhabit(name, worker_id).look.remote() for worker_id in (0, 1)])
    for worker_id, look in enumerate(seen):
        env = look["env"]
        assert env["TPU_NAME"] == name
        assert env["TPU_WORKER_ID"] == str(worker_id)
        assert env["TPU_ACCELERATOR_TYPE"] == SLICE
        assert env["TPU_TOPOLOGY"] == "2x2x2"
        assert env["TPU_WORKER_HOSTNAMES"] == ",".join(other["address"] for other in seen)
        directory = cluster.host_dir(name, worker_id)
        assert env["IRIS_RAY_HOST_DIR"] == str(directory) == look["cwd"]
        assert env["TMPDIR"] == str(directory / "tmp")
        assert sorted(path.name for path in (directory / "dev").iterdir()) == [f"accel{i}" for i in range(4)]
        assert (directory / "lock").is_dir()
        assert env["IRIS_RAY_METADATA_HOST"].startswith(f"{look['address']}:")
        assert not {"GCE_METADATA_HOST", "GCE_METADATA_IP"} & env.keys() - os.environ.keys()
        assert metadata_of(look) == {
            "instance/preempted": "FALSE",
            "instance/attributes/agent-worker-number": str(worker_id),
            "instance/attributes/instance-id": name,
        }
    assert len({look["env"]["IRIS_RAY_HOST_DIR"] for look in seen}) == 2


@pytest.mark.cluster
def test_runtime_env_reaches_workers_on_host_and_head(cluster: SimulatedCluster) -> None:
    (name,) = cluster.slice_names
    read = ray.remote(num_cpus=0, runtime_env={"env_vars": {"COLOUR": "green"}})(lambda: os.environ["COLOUR"])
    on_host = read.options(resources={name: 0.001}).remote()
    on_head = read.options(resources={"node:__internal_head__": 0.001}).remote()
    assert ray.get([on_host, on_head]) == ["green", "green"]


@pytest.mark.cluster
def test_kill_host_takes_everything_on_it_and_nothing_else(cluster: SimulatedCluster, fresh_slice: str) -> None:
    victim, neighbour = inhabit(fresh_slice, 0), inhabit(fresh_slice, 1)
    pids = ray.get(victim.look.remote())["pids"]
    ray.get(neighbour.look.remote())
    assert set(pids) <= set(cluster.host_pids(fresh_slice, 0))
    cluster.kill_host(fresh_slice, 0)
    assert cluster.host_pids(fresh_slice, 0) == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert cluster.worker_ids(fresh_slice) == [1]
    assert fresh_slice in cluster.slice_names
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.look.remote())
    assert eventually(lambda: not is_alive(cluster, fresh_slice, 0)) < 8  # Ray's own settings take 13 s
    assert is_alive(cluster, fresh_slice, 1)
    ray.get(neighbour.look.remote())
    cluster.kill_host(fresh_slice, 0)  # a second time is harmless


@pytest.mark.cluster
def test_freeze_host_for_long_is_found_dead(cluster: SimulatedCluster, fresh_slice: str) -> None:
    cluster.freeze_host(fresh_slice, 1)
    assert {psutil.Process(pid).status() for pid in cluster.host_pids(fresh_slice, 1)} == {psutil.STATUS_STOPPED}
    eventually(lambda: not is_alive(cluster, fresh_slice, 1))
    assert cluster.worker_ids(fresh_slice) == [0, 1]
    cluster.thaw_host(fresh_slice, 1)
    eventually(lambda: cluster.worker_ids(fresh_slice) == [0])  # its raylet learns that it has been given up


@pytest.mark.cluster
def test_freeze_host_briefly_is_survived(cluster: SimulatedCluster, fresh_slice: str) -> None:
    inhabitant = inhabit(fresh_slice, 0)
    ray.get(inhabitant.look.remote())
    cluster.freeze_host(fresh_slice, 0)
    pending = inhabitant.look.remote()
    assert ray.wait([pending], timeout=0.5) == ([], [pending])
    cluster.thaw_host(fresh_slice, 0)
    ray.get(pending)


@pytest.mark.cluster
def test_preempt_slice_with_notice_drains_then_dies(cluster: SimulatedCluster, fresh_slice: str) -> None:
    from ray._private.state import state  # as Ray Train does

    # An idle node that is drained ends by itself at once: have somebody there.
    inhabitants = [inhabit(fresh_slice, worker_id) for worker_id in (0, 1)]
    looks = ray.get([inhabitant.look.remote() for inhabitant in inhabitants])
    node_ids = {cluster.node_id(fresh_slice, worker_id) for worker_id in (0, 1)}
    began = time.time()
    preemption = cluster.preempt_slice(fresh_slice, notice_s=3)
    eventually(lambda: node_ids <= state.get_draining_nodes().keys(), timeout_s=2.5)
    deadline_s = state.get_draining_nodes()[cluster.node_id(fresh_slice, 0)] / 1000
    assert deadline_s == pytest.approx(began + 3, abs=0.5)
    assert not preemption.done
    assert [metadata_of(look)["instance/preempted"] for look in looks] == ["TRUE", "TRUE"]
    ray.get([inhabitant.look.remote() for inhabitant in inhabitants])  # work goes on until then
    assert preemption.wait(30)
    assert time.time() - began >= 3
    assert fresh_slice not in cluster.slice_names
    eventually(lambda: not any(is_alive(cluster, fresh_slice, worker_id) for worker_id in (0, 1)))


@pytest.mark.cluster
def test_preempt_slice_is_heard_where_it_should_be(cluster: SimulatedCluster, fresh_slice: str) -> None:
    from ray._private.state import state

    look = ray.get(inhabit(fresh_slice, 0).look.remote())
    cluster.preempt_slice(fresh_slice, notice_s=1000, heard_by="metadata")
    assert metadata_of(look)["instance/preempted"] == "TRUE"
    assert cluster.node_id(fresh_slice, 0) not in state.get_draining_nodes()
    other = cluster.add_slice("v4-8")
    cluster.preempt_slice(other, notice_s=1000, heard_by="ray")
    eventually(lambda: other not in cluster.slice_names)  # nothing runs there
    assert (
        requests.get(
            f"http://{cluster.metadata(other, 0).address}/computeMetadata/v1/instance/preempted",
            headers={"Metadata-Flavor": "Google"},
            timeout=10,
        ).text
        == "FALSE"
    )


@pytest.mark.cluster
def test_preempt_slice_on_which_nothing_runs_goes_before_the_deadline(
    cluster: SimulatedCluster, fresh_slice: str
) -> None:
    preemption = cluster.preempt_slice(fresh_slice, notice_s=1000)
    eventually(lambda: fresh_slice not in cluster.slice_names)
    assert not preemption.done


@pytest.mark.cluster
def test_preempt_slice_without_notice_kills_before_it_returns(cluster: SimulatedCluster, fresh_slice: str) -> None:
    preemption = cluster.preempt_slice(fresh_slice, 0)
    assert preemption.done
    assert cluster.worker_ids(fresh_slice) == []
    assert fresh_slice not in cluster.slice_names
    assert cluster.add_slice("v4-8") not in (fresh_slice, f"{SLICE}-0")
    cluster.preempt_slice("v4-8-0")


@pytest.mark.cluster
def test_unknown_names_are_refused_and_the_known_listed(cluster: SimulatedCluster) -> None:
    name = cluster.slice_names[0]
    with pytest.raises(InvalidRequestError, match=name):
        cluster.kill_host("v4-16", 0)
    for worker_id in (2, -1, True, "0"):
        with pytest.raises(InvalidRequestError, match="0, 1"):
            cluster.freeze_host(name, worker_id)  # type: ignore[arg-type]
    for notice_s in (-1, float("nan"), float("inf"), True, "30"):
        with pytest.raises(InvalidRequestError, match="notice_s"):
            cluster.preempt_slice(name, notice_s)  # type: ignore[arg-type]
    for starts_in_s in (-1, True, None):
        with pytest.raises(InvalidRequestError, match="starts_in_s"):
            cluster.announce_maintenance(name, 0, starts_in_s)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="heard_by"):
        cluster.preempt_slice(name, 30, heard_by="nobody")  # type: ignore[arg-type]
    with pytest.raises(UnknownTPUTypeError):
        cluster.add_slice("v4-9")
    assert cluster.worker_ids(name) == [0, 1]


@pytest.mark.cluster
def test_gcs_that_would_take_everything_with_it_is_not_killed(cluster: SimulatedCluster) -> None:
    for fault in (cluster.kill_gcs, cluster.restart_gcs):
        with pytest.raises(InvalidRequestError, match="persistent=True"):
            fault()
    assert ray.nodes()


@pytest.mark.cluster
def test_second_cluster_in_the_process_is_refused(cluster: SimulatedCluster) -> None:
    with pytest.raises(InvalidRequestError, match="simulated cluster already"):
        SimulatedCluster().start()
    assert ray.is_initialized()


@pytest.mark.cluster
def test_other_process_connects_to_the_head(cluster: SimulatedCluster) -> None:
    script = f"""
        import ray
        ray.init({cluster.address!r}, log_to_driver=False)
        print(ray.get_runtime_context().get_node_id(), ray.get(ray.remote(lambda: 42).remote()))
    """
    head = ray.get_runtime_context().get_node_id()
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, text=True, capture_output=True, timeout=60
    ).stdout
    assert f"{head} 42" in output.splitlines()


# -------------------------------------------------------------------------------- drivers of their own, and their end


class Driver:
    """A script in a process of its own, with everything that descends from it marked by an environment variable."""

    PREAMBLE = """
        import os, signal, subprocess, sys, threading, time
        import ray
        from iris_ray.testing import SimulatedCluster

        @ray.remote(num_cpus=0, resources={"TPU": 4})
        def live(seconds):
            print("line-of-a-task")
            subprocess.Popen(["setsid", "sleep", "1000"])
            time.sleep(seconds)
    """

    def __init__(self, script: str) -> None:
        self._mark = uuid.uuid4().hex
        source = textwrap.dedent(self.PREAMBLE) + textwrap.dedent(script)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", source],
            env={**os.environ, "SIMULATED_CLUSTER_TEST": self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"the driver never said {text!r}, but:\n{''.join(self.lines)}")

    def finish(self, timeout_s: float = 60) -> int:
        output, _ = self.process.communicate(timeout=timeout_s)
        self.lines += output.splitlines(keepends=True)
        return self.process.returncode

    def remains(self) -> list[str]:
        """Processes and directories that are there because of this driver."""
        processes = [
            f"{p.pid} {p.info['name']}"
            for p in psutil.process_iter(["environ", "name"])
            if (p.info["environ"] or {}).get("SIMULATED_CLUSTER_TEST") == self._mark
        ]
        return processes + [str(path) for path in Path("/tmp").glob(f"iris-{self.process.pid}-*")]


@pytest.fixture
def driver() -> Iterator[Callable[[str], Driver]]:
    drivers: list[Driver] = []

    def start(script: str) -> Driver:
        drivers.append(Driver(script))
        return drivers[-1]

    yield start
    for one in drivers:
        one.process.kill()
        one.process.wait()
        if one.process.stdout is not None:
            one.process.stdout.close()


BUSY = """
    with SimulatedCluster({"v4-8": 1}) as cluster:
        live.remote(1000)
        while not any("sleep" in open(f"/proc/{pid}/comm").read() for pid in cluster.host_pids("v4-8-0", 0)[2:]):
            time.sleep(0.02)
        %s
        print("busy")
        time.sleep(1000)
"""


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_driver_ended_by_signal_leaves_nothing(driver: Callable[[str], Driver], number: signal.Signals) -> None:
    one = driver(BUSY % "pass")
    one.read_until("busy")
    assert len(one.remains()) > 5
    one.process.send_signal(number)
    assert one.finish() != 0
    eventually(lambda: not one.remains())


@pytest.mark.cluster
@pytest.mark.parametrize("before", ["cluster.freeze_host('v4-8-0', 0)", "cluster.preempt_slice('v4-8-0', 1000)"])
def test_driver_killed_with_a_host_in_trouble_leaves_nothing(driver: Callable[[str], Driver], before: str) -> None:
    one = driver(BUSY % before)
    one.read_until("busy")
    one.process.kill()
    one.finish()
    eventually(lambda: not one.remains())


@pytest.mark.cluster
@pytest.mark.parametrize("said", ["starting the head", "connecting", "starting 2 TPU hosts", "have joined"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_driver_interrupted_while_starting_leaves_nothing(
    driver: Callable[[str], Driver], number: signal.Signals, said: str
) -> None:
    one = driver("""
        with SimulatedCluster({"v4-16": 1}):
            time.sleep(1000)
    """)
    one.read_until(said)
    one.process.send_signal(number)
    assert one.finish() != 0
    assert number == signal.SIGKILL or "KeyboardInterrupt" in "".join(one.lines)
    eventually(lambda: not one.remains())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("raise KeyError('mine')", 1), ("os._exit(3)", 3)], ids=["normal", "error", "_exit"]
)
def test_driver_that_never_calls_shutdown_leaves_nothing(
    driver: Callable[[str], Driver], ending: str, code: int
) -> None:
    one = driver("SimulatedCluster({'v4-8': 1}).start()\n" + ending)
    assert one.finish() == code
    eventually(lambda: not one.remains())


@pytest.mark.cluster
def test_cluster_whose_gcs_is_dead_ends_as_any_other(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        with SimulatedCluster({"v4-8": 1}, persistent=True) as cluster:
            cluster.kill_gcs()
    """)
    assert one.finish() == 0, "".join(one.lines)
    eventually(lambda: not one.remains())


@pytest.mark.cluster
def test_output_of_tasks_reaches_the_driver_once(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        with SimulatedCluster({"v4-16": 1}, quiet=True):
            ray.get([live.remote(0)])
            time.sleep(2)  # that a second copy would need
    """)
    assert one.finish() == 0
    assert "".join(one.lines).count("line-of-a-task") == 1
    assert "simulated cluster" not in "".join(one.lines)


@pytest.mark.cluster
def test_unconnected_cluster_takes_a_driver_with_working_dir(driver: Callable[[str], Driver], tmp_path: Path) -> None:
    (tmp_path / "shipped.py").write_text("VALUE = 'from the working directory'\n")
    one = driver(f"""
        def read():
            import shipped
            return shipped.VALUE, os.environ["COLOUR"]

        with SimulatedCluster({{"v4-8": 1}}, connect=False) as cluster:
            assert not ray.is_initialized()
            ray.init(cluster.address, runtime_env={{"working_dir": {str(tmp_path)!r}, "env_vars": {{"COLOUR": "red"}}}})
            print(ray.get(ray.remote(resources={{"v4-8-0": 1}})(read).remote()))
        assert not ray.is_initialized()  # a driver that loses its cluster aborts
        with SimulatedCluster(quiet=True):  # and the next cluster in the process works
            print(ray.get(ray.remote(lambda: "again").remote()))
    """)
    assert one.finish() == 0, "".join(one.lines)
    assert "('from the working directory', 'red')" in "".join(one.lines)
    assert "again" in "".join(one.lines)
    eventually(lambda: not one.remains())


@pytest.mark.cluster
def test_forked_child_of_the_driver_keeps_nothing_alive(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        import json
        cluster = SimulatedCluster({"v4-8": 1}).start()
        child = os.fork()
        if child == 0:
            cluster.shutdown()  # not the child's to end
            time.sleep(1000)
        assert cluster.worker_ids("v4-8-0") == [0]
        began = time.monotonic()
        cluster.shutdown()
        print("took", time.monotonic() - began)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    """)
    assert one.finish() == 0, "".join(one.lines)
    (took,) = (float(line.split()[1]) for line in one.lines if line.startswith("took"))
    assert took < 8
    eventually(lambda: not one.remains())


@pytest.mark.cluster
def test_host_that_cannot_start_is_reported_with_its_log(driver: Callable[[str], Driver]) -> None:
    one = driver("""
        with SimulatedCluster() as cluster:
            os.environ["RAY_raylet_client_num_connect_attempts"] = "nonsense"
            try:
                cluster.add_slice("v4-8")
            except RuntimeError as error:
                print("refused:", error)
            print(cluster.slice_names)
    """)
    assert one.finish() == 0, "".join(one.lines)
    text = "".join(one.lines)
    assert "refused: Host v4-8-0-w0 ended while it started" in text
    assert "raylet ended with exit code" in text
    assert "[]" in text
