"""The process that runs the user's function: one per host and attempt, never used twice.

It starts ahead as a *standby* with Ray and iris_ray imported and nothing else, so that whatever reads the environment
at import does so after it is set. It is a plain, single-threaded actor: user code gets the main thread, and with it
signals.
"""

import contextlib
import errno
import faulthandler
import importlib
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection

import ray
from ray import cloudpickle

from iris_ray.actors.host.chips import LockProbe, describe, in_the_way, libtpu_lock
from iris_ray.actors.host.process_ledger import (
    STACKS_SIGNAL,
    TOKEN_VARIABLE,
    ProcessLedger,
    heed_notices,
    host_directory,
)
from iris_ray.actors.host.process_tree import stat_of
from iris_ray.actors.host.task_environment import task_environment
from iris_ray.actors.host.task_output import redirect_output, until_taken
from iris_ray.actors.wire.messages import StandbyReady, TaskLaunch
from iris_ray.actors.wire.payloads import Rebuilt, load
from iris_ray.actors.wire.ray_internals import label_output
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.errors import ResultNotPicklableError
from iris_ray.model.outcomes import EndKind, TaskEnd

# Below Linux' default ephemeral range (32768 and up), where an outgoing connection may take a port at any moment, and
# above Ray's default worker ports (10002-19999).
_PORTS = range(20_000, 32_768)
PORTS_HELD = 3


class TaskProcess:
    """Waits for one task, runs it, and tells how it ended as a value.

    Args:
        address: the host's IP address.
        avoid_ports: ports that earlier attempts used.
        preload: modules to import while it waits.
    """

    def __init__(self, address: str, avoid_ports: Collection[int], preload: tuple[str, ...]) -> None:
        self._error = import_all(preload)
        self._token = secrets.token_hex(8)
        self._held = hold_ports(address, PORTS_HELD, avoid_ports)

    def ready(self) -> StandbyReady:
        """Answering is the proof. The ports stay bound, so that nobody else takes them, until the task starts."""
        ports = tuple(held.getsockname()[1] for held in self._held)
        stat = stat_of(os.getpid())
        assert stat is not None
        return StandbyReady(stat.pid, stat.started, self._token, ports, self._error)

    def end_leftovers(self, exclusive: bool) -> None:
        """End the task that ran here before: the actor that should have done so is gone.

        Args:
            exclusive: whether no task of anybody else may be on this host.

        Raises:
            RuntimeError: it can't be ended.
        """
        if stubborn := ProcessLedger(host_directory(), exclusive).end_leftovers(grace_s=0.0):
            raise RuntimeError(f"{', '.join(stubborn)} can't be ended")

    def run(self, launch: TaskLaunch) -> TaskEnd:
        """Run the user's function here and now, unless another process has this host's chips in its hands.

        Never raises for what user code does.
        """
        if launch.info.slice_name and (in_use := self._chips_in_use()):
            return TaskEnd(EndKind.DEVICE_BUSY, time.time(), error=in_use)
        files = TaskFiles.of_process(host_directory(), os.getpid())
        heed_notices(files)  # from the mark of its start on it may be told
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)  # whatever user code does to sys.stderr
        pipe = redirect_output(host_directory(), launch)
        for held in self._held:
            held.close()
        changes = task_environment(os.environ, launch.env, launch.info, launch.multislice, launch.num_cpus)
        for name, value in changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        os.environ[TOKEN_VARIABLE] = self._token
        os.environ[TaskFiles.VARIABLE] = files.prefix
        if pipe is None:
            label_output(launch.label)
        try:
            result = load(launch.pickled_function)()
            end = _returned(result)
        except SystemExit as stop:
            if files.notice.exists() and (stop.code in (None, 0) or came_from_handler(stop)):
                say_saved(files)  # it has saved its state and leaves, as it was told: no success, and no failure
            end = _exited(stop)
        except BaseException as error:
            end = _raised(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code may have closed or replaced them
                stream.flush()
        if pipe is not None:
            until_taken(pipe)
        return end

    def _chips_in_use(self) -> str | None:
        """Which other process holds this host's chips, in words; None, after some ten microseconds, if none does."""
        self._probe = LockProbe(libtpu_lock())  # kept: closing it would take the lock from our own libtpu
        pid = self._probe.holder()
        return None if pid is None else in_the_way([describe(pid, ProcessLedger(host_directory()))])

    def exit(self) -> None:
        """End the process in good order: exit handlers of user code run."""
        ray.actor.exit_actor()


def came_from_handler(stop: SystemExit) -> bool:
    """Whether the process's handler for SIGTERM raised it, as far as that can be told: then any code will do."""
    handler = signal.getsignal(signal.SIGTERM)
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    frames = traceback.walk_tb(stop.__traceback__)
    return code is not None and any(frame.f_code is code for frame, _ in frames)


def say_saved(files: TaskFiles) -> None:
    """As `PreemptionNotice.saved` does, once all threads are over that an exit waits for; never returns.

    One of them may be writing the checkpoint. If it takes too long, the notice's deadline ends it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nobody need be told again
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does; it ends idle pools of threads, too
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    files.saved.touch()
    while True:
        time.sleep(60.0)


def import_all(modules: Collection[str]) -> str | None:
    """Import modules; what went wrong, or None."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"preload={module!r} can't be imported: {type(error).__name__}: {error}"
    return None


def hold_ports(address: str, count: int, avoid: Collection[int]) -> list[socket.socket]:
    """Sockets bound to ports that nothing on this host uses; bound only, so nothing listens."""
    held: list[socket.socket] = []
    while len(held) < count:
        port = random.choice(_PORTS)
        if port in avoid:
            continue
        probe = socket.socket()
        try:
            probe.bind((address, port))
        except OSError as error:
            probe.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            held.append(probe)
    return held


def _returned(result: object) -> TaskEnd:
    try:
        return TaskEnd(EndKind.RETURNED, time.time(), cloudpickle.dumps(result))
    except Exception as error:
        message = f"the function returned a {type(result).__name__} that can't be pickled: {error}"
        return _raised(ResultNotPicklableError(message))


def _exited(stop: SystemExit) -> TaskEnd:
    """``sys.exit()`` and ``sys.exit(0)`` are a script's way to return; anything else is a failure."""
    if stop.code in (None, 0):
        return TaskEnd(EndKind.RETURNED, time.time(), cloudpickle.dumps(None))
    return TaskEnd(EndKind.EXITED, time.time(), error=f"the function called sys.exit({stop.code!r})")


def _raised(error: BaseException) -> TaskEnd:
    ended_at = time.time()
    text = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    payload = _pickled_error(error) if isinstance(error, Exception) else None
    kind = EndKind.OUT_OF_MEMORY if isinstance(error, MemoryError) else EndKind.RAISED
    return TaskEnd(kind, ended_at, payload, summary, text)


def _pickled_error(error: Exception) -> bytes | None:
    """The exception, pickled in a way that is known to work here; None if there is none."""
    for travelling in (error, Rebuilt(error)):  # the second: its __init__ takes other arguments than it passes on
        try:
            payload: bytes = cloudpickle.dumps(travelling)
            cloudpickle.loads(payload)
            return payload
        except Exception:
            continue
    return None
