"""The memory of GPUs, as a driver says that stands for NVIDIA's."""

import json
import sys
from pathlib import Path

import pytest

from iris_ray.slots.actors.gpu_memory import GpuMemory, gpu_memory

STAND_IN = Path(__file__).parents[3] / "support" / "nvml"
GB = 10**9


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    gpus = [{"total": 80 * GB, "reserved": GB, "used": 3 * GB}, {"total": 40 * GB, "used": 0}]
    monkeypatch.setenv("IRIS_TEST_NVML", json.dumps(gpus))


@pytest.mark.usefixtures("driver")
def test_driver_says_memory_without_what_it_keeps_by_number_and_uuid() -> None:
    assert gpu_memory(["1", "GPU-0"]) == [GpuMemory(40 * GB, 0), GpuMemory(79 * GB, 3 * GB)]


@pytest.mark.usefixtures("driver")
def test_missing_driver_and_gpu_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="Invalid Argument"):
        gpu_memory(["2"])
    monkeypatch.delenv("IRIS_TEST_NVML")
    with pytest.raises(RuntimeError, match="driver can't say: Driver Not Loaded"):
        gpu_memory(["0"])


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="nvidia-ml-py is not installed"):
        gpu_memory(["0"])
