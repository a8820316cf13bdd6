"""When a place is looked for again for a model that waits."""

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.allocator import Decision, SlotRequirement
from iris_ray.slots.core.policy import ServingPolicy
from tests.support.slot_world import A, B, C, SlotWorld, serving_world


def decisions_of(w: SlotWorld) -> list[str]:
    """The models for which a place is looked for from now on."""
    seen: list[str] = []
    decide = w.reconciler.allocator.decide

    def noted(requirement: SlotRequirement, now: float) -> Decision:
        seen.append(requirement.spec.name)
        return decide(requirement, now)

    w.reconciler.allocator.decide = noted  # type: ignore[method-assign]
    return seen


def test_no_place_is_looked_for_again_before_there_is_more_room() -> None:
    w = serving_world(A, B, C, gpus_each=2, policy=ServingPolicy())
    w.ask("a", A.identity)
    w.ask("c", C.identity)
    w.settle()
    w.ask("b", B.identity)
    w.tick()
    seen = decisions_of(w)
    for number in range(20):
        w.now += 0.1
        w.ask(f"a{number}", A.identity)
        w.settle()
    assert seen == []
    w.hear(ev.SlotEviction(w.ready("c")[0]))
    w.hear(ev.Tick())
    assert seen == ["b"]
    w.settle()
    assert w.answered["b"] == 1


def test_place_is_looked_for_when_a_slot_is_stale_though_nothing_happens() -> None:
    w = serving_world(A, B, policy=ServingPolicy())
    w.ask("a", A.identity)
    w.settle()
    w.ask("b", B.identity)
    w.now = w.reconciler.wakeup()
    while "b" not in w.answered and w.now < 20.0:
        w.hear(ev.Tick())
        w.settle()
        w.now = w.reconciler.wakeup()
    assert w.answered["b"] == 1
    assert w.reconciler.fleet.slots["slot-2"].created_at == pytest.approx(10.0)


def test_who_has_waited_for_long_is_looked_at_when_that_is_so() -> None:
    w = serving_world(A, B, policy=ServingPolicy(ageing_s=33.3))
    w.ask("a", A.identity)
    w.settle(serve=False)
    w.ask("b", B.identity)
    while w.now < 40.0:
        w.now = w.reconciler.wakeup()
        w.hear(ev.Tick())
    assert w.reconciler.fleet.slots["slot-2"].created_at == pytest.approx(33.3)


def test_a_place_is_looked_for_when_a_runner_opens() -> None:
    w = serving_world(A)
    w.hear(ev.RunnerClosed("a"))
    w.ask("r", A.identity)
    w.tick()
    seen = decisions_of(w)
    w.tick()
    assert seen == []
    w.hear(ev.RunnerClosed("a", closed=False))
    assert seen == ["a"]
    w.settle()
    assert w.answered == {"r": 1}
