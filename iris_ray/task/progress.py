"""How a task says how far it is.

What it says goes through files of its process (`actors/wire/task_files.py`), which TPUHostActor reads every few
seconds. So child processes of a task can say it, too.
"""

import contextlib
import threading
from pathlib import Path

from iris_ray.actors.wire.task_files import STATUS_CHARACTERS, TaskFiles
from iris_ray.errors import InvalidRequestError


def heartbeat(step: int | None = None) -> None:
    """Say that this task makes progress, for jobs with a ``stall_timeout``. Costs a small file (some ten microseconds).

    Args:
        step: how far it is. ``iris-ray ls`` shows it. If the gang stalls, the task that is furthest behind is named.
    """
    if (files := TaskFiles.of_this_task()) is not None:
        _replace(files.heartbeat, "" if step is None else str(int(step)))


def report_status(text: str) -> None:
    """Say in a few words how it goes; ``iris-ray ls`` and ``iris-ray status`` show it some seconds later.

    The words of the job's first task that says anything count; each call replaces those before. Call it as often as you
    like: it costs a small file (some ten microseconds), and is read every few seconds. Outside a task it does nothing.

    Args:
        text: one line; of a longer text the first 200 characters are kept.

    Raises:
        InvalidRequestError: it is not a str.

    Example::

        if step % 10 == 0:
            iris_ray.report_status(f"loss {loss:.2f}, {steps_per_s:.1f} steps/s")
    """
    if not isinstance(text, str):
        raise InvalidRequestError(f"the status is {text!r}; give a str, such as 'loss 2.31, ETA 3 h'")
    if (files := TaskFiles.of_this_task()) is not None:
        words = text[: 4 * STATUS_CHARACTERS].encode(errors="backslashreplace").decode().split()
        _replace(files.status, " ".join(words)[:STATUS_CHARACTERS])


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole. A full disk is no reason to end a training run, so then nothing happens."""
    unfinished = Path(f"{path}.{threading.get_native_id()}")  # the id is unique among all processes
    with contextlib.suppress(OSError):
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
