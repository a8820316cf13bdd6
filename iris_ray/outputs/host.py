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
from iris_ray.actors.host.services import Host, HostPart
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import IrisError
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.calls import OutputCalls
from iris_ray.outputs.core import MOST_ENTRIES, Removed
from iris_ray.outputs.directory import OutputDirectory, outputs_directory
from iris_ray.outputs.settings import GB, TASK_OUTPUT_GB

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""The pause between two looks at the directories of running tasks."""
PAUSE = 20.0
"""The pause is also at least this many times the time of the look: a million files cost a host 5 % of a core."""
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

    async def run(self) -> None:
        known: set[TaskAttemptId] = set()
        while True:
            began = time.monotonic()
            files = [watch.files for watch in self.host.watches.values() if not watch.gone.is_set()]
            if files or known:
                await self._learn_limit()
                running = await self.in_thread(attempts_of, files)
                for attempt in sorted(running | known):
                    await self._look(attempt, attempt in running)
                known = running
            await asyncio.sleep(max(LOOK_S, PAUSE * (time.monotonic() - began)))

    async def _look(self, attempt: TaskAttemptId, runs: bool) -> None:
        directory = OutputDirectory.of(outputs_directory(self.host.directory()), attempt)
        had = await self.in_thread(directory.removed)
        done = await self.in_thread(directory.trim, self._limit)
        if not runs:
            await self.in_thread(directory.remove_if_unused)
        if done.files and not had.files:  # `iris-ray cp --output` tells of all
            logger.warning("%s", in_words(attempt, done, self._limit, directory.path))

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
        f"task {attempt.task_index} of {attempt.job_id} has more in its $IRIS_OUTPUT_DIR than may be kept, {limit}:"
        f" {done.files} of its oldest files, {done.bytes >> 20} MB, were removed from {path}"
    )
