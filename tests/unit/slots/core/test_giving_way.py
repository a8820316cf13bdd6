"""A slot in use gives way to a model that has waited for long, and cuts no request off for it."""

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.slots.core.slot import SlotState
from tests.support.slot_world import A, B, SlotWorld, serving_world


def test_a_model_in_constant_use_gives_way_after_a_while() -> None:
    policy = ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(10.0), min_residency_s=5.0), ageing_s=20.0)
    w = serving_world(A, B, policy=policy)
    w.ask("a0", A.identity)
    w.settle(serve=False)
    w.ask("b", B.identity)
    for second in range(1, 40):
        w.ask(f"a{second}", A.identity)
        w.tick(1.0)
        w.settle(serve=False)
        for process in list(w.processes.values()):
            for request_id in sorted(process.requests)[:1]:
                w.end_request(request_id, process.slot_id)
    assert w.answered["b"] == 1
    w.run(60)
    assert len(w.answered) == 41


def in_contention() -> SlotWorld:
    """A request of one model runs, and another model has waited for so long that the slot is to give way."""
    w = serving_world(A, B, policy=ServingPolicy())
    w.ask("long", A.identity)
    w.settle(serve=False)
    w.ask("b0", B.identity)
    w.run(40, serve=False)
    assert w.reconciler.fleet.slots["slot-1"].state is SlotState.DRAINING
    return w


def test_a_request_that_takes_long_is_done_beside_another_model_in_constant_use() -> None:
    w = in_contention()
    for second in range(600):
        w.ask(f"b{second + 1}", B.identity)
        w.run(1, serve=False)
        for process in list(w.processes.values()):
            for request_id in sorted(process.requests):
                if request_id != "long" or second >= 500:
                    w.end_request(request_id, process.slot_id)
    assert w.answered["long"] == 1
    assert w.answered["b0"] == 1
    assert not w.requeued
    assert not w.refused


def test_a_cancelled_request_that_goes_on_does_not_keep_a_slot_that_has_to_give_way() -> None:
    w = in_contention()
    for request_id in w.processes["slot-1"].requests:
        w.reconciler.handle(ev.RequestCancelled(request_id), w.now)  # a thread that nobody can stop
    w.run(70, serve=False)
    assert (w.ready("a"), w.ready("b")) == ([], ["slot-2"])


def test_a_runner_that_has_to_go_cuts_off_what_an_eviction_would_have_waited_for() -> None:
    w = in_contention()
    w.hear(ev.RunnerClosed("a", reason="its host has to go"))
    w.run(50, serve=False)
    assert not w.requeued
    w.run(20, serve=False)
    assert [each.request_id for each in w.requeued] == ["long"]
    assert w.deleted == [("slot-1", "its host has to go")]


def test_request_that_is_cut_off_goes_to_a_warm_slot_at_once() -> None:
    w = serving_world(A, runners=2, replicas=2, policy=ServingPolicy(drain_s=1.0))
    w.tick()
    first, second = w.ready("a")
    w.ask("r", A.identity)
    (busy,) = (name for name in (first, second) if w.reconciler.fleet.slots[name].active)
    w.hear(ev.SlotEviction(busy))
    w.now += 1.5
    w.hear(ev.Tick())
    (free,) = {first, second} - {busy}
    assert w.reconciler.fleet.slots[free].active == {"r"}


def test_a_cancelled_request_that_goes_on_does_not_keep_the_only_seat_of_its_own_model() -> None:
    w = serving_world(A, policy=ServingPolicy())
    w.ask("hangs", A.identity)
    w.settle(serve=False)
    w.reconciler.handle(ev.RequestCancelled("hangs"), w.now)  # a thread that nobody can stop
    w.ask("r", A.identity)
    w.run(75, serve=False)
    assert [process.requests for process in w.processes.values()] == [{"r"}]
