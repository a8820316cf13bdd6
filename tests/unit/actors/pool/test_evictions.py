"""A gang gives its hosts to a job of a higher band: what its tasks hear, when they end, what it costs. Virtual time."""

import asyncio
import time

import pytest

from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import GRACE_S
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import VirtualCluster, played

RAN_S = 200.0


async def trains(task: Task) -> int:
    """The first attempt runs until it is told, and saves if it can. The second one returns."""
    if task.info.attempt > 1:
        return task.info.attempt
    await task.told.wait()
    if task.info.job_id.startswith("saves"):
        await asyncio.sleep(1.0)
        task.save()
    await asyncio.sleep(10_000.0)
    return 1


async def serves(task: Task) -> str:
    await asyncio.sleep(60.0)
    return "served"


@played(slices=1)
@pytest.mark.parametrize("job_id", ["saves", "does-not-save"])
async def test_lower_band_gang_is_told_and_moves_or_stops(cluster: VirtualCluster, job_id: str) -> None:
    results = cluster.run(job_id, work=trains, priority=PriorityBand.BATCH, max_retries_preemption=1)
    first = await cluster.runs(job_id, 2)
    await asyncio.sleep(RAN_S)
    began = time.time()
    served = cluster.run("prod", work=serves, priority=PriorityBand.PRODUCTION, user="ann")
    await cluster.until(lambda: all(task.told.is_set() for task in first))
    status = await cluster.status(job_id)
    assert "PRODUCTION job prod of ann takes its hosts from BATCH" in status.explanation
    assert "taken from " + job_id in (await cluster.status("prod")).explanation
    await cluster.started("prod", 2)
    passed = time.time() - began
    assert passed < GRACE_S / 2 if job_id == "saves" else GRACE_S <= passed < GRACE_S + 10.0
    for task in first:
        assert task.notice is not None
        assert task.notice.kind is NoticeKind.EVICTION
        assert abs(task.notice.deadline - began - GRACE_S) < 2.0
    waiting = await cluster.status(job_id)
    assert (waiting.state, waiting.evictions) == (JobState.PENDING, 1)
    assert (waiting.error or "").startswith("evicted: PRODUCTION job prod of ann")
    assert await served == ["served"] * 2
    assert await results == [2] * 2
    assert await cluster.charged(job_id) == (0, 0)


@played(slices=2)
@pytest.mark.parametrize("tells", ["saves", "asks"])
async def test_gang_whose_tasks_tell_that_it_loses_little_gives_way_first(cluster: VirtualCluster, tells: str) -> None:
    """The other one has begun later."""
    results = [cluster.run("tells", work=trains, priority=PriorityBand.BATCH, max_retries_preemption=1)]
    told = (await cluster.runs("tells", 2))[0]
    told.saves_every_s, told.asks = (300.0, False) if tells == "saves" else (None, True)
    await asyncio.sleep(RAN_S)
    results.append(cluster.run("silent", priority=PriorityBand.BATCH))
    silent = await cluster.runs("silent", 2)
    await asyncio.sleep(7 * RAN_S)
    served = cluster.run("prod", work=serves, priority=PriorityBand.PRODUCTION)
    await cluster.until(lambda: told.told.is_set())
    assert not any(task.told.is_set() for task in silent)
    assert await served == ["served"] * 2
    for task in silent:
        task.end.set_result(0)
    await asyncio.gather(*results)


@played(slices=1)
async def test_eviction_continues_under_next_controller(cluster: VirtualCluster) -> None:
    results = cluster.run("job", work=trains, priority=PriorityBand.BATCH, max_retries_preemption=1)
    first = await cluster.runs("job", 2)
    await asyncio.sleep(RAN_S)
    served = cluster.run("prod", work=serves, priority=PriorityBand.PRODUCTION)
    await cluster.until(lambda: all(task.told.is_set() for task in first))
    cluster.restart_controller()
    assert await served == ["served"] * 2
    assert await results == [2] * 2
    assert (await cluster.status("job")).evictions == 1


@played(slices=1)
async def test_gang_goes_on_if_evicting_job_is_cancelled(cluster: VirtualCluster) -> None:
    cluster.run("job", work=trains, priority=PriorityBand.BATCH)
    first = await cluster.runs("job", 2)
    await asyncio.sleep(RAN_S)
    cluster.run("prod", work=serves, priority=PriorityBand.PRODUCTION)
    await cluster.until(lambda: all(task.told.is_set() for task in first))
    await cluster.ask("cancel", "prod", "enough", "ann")
    await asyncio.sleep(10 * GRACE_S)
    assert all(map(cluster.is_running, first))
    status = await cluster.status("job")
    assert (status.state, status.evictions, status.gives_way) == (JobState.RUNNING, 0, None)
    await cluster.ask("cancel", "job", "enough", "ann")


@played(slices=1)
async def test_eviction_uses_set_grace_under_next_controller_too(cluster: VirtualCluster) -> None:
    await cluster.ask("set_settings", {"eviction_grace_s": "90"}, False, "olga")
    cluster.restart_controller()
    cluster.run("job", work=trains, priority=PriorityBand.BATCH)
    first = await cluster.runs("job", 2)
    await asyncio.sleep(RAN_S)
    began = time.time()
    cluster.run("prod", work=serves, priority=PriorityBand.PRODUCTION)
    await cluster.until(lambda: all(task.told.is_set() for task in first))
    deadlines = [task.notice.deadline - began for task in first if task.notice is not None]
    assert all(abs(deadline - 90.0) < 2.0 for deadline in deadlines), deadlines
    await cluster.ask("cancel", "prod", "enough", "ann")
    await cluster.ask("cancel", "job", "enough", "ann")


@played(slices=1)
async def test_evictions_wait_while_switched_off(cluster: VirtualCluster) -> None:
    await cluster.ask("set_settings", {"evictions": "off"}, False, "olga")
    cluster.run("job", work=trains, priority=PriorityBand.BATCH)
    first = await cluster.runs("job", 2)
    cluster.run("prod", work=serves, priority=PriorityBand.PRODUCTION)
    await asyncio.sleep(2 * RAN_S)
    assert not any(task.told.is_set() for task in first)
    await cluster.ask("set_settings", {"evictions": None}, False, "olga")
    await asyncio.sleep(1.0)
    assert all(task.told.is_set() for task in first)
    await cluster.ask("cancel", "prod", "enough", "ann")
    await cluster.ask("cancel", "job", "enough", "ann")
