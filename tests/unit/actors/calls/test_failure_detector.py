"""Who has stopped answering, with members that are plain coroutines and a clock that costs no time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayError,
)

from iris_ray.actors.calls.liveness import FIRST_PING_S, PING_S, RETRY_S, FailureDetector
from tests.support.virtual_time import block, now, run

LIMIT_S = 5.0
Member = Callable[[], Awaitable[object]]


async def answers() -> bool:
    return True


async def answers_late() -> bool:
    await asyncio.sleep(LIMIT_S / 2)
    return True


async def never_answers() -> None:
    await asyncio.Event().wait()


async def died() -> None:
    raise ActorDiedError


async def is_unavailable() -> None:
    raise ActorUnavailableError("for now", None)


def refuses_at_once() -> Awaitable[object]:
    raise ValueError("before anything is awaited")


async def is_cancelled() -> None:
    raise asyncio.CancelledError


@contextmanager
def watching(limit_s: float = LIMIT_S, since_first: bool = False, **members: Member) -> Iterator[FailureDetector[str]]:
    watch = FailureDetector(lambda name: members[name](), members, limit_s, since_first)
    try:
        yield watch
    finally:
        watch.stop()


def test_answering_member_is_never_lost() -> None:
    async def watched() -> dict[str, str]:
        with watching(prompt=answers, late=answers_late) as watch:
            await asyncio.sleep(4 * LIMIT_S)
            return watch.silent

    assert run(watched()) == {}


@pytest.mark.parametrize("silent", [never_answers, is_unavailable, refuses_at_once, is_cancelled])
def test_silent_member_is_lost_at_limit_not_before(silent: Member) -> None:
    async def watched() -> None:
        with watching(silent=silent) as watch:
            await asyncio.sleep(LIMIT_S - 0.01)
            assert watch.silent == {}
            await asyncio.wait_for(watch.found(), 60)
            assert LIMIT_S - 1e-6 <= now() <= LIMIT_S + RETRY_S + 1e-6
            assert watch.silent == {"silent": "has not answered for 5 s"}

    run(watched())


def test_failure_detector_works_in_real_time() -> None:
    async def watched() -> dict[str, str]:
        began = time.monotonic()
        with watching(limit_s=0.2, silent=never_answers, prompt=answers) as watch:
            await asyncio.wait_for(watch.found(), 10)
            assert time.monotonic() - began >= 0.2
            return watch.silent

    assert asyncio.run(watched()) == {"silent": "has not answered for 0.2 s"}


def test_member_falling_silent_is_lost_limit_after_answer() -> None:
    async def watched() -> None:
        last, stops = 0.0, 2 * LIMIT_S

        async def stops_answering() -> None:
            nonlocal last
            if now() > stops:
                await never_answers()
            last = now()

        with watching(member=stops_answering) as watch:
            await asyncio.wait_for(watch.found(), 60)
            assert now() == pytest.approx(last + LIMIT_S)
            assert stops - PING_S < last <= stops

    run(watched())


def test_member_answering_again_before_limit_is_kept() -> None:
    async def watched() -> dict[str, str]:
        async def is_away_for_a_while() -> None:
            if now() % LIMIT_S < LIMIT_S / 2:
                raise ActorUnavailableError("for now", None)

        with watching(member=is_away_for_a_while) as watch:
            await asyncio.sleep(4 * LIMIT_S)
            return watch.silent

    assert run(watched()) == {}


@pytest.mark.parametrize("since_first", [False, True])
@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), OutOfMemoryError("killed"), ActorUnschedulableError("its node is dead")],
    ids=["died", "killed for memory", "never started"],
)
def test_member_whose_actor_is_gone_is_lost_at_once(error: RayError, since_first: bool) -> None:
    async def died() -> None:
        raise error

    async def watched() -> None:
        with watching(since_first=since_first, dead=died, prompt=answers) as watch:
            await asyncio.wait_for(watch.found(), 60)
            assert now() == FIRST_PING_S
            assert list(watch.silent) == ["dead"]
            assert type(error).__name__ in watch.silent["dead"]
            assert not watch.hung

    run(watched())


def test_one_silent_member_does_not_hide_another() -> None:
    async def watched() -> dict[str, str]:
        with watching(dead=died, silent=never_answers, prompt=answers) as watch:
            await asyncio.wait_for(watch.found(), 60)
            assert list(watch.silent) == ["dead"]
            await asyncio.wait_for(watch.found(), 60)  # it stays found
            assert now() == FIRST_PING_S
            await asyncio.sleep(2 * LIMIT_S)
            return watch.silent

    assert set(run(watched())) == {"dead", "silent"}


@pytest.mark.parametrize("before_s", [0.0, 0.5, 1.0, 1.2, 2.4, 2.5, 3.0, 3.5])
def test_blocked_event_loop_time_counts_against_no_member(before_s: float) -> None:
    """Whenever it begins: before the next question, or while one is under way whose answer would come in time."""

    async def watched() -> None:
        with watching(prompt=answers, late=answers_late) as watch:
            await asyncio.sleep(before_s)
            block(1.6 * LIMIT_S)
            await asyncio.sleep(2 * LIMIT_S)
            assert watch.silent == {}

    run(watched())


def test_silent_member_is_found_despite_blocked_event_loop() -> None:
    async def watched() -> dict[str, str]:
        with watching(silent=never_answers, prompt=answers) as watch:
            await asyncio.sleep(1.0)
            block(2 * LIMIT_S)
            await asyncio.wait_for(watch.found(), LIMIT_S)
            return watch.silent

    assert list(run(watched())) == ["silent"]


@pytest.mark.parametrize("after_s", [0.0, 0.05, 2 * LIMIT_S])
def test_stop_leaves_no_task_behind(after_s: float) -> None:
    async def watched() -> None:
        with watching(a=answers, b=never_answers, c=died, d=is_unavailable):
            await asyncio.sleep(after_s)
        for _ in range(100):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(watched())


def test_watch_without_members_finds_nobody() -> None:
    async def watched() -> None:
        with watching() as watch:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch.found(), 60)
            assert watch.silent == {}

    run(watched())


def test_starting_member_is_not_lost_before_first_answer() -> None:
    async def watched() -> tuple[dict[str, str], dict[str, str]]:
        asked = 0

        async def starts_late_and_hangs_then() -> None:
            nonlocal asked
            asked += 1
            await asyncio.sleep(10 * LIMIT_S if asked == 1 else 1000 * LIMIT_S)

        with watching(since_first=True, new=starts_late_and_hangs_then, starting=never_answers) as watch:
            await asyncio.sleep(10.5 * LIMIT_S)
            before = dict(watch.silent)
            await asyncio.sleep(2 * LIMIT_S)
            return before, watch.silent

    before, silent = run(watched())
    assert before == {}
    assert silent.keys() == {"new"}


def test_silent_member_is_found_after_watch_error(caplog: pytest.LogCaptureFixture) -> None:
    async def watched() -> dict[str, str]:
        with watching(silent=never_answers) as watch:
            with mock.patch.object(asyncio, "wait", side_effect=ValueError("unexpected")):
                await asyncio.sleep(1.0)
            await asyncio.wait_for(watch.found(), LIMIT_S)
            return watch.silent

    assert run(watched()) == {"silent": "has not answered for 5 s"}
    assert "ValueError: unexpected" in caplog.text
