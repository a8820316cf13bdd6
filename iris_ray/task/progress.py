"""How a task reports its progress.

Reports go through files of its process (`actors/protocol/task_files.py`), which TPUHostActor reads every few seconds.
So child processes of a task can report as well.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, SupportsFloat

from iris_ray.actors.protocol.task_files import STATUS_CHARACTERS, TaskFiles
from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown
from iris_ray.model.goodput import MARKS
from iris_ray.model.plain_values import LARGEST_INT
from iris_ray.model.rhythm import RhythmMeter


def heartbeat(step: int | None = None) -> None:
    """Report that this task makes progress. Writes a small file, and sends nothing.

    A gang in which no task does so for long counts as hung, and starts again: see the option ``stall_timeout``.

    Call it at the beginning of every step: `iris-ray job goodput` then knows how the job spent its time.

    Args:
        step: the number of the step. ``iris-ray ls`` shows it. If the gang hangs, the error names the task that holds
            the others up or, if that is not clear, the task that is furthest behind.

    Raises:
        InvalidRequestError: the step is not a number, or does not fit into 64 bits. Of a float, the whole part counts.
    """
    number = None if step is None else _whole(step)
    if (files := TaskFiles.of_this_task()) is not None:
        if number is not None:
            _note_first_steps(files, number)
        with _marking:
            meter = _meters.setdefault(files.prefix, RhythmMeter())
            if meter.beat(time.monotonic()):
                _tell_rhythm(files, meter)
        if not _replace(files.heartbeat, "" if number is None else str(number)):
            with contextlib.suppress(OSError):  # a full disk takes an empty file, so the gang does not count as hung
                (files.rhythm if files.heartbeat.exists() else files.heartbeat).touch()


def report_status(text: str = "", /, **numbers: SupportsFloat) -> None:
    """Report the job's status in a few words; ``iris-ray ls`` and ``iris-ray job status`` show it some seconds later.

    The job's status is that of its first task that reports one; each call replaces the last report. Call it as often as
    you like: a call writes a small file, which is read every few seconds, and every minute in the largest jobs. Outside
    a task it does nothing.

    Args:
        text: one line; the first 200 characters are kept, less those of the numbers.
        numbers: follow the text, as ``loss=2.31``. The history keeps them, and the dashboard draws them as curves.

    Raises:
        InvalidRequestError: the text is not a str, or one of the numbers is not a number.

    Example::

        if step % 10 == 0:
            iris_ray.report_status(f"ETA {hours:.0f} h", loss=loss, steps_per_s=steps_per_s)
    """
    if not isinstance(text, str):
        raise InvalidRequestError(f"the status is {text!r}; give a str, such as 'ETA 3 h', and numbers as loss=2.31")
    pairs = " ".join(f"{name}={_number(name, value):.6g}" for name, value in numbers.items())
    if (files := TaskFiles.of_this_task()) is not None:
        words = " ".join(text[: 4 * STATUS_CHARACTERS].encode(errors="backslashreplace").decode().split())
        left = max(0, STATUS_CHARACTERS - len(pairs) - bool(pairs))
        _replace(files.status, f"{words[:left]} {pairs}".strip()[:STATUS_CHARACTERS])


def _number(name: str, value: Any) -> float:
    """Return a number as a float, also one of NumPy or an array of JAX that holds a single one."""
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidRequestError(f"{name} is {shown(value)}; give a number, such as {name}=2.31")


@contextlib.contextmanager
def unproductive(what: str, *, outlives_hosts: bool = True) -> Iterator[None]:
    """Mark the time of a block as unproductive: ``iris-ray job goodput`` counts it by its kind.

    The block is also a declared pause, which may take longer than a step. The first pause of a kind has no limit; later
    ones may take ten times as long as the longest so far, and at least ten minutes, until the gang counts as hung. A
    limit that the option ``stall_timeout`` sets also holds during a pause.

    Args:
        what: ``"tpu_init"``, ``"training_prep"``, ``"data_loading"`` or ``"checkpoint_restore"`` before the first step;
            ``"checkpoint_save"`` at any time, while the save delays the next step; ``"evaluation"``, which counts as
            productive.
        outlives_hosts: for ``"checkpoint_save"``: whether the gang can continue from this save on other hosts. True for
            a save to a bucket, False for one to this host's memory or disk. When the cluster has to choose which gang
            gives up its hosts, it takes work since the last such save to be lost, unless the gang saves at notices. A
            block of less than 10 ms does not count as a save.

    Raises:
        InvalidRequestError: there is no such kind.

    Example::

        with iris_ray.unproductive("checkpoint_restore"):
            state = restore(path)
    """
    if what not in PAUSES:
        raise InvalidRequestError(f"{what!r} can't be marked; give one of {', '.join(PAUSES)}")
    files = TaskFiles.of_this_task()
    if files is None:
        yield
        return
    began, saved = time.monotonic(), False
    with _marking:
        meter = _meters.setdefault(files.prefix, RhythmMeter())
        meter.pause_begins(what, began)
        _tell_rhythm(files, meter)
    try:
        yield
        saved = what == "checkpoint_save" and outlives_hosts
    finally:
        now = time.monotonic()
        with _marking:
            meter.pause_ends(what, now - began, now)
            _tell_rhythm(files, meter)
            if what in MARKS:
                _mark(files, what, now - began)
        if saved and now - began >= SHORTEST_SAVE_S:
            note_save()


SHORTEST_SAVE_S = 0.01
"""The shortest save: programs may mark a call at each step that saves only now and then."""


def note_save() -> None:
    """Tell that the state of now is saved where it outlives the hosts."""
    if (files := TaskFiles.of_this_task()) is not None:
        with _marking:
            try:
                every_s = f"{time.time() - files.last_save.stat().st_mtime:.3f}"
            except OSError:
                every_s = ""
            _replace(files.last_save, every_s)


def count_unproductive(what: str, seconds: float) -> None:
    """Count seconds as `unproductive` does, without a declared pause: for short work that a thread reports later."""
    if seconds and (files := TaskFiles.of_this_task()) is not None:
        with _marking:
            _mark(files, what, seconds)


PAUSES = (*MARKS, "evaluation")
"""The kinds of time that `unproductive` marks."""


_first_steps: dict[str, list[int]] = {}
"""The first steps of this process, by the prefix of the task's files."""
_marked: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
_meters: dict[str, RhythmMeter] = {}
"""The meters of this process's heartbeats, by the prefix of the task's files."""
_marking = threading.Lock()


def _make_lock() -> None:
    """Give a forked child a lock of its own: a thread of its parent may have held that one for ever."""
    global _marking
    _marking = threading.Lock()


os.register_at_fork(after_in_child=_make_lock)


def _whole(step: Any) -> int:
    """Return a step as an int, also one of NumPy's or JAX's ints."""
    try:
        number = int(step)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or abs(number) > LARGEST_INT:
        raise InvalidRequestError(f"the step is {shown(step)}; give an int of 64 bits, or leave it out")
    return number


def _note_first_steps(files: TaskFiles, step: int) -> None:
    """Note when the first two steps began: the extra time of the first one is that of the compilation."""
    known = _first_steps.setdefault(files.prefix, [])
    if len(known) < 2 and step not in known:
        known.append(step)
        with contextlib.suppress(OSError), open(files.first_steps, "a", encoding="utf-8") as file:
            file.write(f"{step} {time.time():.6f}\n")


def _mark(files: TaskFiles, what: str, seconds: float) -> None:
    before, during = _marked.setdefault(files.prefix, ({}, {}))
    part = during if files.first_steps.exists() else before
    part[what] = part.get(what, 0.0) + seconds
    _replace(files.marked, json.dumps([before, during]))


def _tell_rhythm(files: TaskFiles, meter: RhythmMeter) -> None:
    _replace(files.rhythm, json.dumps(asdict(meter.told)))


def _replace(path: Path, text: str) -> bool:
    """Replace a file atomically; return whether that was possible. A full disk must not end a training run."""
    unfinished = Path(f"{path}.{threading.get_native_id()}")  # the id is unique among all processes
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return False
    return True
