"""Who may call a slot, and when a session is over there."""

from concurrent.futures import ThreadPoolExecutor

from iris_ray.slots.actors import messages
from iris_ray.slots.actors.messages import NotHeld, Reasons
from iris_ray.slots.actors.slot_actor import HeldSessions


def test_stopped_session_ends_after_its_current_call() -> None:
    sessions = HeldSessions()
    sessions.open("a")
    assert sessions.begin_call("a") is None
    with ThreadPoolExecutor() as threads:
        over = threads.submit(sessions.stop, "a", "its runner goes")
        assert sessions.begin_call("a") == NotHeld("its runner goes")
        assert not over.done()
        sessions.end_call("a")
        over.result(10)
    assert sessions.begin_call("a") == NotHeld("its runner goes")


def test_session_stopped_before_opening_stays_closed() -> None:
    sessions = HeldSessions()
    sessions.stop("a", "it was closed")
    sessions.open("a")
    assert sessions.begin_call("a") == NotHeld("it was closed")
    assert sessions.begin_call("nobody") == NotHeld("it has ended")


def test_first_stop_reason_counts_and_oldest_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(messages, "MOST", 2)
    known = Reasons()
    known.note("a", "closed")
    known.note("a", "idle")
    assert known.of("a") == "closed"
    known.note("b", "idle")
    known.note("c", "idle")
    assert [known.of(name) for name in "abc"] == ["it has ended", "idle", "idle"]
