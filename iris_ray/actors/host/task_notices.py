"""Delivers a notice to a task, as a file and a SIGTERM, and waits until the task has saved its state."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

from iris_ray.actors.host.processes.watched_process import WatchedProcess
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.model.notices import Notice

logger = logging.getLogger(__name__)

WRITE_AGAIN_S = 0.5
SAVED_POLL_S = 0.02
"""Seconds between two looks whether a task has saved its state; its gang moves once all tasks have."""
LATE_ANSWER_S = 5.0
"""Seconds after a notice's deadline after which a caller gets an answer in any case. It allows for hosts whose clocks
differ; a caller that still wants to know asks again."""


class TaskNotices:
    """Tells one task about notices.

    Args:
        process: the task's process.
        files: the files that the process and its host share.
        has_started: whether user code has begun to run in the process. Before that it has no signal handler.
        background: runs the delivery.
    """

    def __init__(
        self,
        process: WatchedProcess,
        files: TaskFiles,
        has_started: Callable[[], bool],
        background: BackgroundTasks,
    ) -> None:
        self._process = process
        self._files = files
        self._has_started = has_started
        self._background = background
        self._latest: Notice | None = None
        self._delivery: asyncio.Task[bool] | None = None
        self._was_signalled = False

    async def deliver(self, notice: Notice) -> bool:
        """Tell the task, and return whether it has saved its state by the notice's deadline, or a moment later.

        A new notice replaces the one before. The same notice is told once, however many callers wait for its answer.
        """
        if self._delivery is None or notice != self._latest:
            if self._delivery is not None:
                self._delivery.cancel()
            self._latest = notice
            self._delivery = self._background.start(self._tell(notice), "delivering a notice to a task")
        delivery = self._delivery
        await asyncio.wait({delivery}, timeout=max(0.0, notice.deadline - time.time()) + LATE_ANSWER_S)
        return delivery.done() and not delivery.cancelled() and delivery.result()

    async def _tell(self, notice: Notice) -> bool:
        """Deliver a notice and wait until the task has saved its state or has ended; return whether it has saved."""
        while not self._process.ended and not self._write(notice):
            await self._process.wait_at_most(WRITE_AGAIN_S)
        while not self._process.ended and not self._has_started():
            await self._process.wait_at_most(SAVED_POLL_S)
        if not self._was_signalled:  # a second signal would start a handler that is saving once more, within itself
            self._was_signalled = True
            self._process.signal(signal.SIGTERM)
        while not self._process.ended and not os.path.exists(self._files.saved):
            await self._process.wait_at_most(SAVED_POLL_S)
        return os.path.exists(self._files.saved)

    def _write(self, notice: Notice) -> bool:
        """Return whether the notice could be written; the disk may be full now and have room later."""
        try:
            self._files.write_notice(notice)
        except OSError as error:
            logger.warning("the notice %s can't be written for now: %s", notice.reason, error)
            return False
        return True
