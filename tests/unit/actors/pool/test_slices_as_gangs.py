"""A job whose failure domain is the slice: its slices start, are lost and return one by one, and hear of each other."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from iris_ray.errors import TaskCrashedError
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import EACH_SLICE
from tests.support.hosts_in_process import Crash, Task
from tests.support.virtual_cluster import VirtualCluster, played

BY_SLICE: dict[str, Any] = {"failure_domain": EACH_SLICE}


async def place(task: Task) -> tuple[int, ...]:
    info = task.info
    return info.task_index, info.slice_id, info.worker_id, info.gang_rank


@played()
async def test_results_come_in_the_order_of_slices(cluster: VirtualCluster) -> None:
    async def later_on_the_first(task: Task) -> tuple[int, ...]:
        await asyncio.sleep(5.0 - task.info.slice_id)
        return await place(task)

    expected = [(0, 0, 0, 0), (1, 0, 1, 1), (2, 1, 0, 0), (3, 1, 1, 1)]
    assert await cluster.run("job", (2,), later_on_the_first, **BY_SLICE) == expected


@played()
async def test_each_slice_is_a_jax_program_of_its_own(cluster: VirtualCluster) -> None:
    cluster.run("job", (2,), **BY_SLICE)
    infos = [task.info for task in await cluster.runs("job", 4)]
    assert {(info.num_tasks, info.num_slices, info.gang_size, info.in_gang) for info in infos} == {(4, 2, 2, False)}
    addresses = {info.slice_id: info.coordinator_address for info in infos}
    assert len(set(addresses.values())) == 2
    assert all(address.startswith("10.0.") for address in addresses.values())


@played(slices=3)
@pytest.mark.parametrize("lost", [0, 1])
async def test_lost_slice_returns_alone_on_another(cluster: VirtualCluster, lost: int) -> None:
    reference = cluster.run("job", (2,), max_retries_preemption=1, **BY_SLICE)
    tasks = await cluster.runs("job", 4)
    mine = [task for task in tasks if task.info.slice_id == lost]
    others = [task for task in tasks if task.info.slice_id != lost]
    cluster.kill_host(mine[0].info.slice_name, 1)
    again = await cluster.runs("job", 2, attempt=2)
    assert {(task.info.slice_id, task.info.task_index) for task in again} == {
        (task.info.slice_id, task.info.task_index) for task in mine
    }
    assert {task.info.slice_name for task in again}.isdisjoint(task.info.slice_name for task in tasks)
    assert not any(task.end.done() or task.process.gone.done() for task in others), "they have never been stopped"
    for task in (*others, *again):
        task.end.set_result((task.info.task_index, task.info.attempt))
    assert await reference == [(i, 2 if i // 2 == lost else 1) for i in range(4)]
    assert await cluster.charged("job", lost) == (0, 1)
    assert await cluster.charged("job", 1 - lost) == (0, 0)


@played(slices=2)
async def test_crash_restarts_its_slice_on_the_same_hosts(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> int:
        if (task.info.attempt, task.info.task_index) == (1, 3):
            await asyncio.sleep(2.0)
            raise Crash("was killed by SIGABRT")
        await asyncio.sleep(20.0)
        return task.info.attempt

    reference = cluster.run("job", (2,), work, max_retries_failure=1, **BY_SLICE)
    first = await cluster.runs("job", 4)
    again = await cluster.started("job", 2, attempt=2)
    assert {task.info.slice_name for task in again} == {t.info.slice_name for t in first if t.info.slice_id == 1}
    assert await reference == [1, 1, 2, 2]


@played()
async def test_slice_that_fails_for_good_ends_the_others(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> None:
        if task.info.task_index == 2:
            await asyncio.sleep(2.0)
            raise ValueError("no")
        await asyncio.Event().wait()

    with pytest.raises((RayTaskError, TaskCrashedError), match=r"worker 0"):
        await cluster.run("job", (2,), work, **BY_SLICE)
    assert (await cluster.status("job")).state is JobState.FAILED
    await cluster.until(lambda: all(task.process.gone.done() for task in cluster.tasks_of("job")))


@played(slices=3)
async def test_slices_hear_at_once_of_a_loss_and_of_the_return(cluster: VirtualCluster) -> None:
    cluster.run("job", (2,), max_retries_preemption=1, **BY_SLICE)
    tasks = await cluster.runs("job", 4)
    await cluster.until(lambda: all(task.membership.running == {0: 1, 1: 1} for task in tasks))
    assert len({task.membership.token for task in tasks}) == 1
    stay = [task for task in tasks if task.info.slice_id == 0]
    lost = next(task for task in tasks if task.info.slice_id == 1)
    cluster.kill_host(lost.info.slice_name, lost.info.worker_id)
    again = await cluster.started("job", 2, attempt=2)
    assert all({0: 1} in [told.running for told in task.memberships] for task in stay), "before it has returned"
    await cluster.until(lambda: all(list(t.membership.running.items()) == [(0, 1), (1, 2)] for t in (*stay, *again)))
    for task in again:
        task.end.set_result(None)
    await cluster.until(lambda: all(task.membership.returned == {1} for task in stay))
    assert {task.membership.token for task in again} == {stay[0].membership.token}
    for task in stay:
        epochs = [told.epoch for told in task.memberships]
        assert epochs == sorted(set(epochs))


@played(slices=1)
async def test_slice_starts_without_waiting_for_other_slices(cluster: VirtualCluster) -> None:
    reference = cluster.run("job", (2,), **BY_SLICE)
    first = await cluster.runs("job", 2)
    status = await cluster.status("job")
    assert (status.state, status.failure_domain, status.waiting is not None) == (JobState.RUNNING, EACH_SLICE, True)
    cluster.add_slice("v4-16-new")
    second = [task for task in await cluster.started("job", 4) if task not in first]
    assert {task.info.slice_id for task in second} == {1}
    for task in (*first, *second):
        task.end.set_result(task.info.task_index)
    assert await reference == [0, 1, 2, 3]
