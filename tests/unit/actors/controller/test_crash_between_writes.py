"""A Controller that dies between any two writes of a story: its successors agree, and nothing is held for ever."""

import asyncio
import contextvars
from typing import Any

import pytest

from iris_ray.actors.calls.names import CONTROLLER_NAME
from iris_ray.actors.controller import write_ahead_log
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.errors import JobCancelledError
from iris_ray.model.lifecycle import JobState
from tests.support.hosts_in_process import Task
from tests.support.ray_in_process import Handle
from tests.support.virtual_cluster import Stage, VirtualCluster, played
from tests.support.worlds import gang_spec

SETTLED_S = 5.0
"""After so long without news nothing goes on any more."""
WRITES = 16
WRITES_WITH_CHECKPOINTS = 58
"""That the story takes at most."""
WRITES_NEWEST_FIRST = 49
"""That it takes with checkpoints if the newest write comes first: more of them are one."""
TAKE_OVER = 12
"""Writes of a Controller that takes over."""


class Crashes:
    """Ends the Controller instead of a write, and starts the next one as Ray does.

    Args:
        cluster: whose Controller.
        planned: which write, counted from the crash before.
    """

    def __init__(self, cluster: VirtualCluster, planned: list[int]) -> None:
        self.writes = 0
        self.planned = planned
        self._cluster = cluster
        cluster.store.before_write = self._before_write

    def _before_write(self) -> None:
        controller = self._cluster.ray.current_actor()
        assert controller is not None
        if not issubclass(controller._class, Controller):
            return
        if controller._is_dead:
            raise asyncio.CancelledError
        if self.planned[:1] == [self.writes]:
            self.planned.pop(0)
            self.crash(controller)
            raise asyncio.CancelledError
        self.writes += 1

    def crash(self, controller: Handle) -> None:
        self.writes = 0
        controller._die()
        asyncio.get_running_loop().call_soon(self._start_next, context=contextvars.Context())

    def _start_next(self) -> None:
        self._cluster.ray.create(Controller, (), {"name": CONTROLLER_NAME})


def end_all(tasks: list[Task]) -> None:
    for task in tasks:
        if not task.end.done():
            task.end.set_result(task.info.task_index)


def seen(cluster: VirtualCluster) -> dict[str, Any]:
    """What the Controller knows, as far as a successor has to know it, too."""
    state = cluster.controllers[-1]._state
    jobs = {
        job_id: (job.state, [(g.attempt, g.groups, [(t.state, t.node_id) for t in g.tasks]) for g in job.gangs])
        for job_id, job in state.jobs.items()
    }
    held = {worker.node_id: sorted(map(str, worker.occupants)) for worker in state.workers.values()}
    return {"jobs": jobs, "held": held, "holders": dict(state.holders), "pools": sorted(cluster.controllers[-1]._pools)}


async def tell(cluster: VirtualCluster) -> None:
    """Two pools, one of which goes; gangs, single tasks, a queue, a lost host."""
    other = cluster.ray.create(SlicePoolManager, (), {})
    theirs = other.run.remote(cluster.request(gang_spec("theirs")))
    theirs.future().add_done_callback(lambda done: done.cancelled() or done.exception())
    mine, small = cluster.run("mine"), cluster.run_tasks("small", 2)
    running = await cluster.started("mine", 2)
    await cluster.started("theirs", 2)
    end_all(await cluster.started("small", 2))
    await small
    late = cluster.run("late", (3,), max_retries_preemption=5)
    end_all(running)
    await mine
    cluster.ray.kill(other)
    first = await cluster.runs("late", 6)
    cluster.add_slice("v4-16-more")
    cluster.kill_host("v4-16-0", 1)
    await cluster.until(lambda: cluster.tasks_of("late")[-1].info.attempt > first[0].info.attempt)
    end_all(await cluster.until(lambda: cluster.last_attempt("late", 6)))
    await late


async def nothing_is_left(cluster: VirtualCluster, crashes: Crashes) -> None:
    """Nothing goes on any more. The next Controller knows the same, and so does the one after that."""
    await asyncio.sleep(SETTLED_S)
    known = [seen(cluster)]
    for _ in range(2):
        crashes.crash(cluster.controller())
        await asyncio.sleep(SETTLED_S)
        cluster.controllers[-1]._state.check()
        known.append(seen(cluster))
    assert known[0] == known[1] == known[2]
    cluster.ray.kill(cluster.pool)
    await asyncio.sleep(SETTLED_S)
    crashes.crash(cluster.controller())
    await asyncio.sleep(SETTLED_S)
    left = seen(cluster)
    assert not any(left["held"].values()), left["held"]
    assert (left["holders"], left["pools"]) == ({}, [])
    assert not cluster.reserved_nodes()


async def tell_with_crashes(cluster: VirtualCluster, *planned: int) -> None:
    crashes = Crashes(cluster, list(planned))
    await tell(cluster)
    await nothing_is_left(cluster, crashes)
    assert planned[0] not in crashes.planned


@pytest.mark.parametrize("at", range(WRITES))
def test_controller_survives_death_before_any_write(stage: Stage, at: int) -> None:
    stage.play(lambda cluster: tell_with_crashes(cluster, at))


@pytest.mark.parametrize("at", range(0, WRITES_NEWEST_FIRST, 2))
def test_controllers_survive_deaths_during_checkpoints(stage: Stage, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(write_ahead_log, "MOST_ENTRIES", 3)

    async def story(cluster: VirtualCluster) -> None:
        cluster.store.newest_first = True
        await tell_with_crashes(cluster, at, at % TAKE_OVER)

    stage.play(story)


@pytest.mark.parametrize(("entries", "writes"), [(write_ahead_log.MOST_ENTRIES, WRITES), (3, WRITES_WITH_CHECKPOINTS)])
def test_story_has_no_more_writes_than_tested(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, entries: int, writes: int
) -> None:
    monkeypatch.setattr(write_ahead_log, "MOST_ENTRIES", entries)

    async def story(cluster: VirtualCluster) -> None:
        crashes = Crashes(cluster, [10_000])
        await tell(cluster)
        await asyncio.sleep(SETTLED_S)
        assert 0.8 * writes <= crashes.writes <= writes

    stage.play(story)


@played()
async def test_job_of_unknowable_pool_is_ended_and_holds_nothing(cluster: VirtualCluster) -> None:
    results = cluster.run("job")
    await cluster.started("job", 2)
    crashes = Crashes(cluster, [])
    crashes.crash(cluster.controller())
    await asyncio.sleep(SETTLED_S)
    (pool,) = cluster.store.keys("pool/")
    cluster.store.values[pool] = b"not a handle"
    crashes.crash(cluster.controller())
    await asyncio.sleep(SETTLED_S)
    assert (await cluster.status("job")).state is JobState.KILLED
    assert not any(seen(cluster)["held"].values())
    assert not cluster.reserved_nodes()
    with pytest.raises(JobCancelledError, match="the process that called run_on_pod is gone"):
        await results
