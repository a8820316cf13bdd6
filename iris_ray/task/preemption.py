"""How a task learns that its gang has to move, and reports that it has saved its state.

Both go through files of the task's process on its host: TPUHostActor writes the notice, and the task its report. So
child processes of a task can use them as well.
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
    """Advance notice that this task's gang has to move.

    Attributes:
        kind: `NoticeKind`: PREEMPTION, MAINTENANCE, GROWTH if it can have more slices, EVICTION if another job takes
            its hosts, or TIME_LIMIT if the job ends, since its ``max_runtime`` is nearly over.
        reason: why, in words, with the host concerned, if there is one.
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
        """Report that this task has saved its state, and wait for its end. Does not return.

        When every task of the gang has reported this or has returned, the attempt ends, and the gang moves at once.
        Otherwise the attempt ends at the deadline. After a notice of the kind TIME_LIMIT the job ends.
        """
        files = TaskFiles.of_this_task()
        assert files is not None, "a notice comes from the files of a task"
        with contextlib.suppress(OSError):  # if the disk is full, the gang moves at the deadline
            files.saved.touch()
        while True:
            time.sleep(60.0)


def preemption_notice() -> PreemptionNotice | None:
    """Return the notice of this task's gang, or None. Costs a look into the file system.

    Tasks of a gang may see it at slightly different times. If all have to save the same step, as in JAX, use
    `iris_ray.jax.agreed_notice`.

    Example::

        for step in range(start, steps):
            state = train_step(state)
            if notice := iris_ray.preemption_notice():
                save(step, state)
                notice.saved()
    """
    note_asking()
    return known_notice()


def known_notice() -> PreemptionNotice | None:
    """Return what `preemption_notice` returns. It does not mean that the task will heed a notice that comes later."""
    files = TaskFiles.of_this_task()
    notice = None if files is None else files.read_notice()
    return None if notice is None else PreemptionNotice(notice.kind, notice.reason, notice.deadline)


_asking: set[str] = set()
"""The prefixes of the files of the tasks of this process that have told that they ask for notices."""


def note_asking() -> None:
    """Tell, once, that this task asks for notices: if it has to leave, it loses less than one that does not."""
    files = TaskFiles.of_this_task()
    if files is not None and files.prefix not in _asking:
        with contextlib.suppress(OSError):  # if the disk is full, it may have room at the next step
            files.asks.touch()
            _asking.add(files.prefix)


def on_preemption(callback: Callable[[PreemptionNotice], object]) -> None:
    """Call a function once, in a thread of its own, when this task's gang has to move. Outside a task: never.

    For code that relies on SIGTERM: each task gets that signal with the first notice of an attempt, and a handler that
    it has installed (JAX and Orbax do) runs. Without a handler, the signal has no effect.

    Raises:
        InvalidRequestError: ``callback`` can't be called, or is async.
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
