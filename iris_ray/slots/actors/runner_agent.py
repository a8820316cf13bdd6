"""The process that stands for a host of a runner: while it lives, so does the host. It watches the slots' processes."""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import psutil

from iris_ray.slots.actors.gpu_memory import gpu_memory
from iris_ray.slots.actors.slot_actor import ProcessIdentity, join_task

LOOK_AGAIN_S = 0.02
OWNER = "IRIS_SLOT_PROCESS"
"""The variable that marks the processes that a slot's process has started, so that they are found after its end."""


def owner_of_this_process() -> str:
    """Return the value of `OWNER` for processes that this one starts."""
    return _owner(os.getpid(), psutil.Process().create_time())


def _owner(pid: int, began: float) -> str:
    return f"{pid} {began:.2f}"


class RunnerAgent:
    """An actor for each host. The task that keeps the host makes it, and it ends with that task.

    Args:
        variables: environment variables that make it one of the task's processes.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        join_task()

    async def watch(self) -> None:
        """Never return: the call fails when this process or its host is gone."""
        await asyncio.Event().wait()

    async def alive(self, processes: Mapping[str, ProcessIdentity]) -> set[str]:
        """Return the names of the processes that are alive."""
        return {name for name, process in processes.items() if _is_alive(process)}

    async def memory(self, processes: Collection[ProcessIdentity]) -> int:
        """Return the bytes of memory that processes and their children use."""
        return await asyncio.to_thread(lambda: sum(map(_memory_of, processes)))

    async def gpu_memory_in_use(self, names: Sequence[str]) -> list[int]:
        """Return the bytes that programs use of GPUs; nothing if the driver does not say."""
        try:
            return [each.used for each in await asyncio.to_thread(gpu_memory, names)]
        except RuntimeError:
            return []

    async def wait_gone(self, process: ProcessIdentity, timeout_s: float) -> bool:
        """Wait until a process is gone, and kill what it has started as its own; return whether all are gone."""
        for _ in range(round(timeout_s / LOOK_AGAIN_S)):
            if not _is_alive(process) and not await asyncio.to_thread(_kill_orphans, process):
                return True
            await asyncio.sleep(LOOK_AGAIN_S)
        return False


def _kill_orphans(process: ProcessIdentity) -> bool:
    """Kill the processes that an ended process has started, by their environment; return whether there were any."""
    found = False
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get(OWNER) == _owner(process.pid, process.began):
                each.kill()
                found = each.status() != psutil.STATUS_ZOMBIE or found
    return found


def _is_alive(process: ProcessIdentity) -> bool:
    try:
        found = psutil.Process(process.pid)
        return abs(found.create_time() - process.began) < 1.0 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _memory_of(process: ProcessIdentity) -> int:
    """Return the bytes of a process tree without shared memory, which is Ray's object store, or files."""
    if not _is_alive(process):
        return 0
    used = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for each in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                memory = each.memory_info()
                used += memory.rss - getattr(memory, "shared", 0)
    return used
