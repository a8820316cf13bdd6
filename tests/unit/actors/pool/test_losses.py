"""What becomes of a gang when its hosts are lost: whole jobs in virtual time, with the real Controller and pool."""

import asyncio
from collections.abc import Sequence

import pytest

from iris_ray.errors import PreemptedTooManyTimesError
from tests.support import virtual_time
from tests.support.hosts_in_process import Crash, Task
from tests.support.virtual_cluster import Stage, VirtualCluster, played


def end_all(tasks: Sequence[Task]) -> None:
    """Every task returns its attempt and index."""
    for task in tasks:
        if not task.end.done():
            task.end.set_result((task.info.attempt, task.info.task_index))


def slices_of(tasks: Sequence[Task]) -> list[str]:
    return list(dict.fromkeys(task.info.slice_name for task in tasks))


@played()
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("slice_id", [0, 1])
@pytest.mark.parametrize("host", [0, 1])
async def test_lost_host_costs_slice_and_one_preemption(
    cluster: VirtualCluster, slices: int, slice_id: int, host: int
) -> None:
    results = cluster.run("job", (slices,), max_retries_preemption=3)
    first = await cluster.runs("job", 2 * slices)
    victim = slices_of(first)[slice_id % slices]
    cluster.kill_host(victim, host)
    second = await cluster.started("job", 2 * slices, attempt=2)
    assert victim not in slices_of(second)
    assert set(slices_of(first)) - {victim} <= set(slices_of(second)), "the other slice stays"
    assert {t.info.coordinator_address for t in first}.isdisjoint(t.info.coordinator_address for t in second)
    assert not any(cluster.is_running(task) for task in first), "the survivors were stopped before"
    end_all(second)
    assert await results == [(2, index) for index in range(2 * slices)]
    assert await cluster.charged("job") == (0, 1)


@played()
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("silence_s", [5.0, 10.0])
async def test_frozen_host_is_replaced_after_allowed_silence(
    cluster: VirtualCluster, host: int, silence_s: float
) -> None:
    results = cluster.run("job", max_retries_preemption=1, host_silence=silence_s)
    first = await cluster.runs("job", 2)
    cluster.freeze_host(first[0].info.slice_name, host)
    froze = virtual_time.now()
    second = await cluster.started("job", 2, attempt=2)
    assert silence_s - 1.0 <= virtual_time.now() - froze <= 3 * silence_s + 10.0
    assert slices_of(second) != slices_of(first)
    end_all(second)
    await results
    assert await cluster.charged("job") == (0, 1)


@played()
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("silent", [True, False])
async def test_host_lost_after_its_task_returned_costs_a_preemption(
    cluster: VirtualCluster, host: int, silent: bool
) -> None:
    """The others had to be stopped, and none of them had failed."""
    results = cluster.run("job", max_retries_preemption=1, max_retries_failure=0)
    first = await cluster.runs("job", 2)
    first[host].end.set_result("early")
    await asyncio.sleep(1.0)
    (cluster.freeze_host if silent else cluster.kill_host)(first[0].info.slice_name, host)
    second = await cluster.started("job", 2, attempt=2)
    end_all(second)
    await results
    assert await cluster.charged("job") == (0, 1)


@played()
async def test_host_silent_within_limit_loses_nothing(cluster: VirtualCluster) -> None:
    results = cluster.run("job", host_silence=5.0)
    first = await cluster.runs("job", 2)
    cluster.freeze_host(first[0].info.slice_name, 1)
    await asyncio.sleep(3.0)
    cluster.thaw_host(first[0].info.slice_name, 1)
    await asyncio.sleep(20.0)
    end_all(first)
    assert await results == [(1, 0), (1, 1)]


@played()
@pytest.mark.parametrize("lost", [1, 2])
async def test_flexible_job_continues_with_fewer_slices(cluster: VirtualCluster, lost: int) -> None:
    """[1, 3] on three slices: when some are lost, it does not wait for others."""
    results = cluster.run("job", (1, 3), max_retries_preemption=5)
    first = await cluster.runs("job", 6)
    for name in slices_of(first)[:lost]:
        for host in (0, 1):
            cluster.kill_host(name, host)
    second = await cluster.until(lambda: cluster.last_attempt("job", 2))
    assert not set(slices_of(second)) & set(slices_of(first)[:lost])
    end_all(second)
    assert len(await results) == 2


@played()
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize(
    "ends", [ConnectionError("peer went away"), Crash("was killed by SIGABRT"), SystemExit(1)], ids=repr
)
async def test_announced_preemption_costs_no_failure(cluster: VirtualCluster, host: int, ends: BaseException) -> None:
    """Even if the user's code ends because of it, before the host is gone."""
    results = cluster.run("job", max_retries_preemption=1)
    first = await cluster.runs("job", 2)
    cluster.drain(first[0].info.slice_name, notice_s=6.0)
    await asyncio.sleep(2.0)
    first[host].end.set_exception(ends)
    second = await cluster.started("job", 2, attempt=2)
    assert slices_of(second) != slices_of(first)
    end_all(second)
    await results
    assert await cluster.charged("job") == (0, 1)


@played(slices=4)
@pytest.mark.parametrize("allowed", [0, 1, 2])
async def test_exhausted_preemption_budget_raises_runtime_error(cluster: VirtualCluster, allowed: int) -> None:
    results = cluster.run("job", max_retries_preemption=allowed)
    for attempt in range(1, allowed + 2):
        tasks = await cluster.runs("job", 2, attempt)
        cluster.kill_host(tasks[0].info.slice_name, 0)
    with pytest.raises(PreemptedTooManyTimesError, match="preempted too many times") as caught:
        await results
    assert isinstance(caught.value, RuntimeError)
    assert await cluster.charged("job") == (0, allowed + 1)


@pytest.mark.parametrize("there", [0, 1, 2])
def test_job_waits_for_later_slices(stage: Stage, there: int) -> None:
    async def story(cluster: VirtualCluster) -> None:
        results = cluster.run("job", (3,))
        await asyncio.sleep(30.0)
        assert not cluster.tasks, "all or none"
        for number in range(there, 3):
            cluster.add_slice(f"later-{number}")
        end_all(await cluster.started("job", 6))
        assert len(await results) == 6

    stage.play(story, slices=there)


MOMENTS = [n / 2 for n in range(1, 17)]
"""Before, during and after a launch, a task's end, and the next launch; seconds."""


@played()
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
async def test_gang_survives_host_killed_at_any_moment(cluster: VirtualCluster, moment: float, warm: bool) -> None:
    """Every task of the last attempt returned, and no other."""

    async def work(task: Task) -> tuple[int, int]:
        await asyncio.sleep(3.0)
        return task.info.attempt, task.info.task_index

    cluster.process_start_s = 1.5
    if warm:
        await cluster.run("before", (2,), work, keep_warm=600.0)
    results = cluster.run("job", (2,), work, max_retries_preemption=2)
    await asyncio.sleep(moment)
    cluster.kill_host("v4-16-0", 1)
    found = await results
    last = found[0][0]
    assert found == [(last, index) for index in range(4)]
    assert len(slices_of(cluster.tasks_of("job", last))) == 2
    failures, preemptions = await cluster.charged("job")
    assert failures == 0
    assert preemptions <= 1
    await cluster.until(lambda: not any(map(cluster.is_running, cluster.tasks_of("job"))))
