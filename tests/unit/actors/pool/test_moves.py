"""What a gang hears before it has to move, and how it moves: by notice, to a spare, to more slices. In virtual time."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.pool.reserved_slice import ReservedSlice
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.errors import JobCancelledError
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.notices import HostNotice, Notice, NoticeKind
from iris_ray.state.events import WorkerDrainedEvent
from tests.support import virtual_time
from tests.support.hosts_in_process import Crash, Task
from tests.support.virtual_cluster import Stage, VirtualCluster, played


def slices_of(tasks: list[Task]) -> set[str]:
    return {task.info.slice_name for task in tasks}


async def saves_when_told(task: Task) -> int:
    """Half a second for each task after the first. The second attempt returns its number."""
    if task.info.attempt > 1:
        await asyncio.sleep(1.0)
        return task.info.attempt
    await task.told.wait()
    await asyncio.sleep(0.5 * task.info.task_index)
    task.save()
    await asyncio.sleep(10_000.0)
    return 1


async def returns_when_told(task: Task) -> int:
    await task.told.wait()
    return 7


async def heeds_nothing(task: Task) -> None:
    await asyncio.sleep(10_000.0)


@played()
@pytest.mark.parametrize(
    ("work", "over_at"), [(saves_when_told, 51.0), (heeds_nothing, 101.0), (returns_when_told, None)]
)
async def test_job_ends_at_its_own_time_limit(cluster: VirtualCluster, work: Any, over_at: float | None) -> None:
    results = cluster.run("job", (1,), work, max_retries_preemption=9, max_runtime=100.0)
    if over_at is None:
        assert await results == [7, 7]
        return
    with pytest.raises(JobCancelledError, match="its max_runtime of 100 s is"):
        await results
    assert abs(virtual_time.now() - over_at) < 5.0
    assert await cluster.charged("job") == (0, 0)
    assert (await cluster.status("job")).state is JobState.KILLED


@played()
@pytest.mark.parametrize(("slices", "doomed"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("notice_s", [30.0, 60.0])
async def test_gang_with_notice_moves_once_all_have_saved(
    cluster: VirtualCluster, slices: int, doomed: int, notice_s: float
) -> None:
    results = cluster.run("job", (slices,), saves_when_told, max_retries_preemption=1)
    first = await cluster.runs("job", 2 * slices)
    names = [task.info.slice_name for task in first[::2]]
    told = time.time()
    cluster.drain(names[doomed], notice_s)
    second = await cluster.started("job", 2 * slices, attempt=2)
    for task in first:
        assert task.notice is not None
        assert task.notice.kind is NoticeKind.PREEMPTION
        assert "Ray is draining it" in task.notice.reason
        assert abs(task.notice.deadline - told - notice_s) < 1.0
    assert virtual_time.now() < 10.0, "not at the deadline"
    assert names[doomed] not in slices_of(second)
    assert cluster.node_id(names[doomed], 0) not in cluster.reserved_nodes(), "it is given back at once"
    assert set(names) - {names[doomed]} <= slices_of(second)
    assert await results == [2] * (2 * slices)
    assert await cluster.charged("job") == (0, 1)


@played()
async def test_notice_of_host_reaches_tasks_without_controller(cluster: VirtualCluster) -> None:
    results = cluster.run("job", (2,), saves_when_told, max_retries_preemption=1)
    first = await cluster.runs("job", 4)
    doomed = first[0].info.slice_name
    cluster.ray.freeze(cluster.controller())
    deadline = time.time() + 12.0
    told = HostNotice(NoticeKind.PREEMPTION, "the pod ends", deadline)
    cluster.pool.take_notice.remote(cluster.node_id(doomed, 1), told, time.time())
    for task in first:
        await asyncio.wait_for(task.told.wait(), 1.0)
        assert task.notice == Notice(NoticeKind.PREEMPTION, f"{doomed} host 1: the pod ends", deadline)
    cluster.ray.thaw(cluster.controller())
    await cluster.started("job", 4, attempt=2)
    assert await results == [2, 2, 2, 2]
    assert await cluster.charged("job") == (0, 1)


@played()
async def test_tasks_hear_a_hosts_notice_once(cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Controller does not repeat it to the pool that has told the Controller."""
    heard: list[float] = []
    repeated: list[Notice] = []
    tell = Task.tell

    def heard_by(task: Task, notice: Notice) -> None:
        heard.append(notice.deadline)
        tell(task, notice)

    async def notified(pool: SlicePoolManager, attempt: AttemptId, notice: Notice, epoch: int, sent_at: float) -> None:
        repeated.append(notice)

    monkeypatch.setattr(Task, "tell", heard_by)
    monkeypatch.setattr(SlicePoolManager, "notify_attempt", notified)
    results = cluster.run("job", (1,))
    first = await cluster.runs("job", 2)
    deadline = time.time() + 12.0
    for until in (deadline, deadline + 60.0, deadline - 6.0):  # the second one is less urgent
        notice = HostNotice(NoticeKind.PREEMPTION, "the pod ends", until)
        await cluster.pool.take_notice.remote(cluster.node_id(first[0].info.slice_name, 0), notice, time.time())
        await asyncio.sleep(1.0)
    assert heard == [deadline] * 2 + [deadline - 6.0] * 2
    assert repeated == []
    for task in first:
        task.end.set_result(None)
    await results


@played()
@pytest.mark.parametrize("ahead", [3600.0, 0.0, -3600.0])
async def test_notices_between_pool_and_controller_survive_wrong_clocks(cluster: VirtualCluster, ahead: float) -> None:
    """The clock of the sender's machine is ahead. As many seconds are left on the receiver's."""
    results = cluster.run("job", (1,), returns_when_told)
    tasks = await cluster.runs("job", 2)
    state, free = cluster.controllers[-1]._state, {"v4-16-0", "v4-16-1"} - slices_of(tasks)
    node_id = cluster.node_id(min(free), 0)
    told = WorkerDrainedEvent(node_id, "the pod ends", NoticeKind.PREEMPTION, time.time() + ahead + 60.0)
    await cluster.ask("report", None, [told], 0, None, time.time() + ahead)
    heard = state.workers[node_id].notice
    assert heard is not None
    assert heard.deadline == pytest.approx(time.time() + 60.0, abs=1.0)
    moves = Notice(NoticeKind.EVICTION, "evicted for other", time.time() + ahead + 30.0)
    epoch = (await cluster.ask("about"))["epoch"]
    await cluster.pool.notify_attempt.remote(AttemptId("job", 1), moves, epoch, time.time() + ahead)
    assert await results == [7, 7]
    for task in tasks:
        assert task.notice is not None
        assert task.notice.deadline == pytest.approx(time.time() + 30.0, abs=1.5)


@played()
async def test_next_notice_is_told_while_controller_hangs(cluster: VirtualCluster) -> None:
    """The first maintenance is called off. Another host's, later one then counts, and one after its deadline, too."""
    results = cluster.run("job", (1,))
    first = await cluster.runs("job", 2)
    nodes = [cluster.node_id(first[0].info.slice_name, index) for index in range(2)]
    began = time.time()
    cluster.ray.freeze(cluster.controller())
    for node, in_s in zip(nodes, (60.0, 90.0), strict=True):
        cluster.pool.take_notice.remote(node, HostNotice(NoticeKind.MAINTENANCE, "repair", began + in_s), time.time())
    await asyncio.sleep(1.0)
    assert [round(task.notice.deadline - began) for task in first if task.notice] == [60, 60]
    cluster.pool.maintenance_called_off.remote(nodes[0])
    await asyncio.sleep(1.0)
    assert [round(task.notice.deadline - began) for task in first if task.notice] == [90, 90]
    await asyncio.sleep(120.0)
    cluster.pool.take_notice.remote(nodes[1], HostNotice(NoticeKind.PREEMPTION, "it ends", began + 200.0), time.time())
    await asyncio.sleep(1.0)
    assert [round(task.notice.deadline - began) for task in first if task.notice] == [200, 200]
    cluster.ray.thaw(cluster.controller())
    for task in first:
        task.end.set_result(None)
    await results


@played()
@pytest.mark.parametrize("ahead", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("saves", [0, 1])
async def test_gang_partly_saved_moves_at_deadline(cluster: VirtualCluster, saves: int, ahead: float) -> None:
    """Though somebody sets the clock meanwhile."""

    async def work(task: Task) -> int:
        if task.info.attempt == 1:
            await task.told.wait()
            if task.info.task_index == saves:
                task.save()
            await asyncio.sleep(10_000.0)
        return task.info.attempt

    results = cluster.run("job", (1,), work, max_retries_preemption=1)
    first = await cluster.runs("job", 2)
    told = virtual_time.now()
    cluster.drain(first[0].info.slice_name, notice_s=20.0)
    await asyncio.wait_for(first[saves].told.wait(), 10.0)
    virtual_time.set_wall_clock(ahead)
    assert await results == [2, 2]
    assert 19.0 <= virtual_time.now() - told <= 27.0
    assert await cluster.charged("job") == (0, 1)


@played()
async def test_gang_saving_nothing_stays_until_host_goes(cluster: VirtualCluster) -> None:
    results = cluster.run("job", max_retries_preemption=1)
    first = await cluster.runs("job", 2)
    cluster.drain(first[0].info.slice_name, notice_s=30.0)
    await asyncio.sleep(60.0)
    assert all(map(cluster.is_running, first))
    cluster.kill_host(first[0].info.slice_name, 0)
    for task in await cluster.started("job", 2, attempt=2):
        task.end.set_result(None)
    await results
    assert await cluster.charged("job") == (0, 1)


@played()
@pytest.mark.parametrize("after_s", [5.0, 25.0])
async def test_gang_returning_before_deadline_does_not_move(cluster: VirtualCluster, after_s: float) -> None:
    async def work(task: Task) -> str:
        await task.told.wait()
        await asyncio.sleep(after_s)
        return task.info.slice_name

    results = cluster.run("job", (1,), work)
    first = await cluster.runs("job", 2)
    cluster.drain(first[0].info.slice_name, notice_s=30.0)
    assert await results == [first[0].info.slice_name] * 2
    assert await cluster.charged("job") == (0, 0)


@played()
@pytest.mark.parametrize(
    "end",
    [lambda: Crash("was killed by SIGTERM"), lambda: Crash("exited with code 143"), lambda: SystemExit(143)],
    ids=["signal", "exit code", "sys.exit"],
)
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("doomed", [0, 1])
async def test_task_ended_by_notice_sigterm_costs_no_failure(
    cluster: VirtualCluster, end: Callable[[], BaseException], index: int, doomed: int
) -> None:
    """Every task of the gang gets the signal, also on the slice that stays; it must not look like a crash."""

    async def work(task: Task) -> int:
        if task.info.attempt == 1:
            await task.told.wait()
            await asyncio.sleep(0.1)
            if task.info.task_index == index:
                raise end()
            await asyncio.sleep(10_000.0)
        return task.info.attempt

    results = cluster.run("job", (2,), work, max_retries_preemption=1)
    first = await cluster.runs("job", 4)
    cluster.drain(first[2 * doomed].info.slice_name, notice_s=40.0)
    assert await results == [2] * 4
    assert await cluster.charged("job") == (0, 1)


@played(slices=4)
@pytest.mark.parametrize("running", [True, False])
async def test_notice_before_start_moves_gang_too(cluster: VirtualCluster, running: bool) -> None:
    """The other slice of the gang is not at fault, so it is used at once."""
    cluster.run("other")
    await cluster.runs("other", 2)
    cluster.process_start_s = 20.0
    cluster.run("job", (2,), max_retries_preemption=5)
    await cluster.until(lambda: len(cluster.reserved_nodes()) == 6)
    if running:
        for task in await cluster.runs("job", 4):
            task.save()
    began = virtual_time.now()
    doomed = (await cluster.status("job")).groups[0]
    cluster.drain(doomed, 600.0)
    await cluster.started("job", 4, attempt=2)
    assert virtual_time.now() - began < 3 * cluster.process_start_s
    assert (await cluster.view("job")).failed_launches == 0
    assert await cluster.charged("job") == (0, 0 if not running else 1)


# -- reservations that Ray does not make -------------------------------------------------------------------------------


@played(slices=2)
async def test_launch_waits_while_ray_reserves_nothing_at_all(cluster: VirtualCluster) -> None:
    """Ray waits for a host that has vanished. Neither the job nor its slices are at fault."""
    cluster.process_start_s, cluster.unreserved = 100.0, "all"
    cluster.run("job")
    await asyncio.sleep(65.0)
    assert (await cluster.view("job")).attempt == 1
    cluster.unreserved = ""
    (first, _) = await cluster.runs("job", 2)
    assert (first.info.attempt, (await cluster.view("job")).failed_launches) == (1, 0)


@played(slices=2)
async def test_launch_goes_elsewhere_if_ray_does_not_reserve_its_slice(cluster: VirtualCluster) -> None:
    cluster.process_start_s, cluster.unreserved = 20.0, "v4-16-0"
    cluster.run("job")
    (first, _) = await cluster.started("job", 2, attempt=2)
    assert first.info.slice_name == "v4-16-1"


# -- spares ------------------------------------------------------------------------------------------------------------


async def spares(cluster: VirtualCluster, state: JobState = JobState.RUNNING) -> list[str]:
    """The slices of the spares that are in that state."""
    jobs = [job for job in await cluster.ask("list_jobs") if "/spare" in job.job_id]
    return [name for job in jobs if job.state is state for name in job.groups]


@played(slices=4)
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("slices", [1, 2])
async def test_spare_takes_over_with_started_processes(cluster: VirtualCluster, host: int, slices: int) -> None:
    """The processes take five seconds to start, and the next attempt runs sooner."""
    cluster.process_start_s = 5.0
    results = cluster.run("job", (slices,), max_retries_preemption=1, spares=1)
    first = await cluster.runs("job", 2 * slices)
    (spare,) = await cluster.until(lambda: spares(cluster))
    await asyncio.sleep(20.0)
    lost = first[0].info.slice_name
    cluster.kill_host(lost, host)
    at = virtual_time.now()
    second = await cluster.started("job", 2 * slices, attempt=2)
    assert slices_of(second) == slices_of(first) - {lost} | {spare}
    assert virtual_time.now() - at < 5.0 + 3.0
    for task in second:
        task.end.set_result(None)
    await results
    await cluster.until(lambda: no_spares(cluster))


async def no_spares(cluster: VirtualCluster) -> bool:
    return not [job for job in await cluster.ask("list_jobs") if "/spare" in job.job_id]


@played()
@pytest.mark.parametrize("kind", [SliceActor, TPUHostActor])
async def test_spare_on_broken_slice_gets_another_attempt(cluster: VirtualCluster, kind: type) -> None:
    results = cluster.run("job", spares=1)
    first = await cluster.runs("job", 2)
    (name,) = await cluster.until(lambda: spares(cluster))
    (before,) = [job.attempt for job in await cluster.ask("list_jobs") if "/spare" in job.job_id]
    cluster.kill_actor(kind, name, 0)

    async def another() -> bool:
        (job,) = [job for job in await cluster.ask("list_jobs") if "/spare" in job.job_id]
        return job.attempt > before and job.state is JobState.RUNNING

    await cluster.until(another)
    for task in first:
        task.end.set_result(None)
    await results


@played(slices=2)
async def test_spare_failing_unexpectedly_gets_another_attempt(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Controller would take it for one that is just starting, and its slice would be nobody's."""
    reserve, errors = ReservedSlice.reserve, [RuntimeError("Ray says no")]

    def reserves(owner: str, hosts: Any, *more: Any) -> ReservedSlice:
        if hosts[0].slice_name == "v4-16-1" and errors:
            raise errors.pop()
        return reserve(owner, hosts, *more)

    monkeypatch.setattr(ReservedSlice, "reserve", staticmethod(reserves))
    results = cluster.run("job", spares=1)
    tasks = await cluster.runs("job", 2)

    async def held_at_the_second_try() -> bool:
        held = [job for job in await cluster.ask("list_jobs") if "/spare" in job.job_id]
        return [(job.attempt, job.state, job.groups) for job in held] == [(2, JobState.RUNNING, ("v4-16-1",))]

    await cluster.until(held_at_the_second_try)
    for task in tasks:
        task.end.set_result(None)
    await results


# -- growth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(1, 2), (2, 3), (2, 4)])
def test_gang_grows_back_and_may_save_before(stage: Stage, counts: tuple[int, int]) -> None:
    few, many = counts
    kinds = []

    async def work(task: Task) -> int:
        while task.info.num_slices < many or task.info.attempt == 1:
            await task.told.wait()
            assert task.notice is not None
            kinds.append(task.notice.kind)
            task.save()
            await asyncio.sleep(10_000.0)
        return task.info.attempt

    async def story(cluster: VirtualCluster) -> None:
        results = cluster.run("job", counts, work, max_retries_preemption=1)
        first = await cluster.runs("job", 2 * many)
        cluster.kill_host(first[0].info.slice_name, 0)
        await cluster.runs("job", 2 * few, attempt=2)
        cluster.add_slice("later")
        assert await results == [3] * (2 * many)
        assert set(kinds) == {NoticeKind.GROWTH}
        assert await cluster.charged("job") == (0, 1), "to grow is free"

    stage.play(story, slices=many)
