"""The memory of GPUs as NVIDIA's driver reports it. This needs nvidia-ml-py."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class GpuMemory(NamedTuple):
    """The memory of a GPU.

    Attributes:
        total: bytes that programs can use; bytes that the driver reserves are left out.
        used: bytes that all programs use now.
    """

    total: int
    used: int


class NoLibraryError(RuntimeError):
    """nvidia-ml-py is not installed. A retry would fail as well."""


def gpu_memory(names: Sequence[str]) -> list[GpuMemory]:
    """Return the memory of GPUs of this host.

    Args:
        names: as ``CUDA_VISIBLE_DEVICES`` has them: numbers or UUIDs.

    Raises:
        NoLibraryError: nvidia-ml-py is not installed.
        RuntimeError: the driver can't be asked; the message says why.
    """
    try:
        import pynvml
    except ImportError:
        raise NoLibraryError("nvidia-ml-py is not installed on that host (pip install nvidia-ml-py)") from None
    try:
        pynvml.nvmlInit()
        try:
            return [_memory_of(pynvml, name) for name in names]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVIDIA's driver can't say: {error}") from None


def _memory_of(nvml: Any, name: str) -> GpuMemory:
    found = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(found, version=nvml.nvmlMemory_v2)
        return GpuMemory(memory.total - memory.reserved, memory.used)
    except nvml.NVMLError:  # drivers before version 510 don't tell their reserved bytes
        memory = nvml.nvmlDeviceGetMemoryInfo(found)
        return GpuMemory(memory.total, memory.used)
