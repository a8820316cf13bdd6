"""Slices that a pool keeps for its next run: how fast that starts, and when they are given back."""

import asyncio

import pytest

from iris_ray.actors.pool import reserved_slice, slice_pool_manager
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.pool.slice_pool_manager import IDLE_LOOK_S, OthersWaiting
from iris_ray.actors.protocol.messages import ProcessSpec
from tests.support.hosts_in_process import Process, Task, returns_at_once
from tests.support.virtual_cluster import VirtualCluster, played


async def lasts_one_second(task: Task) -> float:
    """Return when it has begun, by the clock of the event loop."""
    begin = asyncio.get_running_loop().time()
    await asyncio.sleep(1.0)
    return begin


@played(slices=1)
async def test_runs_in_a_row_start_at_once_on_a_warm_slice(cluster: VirtualCluster) -> None:
    """Only the first one waits until its hosts have imported what a task needs."""
    cluster.process_start_s = 1.5
    waits = []
    for number in range(4):
        called = asyncio.get_running_loop().time()
        waits.append((await cluster.run(f"run-{number}", (1,), lasts_one_second, keep_warm=600.0))[0] - called)
    assert waits == pytest.approx([1.5, 0.0, 0.0, 0.0], abs=0.1)


@played(slices=2)
async def test_slice_of_two_hosts_needs_no_slice_actor(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gang moves when a host's actor ends, and the slice runs processes of another kind next."""
    monkeypatch.setattr(reserved_slice, "FEW_HOSTS", 2)
    results = cluster.run("first", (1,), keep_warm=600.0, max_retries_preemption=1)
    first = await cluster.runs("first", 2)
    cluster.kill_host_actor_of(first[1])
    second = await cluster.started("first", 2, attempt=2)
    assert not any(map(cluster.is_running, first))
    for task in second:
        task.end.set_result(task.info.attempt)
    assert await results == [2, 2]
    for preload in ("a", "b"):
        process = ProcessSpec(preload=(preload,))
        await cluster.run(preload, (1,), returns_at_once, process=process, keep_warm=600.0)
    with pytest.raises(IndexError):
        cluster.kill_actor(SliceActor, second[0].info.slice_name, 0)


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
async def test_no_process_waits_on_an_idle_slice(cluster: VirtualCluster) -> None:
    await cluster.run("job", (1,), returns_at_once, keep_warm=600.0)
    await asyncio.sleep(10.0)
    processes = cluster.node(cluster.node_id("v4-16-0", 0)).processes.values()
    assert [process.gone.done() for process in processes] == [True]


@played(slices=1)
async def test_job_with_other_modules_waits_for_them(cluster: VirtualCluster) -> None:
    cluster.process_start_s = 1.5
    await cluster.run("first", (1,), returns_at_once, keep_warm=600.0)
    await asyncio.sleep(10.0)
    called = asyncio.get_running_loop().time()
    other = ProcessSpec(preload=("json",))
    began = (await cluster.run("other", (1,), lasts_one_second, keep_warm=600.0, process=other))[0]
    assert began - called == pytest.approx(1.5, abs=0.1)


@played(slices=1)
async def test_process_that_dies_before_its_task_costs_one_failed_launch(cluster: VirtualCluster) -> None:
    """As when the memory of a host runs short."""
    node = cluster.node(cluster.node_id("v4-16-0", 1))
    await cluster.run("first", (1,), returns_at_once, keep_warm=600.0)

    class DiesOnce(dict[int, Process]):
        def __setitem__(self, pid: int, process: Process) -> None:
            super().__setitem__(pid, process)
            node.processes = dict(self)
            process.die()

    node.processes = DiesOnce(node.processes)
    called = asyncio.get_running_loop().time()
    await cluster.run("next", (1,), returns_at_once, keep_warm=600.0)
    assert asyncio.get_running_loop().time() - called < 2.0
    assert [len(task.attempts) for task in await cluster.ask("list_tasks", "next")] == [2, 2]


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


def test_look_for_others_reads_no_group_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps each removed group for ever, so a look at all of them would take longer from day to day."""
    waiting = {"aa": [{"TPU": 4.0}], "bb": [{"TPU": 2.0}, {"CPU": 1.0}], "cc": [{"CPU": 1.0}]}
    names = {"aa": "iris_ray/owner/1", "bb": "train"}
    read: list[str] = []

    def table(group: str) -> dict[str, str]:
        read.append(group)
        return {"name": names[group]}

    monkeypatch.setattr(slice_pool_manager, "waiting_placement_groups", lambda: waiting)
    monkeypatch.setattr(slice_pool_manager, "placement_group_by_id", lambda group: group)
    monkeypatch.setattr(slice_pool_manager, "placement_group_table", table)
    others = OthersWaiting()
    assert [others.look() for _ in range(3)] == [None, 2.0, None]
    assert sorted(read) == ["aa", "bb"]
