"""What people see of a job's progress."""

import asyncio

import pytest

from iris_ray.actors.pool import progress_watch
from iris_ray.actors.protocol.messages import Progress
from iris_ray.model.lifecycle import AttemptId
from tests.support.attempts import Controller, Slices, new_attempt
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import VirtualCluster, played


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
    running = asyncio.ensure_future(new_attempt(slices, controller).run({"a": []}, lambda: None, lambda: None))
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
    running = asyncio.ensure_future(new_attempt(slices, controller).run({"a": []}, lambda: None, lambda: None))
    await asyncio.sleep(0.5)
    slices.returns.set()
    assert (await running).verdict.succeeded
    assert [said.step for said in controller.heard] == [7]
    assert "AttributeError" in caplog.text


def test_large_gang_is_asked_less_often_within_a_minute() -> None:
    assert [progress_watch.pause_s(tasks) for tasks in (1, 64, 320, 10_000)] == [5.0, 5.0, 20.0, 60.0]
