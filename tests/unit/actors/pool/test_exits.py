"""Jobs whose caller cancels, and tasks that have returned and go on."""

import asyncio
import time
from collections import Counter

import pytest
import ray

from iris_ray.actors.protocol.messages import HOST_SILENCE_S
from iris_ray.model.lifecycle import JobState
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import VirtualCluster, played

# -- tasks that have returned -----------------------------------------------------------------------------------------


UPLOAD_S = 200.0
MOMENT_S = 5.0


async def nothing() -> None: ...


async def uploads_at_its_end(task: Task) -> int:
    task.exit_takes = UPLOAD_S
    await asyncio.sleep(1.0)
    return task.info.task_index


@played(slices=1)
@pytest.mark.parametrize("keep_warm", [0.0, 60.0])
async def test_results_return_at_once_while_hosts_finish_saving(cluster: VirtualCluster, keep_warm: float) -> None:
    began = time.monotonic()
    assert await cluster.run("job", (1,), uploads_at_its_end, keep_warm=keep_warm) == [0, 1]
    assert time.monotonic() - began < MOMENT_S
    next_job = cluster.run("next", (1,), uploads_at_its_end)
    await cluster.pool.tasks_ended.remote()
    assert [task.saved for task in cluster.tasks_of("job", 1)] == [True, True]
    assert time.monotonic() - began >= UPLOAD_S
    assert await next_job == [0, 1]
    assert time.monotonic() - began >= UPLOAD_S, "it has had to wait"


@played()
async def test_saving_beyond_grace_is_cut_off(cluster: VirtualCluster) -> None:
    assert await cluster.run("job", (1,), uploads_at_its_end, exit_grace=10.0) == [0, 1]
    began = time.monotonic()
    await cluster.pool.tasks_ended.remote()
    assert 10.0 <= time.monotonic() - began < 10.0 + MOMENT_S
    assert [task.saved for task in cluster.tasks_of("job", 1)] == [False, False]


@played()
async def test_release_waits_for_saving(cluster: VirtualCluster) -> None:
    await cluster.run("job", (1,), uploads_at_its_end, keep_warm=1000.0)
    await cluster.pool.release.remote()
    assert [task.saved for task in cluster.tasks_of("job", 1)] == [True, True]


@played()
async def test_cancelled_job_gives_returned_tasks_no_more_time(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> int:
        if task.info.task_index == 1:
            return int(await asyncio.Event().wait())
        return await uploads_at_its_end(task)

    results = cluster.run_tasks("job", 2, work)
    await asyncio.sleep(MOMENT_S)
    began = time.monotonic()
    ray.cancel(results)
    await asyncio.sleep(1.0)
    await cluster.pool.tasks_ended.remote()
    assert time.monotonic() - began < MOMENT_S
    assert not cluster.tasks_of("job", 1)[0].saved


@played()
async def test_host_falling_silent_during_saving_is_not_awaited(cluster: VirtualCluster) -> None:
    await cluster.run("job", (1,), lambda task: uploads_at_its_end(task) if task.info.task_index else nothing())
    began = time.monotonic()
    cluster.freeze_host(cluster.tasks_of("job", 1)[0].info.slice_name, 1)
    await cluster.pool.tasks_ended.remote()
    assert time.monotonic() - began < 2 * HOST_SILENCE_S


# -- cancelled at any moment ------------------------------------------------------------------------------------------


class Calls(Counter[str]):
    """Counts calls, and tells when there is another one of ``awaited``."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited = awaited
        self.came = asyncio.Event()

    def __setitem__(self, name: str, count: int) -> None:
        super().__setitem__(name, count)
        if name == self._awaited:
            self.came.set()


@played(slices=1)
@pytest.mark.parametrize("turns", range(4, 16))
async def test_waiting_job_cancelled_during_controllers_call_ends(cluster: VirtualCluster, turns: int) -> None:
    """An answer and the cancellation may come in the same turn: neither hides the other."""
    cluster.run("other")
    await cluster.runs("other", 2)
    results = cluster.run("job")
    await asyncio.sleep(1.9)
    cluster.ray.calls = calls = Calls("report")
    await calls.came.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    results.future().cancel()
    await asyncio.sleep(100.0)
    assert (await cluster.status("job")).state is JobState.KILLED
