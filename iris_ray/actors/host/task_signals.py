"""The signals that a host sends to a running task process, and what the process does with them by default."""

import os
import signal
import sys
from types import FrameType

from iris_ray.actors.wire.task_files import TaskFiles

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a task process print the stacks of all its threads, whatever it does. No other software uses this number."""


def survive_notices(files: TaskFiles) -> None:
    """Install a SIGTERM handler that ignores the signal if a notice came with it.

    Without a notice, SIGTERM does what it did before. User code may install a handler of its own afterwards. Children
    that the task forks inherit this handler, but SIGTERM ends them as before.
    """
    before, task = signal.getsignal(signal.SIGTERM), os.getpid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.getpid() == task and os.path.exists(files.notice):
            return
        if callable(before):
            before(number, frame)
        else:
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, on_sigterm)
