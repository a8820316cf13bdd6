"""The process that stands for a runner: while it lives, so does the host. It sees whether processes are gone."""

import asyncio
from collections.abc import Mapping

import psutil
import ray

from iris_ray.actors.slots.slot_actor import ProcessIdentity

LOOK_AGAIN_S = 0.02


class RunnerAgent:
    """One for each reserved host."""

    async def node_id(self) -> str:
        """Return the id of the Ray node."""
        return str(ray.get_runtime_context().get_node_id())

    async def watch(self) -> None:
        """Never return: the call fails when this process or its host is gone."""
        await asyncio.Event().wait()

    async def alive(self, processes: Mapping[str, ProcessIdentity]) -> set[str]:
        """Return the names of those processes that are there."""
        return {name for name, process in processes.items() if _is_alive(process)}

    async def wait_gone(self, process: ProcessIdentity, timeout_s: float) -> bool:
        """Wait until a process is gone; return whether it is."""
        for _ in range(round(timeout_s / LOOK_AGAIN_S)):
            if not _is_alive(process):
                return True
            await asyncio.sleep(LOOK_AGAIN_S)
        return not _is_alive(process)


def _is_alive(process: ProcessIdentity) -> bool:
    try:
        found = psutil.Process(process.pid)
        return abs(found.create_time() - process.began) < 1.0 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
