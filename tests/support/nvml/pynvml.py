"""Stands for nvidia-ml-py: the driver of a host whose GPUs the variable `IRIS_TEST_NVML` describes, as JSON.

It is a list of objects with the bytes ``total``, ``reserved`` and ``used``. Without ``reserved`` the driver is
old. One with ``mig``, the numbers of a GPU and of a part, stands for that part of it.
"""

import json
import os
from types import SimpleNamespace
from typing import Any

nvmlMemory_v2 = 2


class NVMLError(Exception):
    """An error of the driver."""


def _gpus() -> list[dict[str, Any]]:
    if "IRIS_TEST_NVML" not in os.environ:
        raise NVMLError("Driver Not Loaded")
    found: list[dict[str, Any]] = json.loads(os.environ["IRIS_TEST_NVML"])
    return found


def nvmlInit() -> None:
    """Find the driver."""
    _gpus()


def nvmlShutdown() -> None:
    """Let it go."""


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    """Return the handle of a GPU, by number."""
    if index >= len(_gpus()):
        raise NVMLError("Invalid Argument")
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    """Return the handle of a GPU or a part, by UUID: GPU-1, MIG-2."""
    return nvmlDeviceGetHandleByIndex(int(uuid.partition("-")[2]))


def nvmlDeviceGetIndex(handle: int) -> int:
    """Return the number of a GPU, or of a part of a GPU among its parts."""
    number: int = _gpus()[handle].get("mig", [None, handle])[1]
    return number


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: int) -> int:
    """Return the handle of the GPU that has a part."""
    gpu: int = _gpus()[handle]["mig"][0]
    return gpu


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> Any:
    """Return the memory of a GPU. Only the second version tells what the driver keeps, and not as used."""
    gpu = _gpus()[handle]
    if version == nvmlMemory_v2:
        if "reserved" not in gpu:
            raise NVMLError("Function Not Found")
        return SimpleNamespace(**gpu)
    return SimpleNamespace(total=gpu["total"], used=gpu["used"] + gpu.get("reserved", 0))
