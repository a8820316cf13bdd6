"""Pools that end, and processes of one pool that replace each other."""

import asyncio
import math
from collections.abc import Collection
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.names import forget_incarnations, take_incarnation
from iris_ray.actors.controller import pool_registry
from iris_ray.actors.controller.pool_registry import PoolRegistry, ends_with_pool
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.messages import AttemptOrder, PoolProcess
from iris_ray.errors import SupersededError
from iris_ray.model.lifecycle import JobState
from iris_ray.state import ControllerState, job_table
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import JobCancelledEvent, JobSubmittedEvent, TasksAssignedEvent
from iris_ray.state.fleet import Allocations
from tests.support.virtual_cluster import VirtualCluster, played
from tests.support.worlds import World, cpu_host, gang_spec, tasks_spec

# -- ends of pools ----------------------------------------------------------------------------------------------------


JOBS = 200


def test_pool_end_costs_the_same_per_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 10)
    world, looks, as_it_was = World(), 0, Allocations.of
    world.do(cpu_host("c", cpus=float(JOBS)))
    for number in range(JOBS):
        world.do(JobSubmittedEvent(tasks_spec(f"j{number}", 1, resources={"CPU": 1.0}), world.now))
        world.do(TasksAssignedEvent(f"j{number}", (0,), "c"))

    def counted(allocations: Allocations, job_id: str) -> Any:
        nonlocal looks
        looks += 1
        return as_it_was(allocations, job_id)

    monkeypatch.setattr(Allocations, "of", counted)
    apply_all(world.state, ends_with_pool(world.state, "pool-a"))
    assert looks < 10 * JOBS
    assert len(world.state.jobs) <= 11
    world.check()


class Recorded:
    """Stands for a journal."""

    def __init__(self, pools: dict[str, tuple[Any, int]]) -> None:
        self.recorded = pools
        self.epoch = 1

    def pools(self) -> dict[str, tuple[Any, int]]:
        return self.recorded

    def note_pool(self, owner: str, pool: object) -> None: ...


def registry(**pools: tuple[Any, int]) -> PoolRegistry:
    journal: Any = Recorded(pools)
    return PoolRegistry(journal, ControllerState(), lambda _: None, BackgroundTasks())


def test_recorded_handle_that_is_no_pool_is_left_out() -> None:
    assert asyncio.run(registry(odd=("no actor", 1)).come_back()) == {}


def test_owners_ending_during_table_read_share_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[set[str]] = []

    def look(owners: Collection[str]) -> None:
        looks.append(set(owners))

    async def in_a_thread(function: Any, *args: Any) -> None:
        await asyncio.sleep(0.01)
        function(*args)

    async def many_end() -> None:
        monkeypatch.setattr(asyncio, "to_thread", in_a_thread)
        pools = registry()
        await asyncio.gather(*(pools._remove_reservations({f"owner-{number}"}) for number in range(50)))

    monkeypatch.setattr(pool_registry, "remove_reservations", look)
    asyncio.run(many_end())
    assert [len(owners) for owners in looks] == [1, 49]


@pytest.mark.parametrize("failures", [3, math.inf])
def test_failed_removal_of_pool_is_retried_for_a_while(monkeypatch: pytest.MonkeyPatch, failures: float) -> None:
    looks: list[set[str]] = []

    def look(owners: Collection[str]) -> None:
        looks.append(set(owners))
        if len(looks) <= failures:
            raise RuntimeError("the GCS does not answer")

    async def two_end() -> None:
        pools = registry()
        await asyncio.gather(pools._remove_reservations({"one"}), pools._remove_reservations({"two"}))
        await pools._remove_reservations({"three"})

    monkeypatch.setattr(pool_registry, "REMOVE_AGAIN_S", 0.01)
    monkeypatch.setattr(pool_registry, "REMOVAL_S", 0.5)
    monkeypatch.setattr(pool_registry, "remove_reservations", look)
    asyncio.run(two_end())
    assert looks[1] == {"one", "two"}
    assert looks[-1] == {"three"}
    assert len(looks) == 5 or (failures == math.inf and len(looks) > 5)


# -- processes of one pool: the newest is obeyed ----------------------------------------------------------------------


async def refused(cluster: VirtualCluster, method: str, *args: Any) -> bool:
    try:
        await cluster.ask(method, *args)
    except RayTaskError as error:
        return isinstance(error.cause, SupersededError)
    return False


@played()
async def test_late_call_of_older_pool_process_changes_nothing(cluster: VirtualCluster) -> None:
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


@played()
async def test_newer_pool_process_ends_older_ones_work_once(cluster: VirtualCluster) -> None:
    cluster.run("job", max_retries_preemption=5)
    await cluster.runs("job", 2)
    spec = cluster.controllers[-1]._state.jobs["job"].spec
    for _ in range(2):
        await cluster.ask("submit", spec, cluster.pool, 2)
        assert await cluster.charged("job") == (0, 1)
    assert await refused(cluster, "submit", spec, cluster.pool, 1)
    assert await cluster.charged("job") == (0, 1)


@played()
async def test_successor_ignores_pool_process_older_than_recorded(cluster: VirtualCluster) -> None:
    cluster.run("job", max_retries_preemption=5)
    await cluster.runs("job", 2)
    reserved = cluster.reserved_nodes()
    cluster.pool._object._incarnation = 0
    cluster.restart_controller()
    await cluster.ask("ping")
    assert await cluster.charged("job") == (0, 0)
    assert cluster.reserved_nodes() == reserved


@played()
async def test_pool_answering_late_after_restart_keeps_its_work(cluster: VirtualCluster) -> None:
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


@played(slices=1)
async def test_incarnations_of_a_pool_grow(cluster: VirtualCluster) -> None:
    assert [take_incarnation(owner) for owner in ("a", "b", "a", "a")] == [1, 1, 2, 3]
    assert cluster.store.keys("incarnation/a/") == ["incarnation/a/3"]
    forget_incarnations("a")
    assert take_incarnation("a") == 1


@played()
async def test_incarnations_of_a_gone_pool_are_forgotten(cluster: VirtualCluster) -> None:
    other = cluster.ray.create(SlicePoolManager, (), {})
    other.run.remote(cluster.request(gang_spec("theirs"))).future().add_done_callback(lambda done: done.exception())
    await cluster.started("theirs", 2)
    assert len(cluster.store.keys("incarnation/")) == 2
    cluster.ray.kill(other)
    await cluster.until(lambda: len(cluster.store.keys("incarnation/")) == 1)


@played()
async def test_watch_of_a_controller_that_is_gone_ends_with_the_first_call_of_the_next(cluster: VirtualCluster) -> None:
    """Else each would stay in the pool, with the connection on which it came."""

    async def watch() -> None:
        await cluster.pool.watched.remote()

    cluster.run("job", (1,))
    await cluster.runs("job", 2)
    before = asyncio.ensure_future(watch())
    await asyncio.sleep(100.0)
    assert not before.done()
    cluster.restart_controller()
    await cluster.until(before.done)
    after = asyncio.ensure_future(watch())
    await asyncio.sleep(100.0)
    assert not after.done()
