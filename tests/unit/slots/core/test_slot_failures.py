"""Slots that crash, loads that fail, and both that take for ever."""

from itertools import pairwise
from math import inf

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.instructions import DeleteSlot, Refusal
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.slot import SlotState
from tests.support.slot_world import A, B, SlotWorld, TimedWorld, serving_world
from tests.support.slots import GB, gpus, in_state, model

# -- loads that fail --------------------------------------------------------------------------------------------------


def test_ready_slot_ends_row_of_failed_loads() -> None:
    w = serving_world(A)
    w.ask("r", A.name)
    for _ in range(2):
        w.stuck.add("a")
        for _ in range(3):
            w.run(10)
            (slot,) = in_state(w.reconciler.fleet, SlotState.STARTING)
            w.hear(ev.SlotFailed(slot.slot_id, "no such file"))
        w.stuck.clear()
        w.run(10, serve=False)
        assert w.ready("a")
        w.crash("r")
    assert not w.refused


def test_failed_load_is_tried_elsewhere_after_pause() -> None:
    w = serving_world(A, runners=2)
    w.ask("r", A.name)
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
    w.ask("r", A.name)
    starts: list[float] = []
    for _ in range(40):
        w.run(1)
        for slot in in_state(w.reconciler.fleet, SlotState.STARTING):
            starts.append(slot.started_at or 0.0)
            w.hear(ev.SlotFailed(slot.slot_id, "no such file"))
    assert w.refused["r"].refusal is Refusal.LOAD_FAILED
    assert "no such file" in w.refused["r"].reason
    pauses = [later - sooner for sooner, later in pairwise(starts)]
    assert pauses == sorted(pauses)
    assert len(starts) == 4


@pytest.mark.parametrize(("of_policy", "of_model"), [(20.0, None), (600.0, 20.0), (5.0, 20.0)])
def test_endless_load_fails_by_the_clock(of_policy: float, of_model: float | None) -> None:
    spec = model("a", 50, load_s=of_model)
    w = serving_world(spec, policy=ServingPolicy(load_s=of_policy))
    w.stuck.add("a")
    w.ask("r", spec.name)
    w.run(30)
    assert ("slot-1", "it did not load within 20 s") in w.deleted


@pytest.mark.parametrize("replicas", [0, 1])
def test_model_whose_loads_hang_leaves_most_of_the_time_to_others(replicas: int) -> None:
    hangs, other = model("hangs", 60), model("other", 60)
    policy, load_s = ServingPolicy(), 5.0
    w = TimedWorld(policy, {"hangs": inf, "other": load_s}, {"hangs": 1.0, "other": 1.0})
    w.join(gpus("a", 1))
    w.hear(ev.ModelRegistered(hangs, replicas=replicas))
    w.hear(ev.ModelRegistered(other))
    w.ask_every(20.0, "hangs", hangs)
    w.run_until(5.0)
    w.ask_every(20.0, "other", other)
    held = 0
    for second in range(6, 12_000):
        w.run_until(float(second))
        held += any(each.model == "hangs" for each in w.processes.values())
    assert w.longest_wait("other") <= policy.ageing_s + policy.load_s + load_s + 10.0
    assert held <= 0.25 * 12_000
    assert replicas or any("evict no other model for" in each.reason for each in w.refused.values())


# -- slots that crash -------------------------------------------------------------------------------------------------


def test_request_killing_its_slots_is_given_up() -> None:
    w = serving_world(A)
    w.ask("poison", A.name)
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
    w.ask("poison", spec.name)
    for number in range(20):
        w.ask(f"r{number}", spec.name)
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
        w.ask(f"r{number}", spec.name)
    together = []
    for _ in range(3):
        w.settle(serve=False)
        together.append(len(w.reconciler.active.by_id))
        w.crash("r0")
    assert together == [9, 3, 1]
    w.settle()
    assert len(w.answered) == 9
    for number in range(9, 18):
        w.ask(f"r{number}", spec.name)
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
    assert "slots in a row have crashed" in w.reconciler.models[A.name].waits_for
    w.ask("r", A.name)
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


# -- loads and ends that take for ever --------------------------------------------------------------------------------


def test_slow_first_load_does_not_take_all_places() -> None:
    others = [model(name, 50) for name in ("a", "b", "c", "d", "e")]
    w = serving_world(*others, model("slow", 50), runners=6)
    for spec in others:
        w.ask(spec.name, spec.name)
    w.settle()
    w.stuck = set(w.runners)
    w.ask("r", model("slow").name)
    begun: list[float] = []
    for _ in range(500):
        w.run(1)
        begun += [w.now] * (len(w.created) - len(others) - len(begun))
    assert begun == [1.0, 30.0, 120.0, 480.0]


def with_a_process_that_does_not_die(**kw) -> SlotWorld:
    """Model a is on runner a. Its slot is evicted for a request for b, and nobody hears of its end."""
    w = serving_world(A, **kw)
    w.ask("first", A.name)
    w.settle()
    w.hear(ev.ModelRegistered(B))
    w.ask("r", B.name)
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
    w.ask("x", A.name)
    w.ask("y", model("huge").name)
    w.settle(serve=False)
    w.hear(ev.ModelRegistered(B))
    w.end_request("x", "slot-1")
    w.ask("r", B.name)
    w.orders["a"].clear()
    w.end_request("y", "slot-2")
    w.hear(ev.SlotEnded("slot-2"))
    del w.processes["slot-2"]
    pass_without_deletions(w, 35)
    assert w.answered["r"] == 1


def test_waiting_slot_stays_if_there_is_no_other_place() -> None:
    w = with_a_process_that_does_not_die()
    pass_without_deletions(w, 200)
    (_, planned) = w.reconciler.fleet.slots.values()
    assert (planned.slot_id, planned.state) == ("slot-2", SlotState.PLANNED)
    w.run(20)
    assert w.answered["r"] == 1
