"""Stands for nvidia-ml-py: the driver of a host whose GPUs the variable `IRIS_TEST_NVML` describes, as JSON.

It is a list of objects with the bytes ``total``, ``reserved`` and ``used``. Without ``reserved`` the driver is
old.
"""

import json
import os
from types import SimpleNamespace
from typing import Any

nvmlMemory_v2 = 2


class NVMLError(Exception):
    """An error of the driver."""


def _gpus() -> list[dict[str, int]]:
    if "IRIS_TEST_NVML" not in os.environ:
        raise NVMLError("Driver Not Loaded")
    found: list[dict[str, int]] = json.loads(os.environ["IRIS_TEST_NVML"])
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
    """Return the handle of a GPU, by UUID: GPU-1."""
    return nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> Any:
    """Return the memory of a GPU. Only the second version tells what the driver keeps, and not as used."""
    gpu = _gpus()[handle]
    if version == nvmlMemory_v2:
        if "reserved" not in gpu:
            raise NVMLError("Function Not Found")
        return SimpleNamespace(**gpu)
    return SimpleNamespace(total=gpu["total"], used=gpu["used"] + gpu.get("reserved", 0))
