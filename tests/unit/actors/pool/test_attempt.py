"""What becomes of an attempt while its tasks run: hangs, silence, and a Controller that is away."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from iris_ray.actors.pool import notice_delivery, progress_watch
from iris_ray.actors.pool.attempt import Attempt
from iris_ray.actors.pool.launch import Launch
from iris_ray.actors.protocol.messages import Progress
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.outcomes import RunErrorKind, TpuPreempted, TpuRunError
from iris_ray.model.verdict import Verdict
from tests.support.attempts import Controller, Slices, new_attempt

LIMIT_S = 0.4


@pytest.fixture(autouse=True)
def _ask_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not take seconds."""
    monkeypatch.setattr(notice_delivery, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(progress_watch, "STACKS_S", 0.0)


async def verdict_of(attempt: Attempt, story: Callable[[], Coroutine[Any, Any, None]]) -> Verdict:
    running = asyncio.ensure_future(attempt.run(Launch({"a": []}), lambda: None))
    await story()
    return (await asyncio.wait_for(running, 20)).verdict


def test_returned_task_counts_as_progress() -> None:
    """Nobody else has ever called heartbeat(), and the last one may take its time to finish."""

    async def run() -> Verdict:
        slices = Slices(hosts=2)
        attempt = new_attempt(slices, Controller(), stall_timeout=LIMIT_S)

        async def story() -> None:
            slices.steps[0] = Progress(0.0, 1)
            await asyncio.sleep(2 * LIMIT_S)
            del slices.steps[0]
            await asyncio.sleep(LIMIT_S / 2)
            slices.returns.set()

        return await verdict_of(attempt, story)

    assert asyncio.run(run()).succeeded


def test_gang_hangs_normally_after_a_notices_deadline() -> None:
    async def run() -> Verdict:
        slices = Slices()
        attempt = new_attempt(slices, Controller(), stall_timeout=LIMIT_S)

        async def story() -> None:
            await asyncio.sleep(0.05)
            attempt.notify(Notice(NoticeKind.MAINTENANCE, "maintenance", time.time() + 0.1))

        return await verdict_of(attempt, story)

    result = asyncio.run(run()).result
    assert isinstance(result, TpuRunError)
    assert result.kind is RunErrorKind.HANG


def test_tasks_waiting_for_saved_peer_do_not_hang() -> None:
    async def run() -> Verdict:
        slices = Slices(hosts=2)
        attempt = new_attempt(slices, Controller(), stall_timeout=LIMIT_S)

        async def story() -> None:
            await asyncio.sleep(0.05)
            attempt.notify(Notice(NoticeKind.MAINTENANCE, "maintenance", time.time() + 60.0))
            slices.steps[0] = Progress(None, None, saved=True)
            await asyncio.sleep(3 * LIMIT_S)
            slices.returns.set()

        return await verdict_of(attempt, story)

    assert asyncio.run(run()).succeeded


def test_host_silence_is_what_the_user_allows() -> None:
    async def run() -> list[float]:
        slices = Slices()

        async def story() -> None:
            slices.crashes.set()

        await verdict_of(new_attempt(slices, Controller(), silence_s=37.0), story)
        return slices.patience

    assert asyncio.run(run()) == [37.0]


def test_verdict_waits_for_returning_controller() -> None:
    """It knows that the host was to go: a task that ends there is no failure."""

    async def run() -> Verdict:
        slices, controller = Slices(), Controller(draining="it is being preempted")
        controller.there = False

        async def story() -> None:
            slices.crashes.set()
            await asyncio.sleep(0.3)
            controller.there = True

        return await verdict_of(new_attempt(slices, controller), story)

    assert isinstance(asyncio.run(run()).result, TpuPreempted)
