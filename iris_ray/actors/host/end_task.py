"""Ending a task: every process of it is killed, also one that has left the task's process tree."""

import contextlib
import logging
import time

import psutil

from iris_ray.actors.host.process_tree import read_of_process

logger = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
"""How often a long wait for processes that have been killed is mentioned."""
BRISK_S = 1.0
"""Processes that are not gone after so long are looked for less often."""

TOKEN_VARIABLE = "IRIS_RAY_TASK_TOKEN"
"""The environment variable with a task's token. All processes that the task starts inherit it, and are found by it."""


def end_task(known: list[psutil.Process], token: str, timeout_s: float = 10.0, grace_s: float = 0.0) -> list[str]:
    """SIGKILL a task's known processes, and all others that carry its token in their environment.

    Blocks until they are gone, or for ``grace_s`` and ``timeout_s`` seconds. Zombies count as gone: they hold neither
    memory nor chips.

    Args:
        known: the members of the task's process tree that are known.
        token: the task's token.
        timeout_s: seconds after the SIGKILL after which processes that still run are left alone.
        grace_s: seconds between a SIGTERM and the SIGKILL; 0 sends no SIGTERM.

    Returns:
        Which processes still run, as ``pid <n>``.
    """
    if grace_s and (asked := [process for process in (*known, *_carriers(token)) if _runs(process)]):
        for process in asked:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.terminate()
        _wait_until_ended(asked, grace_s)
    left, said, began = known, 0.0, time.monotonic()
    while left := [process for process in (*left, *_carriers(token)) if _runs(process)]:  # a dying one may have forked
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        waited = time.monotonic() - began
        psutil.wait_procs(left, timeout=0.02 if waited < BRISK_S else 0.5)
        if waited > timeout_s:
            return _names(left)
        if waited // SAY_EVERY_S > said and (names := _names(left)):
            said = waited // SAY_EVERY_S
            logger.warning("%s: killed %.0f s ago and not gone yet; much memory takes long", ", ".join(names), waited)
    return []


def _wait_until_ended(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended, for so many seconds at most. `psutil.wait_procs` would wait for zombies, too."""
    deadline = time.monotonic() + seconds
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _names(processes: list[psutil.Process]) -> list[str]:
    """Return which of them still run."""
    return sorted({f"pid {process.pid}" for process in processes if _runs(process)})


def _runs(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _carriers(token: str) -> list[psutil.Process]:
    """Return all processes with this token, also those that left the task's tree, such as daemons."""
    found = []
    entry = f"{TOKEN_VARIABLE}={token}".encode()
    for pid in psutil.pids():
        if entry in read_of_process(pid, "environ").split(b"\0"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if entry in read_of_process(pid, "environ").split(b"\0"):  # the pid was not reused in between
                    found.append(process)
    return found
