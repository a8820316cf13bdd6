"""Ends the largest task of a host before Ray's memory monitor ends the actor that watches all of them.

That monitor knows Ray's workers only. When the memory of a host is nearly used up, it kills them one after the other,
the newest first, and never finds a fork. See docs/design/forked-tasks.md for what was tried.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from iris_ray.actors.host.task_watch import TaskWatch

logger = logging.getLogger(__name__)

MARGIN = 0.03
"""The guard acts when this share of the memory is left below Ray's threshold: Ray looks every 250 ms."""
NEAR = 0.10
"""Within this share of the guard's limit, it looks often."""
OFTEN_S, SELDOM_S = 0.02, 0.2
FREED_S = 1.0
"""The time for the memory of a killed task to be freed, before another one is killed."""
LEAST = 0.03
"""A task with less than this share of the memory is not killed: that would not help."""
DYING_S, DYING_POLL_S = 60.0, 0.1
"""The time for a killed task to end: the kernel frees hundreds of gigabytes first."""

_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/memory")


def rays_threshold(raylet: Mapping[str, str]) -> float | None:
    """Return the share of the memory from which on Ray kills workers; None if it kills none.

    Args:
        raylet: the variables of the host's raylet. An operator may have set the same by ``--system-config``, which only
            the raylet knows.
    """
    try:
        if float(raylet.get("RAY_memory_monitor_refresh_ms", 250)) <= 0:
            return None
        return float(raylet.get("RAY_memory_usage_threshold", 0.95))
    except ValueError:
        return 0.95


def memory_in_use() -> tuple[float, int]:
    """Return the share of the memory that is in use, and the memory in bytes, of this machine or of this container."""
    machine = psutil.virtual_memory()
    limit, used = _of_container()
    if limit is not None and limit < machine.total:
        return used / limit, limit
    return 1 - machine.available / machine.total, machine.total


def _of_container() -> tuple[int | None, int]:
    """Return the memory limit of this container and what it uses, without the page cache; None if it has no limit."""
    for limit, usage, stat, prefix in (
        (_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", ""),
        (_V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat", "total_"),
    ):
        try:
            most = int(limit.read_text())
            lines = dict(line.split() for line in stat.read_text().splitlines())
            cache = int(lines[f"{prefix}inactive_file"]) + int(lines[f"{prefix}active_file"])
            return most, int(usage.read_text()) - cache
        except (OSError, ValueError, KeyError):  # there is no such group, or no limit
            continue
    return None, 0


class MemoryGuard:
    """Watches the memory of a host.

    Args:
        name: of the host, for messages.
        tasks: returns the watches of the forked tasks that run.
        threshold: as of `rays_threshold`.
        in_use: returns what `memory_in_use` does.
    """

    def __init__(
        self,
        name: str,
        tasks: Callable[[], Iterable[TaskWatch]],
        threshold: float,
        in_use: Callable[[], tuple[float, int]] = memory_in_use,
    ) -> None:
        self._name = name
        self._tasks = tasks
        self._threshold = threshold
        self._in_use = in_use

    async def look(self) -> None:
        """Look once, end the largest task if the memory is nearly used up, and pause."""
        share, total = self._in_use()
        if share < self._threshold - MARGIN:
            await asyncio.sleep(OFTEN_S if share > self._threshold - MARGIN - NEAR else SELDOM_S)
            return
        sizes = {watch: watch.memory() for watch in self._tasks()}
        largest = max(sizes, key=sizes.__getitem__, default=None)
        if largest is None or sizes[largest] < LEAST * total:
            await asyncio.sleep(SELDOM_S)
            return
        why = (
            f"the task process was killed, because the host's memory was nearly used up: {share:.0%} of"
            f" {total / 2**30:.1f} GiB, of which the task had {sizes[largest] / 2**30:.1f} GiB (Ray kills its own"
            f" processes at {self._threshold:.0%})"
        )
        logger.warning("%s: %s", self._name, why)
        largest.kill_for_memory(why)
        began = time.monotonic()
        while largest.memory() and time.monotonic() < began + DYING_S:
            await asyncio.sleep(DYING_POLL_S)
        await asyncio.sleep(FREED_S)
