"""SimulatedCluster without a cluster: arguments, what a host says about itself, machines and their process trees."""

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing import Preemption, SimulatedCluster
from iris_ray.testing.machine import Machine
from iris_ray.testing.tpu_host import TPUHost


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> float:
    """Waits until the condition holds. Returns how long that took, in seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it never happened"
        time.sleep(0.02)
    return time.monotonic() - began


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


TREE = """
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
    machine = a_machine(TREE, tmp_path, lifeline[1])
    eventually(lambda: len(machine.pids()) == 2 and (tmp_path / "ready").exists())
    pids = machine.pids()
    machine.kill()
    assert not machine.running
    assert machine.pids() == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    machine.kill()  # a second time is harmless


def test_machine_freeze_stops_all_and_thaw_continues(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(TREE, tmp_path, lifeline[1])
    eventually(lambda: len(machine.pids()) == 2 and (tmp_path / "ready").exists())
    machine.freeze()
    assert {psutil.Process(pid).status() for pid in machine.pids()} == {psutil.STATUS_STOPPED}
    machine.thaw()
    eventually(lambda: {psutil.Process(pid).status() for pid in machine.pids()} == {psutil.STATUS_SLEEPING})
    machine.freeze()
    machine.kill()
    assert not machine.running


def test_machine_ends_with_its_command(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    machine = a_machine(TREE.replace("time.sleep(1000)", "time.sleep(0.2)"), tmp_path, lifeline[1])
    eventually(lambda: not machine.running)
    assert machine.pids() == []


def test_machine_unknown_program_says_so_in_its_log(tmp_path: Path, lifeline: tuple[int, int]) -> None:
    log = tmp_path / "log"
    machine = Machine(["/no/such/program"], env=os.environ, cwd=tmp_path, log=log, lifeline=lifeline[1])
    eventually(lambda: not machine.running)
    assert "cannot run /no/such/program" in log.read_text()
