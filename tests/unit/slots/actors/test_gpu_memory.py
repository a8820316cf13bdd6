"""The memory of GPUs, as a driver says that stands for NVIDIA's."""

import sys
import threading
from collections.abc import Callable

import pytest

from iris_ray.slots.actors import gpu_memory as driver_calls
from iris_ray.slots.actors.gpu_memory import GpuMemory, NoLibraryError, gpu_memory, gpu_memory_in_time

GB = 10**9


@pytest.fixture
def driver(nvidia: Callable[..., None]) -> None:
    nvidia(
        {"total": 80 * GB, "reserved": GB, "used": 3 * GB},
        {"total": 40 * GB, "used": 0},
        {"total": 20 * GB, "reserved": 0, "used": 0, "mig": [1, 6]},
    )


@pytest.mark.usefixtures("driver")
def test_driver_says_memory_without_what_it_keeps_by_number_and_uuid() -> None:
    large, small = GpuMemory(79 * GB, 3 * GB, (0,)), GpuMemory(40 * GB, 0, (1,))
    assert gpu_memory(["1", "GPU-0"]) == gpu_memory_in_time(["1", "GPU-0"]) == [small, large]
    assert gpu_memory(["GPU-1", "0"]) == [small, large]
    assert gpu_memory(["MIG-2"]) == [GpuMemory(20 * GB, 0, (1, 6))]


@pytest.mark.usefixtures("driver")
def test_missing_driver_and_gpu_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="Invalid Argument"):
        gpu_memory(["3"])
    monkeypatch.delenv("IRIS_TEST_NVML")
    with pytest.raises(RuntimeError, match="driver can't say: Driver Not Loaded"):
        gpu_memory(["0"])


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="nvidia-ml-py is not installed"):
        gpu_memory(["0"])
    with pytest.raises(NoLibraryError):
        gpu_memory_in_time(["0"])


@pytest.mark.usefixtures("driver")
def test_library_without_a_function_is_an_error_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pynvml.nvmlDeviceGetMemoryInfo")
    with pytest.raises(RuntimeError, match="driver can't say: module 'pynvml' has no attribute"):
        gpu_memory(["0"])


def test_hanging_driver_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(driver_calls, "gpu_memory", lambda names: [GpuMemory(9, 5)] if goes_on.wait(20) else [])
    with pytest.raises(RuntimeError, match=r"driver has not answered within 0\.05 s"):
        gpu_memory_in_time(["0"], 0.05)
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "NVIDIA's driver"] == [True]
    goes_on.set()
