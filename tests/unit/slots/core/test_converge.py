"""Which models are looked at for a place, and when."""

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.allocator import Decision, SlotRequirement
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.slot_planner import SlotAgenda
from tests.support.slot_world import A, B, C, SlotWorld, serving_world
from tests.support.slots import model

# -- the agenda -------------------------------------------------------------------------------------------------------


FIRST, SECOND = model("a").name, model("b").name


def test_entry_keeps_its_time_unless_an_earlier_comes() -> None:
    agenda = SlotAgenda()
    agenda.look_again(FIRST, 5.0)
    for when in (9.0, float("inf")):
        agenda.look_again(FIRST, when)
    assert agenda.next_time() == 5.0
    assert agenda.take(4.9) == []
    agenda.look_again(FIRST, 3.0)
    assert agenda.take(5.0) == [FIRST]
    assert agenda.next_time() == float("inf")


def test_entry_waiting_for_room_stays_until_looked_at() -> None:
    agenda = SlotAgenda()
    agenda.wait_for_room(FIRST)
    assert agenda.take(0.0) == []
    agenda.note(agenda.waits_for_room)
    assert agenda.take(0.0) == [FIRST]
    assert not agenda.waits_for_room


# -- searches ---------------------------------------------------------------------------------------------------------


def decisions_of(w: SlotWorld) -> list[str]:
    """The models for which a place is looked for from now on."""
    seen: list[str] = []
    decide = w.reconciler.allocator.decide

    def noted(requirement: SlotRequirement, now: float) -> Decision:
        seen.append(requirement.spec.name)
        return decide(requirement, now)

    w.reconciler.allocator.decide = noted  # type: ignore[method-assign]
    return seen


def test_place_is_searched_again_only_after_more_room() -> None:
    w = serving_world(A, B, C, gpus_each=2, policy=ServingPolicy())
    w.ask("a", A.name)
    w.ask("c", C.name)
    w.settle()
    w.ask("b", B.name)
    w.tick()
    seen = decisions_of(w)
    for number in range(20):
        w.now += 0.1
        w.ask(f"a{number}", A.name)
        w.settle()
    assert seen == []
    w.hear(ev.SlotEviction(w.ready("c")[0]))
    w.hear(ev.Tick())
    assert seen == ["b"]
    w.settle()
    assert w.answered["b"] == 1


def test_place_is_searched_when_slot_becomes_stale() -> None:
    w = serving_world(A, B, policy=ServingPolicy())
    w.ask("a", A.name)
    w.settle()
    w.ask("b", B.name)
    w.now = w.reconciler.wakeup()
    while "b" not in w.answered and w.now < 20.0:
        w.hear(ev.Tick())
        w.settle()
        w.now = w.reconciler.wakeup()
    assert w.answered["b"] == 1
    assert w.reconciler.fleet.slots["slot-2"].created_at == pytest.approx(10.0)
