"""SimulatedCluster: what it refuses at once, what its hosts say about themselves, and its directory."""

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing import Preemption, SimulatedCluster
from iris_ray.testing import workspace as module
from iris_ray.testing.tpu_host import Host, checked_seconds, tpu_host
from iris_ray.testing.workspace import Workspace
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("impossible", "words"),
    [
        ({"slices": ["v4-8"]}, "maps TPU types"),
        ({"slices": {"v4-8": -1}}, "0 or more"),
        ({"slices": {"v4-8": True}}, "is True"),
        ({"slices": {"v4-8": 1.0}}, "give an int"),
        ({"slices": {"v4-8": "2"}}, "give an int"),
        ({"cpus_per_host": 0}, "cpus_per_host"),
        ({"cpus_per_host": True}, "cpus_per_host"),
        ({"cpus_per_host": 1.5}, "cpus_per_host"),
    ],
)
def test_constructor_impossible_cluster_refused(impossible: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SimulatedCluster(**impossible)


def test_constructor_unknown_type_refused() -> None:
    with pytest.raises(UnknownTPUTypeError):
        SimulatedCluster({"v4-9": 1})


def test_not_started_cluster_says_so() -> None:
    cluster = SimulatedCluster({"v4-8": 1})
    assert cluster.slice_names == []
    with pytest.raises(InvalidRequestError, match="not running"):
        _ = cluster.address
    with pytest.raises(InvalidRequestError, match="not running"):
        cluster.kill_host("v4-8-0", 0)
    cluster.shutdown()


def a_host(tpu_type: str, worker_id: int) -> Host:
    config = get_tpu_config(tpu_type)
    addresses = [f"127.1.2.{number}" for number in range(config.vm_count)]
    return tpu_host("my-slice", worker_id, config, "ab" * 28, addresses, Path("/tmp/nowhere"))


def test_host_resources_head_resource_only_on_worker_0() -> None:
    assert a_host("v4-32", 0).resources == {
        "TPU": 4,
        "accelerator_type:TPU-V4": 1,
        "my-slice": 1,
        "TPU-v4-32-head": 1,
    }
    assert a_host("v4-32", 3).resources == {"TPU": 4, "accelerator_type:TPU-V4": 1, "my-slice": 1}
    assert a_host("v6e-8", 0).resources["TPU"] == 8


def test_host_describes_itself_like_ray_on_tpu_vm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same environment, read by Ray's own detection, gives the same labels and resources."""
    from ray._private.accelerators import TPUAcceleratorManager

    for tpu_type in ("v4-32", "v5litepod-16", "v6e-8", "v7x-16"):
        host = a_host(tpu_type, 0)
        for name, value in host.variables.items():
            monkeypatch.setenv(name, value)
        labels = TPUAcceleratorManager.get_current_node_accelerator_labels()
        accelerator = TPUAcceleratorManager.get_current_node_accelerator_type()
        assert host.labels == {**labels, "ray.io/accelerator-type": accelerator}
        found = TPUAcceleratorManager.get_current_node_additional_resources()
        assert host.resources == {"TPU": host.chips, f"accelerator_type:{accelerator}": 1, **found}


def test_host_environment_drops_facts_of_drivers_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "elsewhere")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    monkeypatch.setenv("JAX_PLATFORMS", "mine")
    monkeypatch.setenv("MY_OWN", "kept")
    environment = a_host("v4-16", 1).environment()
    assert not {"TPU_VISIBLE_CHIPS", "MEGASCALE_COORDINATOR_ADDRESS", "RAY_ADDRESS"} & environment.keys()
    assert environment["JAX_PLATFORMS"] == "mine"
    assert environment["MY_OWN"] == "kept"
    assert environment["TPU_WORKER_HOSTNAMES"] == "127.1.2.0,127.1.2.1"


def test_preemption_cancelled_leaves_the_hosts() -> None:
    killed: list[str] = []
    preemption = Preemption("s", 60.0, lambda: killed.append("s"))
    preemption.start()
    preemption.cancel()
    assert not killed
    assert not preemption.done
    assert not preemption.wait(0)


# -- notices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notice_s", [-1.0, float("nan"), float("inf"), 1e10, 10**100, True, "30"])
def test_invalid_notice_time_is_refused(notice_s: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"notice_s is .*; give seconds, 0 or more, 31536000 at most"):
        checked_seconds("notice_s", notice_s)


# -- the directory ----------------------------------------------------------------------------------------------------


def test_slow_janitor_is_reaped_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_JANITOR_TIMEOUT_S", 0.1)
    one = Workspace()
    root, janitor, held = one.root, one._janitor.pid, os.dup(one._lifeline)
    try:
        one.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del one
            gc.collect()
        assert root.exists()
    finally:
        os.close(held)
    wait_until(lambda: not root.exists())
    wait_until(lambda: not psutil.pid_exists(janitor))
