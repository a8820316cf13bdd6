"""A policy's rule of when slots are stale may fail. That stops nothing."""

from typing import Any

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.instructions import AskRunner, RaiseAlarm
from iris_ray.slots.core.models import Request
from iris_ray.slots.core.policy import PlacementPolicy, ServingPolicy
from tests.support.slot_world import A, B, serving_world


def raises(runner_id: str, last_activity: float) -> float:
    raise KeyError(runner_id)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (raises, "raised KeyError: 'a'"),
        (lambda runner_id, last_activity: None, "raised TypeError"),
        (lambda runner_id, last_activity: float("nan"), "returned NaN"),
    ],
)
def test_a_rule_of_staleness_that_fails_makes_no_slot_stale_and_is_reported(rule: Any, said: str) -> None:
    w = serving_world(A, B, policy=ServingPolicy(placement=PlacementPolicy(stale_at=rule)))
    w.ask("a", A.identity)
    w.settle()
    w.now += 20.0
    heard = w.reconciler.handle(ev.RequestArrived(Request("b", B.identity, w.now)), w.now)
    (alarm,) = (each for each in heard if isinstance(each, RaiseAlarm))
    assert f"PlacementPolicy.stale_at {said}" in alarm.text
    assert any(isinstance(each, AskRunner) for each in heard), "what else is to be done is not lost"
    assert "b" in w.reconciler.queue
    assert w.ready("a")
    assert not any(isinstance(each, RaiseAlarm) for each in w.reconciler.handle(ev.Tick(), w.now + 5.0))
    w.run(40)
    assert w.answered == {"a": 1, "b": 1}, "who has waited for long is served"


def test_a_rule_of_staleness_that_has_failed_is_asked_again() -> None:
    broken = [True]

    def rule(runner_id: str, last_activity: float) -> float:
        return last_activity + (1 / 0 if broken else 10.0)

    w = serving_world(A, B, policy=ServingPolicy(placement=PlacementPolicy(stale_at=rule), ageing_s=1000.0))
    w.ask("a", A.identity)
    w.settle()
    w.ask("b", B.identity)
    w.run(60)
    assert "b" not in w.answered
    broken.clear()
    w.run(40)
    assert w.answered["b"] == 1
