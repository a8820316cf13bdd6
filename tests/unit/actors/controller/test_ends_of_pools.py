"""The end of a pool, or many: what is recorded as one and is none, what its jobs cost, and one look at Ray's table."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.controller import pool_registry
from iris_ray.actors.controller.pool_registry import PoolRegistry, ends_with_pool
from iris_ray.state import ControllerState, job_table
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import JobSubmittedEvent, TaskAssignedEvent
from iris_ray.state.fleet import Allocations
from tests.support.worlds import World, cpu_host, tasks_spec

JOBS = 200


def test_pool_end_costs_the_same_per_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 10)
    world, looks, as_it_was = World(), 0, Allocations.of
    world.do(cpu_host("c", cpus=float(JOBS)))
    for number in range(JOBS):
        world.do(JobSubmittedEvent(tasks_spec(f"j{number}", 1, resources={"CPU": 1.0}), world.now))
        world.do(TaskAssignedEvent(f"j{number}", 0, "c"))

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


@pytest.mark.parametrize("failures", [3, 1000])
def test_failed_removal_of_pool_is_retried_a_few_times(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    looks: list[set[str]] = []

    def look(owners: Collection[str]) -> None:
        looks.append(set(owners))
        if len(looks) <= failures:
            raise RuntimeError("the GCS does not answer")

    async def two_end() -> None:
        pools = registry()
        await asyncio.gather(pools._remove_reservations({"one"}), pools._remove_reservations({"two"}))
        await pools._remove_reservations({"three"})

    monkeypatch.setattr(pool_registry, "REMOVE_AGAIN_S", 0.0)
    monkeypatch.setattr(pool_registry, "remove_reservations", look)
    asyncio.run(two_end())
    assert looks[1] == {"one", "two"}
    assert looks[-1] == {"three"}
    assert len(looks) == (failures + 2 if failures == 3 else 2 * pool_registry.REMOVAL_TRIES)
