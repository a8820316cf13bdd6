"""Loads that fail are tried again after a pause, and those who wait are told."""

from itertools import pairwise

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.instructions import Refusal
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.slot import SlotState
from tests.support.slot_world import A, serving_world


def test_ready_slot_ends_row_of_failed_loads() -> None:
    w = serving_world(A)
    w.ask("r", A.identity)
    for _ in range(2):
        w.stuck.add("a")
        for _ in range(3):
            w.run(10)
            (slot,) = w.reconciler.fleet.in_state(SlotState.STARTING)
            w.hear(ev.SlotFailed(slot.slot_id, "no such file"))
        w.stuck.clear()
        w.run(10, serve=False)
        assert w.ready("a")
        w.crash("r")
    assert not w.refused


def test_request_beside_ready_slot_survives_failed_loads() -> None:
    w = serving_world(A, runners=2)
    w.ask("long", A.identity)
    w.settle(serve=False)
    w.stuck.update("ab")
    w.ask("next", A.identity)
    for _ in range(60):
        for slot in w.reconciler.fleet.in_state(SlotState.STARTING):
            w.hear(ev.SlotFailed(slot.slot_id, "no such file"))
        w.run(1, serve=False)
    assert w.reconciler.models[A.identity].failures >= 4
    assert not w.refused
    w.settle()
    assert sorted(w.answered) == ["long", "next"]


def test_failed_load_is_tried_elsewhere_after_pause() -> None:
    w = serving_world(A, runners=2)
    w.ask("r", A.identity)
    first = next(iter(w.reconciler.fleet.slots.values()))
    w.hear(ev.SlotFailed(first.slot_id, "out of memory"))
    w.tick(0.5)
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.FAILED]
    w.run(1)
    assert w.answered == {"r": 1}
    (second,) = w.reconciler.fleet.slots.values()
    assert second.allocation.runner_id != first.allocation.runner_id


def test_waiting_requests_fail_after_several_loads_and_pauses_grow() -> None:
    w = serving_world(A)
    w.stuck.add("a")
    w.ask("r", A.identity)
    starts: list[float] = []
    for _ in range(40):
        w.run(1)
        for slot in w.reconciler.fleet.in_state(SlotState.STARTING):
            starts.append(slot.started_at or 0.0)
            w.hear(ev.SlotFailed(slot.slot_id, "no such file"))
    assert w.refused["r"].refusal is Refusal.LOAD_FAILED
    assert "no such file" in w.refused["r"].reason
    pauses = [later - sooner for sooner, later in pairwise(starts)]
    assert pauses == sorted(pauses)
    assert len(starts) == 4


def test_endless_load_fails_by_the_clock() -> None:
    w = serving_world(A, policy=ServingPolicy(load_s=20.0))
    w.stuck.add("a")
    w.ask("r", A.identity)
    w.run(30)
    assert ("slot-1", "it did not load within 20 s") in w.deleted
