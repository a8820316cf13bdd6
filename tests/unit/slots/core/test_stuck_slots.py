"""A load, or the end of a slot, that takes for ever holds no other slot up."""

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.instructions import DeleteSlot
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.slot import SlotState
from tests.support.slot_world import A, B, SlotWorld, serving_world
from tests.support.slots import GB, gpus, model


def test_runner_on_which_nothing_loads_delays_no_model() -> None:
    w = serving_world(A, runners=2, policy=ServingPolicy(late_s=10.0, load_s=300.0))
    w.stuck.add("a")
    w.ask("r", A.identity)
    assert next(iter(w.reconciler.fleet.slots.values())).allocation.runner_id == "a"
    w.run(15)
    assert w.answered == {"r": 1}


def test_slow_first_load_does_not_take_all_places() -> None:
    others = [model(name, 50) for name in ("a", "b", "c", "d", "e")]
    w = serving_world(*others, model("slow", 50), runners=6)
    for spec in others:
        w.ask(spec.name, spec.identity)
    w.settle()
    w.stuck = set(w.runners)
    w.ask("r", model("slow").identity)
    begun: list[float] = []
    for _ in range(500):
        w.run(1)
        begun += [w.now] * (len(w.created) - len(others) - len(begun))
    assert begun == [1.0, 30.0, 120.0, 480.0]


def with_a_process_that_does_not_die(**kw) -> SlotWorld:
    """Model a is on runner a. Its slot is evicted for a request for b, and nobody hears of its end."""
    w = serving_world(A, **kw)
    w.ask("first", A.identity)
    w.settle()
    w.hear(ev.ModelRegistered(B))
    w.ask("r", B.identity)
    w.orders["a"].clear()
    return w


def pass_without_deletions(w: SlotWorld, seconds: int) -> None:
    for _ in range(seconds):
        w.tick(1.0)
        for runner_id, orders in w.orders.items():
            kept = [order for order in orders if not isinstance(order, DeleteSlot) or runner_id != "a"]
            orders.clear()
            orders.extend(kept)
        w.settle()


def test_slot_whose_place_stays_taken_is_planned_elsewhere() -> None:
    w = with_a_process_that_does_not_die()
    w.join(gpus("b", 1))
    w.settle_one()
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.DRAINING, SlotState.PLANNED]
    pass_without_deletions(w, 29)
    assert "r" not in w.answered
    pass_without_deletions(w, 5)
    assert w.answered["r"] == 1
    assert len(w.reconciler.fleet.on_runner("a")) == 1, "its first place is free for others"


def test_slot_whose_place_stays_taken_moves_within_runner() -> None:
    w = serving_world(model("a", 50), model("huge", memory={1: 50 * GB}), gpus_each=2)
    w.ask("x", A.identity)
    w.ask("y", model("huge").identity)
    w.settle(serve=False)
    w.hear(ev.ModelRegistered(B))
    w.end_request("x", "slot-1")
    w.ask("r", B.identity)
    w.orders["a"].clear()
    w.end_request("y", "slot-2")
    w.hear(ev.SlotEnded("slot-2"))
    del w.processes["slot-2"]
    pass_without_deletions(w, 35)
    assert w.answered["r"] == 1


def test_moved_slot_takes_first_place_when_free() -> None:
    w = serving_world(A, B, runners=2, policy=ServingPolicy())
    w.ask("a0", A.identity)
    w.ask("a1", A.identity)
    w.settle(serve=False)
    w.ask("b", B.identity)
    w.run(75, serve=False)  # starving after 30 s; its first place is late 30 s after that
    assert len(w.reconciler.fleet.in_state(SlotState.DRAINING)) == 2
    (planned,) = w.reconciler.fleet.in_state(SlotState.PLANNED)
    (other,) = (p for p in w.processes.values() if p.allocation.runner_id != planned.allocation.runner_id)
    (request_id,) = other.requests
    w.end_request(request_id, other.slot_id)
    w.run(40, serve=False)
    assert w.ready("b")


def test_waiting_slot_stays_if_there_is_no_other_place() -> None:
    w = with_a_process_that_does_not_die()
    pass_without_deletions(w, 200)
    (_, planned) = w.reconciler.fleet.slots.values()
    assert (planned.slot_id, planned.state) == ("slot-2", SlotState.PLANNED)
    w.run(20)
    assert w.answered["r"] == 1
