"""A defect of iris_ray, or of a policy's rule, stops no other model."""

from collections.abc import Callable, Iterator
from inspect import isgeneratorfunction
from typing import Any

import pytest

from iris_ray.slots.actors.slot_processes import status_of
from iris_ray.slots.core import events as ev
from iris_ray.slots.core.allocator import Allocator, SlotRequirement
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.instructions import AskRunner, Instruction, RaiseAlarm
from iris_ray.slots.core.models import Request
from iris_ray.slots.core.policy import PlacementPolicy, ServingPolicy
from iris_ray.slots.core.request_queue import ActiveRequests
from iris_ray.slots.core.slot import Slot
from tests.support.slot_world import A, B, SlotWorld, serving_world
from tests.support.slots import gpus

# -- defects ----------------------------------------------------------------------------------------------------------


def put_in(patch: pytest.MonkeyPatch, where: type, name: str, model: str) -> None:
    """Have a method raise an exception if its first argument is about this model."""
    method: Callable[..., Any] = getattr(where, name)

    def fails() -> Iterator[Instruction]:
        yield from ()
        raise KeyError("a defect")

    def defective(self: Any, about: Any, *arguments: Any, **named: Any) -> Any:
        found = self.slots[about] if isinstance(self, SlotFleet) and isinstance(about, str) else about
        if isinstance(found, SlotRequirement):
            found = found.spec.name
        if (found if isinstance(found, str) else found.model) == model:
            return fails() if isgeneratorfunction(method) else next(fails())
        return method(self, about, *arguments, **named)

    patch.setattr(where, name, defective)


def waiting_world() -> SlotWorld:
    """A request of each model waits for a runner, that of the first one for longer."""
    w = serving_world(A, B, runners=0)
    w.ask("a", A.name)
    w.ask("b", B.name)
    return w


@pytest.mark.parametrize(("where", "name"), [(Allocator, "decide"), (ActiveRequests, "dispatch"), (SlotFleet, "start")])
def test_unservable_model_blocks_no_other(monkeypatch: pytest.MonkeyPatch, where: type, name: str) -> None:
    w = waiting_world()
    with monkeypatch.context() as patch:
        put_in(patch, where, name, A.name)
        w.join(gpus("a", 2))
        w.run(60)
        assert w.answered == {"b": 1}
        (alarm,) = w.alarms
        assert alarm.startswith("a: it can't be served now, by a defect of iris_ray (KeyError: 'a defect')\nTraceback")
        rows = {row.model: row for row in status_of(w.reconciler, {}, w.now).models}
        assert "by a defect of iris_ray (KeyError: 'a defect'). Other models continue" in rows["a"].waits_for
        assert rows["b"].waits_for == ""
    w.run(6)
    assert w.answered == {"a": 1, "b": 1}


def test_lost_runner_reruns_requests_except_those_of_defective_model(monkeypatch: pytest.MonkeyPatch) -> None:
    w = serving_world(A, B, gpus_each=2)
    for name in "ab":
        w.ask(name, name)
        w.settle(serve=False)
    lost: list[Slot] = []
    lose = ActiveRequests.lose

    def defective(self: ActiveRequests, slot: Slot, *arguments: Any) -> Any:
        lost.append(slot)
        yield from lose(self, slot, *arguments)
        if len(lost) == 1:
            raise KeyError("a defect")

    monkeypatch.setattr(ActiveRequests, "lose", defective)
    w.lose("a")
    assert [request.request_id for request in w.requeued] == ["a", "b"]
    assert len(w.alarms) == 1


# -- rules of staleness that fail -------------------------------------------------------------------------------------


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
def test_failing_staleness_rule_makes_nothing_stale_and_is_reported(rule: Any, said: str) -> None:
    w = serving_world(A, B, policy=ServingPolicy(placement=PlacementPolicy(stale_at=rule)))
    w.ask("a", A.name)
    w.settle()
    w.now += 20.0
    heard = w.reconciler.handle(ev.RequestArrived(Request("b", B.name, w.now)), w.now)
    (alarm,) = (each for each in heard if isinstance(each, RaiseAlarm))
    assert f"PlacementPolicy.stale_at {said}" in alarm.text
    assert any(isinstance(each, AskRunner) for each in heard), "what else is to be done is not lost"
    assert "b" in w.reconciler.queue
    assert w.ready("a")
    assert not any(isinstance(each, RaiseAlarm) for each in w.reconciler.handle(ev.Tick(), w.now + 5.0))
    w.run(40)
    assert w.answered == {"a": 1, "b": 1}, "who has waited for long is served"


def test_failed_staleness_rule_is_asked_again() -> None:
    broken = [True]

    def rule(runner_id: str, last_activity: float) -> float:
        return last_activity + (1 / 0 if broken else 10.0)

    w = serving_world(A, B, policy=ServingPolicy(placement=PlacementPolicy(stale_at=rule), ageing_s=1000.0))
    w.ask("a", A.name)
    w.settle()
    w.ask("b", B.name)
    w.run(60)
    assert "b" not in w.answered
    broken.clear()
    w.run(40)
    assert w.answered["b"] == 1
