"""Work that an actor does beside its calls, such as watching a process. Its errors are logged."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_S = 1.0
"""The pause between an unexpected error and the next try."""


class BackgroundTasks:
    """Runs coroutines beside an actor's calls, and logs the error of each one that fails.

    It holds a strong reference to each task until the task ends: asyncio holds only a weak one, so a task without an
    owner may be collected in the middle of its work, and an owner that keeps a failed task hides its error.

    Args:
        on_error: called with each error after it was logged. Cancellation is not an error.

    Example:
        >>> background = BackgroundTasks()
        >>> background.start(relay.run(), "sending the last lines")  # logs "sending the last lines failed", if it does
        >>> await background.all_ended()
    """

    def __init__(self, on_error: Callable[[BaseException], object] | None = None) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Return the number of tasks that have not ended."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], what: str) -> "asyncio.Task[T]":
        """Start a coroutine and return at once.

        Args:
            work: the coroutine. A caller that awaits its task gets the error as well.
            what: a phrase that names the work, such as "watching job 7"; log messages begin with it.
        """
        task = until_the_end(asyncio.create_task(work, name=what))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def repeat(self, step: Callable[[], Awaitable[object]], what: str) -> "asyncio.Task[None]":
        """Start to take a step again and again, as `repeat` does."""
        return self.start(repeat(step, what), what)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    async def all_ended(self) -> None:
        """Wait until all tasks have ended, including tasks that start meanwhile.

        A task must not call this itself: it would wait for itself.
        """
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("%s failed", task.get_name(), exc_info=error)
        if self._on_error is not None:
            self._on_error(error)


def until_the_end(task: "asyncio.Task[T]") -> "asyncio.Task[T]":
    """Return a task that may still wait when its process ends. Its owner keeps it until then.

    Otherwise asyncio would log that the task is destroyed.
    """
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # as in asyncio.gather
    return task


async def repeat(step: Callable[[], Awaitable[object]], what: str, pause_s: float = PAUSE_S) -> None:
    """Take a step again and again until it returns True. Log an unexpected error, and go on after a pause.

    Args:
        step: takes its own pauses.
        what: a phrase that names the work, such as "watching job 7"; log messages begin with it.
        pause_s: the pause after an error; seconds.
    """
    while True:
        try:
            if await step() is True:
                return
        except Exception:
            logger.exception("%s failed; going on in %g s", what, pause_s)
            await asyncio.sleep(pause_s)
