"""Makes a host ready for its first task: ends leftovers of earlier tasks, waits for free chips."""

import asyncio
import logging
import subprocess

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.host.chips import Devices, NotFree, wait_until_free
from iris_ray.actors.host.directories import host_directory
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.reaper import start_reaper

logger = logging.getLogger(__name__)


class HostPreparation:
    """Prepares one host once: tasks that start on it later belong to the current actor.

    Args:
        name: the host's name, for messages.
        ledger: the host's record of task processes.
        devices: the host's chips, if its tasks have them to themselves; else None.
        background: runs the preparation.
    """

    def __init__(self, name: str, ledger: ProcessLedger, devices: Devices | None, background: BackgroundTasks) -> None:
        self._name = name
        self._ledger = ledger
        self._devices = devices
        self._background = background
        self._has_reaper = False
        self._latest: asyncio.Task[NotFree | None] | None = None

    async def ensure(self) -> NotFree | None:
        """Prepare the host, unless that has succeeded before. Concurrent callers wait for one try.

        Returns:
            None once the host is ready, or why its chips are not free.

        Raises:
            RuntimeError: processes of an earlier task can't be ended, and the next task would need their chips.
        """
        if self._latest is None or _has_failed(self._latest):
            self._latest = self._background.start(self._prepare(), f"preparing {self._name}")
        return await asyncio.shield(self._latest)

    async def _prepare(self) -> NotFree | None:
        if left := await asyncio.to_thread(self._ledger.end_leftovers):
            why = f"{self._name}: processes of an earlier task can't be ended: {', '.join(left)}"
            if self._devices is not None:
                raise RuntimeError(why)
            logger.warning("%s", why)  # they hold no chips, and other tasks may run beside them
        await self._start_reaper()
        if self._devices is None:
            return None
        return await asyncio.to_thread(wait_until_free, self._devices, self._ledger)

    async def _start_reaper(self) -> None:
        """Start a reaper that ends the host's tasks if this actor dies."""
        if self._has_reaper:
            return
        try:
            await asyncio.to_thread(start_reaper, host_directory(), self._devices is not None)
            self._has_reaper = True
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("%s: if its driver is killed, daemons of its tasks will live on: %s", self._name, error)


def _has_failed(preparation: "asyncio.Task[NotFree | None]") -> bool:
    return preparation.done() and (preparation.exception() is not None or preparation.result() is not None)
