"""The task processes that wait for the next attempts: how many there are, when they start, and what their end costs."""

import asyncio
from itertools import pairwise

import pytest

from iris_ray.actors.pool.slice_pool_manager import IDLE_LOOK_S
from iris_ray.actors.protocol.messages import ProcessSpec
from tests.support.hosts_in_process import OutOfMemory, Task, returns_at_once
from tests.support.virtual_cluster import VirtualCluster, played


async def lasts_one_second(task: Task) -> float:
    """Return when it has begun, by the clock of the event loop."""
    begin = asyncio.get_running_loop().time()
    await asyncio.sleep(1.0)
    return begin


@played(slices=1)
@pytest.mark.parametrize(
    ("cores", "free_gib", "waits_s"),
    [(200, 100, [0.5, 0.0, 0.0]), (200, 8, [0.5, 0.5, 0.5]), (2, 100, [1.5, 1.5, 1.5])],
    ids=["roomy", "little memory", "few cores"],
)
async def test_next_standbys_start_early_if_resources_allow(
    cluster: VirtualCluster, cores: int, free_gib: int, waits_s: list[float]
) -> None:
    """Where there are few, they start once it has ended. On roomy hosts several wait from the second run on."""
    cluster.process_start_s, cluster.cores, cluster.free_bytes = 1.5, cores, free_gib << 30
    begins = [(await cluster.run(f"run-{n}", (1,), lasts_one_second, keep_warm=600.0))[0] for n in range(4)]
    waits = [after - before - 1.0 for before, after in pairwise(begins)]
    assert waits == pytest.approx(waits_s, abs=0.1)


@played(slices=1)
async def test_consecutive_runs_start_at_once_up_to_standbys(cluster: VirtualCluster) -> None:
    """The fourth waits until processes have started."""
    cluster.process_start_s = 1.5
    await cluster.run("first", (1,), lasts_one_second, keep_warm=600.0, standbys=3)
    await asyncio.sleep(10.0)
    waits = []
    for n in range(4):
        called = asyncio.get_running_loop().time()
        began = await cluster.run(f"run-{n}", (1,), lasts_one_second, keep_warm=600.0, standbys=3)
        waits.append(began[0] - called)
    assert waits == pytest.approx([0.0, 0.0, 0.0, 1.5], abs=0.1)


@played(slices=2)
@pytest.mark.parametrize(("exit_takes", "slice_name"), [(0.5, "v4-16-0"), (30.0, "v4-16-1")])
async def test_next_run_prefers_warm_slice_to_free_one_briefly(
    cluster: VirtualCluster, exit_takes: float, slice_name: str
) -> None:
    async def returns_and_exits_slowly(task: Task) -> str:
        task.exit_takes = exit_takes
        return task.info.slice_name

    assert await cluster.run("first", (1,), returns_and_exits_slowly, keep_warm=600.0) == ["v4-16-0"] * 2
    assert await cluster.run("next", (1,), returns_and_exits_slowly, keep_warm=600.0) == [slice_name] * 2


@played(slices=2)
async def test_runs_do_not_wait_long_for_leaving_slice(cluster: VirtualCluster) -> None:
    """Its exit handlers take long. Another slice is warm, too."""

    async def exits_slowly(task: Task) -> str:
        task.exit_takes = 30.0
        return task.info.slice_name

    async def begins(task: Task) -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)
        return began

    both = [cluster.run(f"run-{n}", (1,), begins, keep_warm=600.0) for n in range(2)]
    assert [len(await run) for run in both] == [2, 2]
    await asyncio.sleep(10.0)
    await cluster.run("slow", (1,), exits_slowly, keep_warm=600.0, exit_grace=60.0)
    await asyncio.sleep(3.0)
    called = asyncio.get_running_loop().time()
    assert (await cluster.run("next", (1,), begins, keep_warm=600.0))[0] < called + 0.1


@played(slices=1)
async def test_standbys_do_not_start_beside_short_runs(cluster: VirtualCluster) -> None:
    """On few cores they would compete with the run that has just begun."""
    await cluster.run("first", (1,), lasts_one_second, keep_warm=600.0, standbys=5)
    await asyncio.sleep(10.0)
    processes = cluster.node(cluster.node_id("v4-16-0", 0)).processes
    assert len(processes) == 1 + 5
    for number in range(5):
        await cluster.run(f"run-{number}", (1,), lasts_one_second, keep_warm=600.0, standbys=5)
        assert len(processes) == 1 + 5, "the next ones start four seconds after a run has begun"
    await asyncio.sleep(10.0)
    assert len(processes) == 1 + 5 + 5


@played(slices=1)
async def test_unsuitable_standbys_end_when_job_needs_its_own(cluster: VirtualCluster) -> None:
    await cluster.run("first", (1,), returns_at_once, keep_warm=600.0, standbys=3)
    await asyncio.sleep(10.0)
    node = cluster.node(cluster.node_id("v4-16-0", 0))
    before = {pid for pid, process in node.processes.items() if not process.gone.done()}
    assert len(before) == 3
    await cluster.run("other", (1,), returns_at_once, keep_warm=600.0, process=ProcessSpec(preload=("json",)))
    await asyncio.sleep(10.0)
    after = {pid for pid, process in node.processes.items() if not process.gone.done()}
    assert len(after) == 1
    assert not after & before


@played(slices=1)
async def test_standbys_ended_while_waiting_cost_one_failed_launch(cluster: VirtualCluster) -> None:
    """A host whose memory runs short loses them all. Each generation would cost a launch, and in the end the host."""
    await cluster.run("first", (1,), returns_at_once, keep_warm=600.0, standbys=3)
    await asyncio.sleep(10.0)
    for process in cluster.node(cluster.node_id("v4-16-0", 1)).processes.values():
        cluster.ray.kill(process.handle)
    called = asyncio.get_running_loop().time()
    await cluster.run("next", (1,), returns_at_once, keep_warm=600.0, standbys=3)
    assert asyncio.get_running_loop().time() - called < 1.0
    assert [len(task.attempts) for task in await cluster.ask("list_tasks", "next")] == [2, 2]


@played(slices=1)
async def test_task_exhausting_memory_restarts_although_standbys_died_too(cluster: VirtualCluster) -> None:
    results = cluster.run("job", (1,), max_retries_failure=1, keep_warm=600.0, standbys=3)
    (_, task) = await cluster.runs("job", 2)
    await asyncio.sleep(10.0)
    for process in cluster.node(cluster.node_id("v4-16-0", 1)).processes.values():
        if process.task is None:
            cluster.ray.kill(process.handle)
    task.end.set_exception(OutOfMemory("was killed by Ray"))
    for task in await cluster.started("job", 2, attempt=2):
        task.end.set_result(None)
    await results
    assert await cluster.charged("job") == (1, 0)


@played(slices=1)
async def test_slices_not_kept_warm_get_no_more_standbys(cluster: VirtualCluster) -> None:
    await cluster.run("job", (1,), returns_at_once, keep_warm=0.0, standbys=3)
    await asyncio.sleep(10.0)
    processes = cluster.node(cluster.node_id("v4-16-0", 0)).processes.values()
    assert [process.gone.done() for process in processes] == [True]


@played(slices=1)
@pytest.mark.parametrize(("keep_warm", "waiting"), [(0.0, 1), (600.0, 3)])
async def test_several_standbys_wait_only_for_further_runs(
    cluster: VirtualCluster, keep_warm: float, waiting: int
) -> None:
    """A job whose slices are given back at its end uses one of them at a time: for its next attempt."""
    results = cluster.run("job", (1,), keep_warm=keep_warm, standbys=3)
    tasks = await cluster.runs("job", 2)
    await asyncio.sleep(10.0)
    processes = cluster.node(cluster.node_id("v4-16-0", 0)).processes.values()
    assert sum(process.task is None and not process.gone.done() for process in processes) == waiting
    for task in tasks:
        task.end.set_result(None)
    await results


def held_slices(cluster: VirtualCluster) -> int:
    return len(cluster.reserved_nodes()) // 2


@played(slices=2)
@pytest.mark.parametrize(
    ("name", "bundle", "left"),
    [
        ("train", {"TPU": 4.0, "CPU": 1.0}, 0),
        ("train", {"CPU": 1.0}, 2),
        ("train", {"TPU": 8.0}, 2),
        ("iris_ray_demand/v4-16/1", {"TPU": 4.0}, 2),
        ("iris_ray/another/1", {"TPU": 4.0}, 2),
    ],
    ids=["chips", "none", "more than a host has", "demand", "another pool"],
)
async def test_warm_slices_are_yielded_to_others_that_wait_for_chips(
    cluster: VirtualCluster, name: str, bundle: dict[str, float], left: int
) -> None:
    """As Ray Train, which would give up before they are cold."""
    await cluster.run("first", (2,), returns_at_once, keep_warm=600.0)
    await asyncio.sleep(60.0)
    cluster.others_wait(name, bundle, bundle)
    assert held_slices(cluster) == 2
    await asyncio.sleep(2 * IDLE_LOOK_S + 2.0)
    assert held_slices(cluster) == left


@played(slices=2)
async def test_group_that_stays_pending_ends_no_second_warm_time(cluster: VirtualCluster) -> None:
    cluster.others_wait("never placed", {"TPU": 4.0})
    for held in (0, 1):
        await cluster.run(f"run-{held}", (1,), returns_at_once, keep_warm=600.0)
        await asyncio.sleep(3 * IDLE_LOOK_S)
        assert held_slices(cluster) == held
