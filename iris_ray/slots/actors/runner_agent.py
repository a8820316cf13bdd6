"""The process that stands for a host of a runner: while it lives, so does the host. It watches the slots' processes."""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import psutil

from iris_ray.processes.identity import ProcessIdentity
from iris_ray.processes.subtree import descendants
from iris_ray.processes.tree import ProcessTree, end_processes
from iris_ray.slots.actors.gpu_memory import gpu_memory
from iris_ray.slots.actors.slot_actor import join_task

LOOK_AGAIN_S = 0.02
OWNER = "IRIS_SLOT_PROCESS"
"""The variable that marks the processes that a slot's process has started, so that they are found after its end."""


def owner_of_this_process() -> str:
    """Return the value of `OWNER` for processes that this one starts."""
    return _owner(ProcessIdentity.of_this_process())


def _owner(process: ProcessIdentity) -> str:
    return f"{process.pid} {process.started}"


class RunnerAgent:
    """An actor for each host. The task that keeps the host makes it, and it ends with that task.

    Args:
        variables: environment variables that make it one of the task's processes.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        join_task()
        self._driver = asyncio.Lock()  # a driver that hangs takes one thread, and no others from `wait_gone`

    async def watch(self) -> None:
        """Never return: the call fails when this process or its host is gone."""
        await asyncio.Event().wait()

    async def alive(self, processes: Mapping[str, ProcessIdentity]) -> set[str]:
        """Return the names of the processes that are alive."""
        return {name for name, process in processes.items() if process.runs()}

    async def memory(self, processes: Collection[ProcessIdentity]) -> int:
        """Return the bytes of memory that processes and their children use."""
        return await asyncio.to_thread(lambda: sum(map(_memory_of, processes)))

    async def gpu_memory_in_use(self, names: Sequence[str]) -> list[int]:
        """Return the bytes that programs use of GPUs; nothing if the driver does not say, or an earlier call hangs."""
        if self._driver.locked():
            return []
        async with self._driver:
            with suppress(RuntimeError):
                return [each.used for each in await asyncio.to_thread(gpu_memory, names)]
        return []

    async def wait_gone(self, process: ProcessIdentity, timeout_s: float) -> bool:
        """Wait until a process is gone, and kill the programs that it has started. Return whether all are gone."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while process.runs():
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(LOOK_AGAIN_S)
        left_s = deadline - asyncio.get_running_loop().time()
        return await asyncio.to_thread(_end_programs, process, left_s) == []


def _end_programs(process: ProcessIdentity, timeout_s: float) -> list[str]:
    """End the programs that an ended process has started, as `end_processes` does."""
    programs = ProcessTree(process, _owner(process), variable=OWNER)
    return end_processes(programs.search(), programs.search, timeout_s)


def _memory_of(process: ProcessIdentity) -> int:
    """Return the bytes of a process tree without shared memory, which is Ray's object store, or files."""
    if not process.runs():
        return 0
    used = 0
    for pid in (process.pid, *descendants(process.pid)):
        with suppress(psutil.NoSuchProcess):
            memory = psutil.Process(pid).memory_info()
            used += memory.rss - getattr(memory, "shared", 0)
    return used
