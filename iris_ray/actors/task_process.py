"""The process that runs the user's function: one per host and attempt, never used twice.

It starts ahead as a *standby* with Ray and iris_ray imported and nothing else, so that whatever reads the environment
at import does so after it is set. It is a plain, single-threaded actor: user code gets the main thread, and with it
signals.
"""

import contextlib
import errno
import importlib
import os
import random
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Collection

import ray
from ray import cloudpickle

from iris_ray.actors.host_processes import TOKEN_VARIABLE, host_directory
from iris_ray.actors.messages import StandbyReady, TaskLaunch
from iris_ray.actors.ray_internals import label_output
from iris_ray.actors.task_output import redirect_output, until_taken
from iris_ray.actors.transport import Rebuilt
from iris_ray.errors import ResultNotPicklableError
from iris_ray.outcomes import EndKind, TaskEnd
from iris_ray.task_env import task_environment

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
        return StandbyReady(os.getpid(), self._token, ports, self._error)

    def run(self, launch: TaskLaunch) -> TaskEnd:
        """Run the user's function here and now. Never raises for what user code does."""
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
        if pipe is None:
            label_output(launch.label)
        try:
            result = cloudpickle.loads(launch.function)()
            end = _returned(result)
        except SystemExit as stop:
            end = _exited(stop)
        except BaseException as error:
            end = _raised(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code may have closed or replaced them
                stream.flush()
        if pipe is not None:
            until_taken(pipe)
        return end

    def exit(self) -> None:
        """End the process in good order: exit handlers of user code run."""
        ray.actor.exit_actor()


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
    return TaskEnd(EndKind.CRASHED, time.time(), error=f"the function called sys.exit({stop.code!r})")


def _raised(error: BaseException) -> TaskEnd:
    ended_at = time.time()
    text = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    payload = _pickled_error(error) if isinstance(error, Exception) else None
    return TaskEnd(EndKind.RAISED, ended_at, payload, summary, text)


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
