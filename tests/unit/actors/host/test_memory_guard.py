"""Which task a host ends when its memory is nearly used up, and when it ends none. In virtual time."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from iris_ray.actors.host.memory_guard import MARGIN, MemoryGuard, memory_in_use, rays_threshold
from iris_ray.processes.identity import own_memory
from tests.support.processes import identity_of
from tests.support.virtual_time import in_virtual_time

GIB = 1 << 30


@dataclass(eq=False)
class Watch:
    """A task that has some memory, until it is killed."""

    size: int
    killed: list[str] = field(default_factory=list)

    def memory(self) -> int:
        return 0 if self.killed else self.size

    def kill_for_memory(self, why: str) -> None:
        self.killed.append(why)


def guard(tasks: list[Watch], others: Callable[[], int] = lambda: 0, threshold: float = 0.95) -> MemoryGuard:
    """A guard of a host with 100 GiB."""

    def in_use() -> tuple[float, int]:
        return (sum(task.memory() for task in tasks) + others()) / (100 * GIB), 100 * GIB

    running: Any = lambda: [task for task in tasks if not task.killed]  # noqa: E731
    return MemoryGuard("host 0", running, threshold, in_use)


async def look_for(seconds: float, made: MemoryGuard) -> None:
    async def again() -> None:
        while True:
            await made.look()

    looking = asyncio.ensure_future(again())
    await asyncio.sleep(seconds)
    assert not looking.done()
    looking.cancel()


@in_virtual_time
async def test_largest_task_goes_and_the_others_stay() -> None:
    tasks = [Watch(30 * GIB), Watch(60 * GIB), Watch(3 * GIB)]
    await look_for(60.0, guard(tasks))
    assert [len(task.killed) for task in tasks] == [0, 1, 0]
    assert "93% of 100.0 GiB, of which the task had 60.0 GiB" in tasks[1].killed[0]


@in_virtual_time
async def test_tasks_go_one_by_one_until_there_is_room() -> None:
    tasks = [Watch(20 * GIB), Watch(10 * GIB), Watch(5 * GIB)]
    await look_for(60.0, guard(tasks, lambda: 70 * GIB))
    assert [len(task.killed) for task in tasks] == [1, 0, 0]
    tasks = [Watch(20 * GIB), Watch(10 * GIB), Watch(5 * GIB)]
    await look_for(60.0, guard(tasks, lambda: 85 * GIB))
    assert [len(task.killed) for task in tasks] == [1, 1, 0]


@in_virtual_time
async def test_no_task_goes_for_the_memory_of_others() -> None:
    tasks = [Watch(GIB // 2)]
    await look_for(60.0, guard(tasks, lambda: 99 * GIB))
    assert tasks[0].killed == []


@in_virtual_time
async def test_nobody_goes_below_the_limit() -> None:
    tasks = [Watch(int((0.95 - MARGIN) * 100) * GIB - GIB)]
    await look_for(60.0, guard(tasks))
    assert tasks[0].killed == []
    await look_for(1.0, guard([]))


@pytest.mark.parametrize(
    ("raylet", "expected"),
    [
        ({}, 0.95),
        ({"RAY_memory_usage_threshold": "0.8"}, 0.8),
        ({"RAY_memory_monitor_refresh_ms": "0"}, None),
        ({"RAY_memory_usage_threshold": "much"}, 0.95),
    ],
)
def test_threshold_is_that_of_the_raylet(raylet: dict[str, str], expected: float | None) -> None:
    assert rays_threshold(raylet) == expected


def test_memory_is_measured() -> None:
    share, total = memory_in_use()
    assert 0.0 < share < 1.0
    assert total > GIB // 4
    eats = "x = bytearray(b'x' * (200 << 20)); print('eaten', flush=True); input()"
    command = [sys.executable, "-c", eats]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 200 << 20 < own_memory(identity_of(process)) < 300 << 20
