"""A gang on hosts without TPU that share a rack: order, launch, loss, release. Whole jobs in virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.lifecycle import JobState
from tests.support.hosts_in_process import Crash, Task
from tests.support.virtual_cluster import VirtualCluster, played

BY_RACK = CoschedulingConfig("rack")


def add_racks(cluster: VirtualCluster, **sizes: int) -> None:
    """Racks of hosts with two CPUs each."""
    for place, (rack, size) in enumerate(sizes.items()):
        for number in range(size):
            node_id = cluster.node_id(rack, number)
            cluster.add_node(node_id, f"10.9.{place}.{number}", {"CPU": 2.0}, {"rack": rack})


async def rack_of(cluster: VirtualCluster, tasks: Sequence[Task]) -> str:
    """The only rack of these tasks, which are on a host each."""
    workers = {worker.node_id: worker for worker in await cluster.workers()}
    hosts = [workers[task.host.node_id] for task in tasks]
    (rack,) = {str(host.attributes["rack"]) for host in hosts}
    assert len({host.node_id for host in hosts}) == len(tasks)
    return rack


def end_all(tasks: Sequence[Task]) -> None:
    for task in tasks:
        task.end.set_result((task.info.attempt, task.info.task_index))


@played(slices=0)
async def test_gang_losing_a_host_restarts_whole_on_another_rack(cluster: VirtualCluster) -> None:
    add_racks(cluster, a=3, b=2)
    results = cluster.run_tasks("job", 3, coscheduling=BY_RACK, max_retries_preemption=1)
    first = await cluster.runs("job", 3)
    assert await rack_of(cluster, first) == "a"
    add_racks(cluster, a=3, b=3)
    cluster.kill_host("a", 1)
    second = await cluster.started("job", 3, attempt=2)
    assert await rack_of(cluster, second) == "b"
    assert not any(map(cluster.is_running, first)), "the survivors were stopped before"
    end_all(second)
    assert await results == [(2, 0), (2, 1), (2, 2)]
    assert await cluster.charged("job") == (0, 1)


@played(slices=0)
async def test_gang_waits_until_one_rack_has_room(cluster: VirtualCluster) -> None:
    add_racks(cluster, a=2, b=2)
    for rack in "ab":
        here = (Constraint("rack", ConstraintOp.EQ, rack),)
        cluster.run_tasks(rack, 1, constraints=here, resources={"CPU": 2.0})
    (in_a,), (in_b,) = await cluster.started("a", 1), await cluster.started("b", 1)
    gang = cluster.run_tasks("gang", 2, coscheduling=BY_RACK, resources={"CPU": 2.0})
    await asyncio.sleep(1.0)
    await cluster.until(lambda: _says(cluster, "gang", "waiting for 1 group by rack (any); 0 free; "))
    end_all([in_b])
    tasks = await cluster.started("gang", 2)
    assert await rack_of(cluster, tasks) == "b"
    end_all([*tasks, in_a])
    assert await gang == [(1, 0), (1, 1)]


async def _says(cluster: VirtualCluster, job_id: str, beginning: str) -> bool:
    waiting = (await cluster.status(job_id)).waiting
    return waiting is not None and str(waiting).startswith(beginning)


@played(slices=0)
async def test_two_rack_gang_numbers_tasks_by_rack(cluster: VirtualCluster) -> None:
    add_racks(cluster, a=2, b=2)
    results = cluster.run_tasks("job", 2, coscheduling=CoschedulingConfig("rack", 2))
    tasks = await cluster.started("job", 4)
    assert {await rack_of(cluster, tasks[:2]), await rack_of(cluster, tasks[2:])} == {"a", "b"}
    assert len({task.info.coordinator_address for task in tasks}) == 1
    end_all(tasks)
    assert await results == [(1, index) for index in range(4)]


@played(slices=0)
async def test_crash_of_one_task_retries_whole_rack_gang(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> int:
        if task.info.attempt == 1 and task.info.task_index == 1:
            raise Crash("was killed by SIGSEGV")
        if task.info.attempt == 1:
            await task.end
        return task.info.attempt

    add_racks(cluster, a=2)
    assert await cluster.run_tasks("job", 2, work, coscheduling=BY_RACK, max_retries_failure=1) == [2, 2]
    assert await cluster.charged("job") == (1, 0)
    status = await cluster.status("job")
    assert (status.error or "").startswith("task 1 on 10.9.0.")


@played(slices=0)
@pytest.mark.parametrize("keep_warm", [0.0, 60.0])
async def test_rack_left_by_gang_is_reserved_by_nobody(cluster: VirtualCluster, keep_warm: float) -> None:
    """Others share these hosts, so nothing there is kept warm."""
    add_racks(cluster, a=2)
    results = cluster.run_tasks("job", 2, coscheduling=BY_RACK, keep_warm=keep_warm)
    end_all(await cluster.started("job", 2))
    await results
    await cluster.until(lambda: not cluster.reserved_nodes())
    assert (await cluster.status("job")).state is JobState.SUCCEEDED
    assert [dict(worker.free) for worker in await cluster.workers() if worker.attributes.get("rack")] == [
        {"CPU": 2.0},
        {"CPU": 2.0},
    ]


@played(slices=0)
async def test_task_waits_until_ray_has_reserved_its_resources(cluster: VirtualCluster) -> None:
    """Its process is a fork of a zygote outside the reservation. Other Ray work may have the host's CPUs."""
    add_racks(cluster, a=2)
    results = cluster.run_tasks("before", 2, coscheduling=BY_RACK)
    end_all(await cluster.started("before", 2))
    await results  # the hosts' actors and zygotes wait for the next tasks
    cluster.unreserved = "all"
    waiting = cluster.run_tasks("job", 2, coscheduling=BY_RACK)
    await asyncio.sleep(2.0)
    assert not [task for task in cluster.tasks if task.info.job_id == "job"]
    cluster.unreserved = ""
    end_all(await cluster.started("job", 2))
    await waiting
