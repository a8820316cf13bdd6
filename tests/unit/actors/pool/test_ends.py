"""Every way in which an attempt can end by its own doing or ours: what it costs, in virtual time."""

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest

from iris_ray.actors.host.chips import NotFree
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.pool import reserved_slice
from iris_ray.actors.pool.gang_run import NO_RETRIES
from iris_ray.actors.pool.reserved_slice import KEPT_S, SHARED_IDLE_S
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.messages import JobView, ProcessSpec
from iris_ray.errors import TaskCrashedError, TaskOutOfMemoryError, TaskSetupError
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.state.quarantine import QUARANTINE
from tests.support import virtual_time
from tests.support.hosts_in_process import Crash, OutOfMemory, Task, returns_at_once
from tests.support.ray_in_process import Reference
from tests.support.virtual_cluster import VirtualCluster, played

STRANGER = NotFree("its chips are held by pid 1 (python3)")
NEIGHBOUR = NotFree("its chips are held by pid 1 (python3), which belongs to another task on it", ours=True)

Ends = dict[str, tuple[Callable[[], BaseException], type[BaseException], str]]

ENDS: Ends = {
    "exception": (lambda: ZeroDivisionError("division by zero"), ZeroDivisionError, "division by zero"),
    "exit code": (lambda: Crash("exited with code 3"), TaskCrashedError, "exited with code 3"),
    "sys.exit": (lambda: SystemExit(7), TaskCrashedError, r"sys.exit\(7\)"),
    "SIGSEGV": (lambda: Crash("was killed by SIGSEGV"), TaskCrashedError, "SIGSEGV"),
    "MemoryError": (lambda: MemoryError("no more"), MemoryError, "no more"),
    "the kernel's killer": (lambda: OutOfMemory("was killed by the kernel"), TaskOutOfMemoryError, "by the kernel"),
}


@played()
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(("slices", "index"), [(1, 0), (1, 1), (2, 0), (2, 2), (2, 3)])
async def test_failure_by_the_jobs_own_doing_costs_a_failure(
    cluster: VirtualCluster, how: str, slices: int, index: int
) -> None:
    end, kind, words = ENDS[how]

    async def work(task: Task) -> int:
        await asyncio.sleep(1.0)
        if task.info.task_index == index and (task.info.attempt < 3 or task.info.job_id == "fails"):
            raise end()
        await asyncio.sleep(10.0)
        return task.info.attempt

    assert await cluster.run("job", (slices,), work, max_retries_failure=2) == [3] * (2 * slices)
    assert await cluster.charged("job") == (2, 0)
    with pytest.raises(kind, match=words):
        await cluster.run("fails", (slices,), work)
    assert await cluster.charged("fails") == (1, 0)


@played()
async def test_each_failed_attempt_says_at_once_why(cluster: VirtualCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a user with a typo in the script would see no traceback until the last retry."""

    def shard(attempt: int) -> None:
        raise ValueError(f"no shard in attempt {attempt}")

    async def work(task: Task) -> None:
        await asyncio.sleep(1.0)
        if task.info.attempt == 3:
            raise KeyError("another")
        shard(task.info.attempt)

    caplog.set_level("INFO", "iris_ray.actors.pool.gang_run")
    with pytest.raises(ValueError, match="job attempt 1 ended with the same traceback:"):
        await cluster.run("job", (1,), work, max_retries_failure=3)
    first, second, third, last = [m for m in caplog.messages if " ended: " in m]
    assert "ValueError: no shard in attempt 1 [failure 1, 3 retries left; trying again]\n" in first
    assert "\n    raise ValueError(f" in first
    assert first.splitlines()[-2:] == [
        "ValueError: no shard in attempt 1",
        f"job attempt 1: {NO_RETRIES}",
    ]
    assert second.endswith("no shard in attempt 2 (as job attempt 1) [failure 2, 2 retries left; trying again]")
    assert "[failure 3, 1 retry left; trying again]\n" in third
    assert third.endswith("\nKeyError: 'another'")
    assert last.endswith("no shard in attempt 4 (as job attempt 1) [failure 4, 0 retries left; job FAILED]")


@played()
async def test_single_failure_is_left_to_the_caller(cluster: VirtualCluster, caplog: pytest.LogCaptureFixture) -> None:
    async def work(task: Task) -> None:
        raise ValueError("no shard")

    caplog.set_level("INFO", "iris_ray.actors.pool.gang_run")
    with pytest.raises(ValueError, match="no shard") as raised:
        await cluster.run("job", (1,), work)
    (only,) = [m for m in caplog.messages if " ended: " in m]
    assert only.endswith("ValueError: no shard [failure 1, 0 retries left; job FAILED]")
    assert "ended with the same" not in str(raised.value)


@played()
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("index", [0, 1])
async def test_single_task_is_charged_alone(cluster: VirtualCluster, how: str, index: int) -> None:
    end, kind, words = ENDS[how]

    async def work(task: Task) -> int:
        await asyncio.sleep(1.0)
        if task.info.task_index == index and (task.info.attempt < 2 or task.info.job_id == "fails"):
            raise end()
        return task.info.attempt

    expected = [1, 1]
    expected[index] = 2
    assert await cluster.run_tasks("job", 2, work, max_retries_failure=1) == expected
    assert [await cluster.charged("job", i) for i in (0, 1)] == [(n - 1, 0) for n in expected]
    with pytest.raises(kind, match=words):
        await cluster.run_tasks("fails", 2, work)


@played()
@pytest.mark.parametrize("allowed", [0, 1])
async def test_surviving_tasks_results_return_after_tolerated_failure(cluster: VirtualCluster, allowed: int) -> None:
    """The error stands in the place of the result of the task that failed."""

    async def work(task: Task) -> int:
        if task.info.task_index == 1:
            raise ZeroDivisionError("division by zero")
        return task.info.task_index

    results = cluster.run_tasks("job", 3, work, max_task_failures=allowed)
    if not allowed:
        with pytest.raises(ZeroDivisionError):
            await results
        return
    first, error, last = await results
    assert (first, last) == (0, 2)
    assert isinstance(error.cause, ZeroDivisionError)
    assert (await cluster.status("job")).state is JobState.SUCCEEDED


EXIT_CODES: dict[str, tuple[Callable[[], BaseException], int]] = {
    "sys.exit": (lambda: SystemExit(7), 7),
    "sys.exit with words": (lambda: SystemExit("no data"), 1),
    "exception": (lambda: ZeroDivisionError("division by zero"), 1),
}


@played()
@pytest.mark.parametrize("how", EXIT_CODES)
async def test_exit_codes_and_times_of_all_attempts_are_told(cluster: VirtualCluster, how: str) -> None:
    end, code = EXIT_CODES[how]

    async def work(task: Task) -> None:
        await asyncio.sleep(60.0)
        if task.info.task_index == 1 and task.info.attempt == 1:
            raise end()

    await cluster.run("job", (1,), work, max_retries_failure=1)
    for task in await cluster.ask("list_tasks", "job"):
        first, second = task.attempts
        was_cause = task.task_index == 1
        assert first.exit_code == (code if was_cause else None)
        assert first.state is (TaskState.FAILED if was_cause else TaskState.COSCHED_FAILED)
        assert (second.state, second.exit_code) == (TaskState.SUCCEEDED, 0)
        assert (task.exit_code, task.failures, task.preemptions) == (0, 1, 0)
        for attempt in task.attempts:
            assert 59.0 < attempt.ended_at - attempt.started_at < 62.0
        assert first.ended_at <= second.started_at


@played()
@pytest.mark.parametrize("kind", [SliceActor, TPUHostActor])
@pytest.mark.parametrize(("slices", "slice_id", "host"), [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 1)])
@pytest.mark.parametrize("has_standby", [False, True], ids=["early", "with the next standby"])
async def test_death_of_our_process_costs_a_preemption(
    cluster: VirtualCluster, kind: type, slices: int, slice_id: int, host: int, has_standby: bool
) -> None:
    """The next attempt could begin at once, on a slice that is warm."""
    if kind is SliceActor:
        host = 0  # where a slice's actor is
    await cluster.run("before", (3,), returns_at_once, keep_warm=600.0)
    results = cluster.run("job", (slices,), max_retries_preemption=1)
    first = await cluster.runs("job", 2 * slices)
    if has_standby:
        await asyncio.sleep(10.0)
    cluster.kill_actor(kind, first[2 * slice_id].info.slice_name, host)
    second = await cluster.started("job", 2 * slices, attempt=2)
    assert not any(map(cluster.is_running, first))
    for task in second:
        task.end.set_result(None)
    await results
    view = await cluster.view("job")
    assert (view.failures, view.preemptions, view.attempt) == (0, 1, 2)


@played(slices=0)
async def test_tasks_without_chips_share_host_actor_until_idle(cluster: VirtualCluster) -> None:
    async def one_after_another() -> None:
        for n in range(3):
            await cluster.run_tasks(f"job-{n}", 1, returns_at_once)

    await asyncio.gather(one_after_another(), cluster.run_tasks("beside", 1, returns_at_once))
    watchers = cluster.host_actors()
    assert len(watchers) == 1
    idle = cluster.pool.until_idle.remote(4).future()
    await asyncio.sleep(SHARED_IDLE_S / 2)
    assert not idle.done()  # else the pool would end with this host, before the caller's next job
    await asyncio.sleep(SHARED_IDLE_S / 2 + 1.0)
    assert idle.done()
    assert not cluster.ray.is_alive(watchers[0], TPUHostActor)
    await cluster.run_tasks("later", 1, returns_at_once)
    assert len(cluster.host_actors()) == 2


@played(slices=0)
async def test_tasks_sharing_host_end_with_our_process_before_retry(cluster: VirtualCluster) -> None:
    results = {name: cluster.run_tasks(name, 1, max_retries_preemption=1) for name in ("one", "other")}
    firsts = [task for name in results for task in await cluster.runs(name, 1)]
    cluster.kill_host_actor_of(firsts[0])
    for name in results:
        (second,) = await cluster.started(name, 1, attempt=2)
        assert not any(map(cluster.is_running, firsts))
        second.end.set_result(second.info.attempt)
    assert [await result for result in results.values()] == [[2], [2]]
    assert [await cluster.charged(name) for name in results] == [(0, 1), (0, 1)]


@played()
@pytest.mark.parametrize("kind", [SliceActor, TPUHostActor])
@pytest.mark.parametrize("host", [0, 1])
async def test_broken_idle_warm_slice_costs_nothing(cluster: VirtualCluster, kind: type, host: int) -> None:
    await cluster.run("before", (1,), returns_at_once, keep_warm=600.0)
    warm = cluster.tasks[0].info.slice_name
    await asyncio.sleep(1.0)
    cluster.kill_actor(kind, warm, 0 if kind is SliceActor else host)
    results = cluster.run("job")
    tasks = await cluster.until(lambda: cluster.last_attempt("job", 2))
    await asyncio.sleep(5.0)
    tasks = cluster.last_attempt("job", 2)
    for task in tasks:
        task.end.set_result(task.info.attempt)
    await results
    assert await cluster.charged("job") == (0, 0)


@played()
@pytest.mark.parametrize("host", [0, 1])
async def test_chips_held_by_stranger_cost_nothing_and_gang_moves(cluster: VirtualCluster, host: int) -> None:
    cluster.node(cluster.node_id("v4-16-0", host)).held_by = STRANGER
    await ends_elsewhere(cluster, cluster.run("job"))


@played(slices=1)
@pytest.mark.parametrize("held_by", [STRANGER, NEIGHBOUR])
async def test_host_is_quarantined_for_strangers_but_not_own_tasks(cluster: VirtualCluster, held_by: NotFree) -> None:
    node = cluster.node(cluster.node_id("v4-16-0", 0))
    node.held_by = held_by
    cluster.run("job")
    seen: set[bool] = set()
    end = virtual_time.now() + 1800.0
    while len(seen) < 2 and virtual_time.now() < end:
        await asyncio.sleep(10.0)
        (host,) = [worker for worker in await cluster.workers() if worker.node_id == node.node_id]
        seen.add(QUARANTINE in str(host.attributes))
    assert (True in seen) is not held_by.ours


@played(slices=1)
async def test_gang_waits_while_own_task_holds_its_chips(cluster: VirtualCluster) -> None:
    node = cluster.node(cluster.node_id("v4-16-0", 0))
    node.held_by = NEIGHBOUR
    results = cluster.run("job", work=returns_at_once)
    said = []
    for _ in range(360):
        await asyncio.sleep(5.0)
        said.append(str((await cluster.status("job")).waiting))
    assert sum("belongs to another task" in words for words in said) > 180  # in between it is tried
    node.held_by = None
    await results
    assert await cluster.charged("job") == (0, 0)


async def ends_elsewhere(cluster: VirtualCluster, results: Reference) -> None:
    """The job ends well, not on the slice that comes first, and uncharged."""
    tasks = await cluster.until(lambda: cluster.last_attempt("job", 2))
    assert tasks[0].info.slice_name != "v4-16-0"
    for task in tasks:
        task.end.set_result(None)
    await results
    assert await cluster.charged("job") == (0, 0)


NO_MODULE = "preload='levanter' can't be imported"


@played()
@pytest.mark.parametrize("host", [0, 1])
async def test_host_failing_set_up_alone_is_at_fault(cluster: VirtualCluster, host: int) -> None:
    cluster.node(cluster.node_id("v4-16-0", host)).setup_error = NO_MODULE
    await ends_elsewhere(cluster, cluster.run("job", process=ProcessSpec(preload=("levanter",))))


@played()
async def test_hosts_failing_proven_set_up_are_at_fault(cluster: VirtualCluster) -> None:
    process = ProcessSpec(preload=("levanter",))
    await cluster.run("before", (1,), returns_at_once, process=process)
    await asyncio.sleep(5.0)
    for host in (0, 1):
        cluster.node(cluster.node_id("v4-16-0", host)).setup_error = NO_MODULE
    await ends_elsewhere(cluster, cluster.run("job", process=process))


@played()
async def test_set_up_failing_everywhere_is_users_fault(cluster: VirtualCluster) -> None:
    for name in ("v4-16-0", "v4-16-1", "v4-16-2"):
        for host in (0, 1):
            cluster.node(cluster.node_id(name, host)).setup_error = NO_MODULE
    with pytest.raises(TaskSetupError, match="levanter"):
        await cluster.run("job", process=ProcessSpec(preload=("levanter",)), max_retries_failure=5)
    assert await cluster.charged("job") == (1, 0)


@played()
async def test_request_is_at_fault_only_if_set_up_fails_twice_in_a_row(cluster: VirtualCluster) -> None:
    hosts = [cluster.node(worker.node_id) for worker in await cluster.workers()]

    async def next_launch_fails(number: int, setup_error: str | None, held_by: NotFree | None) -> None:
        for host in hosts:
            host.setup_error, host.held_by = setup_error, held_by
        await cluster.until(partial(has_failed, number))

    async def has_failed(number: int) -> bool:
        view: JobView | None = await cluster.ask("report", "job", [], 0)  # None: the job is still on its way
        return view is not None and view.failed_launches == number

    job = cluster.run_tasks("job", 1, returns_at_once, process=ProcessSpec({"pip": ["levanter"]}))
    await next_launch_fails(1, NO_MODULE, None)
    await next_launch_fails(2, None, STRANGER)
    await next_launch_fails(3, NO_MODULE, None)
    for host in hosts:
        host.setup_error = None
    await job
    assert await cluster.charged("job") == (0, 0)


@played()
async def test_set_up_failing_on_one_host_is_retried_elsewhere(cluster: VirtualCluster) -> None:
    async def where(task: Task) -> str:
        return task.host.node_id

    process = ProcessSpec({"pip": ["levanter"]})
    (first,) = await cluster.run_tasks("before", 1, where)
    cluster.node(first).setup_error = NO_MODULE
    assert await cluster.run_tasks("job", 1, where, process=process) != [first]
    assert await cluster.charged("job") == (0, 0)
    for name, host in product(("v4-16-0", "v4-16-1", "v4-16-2"), (0, 1)):
        cluster.node(cluster.node_id(name, host)).setup_error = NO_MODULE
    with pytest.raises(TaskSetupError, match="levanter"):
        await cluster.run_tasks("fails", 1, where, process=ProcessSpec({"pip": ["another"]}))
    assert await cluster.charged("fails") == (1, 0)


@played()
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_disk_error_in_user_code_costs_failure_and_moves(cluster: VirtualCluster, number: int) -> None:
    """Whether the user's own files have filled the disk, nobody knows; another host helps in either case."""

    async def work(task: Task) -> str:
        await asyncio.sleep(1.0)
        if task.info.slice_name == "v4-16-0" and task.info.worker_id == 1:
            raise OSError(number, os.strerror(number))
        await asyncio.sleep(1.0)
        return task.info.slice_name

    assert "v4-16-0" not in await cluster.run("job", (1,), work, max_retries_failure=1)
    assert await cluster.charged("job") == (1, 0)
    with pytest.raises(OSError, match=os.strerror(number)):
        await cluster.run("fails", (3,), work, max_retries_failure=0)


@played(slices=0)
async def test_tasks_one_after_the_other_share_a_reservation(cluster: VirtualCluster) -> None:
    """Ray keeps the record of each reservation that it has ever made."""
    for n in range(3):
        await cluster.run_tasks(f"job-{n}", 1, returns_at_once)
        await asyncio.sleep(KEPT_S / 2)
    assert cluster.reservations_made == 1
    await cluster.run_tasks("other-shape", 1, returns_at_once, resources={"CPU": 0.5})
    assert cluster.reservations_made == 2
    await asyncio.sleep(1.0)
    assert not cluster.reserved_nodes(), "others may have its CPUs"
    await cluster.run_tasks("later", 1, returns_at_once)
    assert cluster.reservations_made == 3


@played(slices=0)
async def test_kept_reservation_goes_if_the_next_task_on_its_host_has_another_shape(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the CPUs that the task needs, and Ray looks only now and then whether those are free."""
    monkeypatch.setattr(reserved_slice, "KEPT_S", 600.0)
    await cluster.run_tasks("job", 1, returns_at_once)
    await asyncio.sleep(1.0)  # its process has ended
    kept = list(cluster._groups)
    await cluster.run_tasks("other-shape", 1, returns_at_once, resources={"CPU": 0.5})
    await asyncio.sleep(1.0)
    assert len(kept) == 1
    assert kept[0] not in cluster._groups


@played(slices=0)
async def test_reservation_of_a_task_that_joined_ray_is_not_used_again(cluster: VirtualCluster) -> None:
    """An actor of its making may run there, and has the CPU on which the next task would start its own."""

    async def joins(task: Task) -> None:
        task.joins_ray = True

    await cluster.run_tasks("joins", 1, joins)
    await cluster.run_tasks("next", 1, returns_at_once)
    assert cluster.reservations_made == 2


@played(slices=0)
async def test_reservation_of_a_lost_task_is_not_used_again(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserved_slice, "KEPT_S", 600.0)  # longer than the pause before a retry
    result = cluster.run_tasks("job", 1, max_retries_preemption=1)
    (first,) = await cluster.runs("job", 1)
    cluster.kill_host_actor_of(first)
    (second,) = await cluster.started("job", 1, attempt=2)
    assert cluster.reservations_made == 2
    second.end.set_result(None)
    await result
