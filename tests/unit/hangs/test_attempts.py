"""What counts as progress of an attempt, and what does not."""

import asyncio
import time

import pytest

from iris_ray.actors.pool import notice_delivery
from iris_ray.actors.protocol.messages import Progress
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.outcomes import RunErrorKind, TpuRunError
from tests.support.attempts import Controller, Slices, new_attempt
from tests.unit.actors.pool.test_attempt import NOTICE_S, told_to_grow, verdict_of

LIMIT_S = 0.4


@pytest.fixture(autouse=True)
def _ask_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not take seconds."""
    monkeypatch.setattr(notice_delivery, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr("iris_ray.hangs.pool.STACKS_S", 0.0)


async def test_returned_task_counts_as_progress() -> None:
    """Nobody else has ever called heartbeat(), and the last one may take its time to finish."""

    slices = Slices(hosts=2)
    attempt = new_attempt(slices, Controller(), stall_timeout=LIMIT_S)

    async def story() -> None:
        slices.steps[0] = Progress(0.0, 1)
        await asyncio.sleep(2 * LIMIT_S)
        del slices.steps[0]
        await asyncio.sleep(LIMIT_S / 2)
        slices.returns.set()

    assert (await verdict_of(attempt, story)).succeeded


async def test_gang_hangs_normally_after_a_notices_deadline() -> None:
    slices = Slices()
    attempt = new_attempt(slices, Controller(), stall_timeout=LIMIT_S)

    async def story() -> None:
        await asyncio.sleep(0.05)
        attempt.notify(Notice(NoticeKind.MAINTENANCE, "maintenance", time.time() + 0.1))

    result = (await verdict_of(attempt, story)).result
    assert isinstance(result, TpuRunError)
    assert result.kind is RunErrorKind.HANG


@pytest.mark.parametrize("saving_s", [60.0, LIMIT_S])
async def test_gang_with_a_notice_may_save_for_longer_than_its_limit(
    saving_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iris_ray.hangs.pool.SAVING_S", saving_s)
    slices = Slices()
    attempt = new_attempt(slices, Controller(), stall_timeout=LIMIT_S)

    async def story() -> None:
        await asyncio.sleep(0.05)
        attempt.notify(Notice(NoticeKind.EVICTION, "another job", time.time() + 60.0))
        await asyncio.sleep(4 * LIMIT_S)
        slices.returns.set()

    assert (await verdict_of(attempt, story)).succeeded is (saving_s > LIMIT_S)


async def test_tasks_waiting_for_saved_peer_do_not_hang() -> None:
    slices = Slices(hosts=2)
    attempt = new_attempt(slices, Controller(), stall_timeout=LIMIT_S)

    async def story() -> None:
        await asyncio.sleep(0.05)
        attempt.notify(Notice(NoticeKind.MAINTENANCE, "maintenance", time.time() + 60.0))
        slices.steps[0] = Progress(None, None, saved=True)
        await asyncio.sleep(3 * LIMIT_S)
        slices.returns.set()

    assert (await verdict_of(attempt, story)).succeeded


def test_gang_staying_after_cancelled_growth_may_hang() -> None:
    end, _ = told_to_grow(False, stall_timeout=3 * NOTICE_S)
    assert isinstance(end.verdict.result, TpuRunError)
    assert end.verdict.result.kind is RunErrorKind.HANG
