"""A gang with two processes on each host: they start, fail, move and end together, as one task of the Controller."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from iris_ray.actors.controller.node_table import POD_TYPE_LABEL, SLICE_NAME_LABEL, WORKER_ID_LABEL
from iris_ray.actors.protocol.messages import ProcessSpec
from iris_ray.errors import TaskCrashedError
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.workers import TOPOLOGY_LABEL
from tests.support.hosts_in_process import Crash, Task
from tests.support.virtual_cluster import VirtualCluster, played

TWO: dict[str, Any] = {"processes_per_host": 2, "process": ProcessSpec(per_host=2)}


async def rank(task: Task) -> tuple[int, int, int]:
    return task.info.task_index, task.info.worker_id, task.info.local_index


@played()
async def test_each_process_has_a_result_in_order_of_ranks(cluster: VirtualCluster) -> None:
    expected = [(index, index // 2 % 2, index % 2) for index in range(8)]
    assert await cluster.run("job", (2,), rank, **TWO) == expected
    assert [task.info.num_tasks for task in cluster.tasks_of("job")] == [8] * 8
    status = await cluster.status("job")
    assert (status.tasks, status.processes_per_host) == ({TaskState.SUCCEEDED: 4}, 2)


@played()
async def test_warm_slice_gets_other_processes_for_another_number(cluster: VirtualCluster) -> None:
    for number, (more, ranks) in enumerate(((TWO, 4), ({}, 2), (TWO, 4))):
        assert len(await cluster.run(f"job-{number}", (1,), rank, keep_warm=60.0, **more)) == ranks


@played()
@pytest.mark.parametrize("crashes", range(4))
async def test_crash_of_any_process_restarts_all_for_one_failure(cluster: VirtualCluster, crashes: int) -> None:
    async def work(task: Task) -> int:
        if task.info.attempt == 1 and task.info.task_index == crashes:
            await asyncio.sleep(5.0)
            raise Crash("was killed by SIGABRT")
        if task.info.attempt == 1:
            await asyncio.Event().wait()
        return task.info.task_index

    assert await cluster.run("job", (1,), work, max_retries_failure=1, **TWO) == [0, 1, 2, 3]
    assert await cluster.charged("job") == (1, 0)
    assert len(cluster.tasks_of("job", 2)) == 4


@played()
async def test_error_names_process_that_was_the_first_cause(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> None:
        if task.info.task_index == 3:
            raise ValueError("no")
        await asyncio.Event().wait()

    with pytest.raises((RayTaskError, TaskCrashedError), match=r"worker 1 process 1"):
        await cluster.run("job", (1,), work, **TWO)


@played()
async def test_lost_host_costs_its_processes_one_preemption(cluster: VirtualCluster) -> None:
    reference = cluster.run("job", (1,), rank_after_a_loss, max_retries_preemption=1, **TWO)
    tasks = await cluster.runs("job", 4)
    cluster.kill_host(tasks[2].info.slice_name, 1)
    assert await reference == [0, 1, 2, 3]
    assert await cluster.charged("job") == (0, 1)


async def rank_after_a_loss(task: Task) -> int:
    if task.info.attempt == 1:
        await asyncio.Event().wait()
    return task.info.task_index


@played(slices=1)
async def test_all_of_rays_units_are_reserved_where_it_counts_devices(cluster: VirtualCluster) -> None:
    """A host of TPU7x with TPU: 8 has four chips, which two processes share."""
    for number in range(2):
        labels = {
            SLICE_NAME_LABEL: "x",
            WORKER_ID_LABEL: str(number),
            POD_TYPE_LABEL: "v7x-16",
            TOPOLOGY_LABEL: "2x2x2",
        }
        shape = {TOPOLOGY_LABEL: "2x2x2"}
        cluster.add_node(f"x-{number}", f"10.7.0.{number}", {"TPU": 8.0, "CPU": 8.0}, labels | shape)

    async def seen(task: Task) -> tuple[int, str]:
        (reserved,) = cluster.bundles_of({"x-0", "x-1"})
        return task.info.task_index, str(reserved)

    gang = cluster.run("job", (1,), seen, tpu_type="v7x-16", **TWO)
    assert await gang == [(rank, str([{"TPU": 8.0}] * 2)) for rank in range(4)]
    workers = {worker.node_id: worker for worker in await cluster.workers()}
    assert workers["x-1"].resources["TPU"] == 4.0
