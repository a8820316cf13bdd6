"""A gang gives its hosts to a job of a higher band: what its tasks hear, when they end, what it costs. Virtual time."""

import asyncio
import time

import pytest

from iris_ray.actors.controller.eviction_settings import EVICTIONS, GRACE, eviction_rules
from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import GRACE_S
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import Stage, VirtualCluster

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


@pytest.mark.parametrize("job_id", ["saves", "does not save"])
def test_lower_band_gang_is_told_and_moves_or_stops(stage: Stage, job_id: str) -> None:
    async def story(cluster: VirtualCluster) -> None:
        results = cluster.run(job_id, work=trains, priority=PriorityBand.BATCH)
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

    stage.play(story, slices=1)


def test_eviction_continues_under_next_controller(stage: Stage) -> None:
    async def story(cluster: VirtualCluster) -> None:
        results = cluster.run("job", work=trains, priority=PriorityBand.BATCH)
        first = await cluster.runs("job", 2)
        await asyncio.sleep(RAN_S)
        served = cluster.run("prod", work=serves, priority=PriorityBand.PRODUCTION)
        await cluster.until(lambda: all(task.told.is_set() for task in first))
        cluster.restart_controller()
        assert await served == ["served"] * 2
        assert await results == [2] * 2
        assert (await cluster.status("job")).evictions == 1

    stage.play(story, slices=1)


def test_gang_goes_on_if_evicting_job_is_cancelled(stage: Stage) -> None:
    async def story(cluster: VirtualCluster) -> None:
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

    stage.play(story, slices=1)


@pytest.mark.parametrize(
    ("value", "grace_s"), [("60", 60.0), ("0", 0.0), ("-1", GRACE_S), ("soon", GRACE_S), ("nan", 30.0)]
)
def test_eviction_grace_comes_from_valid_variable_only(value: str, grace_s: float) -> None:
    rules = eviction_rules({GRACE: value})
    assert rules is not None
    assert rules.grace_s == grace_s


def test_evictions_can_be_switched_off() -> None:
    assert eviction_rules({EVICTIONS: "0"}) is None
    assert eviction_rules({EVICTIONS: "1"}) is not None
