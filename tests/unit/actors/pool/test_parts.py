"""Gangs on parts of slices, from the Controller to the tasks: neighbours, losses, and parts that are kept warm."""

import asyncio
from typing import Any

from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.parts import part_attribute
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import VirtualCluster, played

TYPE = "v6e-16"
WHOLE: dict[str, Any] = {"tpu_type": TYPE}
PART: dict[str, Any] = {"tpu_type": TYPE, "replicas": 2, "coscheduling": CoschedulingConfig(part_attribute("2x4"))}


async def place(task: Task) -> tuple[str, int]:
    return task.info.slice_name, task.info.worker_id


async def until_cancelled(task: Task) -> None:
    await asyncio.Event().wait()


async def survive_loss(task: Task) -> tuple[str, int]:
    if task.info.attempt == 1:
        await asyncio.Event().wait()
    return task.info.slice_name, task.info.attempt


@played(slices=0)
async def test_two_gangs_of_one_pool_share_a_slice(cluster: VirtualCluster) -> None:
    cluster.add_slice("a", TYPE)
    both = [cluster.run(f"job-{i}", (1,), place, **PART) for i in range(2)]
    found = [await reference for reference in both]
    assert sorted(found) == [[(f"a:2x4:{i}", 0), (f"a:2x4:{i}", 1)] for i in range(2)]


@played(slices=0)
async def test_lost_host_stops_its_gang_only(cluster: VirtualCluster) -> None:
    cluster.add_slice("a", TYPE)
    lost = cluster.run("lost", (1,), survive_loss, max_retries_preemption=1, **PART)
    await cluster.runs("lost", 2)
    cluster.run("left", (1,), until_cancelled, **PART)
    await cluster.runs("left", 2)
    cluster.kill_host("a", 2)
    cluster.add_slice("b", TYPE)
    assert await lost == [("b:2x4:0", 2)] * 2
    assert await cluster.charged("lost") == (0, 1)
    assert all(map(cluster.is_running, cluster.tasks_of("left", 1)))
    assert await cluster.charged("left") == (0, 0)


@played(slices=0)
async def test_part_is_kept_warm_and_goes_to_whoever_needs_its_hosts(cluster: VirtualCluster) -> None:
    """The next run on the part finds it reserved. A gang on the whole slice, of the same pool, has it given back."""
    cluster.add_slice("a", TYPE)
    for number in range(2):
        await cluster.run(f"job-{number}", (1,), place, keep_warm=600.0, **PART)
    assert cluster.reservations_made == 1
    workers = {worker.host_index: worker for worker in await cluster.workers() if worker.slice_name == "a"}
    assert [workers[i].holder is not None for i in range(4)] == [True, False, True, False]
    assert not any(worker.foreign for worker in workers.values())
    assert await cluster.run("whole", (1,), place, keep_warm=600.0, **WHOLE) == [("a", i) for i in range(4)]
    assert await cluster.run("part", (1,), place, **PART) == [("a:2x4:0", i) for i in range(2)]


@played(slices=0)
async def test_controller_that_comes_back_knows_warm_parts_and_those_in_use(cluster: VirtualCluster) -> None:
    cluster.add_slice("a", TYPE)
    cluster.run("busy", (1,), until_cancelled, **PART)
    await cluster.runs("busy", 2)
    await cluster.run("warm", (1,), place, keep_warm=600.0, **PART)
    cluster.restart_controller()
    await asyncio.sleep(10.0)
    workers = {worker.host_index: worker for worker in await cluster.workers() if worker.slice_name == "a"}
    assert [worker.foreign for worker in workers.values()] == [None] * 4
    made = cluster.reservations_made
    assert await cluster.run("next", (1,), place, **PART) == [("a:2x4:1", i) for i in range(2)]
    assert cluster.reservations_made == made
    assert all(map(cluster.is_running, cluster.tasks_of("busy", 1)))
