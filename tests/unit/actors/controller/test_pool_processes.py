"""Processes of one pool: the newest is obeyed, and what an older one says late changes nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S
from iris_ray.actors.calls.names import forget_incarnations, take_incarnation
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.messages import AttemptOrder, PoolProcess
from iris_ray.errors import SupersededError
from iris_ray.model.lifecycle import JobState
from iris_ray.state.events import JobCancelledEvent
from tests.support.virtual_cluster import Stage, VirtualCluster
from tests.support.worlds import gang_spec


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


async def refused(cluster: VirtualCluster, method: str, *args: Any) -> bool:
    try:
        await cluster.ask(method, *args)
    except RayTaskError as error:
        return isinstance(error.cause, SupersededError)
    return False


def test_late_call_of_an_older_process_is_refused_and_takes_nothing_from_the_newer_one(stage: Stage) -> None:
    async def story(cluster: VirtualCluster) -> None:
        cluster.run("job", max_retries_preemption=5)
        await cluster.runs("job", 2)
        spec = cluster.controllers[-1]._state.jobs["job"].spec
        reserved = cluster.reserved_nodes()
        assert await refused(cluster, "submit", spec, cluster.pool, 0)
        ended = [JobCancelledEvent("job", "it failed")]
        assert await refused(cluster, "report", "job", ended, 0, PoolProcess(spec.owner, 0))
        assert await cluster.charged("job") == (0, 0)
        assert (await cluster.status("job")).state is JobState.RUNNING
        assert cluster.reserved_nodes() == reserved != set()

    stage.play(story)


def test_newer_process_ends_what_ran_in_the_older_one_once(stage: Stage) -> None:
    async def story(cluster: VirtualCluster) -> None:
        cluster.run("job", max_retries_preemption=5)
        await cluster.runs("job", 2)
        spec = cluster.controllers[-1]._state.jobs["job"].spec
        for _ in range(2):
            await cluster.ask("submit", spec, cluster.pool, 2)
            assert await cluster.charged("job") == (0, 1)
        assert await refused(cluster, "submit", spec, cluster.pool, 1)
        assert await cluster.charged("job") == (0, 1)

    stage.play(story)


def test_successor_does_not_listen_to_an_older_process_than_it_knows_of(stage: Stage) -> None:
    async def story(cluster: VirtualCluster) -> None:
        cluster.run("job", max_retries_preemption=5)
        await cluster.runs("job", 2)
        reserved = cluster.reserved_nodes()
        cluster.pool._object._incarnation = 0
        cluster.restart_controller()
        await cluster.ask("ping")
        assert await cluster.charged("job") == (0, 0)
        assert cluster.reserved_nodes() == reserved

    stage.play(story)


def test_pool_that_answers_late_after_a_restart_keeps_what_runs(stage: Stage) -> None:
    async def story(cluster: VirtualCluster) -> None:
        cluster.run("job", max_retries_preemption=5)
        await cluster.runs("job", 2)
        pool = cluster.pool._object
        as_it_was, late = pool.assign, []

        async def assign(order: AttemptOrder) -> bool | None:
            late.append(order.attempt.number)
            await asyncio.sleep(2 * ANSWER_TIMEOUT_S)
            taken: bool | None = await as_it_was(order)
            return taken

        pool.assign = assign
        cluster.restart_controller()
        await cluster.ask("ping")
        await asyncio.sleep(3 * ANSWER_TIMEOUT_S)
        status = await cluster.status("job")
        assert (late, status.state, status.attempt) == ([1], JobState.RUNNING, 1)

    stage.play(story)


def test_numbers_of_the_processes_of_a_pool_grow(stage: Stage) -> None:
    async def story(cluster: VirtualCluster) -> None:
        assert [take_incarnation(owner) for owner in ("a", "b", "a", "a")] == [1, 1, 2, 3]
        assert cluster.store.keys("incarnation/a/") == ["incarnation/a/3"]
        forget_incarnations("a")
        assert take_incarnation("a") == 1

    stage.play(story, slices=1)


def test_numbers_of_a_pool_that_is_gone_are_forgotten(stage: Stage) -> None:
    async def story(cluster: VirtualCluster) -> None:
        other = cluster.ray.create(SlicePoolManager, (), {})
        other.run.remote(cluster.request(gang_spec("theirs"))).future().add_done_callback(lambda done: done.exception())
        await cluster.started("theirs", 2)
        assert len(cluster.store.keys("incarnation/")) == 2
        cluster.ray.kill(other)
        await cluster.until(lambda: len(cluster.store.keys("incarnation/")) == 1)

    stage.play(story)
