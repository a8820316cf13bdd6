"""The service of output directories on a host: it keeps the directories of running tasks within the limit."""

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.host.services import Host, HostEvent, HostPart, TaskOver
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import IrisError
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.calls import OutputCalls
from iris_ray.outputs.core import MOST_ENTRIES, Removed
from iris_ray.outputs.directory import OutputDirectory, Trimmed, outputs_directory
from iris_ray.outputs.settings import GB, TASK_OUTPUT_GB

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""The pause between two looks at the directories of running tasks."""
PAUSE, LONGEST_PAUSE_S = 20.0, 60.0
"""The pause is also at least this many times the time of the look, so that a million files cost a host 5 % of a core,
and at most this long, since programs write meanwhile."""
ASK_S = 60.0
"""The time for which the Controller's word about the limit is used."""
ANSWER_S = 10.0


class OutputsOnHost(HostPart):
    """Looks at the output directory of each running task every `LOOK_S`, and once more after its end."""

    def __init__(self, host: Host, running: RunningPart[Any]) -> None:
        super().__init__(host, running)
        default = TASK_OUTPUT_GB.parse(TASK_OUTPUT_GB.default)
        self._limit = None if default is None else default * GB
        self._asked_at = -ASK_S
        self._trims = asyncio.Lock()
        self._told: set[TaskAttemptId] = set()  # of which files that can't be removed

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            if files := [watch.files for watch in self.host.watches.values() if not watch.gone.is_set()]:
                for attempt in sorted(await self.in_thread(attempts_of, files)):
                    await self._look(attempt)
            await asyncio.sleep(min(LONGEST_PAUSE_S, max(LOOK_S, PAUSE * (time.monotonic() - began))))

    async def happened(self, events: list[HostEvent]) -> None:
        for event in events:
            match event:
                case TaskOver(attempt):
                    if not await self.in_thread(self._directory(attempt).remove_if_unused):
                        await self._look(attempt)
                    self._told.discard(attempt)

    async def _look(self, attempt: TaskAttemptId) -> None:
        await self._learn_limit()
        directory = self._directory(attempt)
        async with self._trims:
            had, done = await self.in_thread(_trimmed, directory, self._limit)
        if done.removed.files and not had.files:  # `iris-ray cp --output` tells of all
            logger.warning("%s", in_words(attempt, done.removed, self._limit, directory.path))
        if done.problem is not None and attempt not in self._told:
            self._told.add(attempt)
            logger.warning("can't be removed from %s, which has too much: %s", directory.path, done.problem)

    def _directory(self, attempt: TaskAttemptId) -> OutputDirectory:
        return OutputDirectory.of(outputs_directory(self.host.directory()), attempt)

    async def _learn_limit(self) -> None:
        """Ask for the limit that operators have set. Without an answer, the last one holds."""
        if time.monotonic() < self._asked_at + ASK_S:
            return
        self._asked_at = time.monotonic()
        try:
            pool = Actor[OutputCalls](self.host.pool.handle, self.host.pool.name)
            reply = await pool.ask_within(ANSWER_S, OutputCalls.most_bytes)
        except IrisError as error:
            logger.info("the limit for output directories is not known: %s", error)
            return
        if not isinstance(reply, Unreachable):
            self._limit = reply


def _trimmed(directory: OutputDirectory, most_bytes: int | None) -> tuple[Removed, Trimmed]:
    """Keep a directory within its limits. Return what was removed before, and what was done now."""
    return directory.removed(), directory.trim(most_bytes)


def attempts_of(files: Collection[TaskFiles]) -> set[TaskAttemptId]:
    """Return the attempts of tasks that run in these processes."""
    started = filter(None, map(StartedTask.read, files))
    return {TaskAttemptId(task.job_id, task.task_index, task.attempt) for task in started}


def in_words(attempt: TaskAttemptId, done: Removed, most_bytes: int | None, path: Path) -> str:
    """Return what people are told of the first removal."""
    limit = (
        f"{MOST_ENTRIES:,} files"
        if most_bytes is None
        else f"{most_bytes // GB} GB (the setting {TASK_OUTPUT_GB.name})"
    )
    return (
        f"task {attempt.task_index} of {attempt.job_id} has more in its $IRIS_OUTPUT_DIR than may be kept, {limit}, or"
        f" than leaves a tenth of the disk free: {done.files} of its oldest files, {done.bytes >> 20} MB, were removed"
        f" from {path}"
    )
