"""Calls of user code in a task's process. However the code ends, the end becomes a `TaskEnd` that can be pickled."""

import atexit
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection
from typing import NoReturn

import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError

from iris_ray.actors.calls.clocks import Moment
from iris_ray.actors.calls.ray_internals import join_for
from iris_ray.actors.host.exit_status import ProgramExit
from iris_ray.actors.protocol.payloads import Payload, Rebuilt, load
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import ResultNotPicklableError, ResultTooLargeError
from iris_ray.model.outcomes import EndKind, TaskEnd


def run_function(function: Payload, files: TaskFiles) -> TaskEnd:
    """Unpickle the user's function, call it, and return how it ended. Never return if it exits after a notice.

    Nor return in a child that user code has forked and that comes here, too: it must not answer for the task.
    """
    task = os.getpid()
    try:
        if isinstance(function, bytes):
            join_for(function)
        end = returned(load(function)())
    except SystemExit as stop:
        if os.getpid() == task and means_saved(stop, files):
            report_saved(files)
        end = exited(stop)
    except BaseException as error:
        end = raised(error)
    if os.getpid() != task:
        with contextlib.suppress(Exception):
            sys.stderr.write(end.traceback)
        flush_output()
        os._exit(end.exit_code or 0)
    if end.kind is not EndKind.RETURNED:
        _forget_jaxs_exit_handlers()
    return end


def _forget_jaxs_exit_handlers() -> None:
    """Have JAX wait for no other task of a gang when the process ends: they are killed.

    The gang's first process would wait for minutes, and any other would abort (tried with JAX 0.10.2 on CPUs).
    """
    for module, name in (("jax._src.api", "clean_up"), ("jax._src.dispatch", "wait_for_tokens")):
        if (handler := getattr(sys.modules.get(module), name, None)) is not None:
            atexit.unregister(handler)


def import_all(modules: Collection[str]) -> str | None:
    """Import modules. Return the error of the first one that can't be imported; None if all can."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"preload={module!r} can't be imported: {type(error).__name__}: {error}"
    return None


def run_exit_handlers() -> None:
    """Do what the interpreter does when it ends: wait for threads that are no daemons, then run exit handlers.

    Call this before Ray ends the process, because Ray ends its child processes first. An exit handler that talks to a
    child, such as the uploader of an experiment tracker, would lose its last data.
    """
    atexit.unregister(ray.shutdown)  # the process stays connected until it exits
    threading._shutdown()  # type: ignore[attr-defined]  # concurrent.futures ends its threads here
    atexit._run_exitfuncs()


# -- the end of a function, as a `TaskEnd` -----------------------------------------------------------------------------

MOST_RESULT_BYTES = 1 << 30
MOST_ERROR_BYTES = 1 << 20
"""Of a larger exception only the text travels."""
MOST_ERROR_CHARACTERS = 1 << 20
"""Of a longer text only the beginning and the end travel."""

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""Error numbers of a disk that is full, read-only or faulty."""


def returned(result: object) -> TaskEnd:
    """Return the end of a task whose function returned this. A result that can't be pickled, or is too large, fails."""
    what = f"the function returned a {type(result).__name__}"
    try:
        payload = cloudpickle.dumps(result)
    except Exception as error:
        return raised(ResultNotPicklableError(f"{what} that can't be pickled: {error}"))
    if len(payload) > MOST_RESULT_BYTES:
        size, most = (f"{count / 2**20:,.0f} MiB" for count in (len(payload), MOST_RESULT_BYTES))
        return raised(ResultTooLargeError(f"{what} of {size}, and the limit is {most}; write it to files instead"))
    return TaskEnd(EndKind.RETURNED, Moment.now(), payload, exit_code=0)


def exited(stop: SystemExit) -> TaskEnd:
    """Return the end of a task whose function called ``sys.exit``. Without a code or with 0, it counts as a return."""
    if stop.code in (None, 0):
        return TaskEnd(EndKind.RETURNED, Moment.now(), cloudpickle.dumps(None), exit_code=0)
    code = stop.code if isinstance(stop.code, int) else 1  # like Python, which prints anything else and exits with 1
    if isinstance(stop, ProgramExit):
        return TaskEnd(stop.kind, Moment.now(), error=stop.words, exit_code=code & 0xFF)
    error = f"the function called sys.exit({stop.code!r})"
    return TaskEnd(EndKind.EXITED, Moment.now(), error=error, exit_code=code & 0xFF)


def raised(error: BaseException) -> TaskEnd:
    """Return the end of a task whose function raised this."""
    ended_at = Moment.now()
    text = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    cause = error
    while isinstance(cause, RayTaskError):  # of a task that this one waited for; Ray's own tasks pass its cause on
        cause = cause.cause
    payload = _pickled(cause) if isinstance(cause, Exception) else None
    return TaskEnd(_kind(error), ended_at, payload, _shortened(summary), _shortened(text), exit_code=1)


def _shortened(text: str) -> str:
    half = MOST_ERROR_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}"


def _kind(error: BaseException) -> EndKind:
    if isinstance(error, MemoryError):
        return EndKind.OUT_OF_MEMORY
    return EndKind.DISK_ERROR if isinstance(error, OSError) and error.errno in DISK_ERRORS else EndKind.RAISED


def _pickled(error: Exception) -> bytes | None:
    """Return the pickled exception, if it can be unpickled here; None if not."""
    for travelling in (error, Rebuilt(error)):  # Rebuilt: for an __init__ that takes other arguments than it passes on
        try:
            payload: bytes = cloudpickle.dumps(travelling)
            cloudpickle.dumps(cloudpickle.loads(payload))  # Ray does this at the receiver
            return payload if len(payload) <= MOST_ERROR_BYTES else None
        except Exception:
            continue
    return None


# -- exit after a notice -----------------------------------------------------------------------------------------------


def means_saved(stop: SystemExit, files: TaskFiles) -> bool:
    """Return whether this exit means that the task has saved its state, which is neither a success nor a failure.

    It does after a notice if the exit has no code or code 0, or if a SIGTERM handler raised it.
    """
    return os.path.exists(files.notice) and (stop.code in (None, 0) or _came_from_sigterm_handler(stop))


def report_saved(files: TaskFiles) -> NoReturn:
    """Wait for all threads that are no daemons, then mark the state as saved, and wait for the end.

    A thread may be writing the checkpoint. If that takes too long, the notice's deadline ends the task.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the task already knows
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at exit; it ends idle thread pools, too
    flush_output()
    with contextlib.suppress(OSError):  # if the disk is full, the gang moves at the deadline
        files.saved.touch()
    while True:
        time.sleep(60.0)


def flush_output() -> None:
    """Flush stdout and stderr, even if user code has closed or replaced them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _came_from_sigterm_handler(stop: SystemExit) -> bool:
    """Return whether the process's SIGTERM handler is in the traceback, if the handler is a Python function."""
    handler = signal.getsignal(signal.SIGTERM)
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    frames = traceback.walk_tb(stop.__traceback__)
    return code is not None and any(frame.f_code is code for frame, _ in frames)
