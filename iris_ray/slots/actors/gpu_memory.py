"""The memory of GPUs as NVIDIA's driver reports it. This needs nvidia-ml-py."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

ANSWER_S: Final = 60.0
"""How long NVIDIA's driver may take to answer. If it was idle, it first starts each GPU."""


class GpuMemory(NamedTuple):
    """The memory of a GPU.

    Attributes:
        total: bytes that programs can use, which CUDA reports as the size of the GPU; bytes that the driver reserves
            are left out.
        used: bytes that all programs use now.
        place: its place in the order of ``nvidia-smi``: the number of the GPU, and for a part of a GPU (MIG) the number
            of the part as well.
    """

    total: int
    used: int
    place: tuple[int, ...] = ()


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
    except Exception as error:  # NVMLError, or that the library is too old to have a function
        raise RuntimeError(f"NVIDIA's driver can't say: {error}") from None


def gpu_memory_in_time(names: Sequence[str], timeout_s: float = ANSWER_S) -> list[GpuMemory]:
    """Return the memory of GPUs as `gpu_memory` does, unless the driver hangs.

    Raises:
        NoLibraryError: nvidia-ml-py is not installed.
        RuntimeError: the driver can't be asked, or does not answer in time; the message says which.
    """
    answer: Future[list[GpuMemory]] = Future()

    def ask() -> None:
        try:
            answer.set_result(gpu_memory(names))
        except Exception as error:
            answer.set_exception(error)

    # a daemon: a call that hangs keeps no process from ending
    threading.Thread(target=ask, name="NVIDIA's driver", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        raise RuntimeError(f"NVIDIA's driver has not answered within {timeout_s:g} s") from None


def _memory_of(nvml: Any, name: str) -> GpuMemory:
    found = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
    place = _place_of(nvml, found, name)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(found, version=nvml.nvmlMemory_v2)
        return GpuMemory(memory.total - memory.reserved, memory.used, place)
    except nvml.NVMLError:  # drivers before version 510 don't tell their reserved bytes
        memory = nvml.nvmlDeviceGetMemoryInfo(found)
        return GpuMemory(memory.total, memory.used, place)


def _place_of(nvml: Any, found: Any, name: str) -> tuple[int, ...]:
    if name.isdecimal():
        return (int(name),)
    number = nvml.nvmlDeviceGetIndex(found)
    if not name.startswith("MIG-"):
        return (number,)
    return nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(found)), number
