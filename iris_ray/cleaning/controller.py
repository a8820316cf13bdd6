"""The service ``cleaning`` in the Controller: has the hosts cleaned, a few at a time, and tells what went."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

import ray

from iris_ray.actors.calls.ray_internals import on_host
from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening, Published
from iris_ray.actors.protocol.services import module_of
from iris_ray.cleaning.core import DAY_S, Limits
from iris_ray.cleaning.disk import KEEP_ALL, clean_this_machine
from iris_ray.cleaning.settings import HOST_FILES_DAYS, HOST_FILES_GB
from iris_ray.errors import ServiceUnavailableError
from iris_ray.model.cluster_settings import ClusterSetting
from iris_ray.model.workers import TPU

logger = logging.getLogger(__name__)

FIRST_S, EVERY_S = 300.0, 3600.0
"""Seconds after its start at which the Controller begins to clean, and between two rounds."""
LOOK_S = 2.0
"""How often it looks for changed settings, which begin a round at once."""
AT_A_TIME: Final = 16
"""How many hosts are cleaned at once."""
HOST_S: Final = 300.0
"""The time in which a host is cleaned; after it the round goes on without it."""
GB: Final = 1 << 30

_clean = ray.remote(num_cpus=0, max_retries=0)(clean_this_machine)


class CleaningInController(ControllerPart):
    """Cleans the head, and each host by a task of Ray's there."""

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._files = self._bytes = 0
        self._since = time.time()
        self._trouble: str | None = None

    async def run(self) -> None:
        limits, due_at = self._limits(), time.monotonic() + FIRST_S
        while True:
            await asyncio.sleep(LOOK_S)
            if time.monotonic() >= due_at or limits != self._limits():
                limits, due_at = self._limits(), time.monotonic() + EVERY_S
                await self.clean_all(*limits)

    def _limits(self) -> tuple[Limits, Limits]:
        """Return what may stay of old files, and of the output directories of tasks."""
        limits, of_outputs = self._set_limits(HOST_FILES_DAYS, HOST_FILES_GB), KEEP_ALL
        with contextlib.suppress(ServiceUnavailableError):
            outputs = module_of("outputs", "settings")
            of_outputs = self._set_limits(outputs.TASK_OUTPUT_DAYS, outputs.HOST_OUTPUT_GB)
        return limits, of_outputs

    def _set_limits(self, days: ClusterSetting[int | None], gigabytes: ClusterSetting[int | None]) -> Limits:
        value = self.controller.state.settings.value
        most = value(gigabytes)
        return Limits(value(days), None if most is None else most * GB)

    async def clean_all(self, limits: Limits, of_outputs: Limits) -> None:
        """Clean every machine that there is now."""
        if limits.keep_all and of_outputs.keep_all:
            return
        self._trouble = None
        if limits.days is not None and (gone := await self.controller.contained.forget_records(limits.days * DAY_S)):
            logger.info("removed %d copies of unreadable records, which were older than %g days", gone, limits.days)
        self._tell("the head", await self.in_thread(clean_this_machine, limits, of_outputs, False))
        free = asyncio.Semaphore(AT_A_TIME)

        async def clean(node_id: str, address: str, name: str, has_chips: bool) -> None:
            async with free:
                try:
                    task = _clean.options(**on_host(node_id, address)).remote(limits, of_outputs, has_chips)
                    async with asyncio.timeout(HOST_S):
                        self._tell(name, await asyncio.wrap_future(task.future()))
                except Exception as error:  # it is gone, its disk hangs, or it has another iris_ray
                    logger.info("%s was not cleaned: %s", name, error)

        workers = list(self.controller.state.workers.values())
        await asyncio.gather(
            *(clean(one.node_id, one.address, one.name, bool(one.resources.get(TPU))) for one in workers)
        )
        self.publish(
            Published(
                about={
                    "files": self._files,
                    "bytes": self._bytes,
                    "since": self._since,
                    "cleaned_at": time.time(),
                    "trouble": self._trouble,
                }
            )
        )

    def _tell(self, name: str, cleaned: Mapping[str, Any]) -> None:
        for place, files in cleaned["files"].items():
            size = cleaned["bytes"][place]
            self._files, self._bytes = self._files + files, self._bytes + size
            logger.info("removed %d files or directories, %d MB, on %s: %s", files, size >> 20, name, place)
        for problem in cleaned["problems"]:
            self._trouble = f"{name}: {problem}"
            logger.warning("can't be removed on %s: %s", name, problem)
