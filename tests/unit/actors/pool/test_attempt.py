"""What becomes of an attempt while its tasks run."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from iris_ray.actors.pool import notice_delivery
from iris_ray.actors.pool.attempt import Attempt
from iris_ray.actors.pool.attempt_end import AttemptEnd
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import HostNotice, Notice, NoticeKind, Replacement
from iris_ray.model.outcomes import TpuCancelled, TpuPreempted
from iris_ray.model.verdict import Verdict
from tests.support.attempts import Controller, Slices, new_attempt
from tests.support.hosts_in_process import Crash, Task
from tests.support.virtual_cluster import VirtualCluster, played

# -- silence, and a Controller that is away ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _ask_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not take seconds."""
    monkeypatch.setattr(notice_delivery, "ASK_AGAIN_S", 0.05)


async def verdict_of(attempt: Attempt, story: Callable[[], Coroutine[Any, Any, None]]) -> Verdict:
    running = asyncio.ensure_future(attempt.run({"a": []}, lambda: None, lambda: None))
    await story()
    return (await asyncio.wait_for(running, 20)).verdict


async def test_host_silence_is_what_the_user_allows() -> None:
    slices = Slices()

    async def story() -> None:
        slices.crashes.set()

    await verdict_of(new_attempt(slices, Controller(), silence_s=37.0), story)
    assert slices.patience == [37.0]


async def test_verdict_waits_for_returning_controller() -> None:
    """It knows that the host was to go: a task that ends there is no failure."""

    slices, controller = Slices(), Controller(draining="it is being preempted")
    controller.there = False

    async def story() -> None:
        slices.crashes.set()
        await asyncio.sleep(0.3)
        controller.there = True

    assert isinstance((await verdict_of(new_attempt(slices, controller), story)).result, TpuPreempted)


# -- growth that is called off ----------------------------------------------------------------------------------------


NOTICE_S = 0.3


Story = Callable[[Slices, Attempt], Coroutine[Any, Any, None]]


def told_to_grow(
    is_to_grow: bool, meanwhile: Story | None = None, stall_timeout: float | None = None
) -> tuple[AttemptEnd, Controller]:
    """An attempt that hears right after its start that it is to grow; ``meanwhile`` begins with it."""

    async def run() -> tuple[AttemptEnd, Controller]:
        slices, controller = Slices(), Controller(is_to_grow)
        attempt = new_attempt(slices, controller, stall_timeout)
        running = asyncio.ensure_future(attempt.run({"a": []}, lambda: None, lambda: None))
        await asyncio.sleep(0.05)
        attempt.notify(Notice(NoticeKind.GROWTH, "2 slices are there for it instead of 1", time.time() + NOTICE_S))
        if meanwhile is not None:
            await meanwhile(slices, attempt)
        return await asyncio.wait_for(running, 20), controller

    return asyncio.run(run())


def test_gang_grows_at_deadline_if_slices_are_there() -> None:
    end, _ = told_to_grow(True)
    assert isinstance(end.verdict.result, TpuCancelled)
    assert end.moved_for is not None


def test_gang_stays_if_new_slices_are_gone_again() -> None:
    async def returns_later(slices: Slices, attempt: Attempt) -> None:
        await asyncio.sleep(3 * NOTICE_S)
        slices.returns.set()

    end, controller = told_to_grow(False, returns_later)
    assert (end.verdict.succeeded, end.moved_for, controller.asked) == (True, None, 1)


def test_gang_that_has_saved_moves_despite_cancelled_growth() -> None:
    """Its tasks wait, and nothing but a new attempt wakes them."""

    async def saves_later(slices: Slices, attempt: Attempt) -> None:
        await asyncio.sleep(2 * NOTICE_S)
        slices.saves = True

    end, _ = told_to_grow(False, saves_later)
    assert isinstance(end.verdict.result, TpuCancelled)
    assert end.moved_for is not None


def test_growth_after_cancelled_growth_is_told_again() -> None:
    async def room_again(slices: Slices, attempt: Attempt) -> None:
        await asyncio.sleep(2 * NOTICE_S)
        slices.saves = True
        attempt.notify(Notice(NoticeKind.GROWTH, "4 slices are there for it instead of 1", time.time() + 60.0))

    end, _ = told_to_grow(False, room_again)
    assert isinstance(end.verdict.result, TpuCancelled)
    assert "4 slices" in end.verdict.result.error


class Told(Slices):
    """A slice that notes what its tasks are told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Notice] = []

    async def notify(self, attempt: AttemptId, notice: Notice, sent_at: float) -> tuple[bool, bool]:
        if notice not in self.told:
            self.told.append(notice)
        return await super().notify(attempt, notice, sent_at)


async def test_most_urgent_notice_of_hosts_and_controller_is_told() -> None:
    """Only the Controller knows that an eviction is called off: it then says what still holds."""
    slices = Told()
    attempt, now = new_attempt(slices, Controller()), time.time()

    async def story() -> None:
        for tell in (
            lambda: attempt.notify(Notice(NoticeKind.EVICTION, "evicted", now + 30.0)),
            lambda: attempt.host_goes("node-0", HostNotice(NoticeKind.MAINTENANCE, "repair", now + 60.0)),
            lambda: attempt.notify(Notice(NoticeKind.MAINTENANCE, "in the Controller's words", now + 60.2)),
            lambda: attempt.host_goes("node-0", HostNotice(NoticeKind.PREEMPTION, "preempted", now + 20.0)),
            lambda: attempt.notify(Notice(NoticeKind.GROWTH, "more slices", now + 10.0)),
        ):
            await asyncio.sleep(0.05)
            tell()
        await asyncio.sleep(0.05)
        slices.returns.set()

    assert (await verdict_of(attempt, story)).succeeded
    evicted, repair, preempted = slices.told
    assert (evicted.kind, type(evicted)) == (NoticeKind.EVICTION, Notice)
    assert (repair.kind, type(repair)) == (NoticeKind.MAINTENANCE, Replacement)
    assert (preempted.kind, type(preempted)) == (NoticeKind.PREEMPTION, Notice)


@played(slices=2)
@pytest.mark.parametrize("after_s", [50.0, 70.0])
async def test_task_ended_by_sigterm_of_cancelled_growth_costs_nothing(cluster: VirtualCluster, after_s: float) -> None:
    async def work(task: Task) -> int:
        if task.info.attempt == 2:
            await task.told.wait()
            assert task.notice is not None
            assert task.notice.kind is NoticeKind.GROWTH
            await asyncio.sleep(after_s)
            if task.info.task_index == 0:
                raise Crash("was killed by SIGTERM")
        if task.info.attempt < 3:
            await asyncio.sleep(10_000.0)
        return task.info.attempt

    results = cluster.run("job", (1, 2), work, max_retries_preemption=1, grow_after=9999.0)
    first = await cluster.runs("job", 4)
    cluster.kill_host(first[0].info.slice_name, 0)
    second, _ = await cluster.runs("job", 2, attempt=2)
    cluster.add_slice("later")
    await asyncio.wait_for(second.told.wait(), 60.0)
    await asyncio.sleep(20.0)
    cluster.kill_host("later", 0)
    assert await results == [3] * 2
    assert await cluster.charged("job") == (0, 1)
