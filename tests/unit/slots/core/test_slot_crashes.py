"""A slot's process ends by itself: its requests run again, and the one that crashes it takes no other with it."""

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.instructions import Refusal
from tests.support.slot_world import A, serving_world
from tests.support.slots import model


def test_request_killing_its_slots_is_given_up() -> None:
    w = serving_world(A)
    w.ask("poison", A.identity)
    for _ in range(60):
        w.run(2, serve=False)
        for slot_id in w.ready("a"):
            del w.processes[slot_id]
            w.hear(ev.SlotEnded(slot_id))
    assert w.refused["poison"].refusal is Refusal.LOST
    assert len(w.created) == 4


@pytest.mark.parametrize("seats", [1, 2, 16, 256])
def test_request_crashing_its_slots_takes_no_other_along(seats: int) -> None:
    spec = model("a", 50, concurrency=seats)
    w = serving_world(spec)
    w.ask("poison", spec.identity)
    for number in range(20):
        w.ask(f"r{number}", spec.identity)
    for _ in range(300):
        w.run(1, serve=False)
        w.crash("poison")
        w.settle_one()
        w.settle_one()
    w.settle()
    assert w.refused.keys() == {"poison"}
    assert "that was the last of 4 attempts" in w.refused["poison"].reason
    assert len(w.answered) == 20


def test_requests_of_crashed_slot_rerun_in_smaller_groups() -> None:
    spec = model("a", 50, concurrency=9)
    w = serving_world(spec)
    for number in range(9):
        w.ask(f"r{number}", spec.identity)
    together = []
    for _ in range(3):
        w.settle(serve=False)
        together.append(len(w.reconciler.active.by_id))
        w.crash("r0")
    assert together == [9, 3, 1]
    w.settle()
    assert len(w.answered) == 9
    for number in range(9, 18):
        w.ask(f"r{number}", spec.identity)
    w.settle(serve=False)
    assert len(w.reconciler.active.by_id) == 9


def test_loads_of_idly_crashing_model_pause_without_refusals() -> None:
    w = serving_world(A, replicas=1)
    for _ in range(300):
        for slot_id in w.ready("a"):
            del w.processes[slot_id]
            w.hear(ev.SlotEnded(slot_id))
        w.run(1)
    assert len(w.created) < 20
    assert "slots in a row have crashed" in w.reconciler.models[A.identity].waits_for
    w.ask("r", A.identity)
    w.run(70)
    assert w.answered == {"r": 1}


def test_slot_crashing_after_long_service_is_remade_at_once() -> None:
    w = serving_world(A, replicas=1)
    for _ in range(10):
        w.run(100)
        for slot_id in w.ready("a"):
            del w.processes[slot_id]
            w.hear(ev.SlotEnded(slot_id))
        w.settle()
        assert w.ready("a")
