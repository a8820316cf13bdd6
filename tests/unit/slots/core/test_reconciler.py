"""Requests come, slots are made, evicted, lost and made again."""

from collections.abc import Callable
from typing import Any

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.slots.core import events as ev
from iris_ray.slots.core.devices import Runner
from iris_ray.slots.core.instructions import AskRunner, DeleteSlot, RaiseAlarm, Refusal, StartRequest
from iris_ray.slots.core.models import Request
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.slot import SlotState
from tests.support.slot_world import A, B, C, serving_world
from tests.support.slots import GB, chips, gpus, model


def test_requests_of_lost_runner_rerun_marked() -> None:
    w = serving_world(A, runners=2)
    w.ask("r", A.name)
    w.ask("once", A.name, retriable=False)
    w.settle(serve=False)
    assert len(w.ready("a")) == 2
    w.lose("a")
    w.lose("b")
    w.join(gpus("c", 1))
    w.settle()
    assert w.answered == {"r": 1}
    assert [request.request_id for request in w.requeued] == ["r"]
    assert w.refused["once"].refusal is Refusal.LOST
    assert "must not be repeated" in w.refused["once"].reason


# -- refused ---------------------------------------------------------------------------------------------------------


def test_refused_requests_leave_no_trace() -> None:
    w = serving_world(A, policy=ServingPolicy(most_waiting=1))
    w.stuck.add("a")
    w.ask("r", A.name, deadline=50.0)
    for name, asked, kw, refusal in [
        ("r", A.name, {}, Refusal.DUPLICATE),
        ("x", B.name, {}, Refusal.UNKNOWN_MODEL),
        ("y", A.name, {}, Refusal.QUEUE_FULL),
        ("z", A.name, {"deadline": -1.0}, Refusal.EXPIRED),
    ]:
        w.ask(name, asked, **kw)
        assert w.refused[name].refusal is refusal
    assert [request.request_id for request in w.reconciler.queue] == ["r"]
    w.now = 50.0
    w.tick()
    assert w.refused["r"].refusal is Refusal.EXPIRED
    assert len(w.reconciler.queue) == 0


# -- what is there and should not be, and the other way round --------------------------------------------------------


def test_orphaned_and_duplicate_slots_end() -> None:
    w = serving_world(A, runners=2)
    w.ask("r", A.name)
    w.settle()
    (slot,) = w.reconciler.fleet.slots.values()
    other = {"a": "b", "b": "a"}[slot.allocation.runner_id]
    w.hear(ev.RunnerReported(other, w.now, ["ghost", slot.slot_id]))
    asked = [order.slot_id for order in w.orders[other] if isinstance(order, DeleteSlot)]
    assert asked == ["ghost", slot.slot_id]


def test_reports_are_requested_every_five_seconds() -> None:
    w = serving_world(A)
    asked = [w.reconciler.handle(ev.Tick(), second).count(AskRunner("a")) for second in (3.0, 5.0, 9.0, 11.0)]
    assert asked == [0, 1, 0, 1]
    heard = w.reconciler.handle(ev.RunnerReported("a", 11.0, {}, {0: 60 * GB}), 11.0)
    assert [type(each) for each in heard] == [RaiseAlarm]


# -- slots without requests ------------------------------------------------------------------------------------------


def test_replicas_are_kept_and_never_evicted() -> None:
    w = serving_world(A, replicas=1)
    w.hear(ev.ModelRegistered(B))
    assert w.ready("a") == ["slot-1"]
    w.ask("r", B.name)
    w.run(20)
    assert w.ready("a") == ["slot-1"]
    w.hear(ev.ModelRegistered(A, replicas=0))
    w.run(2)
    assert w.answered == {"r": 1}


def test_replicas_go_to_different_runners() -> None:
    small = model("m", 10)
    w = serving_world(small, runners=3, gpus_each=2, replicas=3)
    assert {each.allocation.runner_id for each in w.processes.values()} == {"a", "b", "c"}
    w.lose("b")
    w.settle()
    w.join(gpus("d", 2))
    w.settle()
    w.hear(ev.ModelRegistered(small, replicas=4))
    w.settle()
    assert {each.allocation.runner_id for each in w.processes.values()} == {"a", "c", "d"}


def test_new_runner_is_prewarmed_without_evictions() -> None:
    w = serving_world(A, prewarm=True, runners=2)
    assert len(w.ready("a")) == 2
    w.hear(ev.ModelRegistered(B, prewarm=True))
    w.settle()
    assert w.ready("b") == []
    w.join(gpus("c", 2))
    w.settle()
    assert (len(w.ready("a")), len(w.ready("b"))) == (3, 1)


def test_models_that_do_not_fit_are_prewarmed_in_turn() -> None:
    """The fewest slots first, and of these the smallest model."""
    large, middle, small = model("l", 40), model("m", 30), model("s", 20)
    w = serving_world(large, middle, small, prewarm=True, runners=0)
    counts = []
    for number in range(3):
        w.join(gpus(f"r{number}", 1))
        w.settle()
        counts.append([len(w.ready(name)) for name in "lms"])
    assert counts == [[0, 1, 1], [1, 1, 2], [2, 2, 2]]


def test_other_code_replaces_slots_gracefully() -> None:
    w = serving_world(A, gpus_each=2, code=b"old")
    w.ask("old", A.name)
    w.settle(serve=False)
    w.hear(ev.ModelRegistered(A, code=b"old"))
    assert w.reconciler.fleet.slots["slot-1"].state is SlotState.READY
    w.hear(ev.ModelRegistered(A, code=b"new"))
    w.ask("new", A.name)
    w.settle(serve=False)
    assert {name: each.requests for name, each in w.processes.items()} == {"slot-1": {"old"}, "slot-2": {"new"}}
    w.settle()
    assert w.deleted == [("slot-1", "its model was registered again")]


@pytest.mark.parametrize("changed", [{"lora": "v2"}, {"runtime": "vllm"}, {"concurrency": 2}], ids=str)
def test_model_registered_anew_serves_the_requests_that_wait(changed: dict[str, Any]) -> None:
    w = serving_world(A)
    w.ask("runs", A.name)
    w.settle(serve=False)
    w.ask("waits", A.name)
    w.hear(ev.ModelRegistered(model("a", 50, **changed)))
    w.settle(serve=False)
    assert w.processes["slot-1"].requests == {"runs"}
    w.settle()
    assert (w.answered, w.refused) == ({"runs": 1, "waits": 1}, {})


def test_model_registered_anew_that_fits_nowhere_refuses_what_waits() -> None:
    w = serving_world(A)
    for name in ("runs", "waits"):
        w.ask(name, A.name)
        w.settle(serve=False)
    w.hear(ev.ModelRegistered(model("a", 90)))
    assert w.refused.keys() == {"waits"}
    assert w.refused["waits"].refusal is Refusal.FITS_NOWHERE


@pytest.mark.parametrize("change", [ev.ModelRegistered(A, code=b"new"), ev.ModelRemoved(A.name)], ids=str)
def test_requests_of_a_model_that_is_changed_or_removed_finish(change: ev.Event) -> None:
    w = serving_world(A, gpus_each=1, code=b"old")
    w.ask("long", A.name)
    w.settle(serve=False)
    w.hear(change)
    w.run(1000, serve=False)
    assert (w.requeued, w.processes["slot-1"].requests) == ([], {"long"})
    w.hear(ev.SlotEviction("slot-1"))  # an operator does not wait for it
    w.run(70, serve=False)
    assert "slot-1" not in w.reconciler.fleet.slots


def test_slot_of_old_code_ends_though_nobody_needs_place() -> None:
    w = serving_world(A, B, gpus_each=1, code=b"old")
    w.ask("long", A.name)
    w.settle(serve=False)
    w.ask("b", B.name)
    w.run(60, serve=False)  # it gives way
    w.hear(ev.ModelRegistered(A, code=b"new"))
    w.hear(ev.RequestCancelled("b"))
    w.run(60, serve=False)
    assert w.reconciler.fleet.slots["slot-1"].state is SlotState.DRAINING


def test_report_from_before_runner_rejoined_does_not_open_it() -> None:
    w = serving_world(A)
    w.now = 10.0
    w.lose("a")
    w.now = 12.0
    w.join(gpus("a", 1))
    w.hear(ev.RunnerReported("a", 11.0, {}))
    w.ask("r", A.name)
    assert not w.reconciler.fleet.slots
    w.hear(ev.RunnerReported("a", 12.0, {}))
    assert w.reconciler.fleet.slots


@pytest.mark.parametrize("removed", [True, False])
def test_removed_and_replaced_models_leave_no_trace(removed: bool) -> None:
    w = serving_world(C, runners=1)

    def sizes() -> list[int]:
        core = w.reconciler
        tables = (core.allocator._pools, core.allocator._lacks, core.allocator._refused, core.fleet.prices)
        return [len(table) for table in tables]

    w.ask("c", C.name)
    w.settle(serve=False)
    for number in range(30):
        name, size = (f"m{number}", 60 + number % 2) if removed else ("m", 30 + number)
        made = model(name, size, constraints=(Constraint("zone", ConstraintOp.EQ, f"z{number}"),))
        w.hear(ev.ModelRegistered(made))
        w.ask(f"r{number}", made.name)
        if removed:
            w.hear(ev.ModelRemoved(made.name))
            w.lose("a")
            w.join(gpus("a", 1))
        w.settle(serve=False)
    assert max(sizes()) <= 3


@pytest.mark.parametrize("gpus_each", [1, 2])
def test_reregistered_model_is_prewarmed_where_its_slots_end(gpus_each: int) -> None:
    w = serving_world(A, prewarm=True, runners=2, gpus_each=gpus_each)
    w.hear(ev.ModelRegistered(model("a", 50, concurrency=2), prewarm=True))
    w.settle()
    assert w.ready("a") == ["slot-3", "slot-4"]


def test_closed_runner_finishes_requests_and_gets_no_more() -> None:
    w = serving_world(A, runners=2)
    w.ask("r", A.name)
    w.settle(serve=False)
    (slot,) = w.reconciler.fleet.slots.values()
    home = slot.allocation.runner_id
    w.hear(ev.RunnerClosed(home))
    assert slot.state is SlotState.DRAINING
    assert not w.deleted
    w.settle()
    assert w.answered == {"r": 1}
    assert [slot_id for slot_id, _ in w.deleted] == [slot.slot_id]
    w.ask("s", A.name)
    w.settle()
    (slot,) = w.reconciler.fleet.slots.values()
    assert slot.allocation.runner_id != home


def test_operator_evicts_slot_and_removes_model() -> None:
    w = serving_world(A, B, gpus_each=2)
    w.ask("r", A.name)
    w.ask("s", B.name)
    w.settle()
    w.hear(ev.SlotEviction(w.ready("a")[0]))
    w.hear(ev.ModelRemoved(B.name))
    w.settle()
    assert w.processes == {}


def test_next_tick_is_next_deadline_or_five_seconds() -> None:
    w = serving_world(A)
    assert w.reconciler.wakeup() == w.now + 5.0
    w.stuck.add("a")
    w.ask("r", A.name, deadline=w.now + 2.0)
    assert w.reconciler.wakeup() == w.now + 2.0


# -- defects of other systems ----------------------------------------------------------------------------------------


def test_models_load_concurrently() -> None:
    w = serving_world(A, B, C, gpus_each=3)
    for spec in (A, B, C):
        w.ask(f"for {spec.name}", spec.name)
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.STARTING] * 3


def test_reports_make_no_duplicate_slots() -> None:
    """The reconciler's own books count; a report that does not know a new slot yet changes nothing."""
    w = serving_world(A, runners=3)
    before = w.now
    w.now += 1.0
    w.ask("r", A.name)
    for name in "abc":
        w.hear(ev.RunnerReported(name, before, {}))
        w.tick()
    assert len(w.reconciler.fleet.slots) == 1


def test_loading_model_blocks_nobody() -> None:
    w = serving_world(A, B, gpus_each=2)
    w.ask("warm", B.name)
    w.settle()
    w.ask("cold", A.name)
    w.ask("next", B.name)
    orders = [order.request.request_id for order in w.orders["a"] if isinstance(order, StartRequest)]
    assert orders == ["next"]


def test_model_fitting_only_hostless_runner_waits_for_it() -> None:
    w = serving_world(A, model("large", 70), model("huge", 90))
    w.lose("a")
    w.join(gpus("small", 1, gigabytes=60))
    w.hear(ev.RunnersExpected((gpus("small", 1, gigabytes=60), gpus("large", 1))))
    w.settle()
    w.ask("waits", model("large", 70).name)
    w.ask("never", model("huge", 90).name)
    assert w.refused.keys() == {"never"}
    assert w.refused["never"].refusal is Refusal.FITS_NOWHERE
    w.join(gpus("large", 1))
    w.settle()
    assert w.answered == {"waits": 1}


def test_due_work_is_done_despite_constant_events() -> None:
    w = serving_world(A)
    asked = 0
    for second in range(60):
        w.now = float(second)
        arrived = ev.RequestArrived(Request(f"r{second}", A.name, w.now))
        asked += w.reconciler.handle(arrived, w.now).count(AskRunner("a"))
    assert asked == 11  # every five seconds, and once before
    assert w.reconciler.models[A.name].demand > 0


@pytest.mark.parametrize("runner", [gpus, chips])
def test_runner_returning_with_fewer_devices_is_used(runner: Callable[..., Runner]) -> None:
    """A GPU has fallen off the bus; and nobody has looked between the two."""
    spec = model("m", 10, kind=runner().kind)
    w = serving_world()
    w.join(runner("again", 4))
    w.hear(ev.ModelRegistered(spec))
    for number in range(5):
        w.ask(f"r{number}", spec.name)
    w.settle()
    w.lose("again")
    w.join(runner("again", 1))
    w.ask("later", spec.name)
    w.settle()
    assert w.answered["later"] == 1
