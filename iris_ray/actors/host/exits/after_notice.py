"""What a task process does when user code leaves with ``sys.exit`` after a notice: the task has saved its state."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

from iris_ray.actors.wire.task_files import TaskFiles


def means_saved(stop: SystemExit, files: TaskFiles) -> bool:
    """Return whether this exit says that the task has saved its state: neither a success nor a failure.

    After a notice that is so for an exit without a code or with 0, and for any exit that a SIGTERM handler raised. A
    disk that can't tell of a notice changes nothing about an exit.
    """
    return os.path.exists(files.notice) and (stop.code in (None, 0) or _came_from_sigterm_handler(stop))


def report_saved(files: TaskFiles) -> NoReturn:
    """Say that the task has saved its state, once all threads have ended that an exit waits for.

    One of them may be writing the checkpoint. If that takes too long, the notice's deadline ends the task.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the task already knows
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at exit; it ends idle thread pools, too
    flush_output()
    with contextlib.suppress(OSError):  # if the disk is full, the gang moves at the deadline
        files.saved.touch()
    while True:
        time.sleep(60.0)


def flush_output() -> None:
    """Flush stdout and stderr, also if user code has closed or replaced them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _came_from_sigterm_handler(stop: SystemExit) -> bool:
    """Return whether the process's SIGTERM handler is in the traceback, as far as its code can be found."""
    handler = signal.getsignal(signal.SIGTERM)
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    frames = traceback.walk_tb(stop.__traceback__)
    return code is not None and any(frame.f_code is code for frame, _ in frames)
