"""How a task learns that its gang is to move, and says that it is ready to.

Everything goes through two files of the task's process on its host: TPUHostActor writes the notice, and the task
marks there that it has saved its state. So child processes of a task can use them, too.
"""

import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown
from iris_ray.model.notices import NoticeKind

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """Advance notice that this task's gang is to move.

    Attributes:
        kind: `NoticeKind`: PREEMPTION, MAINTENANCE, GROWTH if more slices are there for it, or EVICTION if a job of a
            higher band takes its hosts.
        reason: why, in words, with the host that goes away.
        deadline: when the attempt ends at the latest; seconds since the epoch.
    """

    kind: NoticeKind
    reason: str
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; negative afterwards."""
        return self.deadline - time.time()

    def saved(self) -> NoReturn:
        """Say that this task has saved its state, and wait for its end. Does not return.

        Once every task of the gang has said so, or has returned, all are ended and the gang goes on elsewhere at once,
        with a new attempt. Otherwise the gang moves at the deadline.
        """
        files = TaskFiles.of_this_task()
        assert files is not None, "a notice comes from the files of a task"
        with contextlib.suppress(OSError):  # if the disk is full, the gang moves at the deadline
            files.saved.touch()
        while True:
            time.sleep(60.0)


def preemption_notice() -> PreemptionNotice | None:
    """Return the notice that this task's gang has had, or None. Costs a look into the file system.

    Tasks of a gang may see it at slightly different times. Where all must save the same step, as in JAX, use
    `iris_ray.jax.agreed_notice`.

    Example::

        for step in range(start, steps):
            state = train_step(state)
            if notice := iris_ray.preemption_notice():
                save(step, state)
                notice.saved()
    """
    files = TaskFiles.of_this_task()
    notice = None if files is None else files.read_notice()
    return None if notice is None else PreemptionNotice(notice.kind, notice.reason, notice.deadline)


def on_preemption(callback: Callable[[PreemptionNotice], object]) -> None:
    """Have a function called, once, in a thread of its own, when this task's gang is to move. Outside a task: never.

    Code that you can't change may rely on SIGTERM: a task that has installed a handler for it (JAX and Orbax do) gets
    that signal with the notice; others get none.

    Raises:
        InvalidRequestError: nobody could call it.
    """
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise InvalidRequestError(
            f"callback is {shown(callback)}; give a function that takes a PreemptionNotice, and is not async"
        )
    if TaskFiles.of_this_task() is None:
        return

    def watch() -> None:
        while (notice := preemption_notice()) is None:
            time.sleep(POLL_S)
        callback(notice)

    threading.Thread(target=watch, name="iris_ray.on_preemption", daemon=True).start()
