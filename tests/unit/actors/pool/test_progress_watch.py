"""What people see of a job's progress: how far it is, and which tasks are slow."""

import asyncio

import pytest

from iris_ray.actors.pool import progress_watch
from iris_ray.actors.pool.launch import Launch
from iris_ray.actors.pool.progress_watch import MOST_NAMED, Speeds
from iris_ray.actors.protocol.messages import Progress
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.outcomes import TaskKey
from tests.support.attempts import Controller, Slices, new_attempt
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import VirtualCluster, played

# -- progress ---------------------------------------------------------------------------------------------------------


@played()
async def test_first_tasks_status_and_furthest_step_are_reported(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> int:
        task.heartbeat(10 + task.info.task_index)
        if task.info.task_index:
            task.report_status(f"I am {task.info.task_index}")
        await asyncio.sleep(60.0)
        task.heartbeat(20)
        task.report_status("loss 2.31")
        await asyncio.sleep(60.0)
        return 0

    results = cluster.run("job", (2,), work)
    await cluster.runs("job", 4)
    await asyncio.sleep(10.0)
    early = await cluster.status("job")
    assert (early.step, early.status) == (13, "I am 1")
    await asyncio.sleep(60.0)
    late = await cluster.status("job")
    assert (late.step, late.status) == (20, "loss 2.31")
    assert late.heartbeat_at is not None
    assert early.heartbeat_at is not None
    assert late.heartbeat_at - early.heartbeat_at == pytest.approx(60.0, abs=0.1)
    await results
    assert (await cluster.status("job")).status == "loss 2.31", "the last words stay"


@played()
async def test_new_controller_hears_unchanged_progress(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> int:
        task.report_status("compiling")
        await asyncio.sleep(600.0)
        return 0

    results = cluster.run("job", (1,), work)
    await cluster.runs("job", 2)
    await cluster.until(lambda: has_said(cluster, "compiling"))
    cluster.restart_controller()
    await cluster.until(lambda: has_said(cluster, None))
    await cluster.until(lambda: has_said(cluster, "compiling"))
    await results


async def has_said(cluster: VirtualCluster, words: str | None) -> bool:
    return (await cluster.status("job")).status == words


async def test_progress_missed_by_absent_controller_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(progress_watch, "LOOK_S", 0.01)

    slices, controller = Slices(), Controller()
    slices.steps[0] = Progress(0.0, 7, status="well")
    controller.there = False
    running = asyncio.ensure_future(new_attempt(slices, controller).run(Launch({"a": []}), lambda: None, lambda: None))
    await asyncio.sleep(0.1)
    assert controller.heard == []
    controller.there = True
    await asyncio.sleep(0.1)
    slices.returns.set()
    assert (await running).verdict.succeeded
    assert [(said.step, said.status) for said in controller.heard] == [(7, "well")], "once: it has not changed since"


async def test_progress_watch_continues_after_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_watch, "FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(progress_watch, "LOOK_S", 0.01)

    class OddSlices(Slices):
        async def progress(self, attempt: AttemptId) -> dict[int, Progress]:
            if not caplog.records:
                return {0: None}  # type: ignore[dict-item]
            return await super().progress(attempt)

    slices, controller = OddSlices(), Controller()
    slices.steps[0] = Progress(0.0, 7)
    running = asyncio.ensure_future(new_attempt(slices, controller).run(Launch({"a": []}), lambda: None, lambda: None))
    await asyncio.sleep(0.5)
    slices.returns.set()
    assert (await running).verdict.succeeded
    assert [said.step for said in controller.heard] == [7]
    assert "AttributeError" in caplog.text


def test_large_gang_is_asked_less_often_within_a_minute() -> None:
    assert [progress_watch.pause_s(tasks) for tasks in (1, 64, 320, 10_000)] == [5.0, 5.0, 20.0, 60.0]


# -- stragglers -------------------------------------------------------------------------------------------------------


LOOK_S = 5.0


def after(minutes: float, speeds: dict[int, float], changed: dict[int, float] | None = None) -> list[int]:
    """Which hosts are named if they make so many steps a second for some minutes, and others in the second half."""
    seen, steps = Speeds(), dict.fromkeys(speeds, 0.0)
    looks = round(minutes * 60.0 / LOOK_S)
    for look in range(looks + 1):
        seen.note({TaskKey(0, host): int(done) for host, done in steps.items()}, look * LOOK_S)
        now = changed if changed is not None and look >= looks / 2 else speeds
        steps = {host: done + LOOK_S * now[host] for host, done in steps.items()}
    return [straggler.task.host_index for straggler in seen.stragglers()]


def test_slow_task_is_named_after_a_minute() -> None:
    speeds = {0: 2.0, 1: 2.0, 2: 1.0, 3: 1.9}
    assert after(0.9, speeds) == []
    assert after(1.1, speeds) == [2]
    for quarters in range(5, 40):
        assert after(quarters / 4, speeds) == [2], "it stays named"


def test_equally_slow_tasks_and_pairs_are_not_named() -> None:
    assert after(5.0, {0: 2.0, 1: 1.9, 2: 1.8}) == []
    assert after(5.0, {0: 2.0, 1: 0.1}) == []
    assert after(5.0, dict.fromkeys(range(4), 0.0)) == []


def test_slowest_tasks_come_first_and_are_limited() -> None:
    speeds = {host: 10.0 if host < 20 else 0.1 * host for host in range(30)}
    assert after(5.0, speeds) == [20, 21, 22, 23, 24][:MOST_NAMED]


def test_newly_slow_task_is_named_and_recovered_one_dropped() -> None:
    even, uneven = dict.fromkeys(range(4), 2.0), {0: 2.0, 1: 2.0, 2: 2.0, 3: 0.5}
    assert after(120.0, even, changed=uneven) == [3]
    assert after(120.0, uneven, changed=even) == []


@played()
async def test_users_see_slow_task_while_job_runs(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> int:
        each = 4.0 if (task.info.slice_id, task.info.worker_id) == (1, 0) else 1.0
        for step in range(round(300.0 / each)):
            task.heartbeat(step)
            await asyncio.sleep(each)
        return 0

    results = cluster.run("job", (2,), work)
    await cluster.runs("job", 4)
    await asyncio.sleep(120.0)
    (named,) = (await cluster.status("job")).stragglers
    assert named.startswith("slice 1 (")
    assert "worker 0: 0.25 steps/s, the median is 1" in named
    await results
