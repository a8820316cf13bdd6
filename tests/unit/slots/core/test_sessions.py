"""Sessions keep a seat, and give it back when they are closed, idle, lost, or others have waited for long."""

from dataclasses import replace

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.instructions import Refusal
from tests.support.slot_world import QUICK, A, SlotWorld, serving_world
from tests.support.slots import model

POLICY = replace(QUICK, ageing_s=10.0)
PAIR = model("pair", 50, concurrency=2)


def run(w: SlotWorld, seconds: int, *sessions: str) -> None:
    """Let time pass while these sessions are used."""
    for _ in range(seconds):
        w.renew(*sessions)
        w.run(1)


def test_session_takes_one_seat_and_requests_the_others() -> None:
    w = serving_world(PAIR, policy=POLICY)
    w.open("s", PAIR.name)
    w.ask("r1", PAIR.name)
    w.ask("r2", PAIR.name)
    w.settle(serve=False)
    assert w.processes["slot-1"].requests == {"r1"}
    w.settle()
    assert sorted(w.answered) == ["r1", "r2"]


@pytest.mark.parametrize(
    ("ago", "reason"), [(None, "its client was silent for 30 s"), (0.0, ""), (50.0, "it was not used for 40 s")]
)
def test_session_ends_when_idle_or_client_silent(ago: float | None, reason: str) -> None:
    w = serving_world(A, policy=POLICY)
    w.open("s", A.name, idle_s=40.0)
    w.settle()
    for _ in range(50):
        w.run(1)
        if ago is not None:
            w.renew("s", ago=min(ago, w.now))
    assert w.ended.get("s", "") == reason
    assert bool(w.reconciler.active.by_id) is (not reason)


def test_frozen_manager_ends_no_session() -> None:
    """The clients have called their slots meanwhile, and what they have said since is still on its way."""
    w = serving_world(A, policy=POLICY)
    w.open("s", A.name, idle_s=40.0)
    w.settle()
    w.run(20)
    w.renew("s")
    for _ in range(3):
        w.tick(300.0)
    assert w.ended == {}
    w.renew("s")
    run(w, 50, "s")
    assert w.ended == {}


def test_lost_slot_ends_its_sessions_for_good() -> None:
    w = serving_world(A, runners=2, policy=POLICY)
    w.open("s", A.name)
    w.settle()
    w.lose(w.open_sessions()["s"].allocation.runner_id)
    w.settle()
    assert w.refused["s"].refusal is Refusal.LOST
    assert w.refused["s"].reason == "runner a is lost"
    assert w.requeued == []
    assert not w.open_sessions()
    assert not w.reconciler.active.by_id
    w.open("again", A.name)
    w.settle()
    assert list(w.open_sessions()) == ["again"]


def test_leaving_runner_stops_sessions_and_waits_for_calls() -> None:
    w = serving_world(A, policy=POLICY)
    w.open("busy", A.name)
    w.settle()
    w.begin_call("busy")
    w.hear(ev.RunnerClosed("a", reason="its host has to go: a PRODUCTION job takes it"))
    run(w, 20, "busy")
    assert "has to end: its host has to go: a PRODUCTION job takes it" in w.ended["busy"]
    assert w.ready("a")
    w.end_call("busy")
    w.settle()
    assert not w.processes


def test_sessions_of_one_model_take_turns_when_others_wait() -> None:
    w = serving_world(PAIR, policy=POLICY)
    for name in "abcd":
        w.open(name, PAIR.name, idle_s=1000.0)
    w.settle()
    first = set(w.open_sessions())
    run(w, 9, *"abcd")
    assert set(w.open_sessions()) == first == {"a", "b"}
    w.begin_call("a")
    run(w, 5, *"abcd")
    assert list(w.ended) == ["a"], "no second one while the first one has not ended"
    w.end_call("a")
    run(w, 2, *"abcd")
    assert set(w.open_sessions()) == {"c", "d"}
    assert w.ended["b"] == "others have waited for pair for 10 s"
    w.ask("r", PAIR.name)
    run(w, 5, *"abcd")
    assert set(w.open_sessions()) == {"c", "d"}, "each keeps its seat for a while"
    run(w, 8, *"abcd")
    assert w.answered == {"r": 1}


def test_session_with_endless_call_does_not_delay_others() -> None:
    w = serving_world(PAIR, policy=POLICY)
    w.open("parked", PAIR.name)
    w.open("idle", PAIR.name)
    w.settle()
    w.begin_call("parked")  # a stream that its client has left half read
    run(w, 20, "parked", "idle")
    w.ask("r", PAIR.name)
    for _ in range(600):
        run(w, 1, "idle")
        w.settle()
    assert w.answered == {"r": 1}


def with_a_call_that_never_ends(load_s: float = 1.0) -> SlotWorld:
    """A session has its model's only seat, and somebody else waits for it."""
    w = serving_world(A, policy=POLICY)
    w.open("s", A.name)
    w.settle()
    w.reconciler.models[A.name].load_s = load_s
    w.begin_call("s")
    run(w, 20, "s")
    w.ask("r", A.name)
    return w


def test_endless_call_keeps_only_seat_a_minute_at_most() -> None:
    w = with_a_call_that_never_ends()
    run(w, 65, "s")
    assert w.ended["s"] == "others have waited for a for 10 s"
    assert not w.deleted
    run(w, 20, "s")
    assert w.deleted == [("slot-1", "others wait, and all that runs there was told to stop 60 s ago")]
    assert w.answered == {"r": 1}
    assert not w.reconciler.models[A.name].crashes


def test_call_may_last_as_long_as_a_new_load() -> None:
    w = with_a_call_that_never_ends(load_s=200.0)
    run(w, 200, "s")
    assert not w.deleted
    run(w, 30, "s")
    assert w.answered == {"r": 1}


def test_endless_call_goes_on_while_nobody_waits() -> None:
    w = with_a_call_that_never_ends()
    w.hear(ev.RequestCancelled("r"))
    w.hear(ev.RequestCancelled("s"))
    run(w, 300, "s")
    assert not w.deleted
