"""What is asked of hosts for slots, and which of a host's devices a process sees."""

from typing import Any

import pytest

from iris_ray import SlotHosts
from iris_ray.errors import InvalidSlotError, UnknownTPUTypeError
from iris_ray.slots.actors.runners import visible_devices
from iris_ray.slots.core.devices import DeviceKind


def test_tpu_type_says_how_many_chips_hosts_have() -> None:
    hosts = SlotHosts(2, tpu_type="v4-16")
    assert (hosts.count, hosts.kind, hosts.devices) == (2, DeviceKind.TPU, 4)


def test_host_is_one_cpu_device_or_one_per_accelerator() -> None:
    assert len(SlotHosts(devices=8).runner.devices) == 1
    assert len(SlotHosts(kind=DeviceKind.GPU, devices=8).runner.devices) == 8
    assert len(SlotHosts(tpu_type="v4-8").runner.devices) == 4


def test_whole_slice_is_one_runner_used_by_one_slot() -> None:
    runner = SlotHosts(tpu_type="v4-16", whole_slices=True).runner
    assert (len(runner.devices), list(runner.sets(8)), list(runner.sets(4))) == (8, [tuple(range(8))], [])
    assert len(SlotHosts(tpu_type="v4-512", whole_slices=True).runner.devices) == 256
    assert SlotHosts(tpu_type="v4-8", whole_slices=True).runner == SlotHosts(tpu_type="v4-8").runner


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"count": 0}, "count is 0"),
        ({"memory": 1.5}, "memory is 1.5"),
        ({"kind": "gpu"}, "give a DeviceKind"),
        ({"kind": DeviceKind.TPU}, "say which slices"),
        ({"whole_slices": True}, "needs a type of slices"),
        ({"kind": DeviceKind.GPU, "tpu_type": "v4-8"}, "have no GPUs"),
    ],
)
def test_senseless_hosts_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSlotError, match=said):
        SlotHosts(**wrong)


def test_unknown_type_is_refused_with_nearest() -> None:
    with pytest.raises(UnknownTPUTypeError, match="v4-16"):
        SlotHosts(tpu_type="v4-161")


def test_runner_with_some_gpus_uses_the_hosts_names() -> None:
    assert visible_devices(DeviceKind.GPU, (0, 1), 2, ("4", "6"))["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert visible_devices(DeviceKind.GPU, (1,), 2)["CUDA_VISIBLE_DEVICES"] == "1"
    assert visible_devices(DeviceKind.CPU, (0,), 1, ("4",))["CUDA_VISIBLE_DEVICES"] == ""


def test_partial_chips_are_a_rectangle() -> None:
    some = visible_devices(DeviceKind.TPU, (2, 3), 4)
    assert (some["TPU_VISIBLE_CHIPS"], some["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == ("2,3", "1,2,1")
    assert "TPU_VISIBLE_CHIPS" not in visible_devices(DeviceKind.TPU, (0, 1, 2, 3), 4)
