"""What a session's client knows of its seat."""

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OwnerDiedError, RayError

from iris_ray.errors import RequestLostError, SessionEndedError, SlotQueueFullError
from iris_ray.slots.actors.messages import Grant, NotHeld, packed_error
from iris_ray.slots.client.lease import MOST_CALLS, Lease


def lease(actor: Any = None) -> Lease:
    return Lease("session-1", "llama", Grant("slot-1", actor))


def test_lease_is_idle_from_end_of_last_call() -> None:
    seat = lease()
    with seat.calling(seat.line_up()):
        time.sleep(0.02)
        assert seat.idle_s() == 0.0
    assert 0.0 < seat.idle_s() < 10.0


def test_answers_are_unpickled_and_model_errors_raised_unchanged() -> None:
    seat = lease()
    assert seat.opened([1, 2]) == [1, 2]
    with pytest.raises(ZeroDivisionError, match="mine"):
        seat.opened(packed_error(ZeroDivisionError("mine")))
    assert seat.over == ""


def test_late_call_has_not_run_and_says_what_to_do() -> None:
    seat = lease()
    with pytest.raises(
        SessionEndedError, match=r"over: its runner goes. This call has not run; open the session again"
    ):
        seat.opened(NotHeld("its runner goes"))
    seat.end("a later reason")
    with pytest.raises(SessionEndedError, match="its runner goes"):
        seat.line_up()


@pytest.mark.parametrize("said_by_ray", [ActorDiedError(), OwnerDiedError("id", "address", "call site")])
def test_call_of_gone_slot_may_have_run(said_by_ray: RayError) -> None:
    """A large answer may have arrived as a reference when its host is lost."""
    seat = lease()
    with (
        pytest.raises(RequestLostError, match=r"may have run in part.*repeat the call if"),
        seat.calling(seat.line_up()),
    ):
        raise said_by_ray
    assert seat.over == "slot slot-1 is gone"
    assert seat.idle_s() > 0.0


def test_model_may_raise_that_its_own_actor_is_gone() -> None:
    seat = lease()
    with pytest.raises(ActorDiedError), seat.calling(seat.line_up()):
        seat.opened(packed_error(ActorDiedError()))
    assert seat.over == ""


def test_waiting_calls_are_limited() -> None:
    seat = lease()
    turns = [seat.line_up() for _ in range(MOST_CALLS)]
    with pytest.raises(SlotQueueFullError, match="open more sessions"):
        seat.line_up()
    with seat.calling(turns[0]):
        pass
    seat.line_up()


def test_calls_take_turns_and_abandoned_one_blocks_nobody() -> None:
    seat = lease()
    first, second, third = (seat.line_up() for _ in range(3))
    assert [turn.came.done() for turn in (first, second, third)] == [True, False, False]
    with pytest.raises(ZeroDivisionError), seat.calling(second):
        raise ZeroDivisionError
    assert not third.came.done()
    with seat.calling(first):
        assert not third.came.done()
    assert third.came.done()


def test_abandoned_call_is_stopped_before_next_begins() -> None:
    """It has the session's seat until then. Were the next one sent, it would take the seat of another session."""
    stopped: list[str] = []
    end: Future[None] = Future()
    sent: Any = SimpleNamespace(future=lambda: end)
    seat = lease(SimpleNamespace(stop=SimpleNamespace(remote=stopped.append)))
    first, second = seat.line_up(), seat.line_up()
    first.end = sent
    with pytest.raises(KeyboardInterrupt), seat.calling(first):
        raise KeyboardInterrupt
    assert stopped == [first.call_id]
    assert not second.came.done()
    assert seat.idle_s() == 0.0
    end.set_result(None)
    assert second.came.done()


def test_abandoned_unsent_call_leaves_line_at_once() -> None:
    seat = lease()
    first, second, third = (seat.line_up() for _ in range(3))
    with pytest.raises(KeyboardInterrupt), seat.calling(second):
        raise KeyboardInterrupt
    with seat.calling(first):
        pass
    assert third.came.done()


def test_call_abandoned_after_leaving_cluster_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    seat = lease()
    turn = seat.line_up()
    turn.end = object()
    monkeypatch.setattr("iris_ray.slots.client.lease.this_connection", lambda: "another cluster")
    with pytest.raises(KeyboardInterrupt), seat.calling(turn):
        raise KeyboardInterrupt
    assert seat.idle_s() > 0.0
