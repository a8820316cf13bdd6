"""Requests to a process of a task for a trace of JAX's profiler.

The process listens at an abstract socket, and a thread of it answers. Without requests that thread sleeps.
"""

import contextlib
import hashlib
import importlib
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.job_info import JobInfo

NO_JAX = "it has not imported JAX"
"""The answer of a process without JAX. A descendant of it may have imported JAX."""
NO_DEVICES = "its JAX has not used its devices yet, and a profiler would start them too early; ask again later"
STARTS_S = 30.0
"""The limit for the start of the profiler beside a program that holds the interpreter's lock; seconds."""
STOPS_S = 300.0
"""The limit for the profiler to write its trace; seconds."""
REQUEST_BYTES = 1 << 16

_listening: int | None = None
"""The process that listens: a fork of it does not."""


def answer_trace_requests(files: TaskFiles | None = None) -> None:
    """Have this process take a trace whenever its host asks. Outside a task, and at a second call, do nothing.

    Args:
        files: of the task; None: as the environment says.
    """
    global _listening
    files = files or TaskFiles.of_this_task()
    if files is None or _listening == os.getpid():
        return
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_address(files, os.getpid()))
        listener.listen()
    except OSError:  # this process can't be asked, and goes on without
        listener.close()
        return
    _listening = os.getpid()
    threading.Thread(target=_serve, args=(listener,), name="iris_ray.jax_traces", daemon=True).start()


def answer_in_program(_: JobInfo) -> None:
    """Have a program that joins JAX answer as well: the task's process may have started it."""
    answer_trace_requests()


def ask_for_trace(files: TaskFiles, pid: int, directory: str, seconds: float) -> str | None:
    """Have a process of a task on this host take a trace, and wait until it is written.

    Args:
        files: the task's.
        pid: the process.
        directory: where JAX is to write it.
        seconds: how long it is to watch.

    Returns:
        None once it is written; else why there is none, as part of a sentence about the process.

    Raises:
        ConnectionError: the process does not listen, or has ended meanwhile.
        TimeoutError: it does not answer.
    """
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(STARTS_S)
        try:
            connected.connect(_address(files, pid))
        except OSError as error:
            raise ConnectionError(f"process {pid} does not accept requests for traces: {error}") from None
        if _peer(connected) != os.getuid():
            raise ConnectionError(f"the program that answers for process {pid} is not iris_ray")
        connected.sendall(json.dumps({"directory": directory, "seconds": seconds}).encode() + b"\n")
        answers = _lines(connected)
        began = next(answers, None)
        connected.settimeout(seconds + STOPS_S)
        last = next(answers, None) if began is not None and "error" not in began else began
    if last is None:
        raise ConnectionError(f"process {pid} ended before its trace was complete")
    return str(last["error"]) if "error" in last else None


def _address(files: TaskFiles, pid: int) -> str:
    """Return an address in the kernel's own names for sockets: it goes with the process, and fits whatever the path."""
    return f"\0iris_ray/{hashlib.sha256(files.prefix.encode()).hexdigest()[:32]}/{pid}"


def _peer(connected: socket.socket) -> int:
    """Return the user on the other side."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])


def _lines(connected: socket.socket) -> Iterator[dict[str, Any]]:
    with connected.makefile("rb") as file:
        while line := file.readline(REQUEST_BYTES):
            yield json.loads(line)


# -- in the process ----------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            connected, _ = listener.accept()
        except OSError:  # user code has closed every descriptor, as daemons do
            return
        if _peer(connected) != os.getuid():  # any account of the host can connect
            connected.close()
            continue
        threading.Thread(target=_answer, args=(connected,), name="iris_ray.jax_trace", daemon=True).start()


def _answer(connected: socket.socket) -> None:
    with connected, contextlib.suppress(OSError, ValueError, TypeError, StopIteration):
        connected.settimeout(STARTS_S)
        for said in _take(connected, **next(_lines(connected))):
            connected.sendall(json.dumps(said).encode() + b"\n")


def _take(connected: socket.socket, directory: str, seconds: float) -> Iterator[dict[str, object]]:
    """Take a trace, and say how that goes. If the other side is gone, end it early."""
    if (why := _why_not()) is not None:
        yield {"error": why}
        return
    try:
        profiler = importlib.import_module("jax.profiler")
        profiler.start_trace(directory, **_options(profiler))
    except Exception as error:
        yield {"error": f"JAX's profiler did not start: {error}"}
        return
    said: dict[str, object] = {"done": True}
    try:
        yield {"started": time.time()}
        ended = select.poll()  # `select.select` takes no descriptor beyond 1023, and a program may have more
        ended.register(connected, select.POLLIN)
        ended.poll(seconds * 1000)
    finally:
        try:
            profiler.stop_trace()
        except Exception as error:  # such as a full disk
            said = {"error": f"JAX's profiler did not write its trace: {error}"}
    yield said


def _why_not() -> str | None:
    """Return why JAX's profiler can't start here: it would start the devices before JAX has joined its peers."""
    if "jax" not in sys.modules:
        return NO_JAX
    bridge = sys.modules.get("jax._src.xla_bridge")
    has_devices = getattr(bridge, "backends_are_initialized", None)
    return NO_DEVICES if bridge is None or (has_devices is not None and not has_devices()) else None


def _options(profiler: Any) -> dict[str, Any]:
    """Leave Python's own calls out, which would slow the program down: py-spy shows them without."""
    try:
        options = profiler.ProfileOptions()
        options.python_tracer_level = 0
        return {"profiler_options": options}
    except AttributeError:  # an older JAX
        return {}
