"""A gang that makes no progress is ended, and starts again."""

import asyncio
from unittest import mock

import pytest

from iris_ray.actors.pool.services import AttemptBegan, PoolEvent
from iris_ray.errors import TaskCrashedError
from iris_ray.hangs.pool import HangsInPool
from iris_ray.model.rhythm import ENOUGH_STEPS, FIRST_STEPS
from tests.support import virtual_time
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import VirtualCluster, played


@played()
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("heartbeats", [0, 3])
async def test_hanging_gang_costs_a_failure_and_names_last_task(
    cluster: VirtualCluster, slices: int, heartbeats: int
) -> None:
    """The others are a step further; without any heartbeat the first task is as good as any."""
    last = 2 * slices - 1

    async def work(task: Task) -> int:
        for step in range(heartbeats):
            await asyncio.sleep(1.0)
            task.heartbeat(step)
        if heartbeats and task.info.task_index != last:
            task.heartbeat(heartbeats)
        if task.info.attempt == 1 or task.info.job_id == "fails":
            await asyncio.sleep(10_000.0)
        return task.info.attempt

    results = cluster.run("job", (slices,), work, max_retries_failure=1, stall_timeout=20.0)
    assert await results == [2] * (2 * slices)
    assert await cluster.charged("job") == (1, 0)
    named = f"slice {slices - 1} .* worker 1 holds the others up: it is at step 2, and the furthest at step 3"
    unclear = "the last is slice 0 .* worker 0, .*which process is at fault is not clear: no process differs"
    who = named if heartbeats else unclear
    with pytest.raises(TaskCrashedError, match=f"no task has made progress for .*; {who}"):
        await cluster.run("fails", (slices,), work, stall_timeout=20.0)


STEPS = 1 + FIRST_STEPS + ENOUGH_STEPS


@played()
async def test_hang_beyond_learned_limit_costs_a_preemption(cluster: VirtualCluster) -> None:
    """Nobody has set a limit. The first attempt is ended, and users see why."""

    async def work(task: Task) -> int:
        for step in range(STEPS):
            task.heartbeat(step)
            await asyncio.sleep(100.0 if task.info.job_id == "slow" else 10.0)
        if task.info.attempt == 1:
            await asyncio.sleep(1_000.0)
        return task.info.attempt

    began = virtual_time.now()
    results = cluster.run("job", (1,), work, max_retries_failure=0, max_retries_preemption=1)
    await cluster.runs("job", 2)
    assert (await cluster.status("job")).stall_limit is None
    await asyncio.sleep(10.0 * STEPS)
    seen = await cluster.status("job")
    assert seen.stall_limit == "600 s (learned: the longest step took 10 s)"
    assert f"it starts again after {seen.stall_limit} without a heartbeat" in seen.explanation
    assert await results == [2, 2]
    assert 600.0 < virtual_time.now() - began - 10.0 * (2 * STEPS - 1) < 620.0
    assert await cluster.charged("job") == (0, 1)
    error = (await cluster.status("job")).error or ""
    assert "no task has made progress for 60" in error
    assert "stall_timeout=0 switches this off" in error
    began = virtual_time.now()
    assert await cluster.run("slow", (1,), work, max_retries_failure=0, max_retries_preemption=1) == [2, 2]
    assert 1000.0 < virtual_time.now() - began - 100.0 * (2 * STEPS - 1) < 1020.0, "ten times the longest step"


@played()
@pytest.mark.parametrize(
    ("steps", "options"),
    [(0, {}), (STEPS, {"stall_timeout": 0}), (STEPS, {"max_retries_preemption": 0})],
    ids=["no heartbeats", "switched off", "no retries"],
)
async def test_hang_without_learned_limit_lasts(cluster: VirtualCluster, steps: int, options: dict[str, float]) -> None:
    async def work(task: Task) -> int:
        for step in range(steps):
            task.heartbeat(step)
            await asyncio.sleep(10.0)
        await asyncio.sleep(1_000.0)
        return task.info.attempt

    assert await cluster.run("job", (1,), work, **options) == [1, 1]


@played()
async def test_hang_is_found_by_a_service_that_was_started_anew(cluster: VirtualCluster) -> None:
    """It has not heard that the attempt began."""
    heard = HangsInPool.happened

    async def happened(part: HangsInPool, events: list[PoolEvent]) -> None:
        await heard(part, [event for event in events if not isinstance(event, AttemptBegan)])

    async def work(task: Task) -> int:
        if task.info.attempt == 1:
            await asyncio.sleep(1_000.0)
        return task.info.attempt

    with mock.patch.object(HangsInPool, "happened", happened):
        assert await cluster.run("job", (1,), work, stall_timeout=20.0, max_retries_failure=1) == [2, 2]


@played()
async def test_gang_that_goes_on_while_it_is_looked_at_is_not_ended(cluster: VirtualCluster) -> None:
    """Its longest step takes little more than the limit, and it is looked at for a second."""

    async def work(task: Task) -> int:
        for step in range(5):
            task.heartbeat(step)
            await asyncio.sleep(21.5)
        return task.info.attempt

    assert await cluster.run("job", (1,), work, stall_timeout=20.0, max_retries_failure=1) == [1, 1]


WAITS, LOOPS = ("_value (jax/_src/array.py:664)",), ("spin (train.py:7)",)


@played()
@pytest.mark.parametrize("options", [{"stall_timeout": 20.0, "max_retries_failure": 1}, {"max_retries_preemption": 1}])
async def test_culprit_of_hang_is_named_and_its_slice_avoided(
    cluster: VirtualCluster, options: dict[str, float]
) -> None:
    async def work(task: Task) -> str:
        culprit = task.info.attempt == 1 and task.info.task_index == 1
        task.stack = LOOPS if culprit else WAITS
        for step in range(STEPS):
            task.heartbeat(step)
            await asyncio.sleep(1.0)
        if task.info.attempt == 1:
            await asyncio.sleep(1_000.0)
        return task.info.slice_name

    results = cluster.run("job", (1,), work, **options)
    (first, _) = await cluster.runs("job", 2)
    elsewhere = await results
    assert first.info.slice_name not in elsewhere, "another slice is free"
    error = (await cluster.status("job")).error or ""
    assert f"slice 0 ({first.info.slice_name}) worker 1 holds the others up: it is in spin (train.py:7)" in error
    (past, _) = (await cluster.ask("list_tasks", "job"))[1].attempts
    assert "holds the others up" in past.error


@played(slices=1)
async def test_avoided_slice_is_taken_if_there_is_no_other(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> int:
        task.stack = LOOPS if task.info.task_index else WAITS
        if task.info.attempt == 1:
            await asyncio.sleep(1_000.0)
        return task.info.attempt

    assert await cluster.run("job", (1,), work, stall_timeout=20.0, max_retries_failure=1) == [2, 2]


@played()
@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
async def test_hang_detection_ignores_wall_clock(cluster: VirtualCluster, ahead: float) -> None:
    """Somebody sets the clock before the first heartbeat."""

    async def work(task: Task) -> int:
        await asyncio.sleep(5.0)
        virtual_time.set_wall_clock(ahead / 2)
        await asyncio.sleep(5.0)
        task.heartbeat(1)
        if task.info.job_id == "hangs":
            await asyncio.sleep(10_000.0)
        return 0

    assert await cluster.run("job", (1,), work, stall_timeout=20.0) == [0, 0]
    assert await cluster.charged("job") == (0, 0)
    began = virtual_time.now()
    with pytest.raises(TaskCrashedError, match="no task has made progress"):
        await cluster.run("hangs", (1,), work, stall_timeout=20.0)
    assert 30.0 <= virtual_time.now() - began < 50.0
