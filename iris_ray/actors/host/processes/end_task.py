"""Ending a task: every process of it is killed, also one that has left the task's process tree."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import psutil

from iris_ray.actors.host.processes.tree import stat_of

logger = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
"""How often a long wait for processes that have been killed is mentioned."""
BRISK_S = 1.0
"""Processes that are not gone after so long are looked for less often."""


def end_task(
    found: Sequence[psutil.Process],
    search: Callable[[], list[psutil.Process]],
    timeout_s: float = 10.0,
    grace_s: float = 0.0,
) -> list[str]:
    """SIGKILL a task's processes, and then those that they have started meanwhile, until none is left.

    Blocks until they are gone, or for ``grace_s`` and ``timeout_s`` seconds. Zombies count as gone, once no
    thread of them runs: they hold neither memory nor chips.

    Args:
        found: its processes, as a search has just found them.
        search: finds its processes; not called if none of those found runs.
        timeout_s: seconds after the SIGKILL after which processes that still run are left alone.
        grace_s: seconds between a SIGTERM and the SIGKILL; 0 sends no SIGTERM.

    Returns:
        Which processes still run, as ``pid <n>``.
    """
    left = _running(found)
    if grace_s and left:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.terminate()
        _wait_until_ended(left, grace_s)
        left = _running(search())
    said, began = 0.0, time.monotonic()
    while left:
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
        left = _running([*left, *search()])  # a dying one may have forked
    return []


def _wait_until_ended(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended, for so many seconds at most. `psutil.wait_procs` would wait for zombies, too."""
    deadline = time.monotonic() + seconds
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _names(processes: list[psutil.Process]) -> list[str]:
    """Return which of them still run, in words."""
    return sorted({f"pid {process.pid}" for process in _running(processes)})


def _running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return those that still run, each of them once."""
    return list({process.pid: process for process in processes if _runs(process)}.values())


def _runs(process: psutil.Process) -> bool:
    """Return whether a process exists and a thread of it runs. Its first thread may have ended before the others."""
    found = stat_of(process.pid)
    return found is not None and not found.has_ended and process.is_running()
