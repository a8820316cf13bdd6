"""Who may call a slot, and when a session is over there."""

import asyncio

from iris_ray.actors.slots import reasons
from iris_ray.actors.slots.held_sessions import HeldSession, HeldSessions
from iris_ray.actors.slots.messages import NotHeld
from iris_ray.actors.slots.reasons import Reasons


def held(sessions: HeldSessions, name: str) -> HeldSession:
    found = sessions.get(name)
    assert isinstance(found, HeldSession)
    return found


async def call(session: HeldSession, log: list[str], name: str, seconds: float = 0.01) -> None:
    async with session:
        log.append(f"{name} begins")
        await asyncio.sleep(seconds)
        log.append(f"{name} ends")


def test_calls_of_one_session_run_one_after_the_other_and_those_of_two_beside_each_other() -> None:
    async def play() -> list[str]:
        log: list[str] = []
        sessions = HeldSessions()
        sessions.open("a")
        sessions.open("b")
        await asyncio.gather(*(call(held(sessions, name[0]), log, name) for name in ("a1", "a2", "b1")))
        return log

    log = asyncio.run(play())
    assert log[:2] == ["a1 begins", "b1 begins"]
    assert log.index("a1 ends") < log.index("a2 begins")


def test_a_session_that_is_stopped_is_over_after_the_calls_that_it_has() -> None:
    async def play() -> None:
        log: list[str] = []
        sessions = HeldSessions()
        sessions.open("a")
        calls = [asyncio.ensure_future(call(held(sessions, "a"), log, name)) for name in ("one", "two")]
        over = asyncio.ensure_future(sessions.wait_over("a"))
        await asyncio.sleep(0)
        sessions.stop("a", "its runner goes")
        assert sessions.get("a") == NotHeld("its runner goes")
        calls[1].cancel()
        await over
        assert log == ["one begins", "one ends"]
        assert calls[1].cancelled()
        assert sessions.get("a") == NotHeld("its runner goes")
        sessions.stop("nobody", "nothing happens")
        assert sessions.get("nobody") == NotHeld("it has ended")

    asyncio.run(play())


def test_the_first_reason_counts_and_the_oldest_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(reasons, "MOST", 2)
    known = Reasons()
    known.note("a", "closed")
    known.note("a", "idle")
    assert known.of("a") == "closed"
    known.note("b", "idle")
    known.note("c", "idle")
    assert [known.of(name) for name in "abc"] == ["it has ended", "idle", "idle"]
