"""Requests come, slots are made, evicted, lost and made again."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from iris_ray.slots import events as ev
from iris_ray.slots.decisions import Decision, Requirement
from iris_ray.slots.devices import Runner
from iris_ray.slots.instructions import AskRunner, DeleteSlot, RaiseAlarm, Refusal, StartRequest
from iris_ray.slots.models import ModelSpec
from iris_ray.slots.policy import IdleFor, Policy
from iris_ray.slots.requests import Request
from iris_ray.slots.serving_policy import ServingPolicy
from iris_ray.slots.slot import SlotState
from tests.support.slot_world import SlotWorld
from tests.support.slots import GB, chips, gpus, model

QUICK = ServingPolicy(placement=Policy(stale_at=IdleFor(0.0), min_residency_s=0.0))


def world(*models: ModelSpec, runners: int = 1, gpus_each: int = 1, policy: ServingPolicy = QUICK, **kw) -> SlotWorld:
    """Runners with devices of 80 GB, and models that were registered in the same way."""
    made = SlotWorld(policy)
    for number in range(runners):
        made.join(gpus("abcdef"[number], gpus_each))
    made.settle()
    for spec in models:
        made.hear(ev.ModelRegistered(spec, **kw))
    made.settle()
    return made


A, B, C = model("a", 50), model("b", 60), model("c", 70)


def test_a_request_gets_a_slot_and_an_answer() -> None:
    w = world(A)
    w.ask("r", A.identity)
    w.settle()
    assert w.answered == {"r": 1}
    assert w.ready("a") == ["slot-1"]


def test_a_warm_slot_serves_again_without_another_load() -> None:
    w = world(A)
    for number in range(5):
        w.ask(f"r{number}", A.identity)
        w.settle()
    assert w.created == ["slot-1"]


def test_as_many_slots_are_made_as_the_queue_fills_and_those_that_start_count() -> None:
    spec = model("a", 10, concurrency=2)
    w = world(spec, gpus_each=2)
    for number in range(5):
        w.ask(f"r{number}", spec.identity)
    assert len(w.reconciler.fleet.slots) == 3
    w.tick()
    assert len(w.reconciler.fleet.slots) == 3


def test_a_slot_is_evicted_for_another_model_and_comes_back_when_it_is_asked_for() -> None:
    w = world(A, B)
    for number, spec in enumerate([A, B, A]):
        w.ask(f"r{number}", spec.identity)
        w.run(2)
    assert sorted(w.answered) == ["r0", "r1", "r2"]
    assert w.ready("a") == ["slot-3"]
    assert [reason for _, reason in w.deleted] == ["its memory is needed for b", "its memory is needed for a"]


def test_the_requests_of_a_lost_runner_run_again_and_are_marked() -> None:
    w = world(A, runners=2)
    w.ask("r", A.identity)
    w.ask("once", A.identity, retriable=False)
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


def test_a_request_that_kills_its_slots_is_given_up() -> None:
    w = world(A)
    w.ask("poison", A.identity)
    for _ in range(60):
        w.run(2, serve=False)
        for slot_id in w.ready("a"):
            del w.processes[slot_id]
            w.hear(ev.SlotEnded(slot_id))
    assert w.refused["poison"].refusal is Refusal.LOST
    assert len(w.created) == 4


def crash(w: SlotWorld, *poison: str) -> None:
    """Let the processes of these requests end by themselves."""
    for slot_id, process in list(w.processes.items()):
        if process.requests & set(poison):
            del w.processes[slot_id]
            w.hear(ev.SlotEnded(slot_id))


@pytest.mark.parametrize("seats", [1, 2, 16, 256])
def test_a_request_that_crashes_its_slots_takes_no_other_request_with_it(seats: int) -> None:
    spec = model("a", 50, concurrency=seats)
    w = world(spec)
    w.ask("poison", spec.identity)
    for number in range(20):
        w.ask(f"r{number}", spec.identity)
    for _ in range(300):
        w.run(1, serve=False)
        crash(w, "poison")
        w.settle_one()
        w.settle_one()
    w.settle()
    assert w.refused.keys() == {"poison"}
    assert "that was the last of 4 attempts" in w.refused["poison"].reason
    assert len(w.answered) == 20


def test_requests_of_a_slot_that_crashed_run_in_a_smaller_group_then_alone_and_then_as_usual() -> None:
    spec = model("a", 50, concurrency=9)
    w = world(spec)
    for number in range(9):
        w.ask(f"r{number}", spec.identity)
    together = []
    for _ in range(3):
        w.settle(serve=False)
        together.append(len(w.reconciler.active.by_id))
        crash(w, "r0")
    assert together == [9, 3, 1]
    w.settle()
    assert len(w.answered) == 9
    for number in range(9, 18):
        w.ask(f"r{number}", spec.identity)
    w.settle(serve=False)
    assert len(w.reconciler.active.by_id) == 9


def test_a_slot_that_is_ready_ends_the_row_of_failed_loads() -> None:
    w = world(A)
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
        crash(w, "r")
    assert not w.refused


def test_who_waits_beside_a_ready_slot_is_not_refused_though_other_loads_fail() -> None:
    w = world(A, runners=2)
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


def test_loads_of_a_model_whose_slots_crash_without_requests_pause_and_nobody_who_waits_is_refused_for_it() -> None:
    w = world(A, replicas=1)
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


def test_a_slot_that_crashes_after_it_was_ready_for_long_is_made_again_at_once() -> None:
    w = world(A, replicas=1)
    for _ in range(10):
        w.run(100)
        for slot_id in w.ready("a"):
            del w.processes[slot_id]
            w.hear(ev.SlotEnded(slot_id))
        w.settle()
        assert w.ready("a")


@pytest.mark.parametrize("twice", [False, True])
def test_what_ends_late_or_twice_changes_nothing(twice: bool) -> None:
    w = world(A)
    w.ask("r", A.identity)
    w.settle(serve=False)
    w.end_request("r", "slot-1")
    late: list[ev.Event] = [
        ev.RequestEnded("r", "slot-1"),
        ev.SlotReady("slot-1"),
        ev.SlotEnded("slot-9"),
        ev.RunnerLost("z"),
    ]
    for event in late:
        w.hear(event)
        if twice:
            w.hear(event)
    assert w.ready("a") == ["slot-1"]


# -- refused ---------------------------------------------------------------------------------------------------------


def test_refusals_leave_no_trace() -> None:
    w = world(A, policy=ServingPolicy(most_waiting=1))
    w.stuck.add("a")
    w.ask("r", A.identity, deadline=50.0)
    for name, identity, kw, refusal in [
        ("r", A.identity, {}, Refusal.DUPLICATE),
        ("x", B.identity, {}, Refusal.UNKNOWN_MODEL),
        ("y", A.identity, {}, Refusal.QUEUE_FULL),
        ("z", A.identity, {"deadline": -1.0}, Refusal.EXPIRED),
    ]:
        w.ask(name, identity, **kw)
        assert w.refused[name].refusal is refusal
    assert [request.request_id for request in w.reconciler.queue] == ["r"]
    w.now = 50.0
    w.tick()
    assert w.refused["r"].refusal is Refusal.EXPIRED
    assert len(w.reconciler.queue) == 0


def test_a_cancelled_request_leaves_the_queue_or_its_slot() -> None:
    w = world(A)
    w.ask("waits", A.identity)
    w.hear(ev.RequestCancelled("waits"))
    assert len(w.reconciler.queue) == 0
    w.ask("runs", A.identity)
    w.settle(serve=False)
    w.hear(ev.RequestCancelled("runs"))
    w.settle(serve=False)
    assert not w.reconciler.active.by_id
    assert w.answered == {}


def test_a_cancelled_request_does_not_come_back_when_its_runner_is_lost() -> None:
    w = world(A)
    w.ask("r", A.identity)
    w.settle(serve=False)
    w.hear(ev.RequestCancelled("r"))
    w.lose("a")
    assert len(w.reconciler.queue) == 0
    assert not w.requeued


# -- loads that fail -------------------------------------------------------------------------------------------------


def test_a_load_that_fails_is_tried_elsewhere_after_a_pause() -> None:
    w = world(A, runners=2)
    w.ask("r", A.identity)
    first = next(iter(w.reconciler.fleet.slots.values()))
    w.hear(ev.SlotFailed(first.slot_id, "out of memory"))
    w.tick(0.5)
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.FAILED]
    w.run(1)
    assert w.answered == {"r": 1}
    (second,) = w.reconciler.fleet.slots.values()
    assert second.allocation.runner_id != first.allocation.runner_id


def test_who_waits_is_told_after_some_failures_and_pauses_grow() -> None:
    w = world(A)
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


def test_a_load_without_end_fails_by_the_clock() -> None:
    w = world(A, policy=ServingPolicy(load_s=20.0))
    w.stuck.add("a")
    w.ask("r", A.identity)
    w.run(30)
    assert ("slot-1", "it did not load within 20 s") in w.deleted


# -- what is there and should not be, and the other way round --------------------------------------------------------


def test_orphans_and_duplicates_and_mismatches_end() -> None:
    w = world(A, runners=2)
    w.ask("r", A.identity)
    w.settle()
    (slot,) = w.reconciler.fleet.slots.values()
    home, other = slot.allocation.runner_id, {"a": "b", "b": "a"}[slot.allocation.runner_id]
    w.hear(ev.RunnerReported(other, w.now, {"ghost": A.identity, slot.slot_id: A.identity}))
    asked = {(order.slot_id, order.reason) for order in w.orders[other] if isinstance(order, DeleteSlot)}
    assert asked == {
        ("ghost", "no slot of this id is wanted"),
        (slot.slot_id, f"the slot of this id belongs to runner {home}"),
    }
    w.orders[other].clear()
    w.hear(ev.RunnerReported(home, w.now, {slot.slot_id: B.identity}))
    w.settle()
    assert (slot.slot_id, "it serves b instead of a") in w.deleted


def test_a_runner_gets_no_slots_before_it_has_reported_that_it_is_empty() -> None:
    w = SlotWorld(QUICK)
    w.join(gpus("a", 1))
    w.hear(ev.ModelRegistered(A))
    w.ask("r", A.identity)
    w.hear(ev.RunnerReported("a", w.now, {"ghost": B.identity}))
    assert not w.reconciler.fleet.slots
    w.hear(ev.RunnerReported("a", w.now, {}))
    assert w.reconciler.fleet.slots


def test_a_slot_that_vanished_is_made_again() -> None:
    w = world(A)
    w.hear(ev.ModelRegistered(A, replicas=1))
    w.settle()
    w.processes.clear()
    w.run(10)
    assert w.ready("a") == ["slot-2"]


def test_reports_are_asked_for_every_five_seconds_and_observed_memory_raises_an_alarm() -> None:
    w = world(A)
    asked = [w.reconciler.handle(ev.Tick(), second).count(AskRunner("a")) for second in (3.0, 5.0, 9.0, 11.0)]
    assert asked == [0, 1, 0, 1]
    heard = w.reconciler.handle(ev.RunnerReported("a", 11.0, {}, {0: 60 * GB}), 11.0)
    assert [type(each) for each in heard] == [RaiseAlarm]


# -- slots without requests ------------------------------------------------------------------------------------------


def test_replicas_are_kept_and_never_evicted() -> None:
    w = world(A, replicas=1)
    w.hear(ev.ModelRegistered(B))
    assert w.ready("a") == ["slot-1"]
    w.ask("r", B.identity)
    w.run(20)
    assert w.ready("a") == ["slot-1"]
    w.hear(ev.ModelRegistered(A, replicas=0))
    w.run(2)
    assert w.answered == {"r": 1}


def test_new_runners_are_prewarmed_if_there_is_room_and_nothing_is_evicted_for_it() -> None:
    w = world(A, prewarm=True, runners=2)
    assert len(w.ready("a")) == 2
    w.hear(ev.ModelRegistered(B, prewarm=True))
    w.settle()
    assert w.ready("b") == []
    w.join(gpus("c", 2))
    w.settle()
    assert (len(w.ready("a")), len(w.ready("b"))) == (3, 1)


def test_slots_that_are_idle_for_long_end() -> None:
    w = world(A, policy=ServingPolicy(idle_s=60.0))
    w.ask("r", A.identity)
    w.run(50)
    assert w.ready("a")
    w.run(50)
    assert not w.ready("a")


def test_a_closed_runner_finishes_its_requests_and_gets_no_more() -> None:
    w = world(A, runners=2)
    w.ask("r", A.identity)
    w.settle(serve=False)
    (slot,) = w.reconciler.fleet.slots.values()
    home = slot.allocation.runner_id
    w.hear(ev.RunnerClosed(home))
    assert slot.state is SlotState.DRAINING
    assert not w.deleted
    w.settle()
    assert w.answered == {"r": 1}
    assert [slot_id for slot_id, _ in w.deleted] == [slot.slot_id]
    w.ask("s", A.identity)
    w.settle()
    (slot,) = w.reconciler.fleet.slots.values()
    assert slot.allocation.runner_id != home


def test_an_operator_can_evict_a_slot_and_a_model_can_be_removed() -> None:
    w = world(A, B, gpus_each=2)
    w.ask("r", A.identity)
    w.ask("s", B.identity)
    w.settle()
    w.hear(ev.SlotEviction(w.ready("a")[0]))
    w.hear(ev.ModelRemoved(B.identity))
    w.settle()
    assert w.processes == {}


def test_a_model_that_is_registered_anew_with_other_memory_is_loaded_anew() -> None:
    w = world(A, replicas=1)
    w.hear(ev.ModelRegistered(model("a", 30), replicas=1))
    w.settle()
    assert w.ready("a") == ["slot-2"]
    assert w.processes["slot-2"].allocation.bytes_each == (30 * GB,)


def test_the_next_tick_is_due_at_the_next_deadline_and_else_after_five_seconds() -> None:
    w = world(A)
    assert w.reconciler.wakeup() == w.now + 5.0
    w.stuck.add("a")
    w.ask("r", A.identity, deadline=w.now + 2.0)
    assert w.reconciler.wakeup() == w.now + 2.0


# -- what is looked at -------------------------------------------------------------------------------------------------


def decisions_of(w: SlotWorld) -> list[str]:
    """The models for which a place is looked for from now on."""
    seen: list[str] = []
    decide = w.reconciler.allocator.decide

    def noted(requirement: Requirement, now: float) -> Decision:
        seen.append(requirement.spec.name)
        return decide(requirement, now)

    w.reconciler.allocator.decide = noted  # type: ignore[method-assign]
    return seen


def test_no_place_is_looked_for_again_before_there_is_more_room() -> None:
    w = world(A, B, C, gpus_each=2, policy=ServingPolicy())
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
    w = world(A, B, policy=ServingPolicy())
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
    w = world(A, B, policy=ServingPolicy(ageing_s=33.3))
    w.ask("a", A.identity)
    w.settle(serve=False)
    w.ask("b", B.identity)
    while w.now < 40.0:
        w.now = w.reconciler.wakeup()
        w.hear(ev.Tick())
    assert w.reconciler.fleet.slots["slot-2"].created_at == pytest.approx(33.3)


def test_a_place_is_looked_for_when_a_runner_opens() -> None:
    w = world(A)
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


# -- rules of users ----------------------------------------------------------------------------------------------------


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
    w = world(A, B, policy=ServingPolicy(placement=Policy(stale_at=rule)))
    w.ask("a", A.identity)
    w.settle()
    w.now += 20.0
    heard = w.reconciler.handle(ev.RequestArrived(Request("b", B.identity, w.now)), w.now)
    (alarm,) = (each for each in heard if isinstance(each, RaiseAlarm))
    assert f"Policy.stale_at {said}" in alarm.text
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

    w = world(A, B, policy=ServingPolicy(placement=Policy(stale_at=rule), ageing_s=1000.0))
    w.ask("a", A.identity)
    w.settle()
    w.ask("b", B.identity)
    w.run(60)
    assert "b" not in w.answered
    broken.clear()
    w.run(40)
    assert w.answered["b"] == 1


# -- defects of other systems ----------------------------------------------------------------------------------------


def test_eviction_and_revival_do_not_wait_for_each_other() -> None:
    """Two models that fit only alternately, both asked for all the time: everybody gets answers."""
    w = world(A, B)
    for number in range(20):
        w.ask(f"a{number}", A.identity)
        w.ask(f"b{number}", B.identity)
        w.run(1)
    w.run(60)
    assert len(w.answered) == 40


def test_nothing_is_evicted_for_a_model_that_can_never_fit() -> None:
    huge = model("huge", 90)
    w = world(A, huge)
    w.ask("r", A.identity)
    w.settle()
    w.ask("s", huge.identity)
    w.run(60)
    assert w.refused["s"].refusal is Refusal.FITS_NOWHERE
    assert not w.deleted


def test_models_load_side_by_side() -> None:
    w = world(A, B, C, gpus_each=3)
    for spec in (A, B, C):
        w.ask(f"for {spec.name}", spec.identity)
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.STARTING] * 3


def test_a_model_in_demand_gets_more_than_one_slot() -> None:
    w = world(A, runners=3)
    for number in range(9):
        w.ask(f"r{number}", A.identity)
    w.settle(serve=False)
    assert len(w.ready("a")) == 3


def test_a_runner_on_which_nothing_ever_loads_does_not_hold_a_model_up() -> None:
    w = world(A, runners=2, policy=ServingPolicy(late_s=10.0, load_s=300.0))
    w.stuck.add("a")
    w.ask("r", A.identity)
    assert next(iter(w.reconciler.fleet.slots.values())).allocation.runner_id == "a"
    w.run(15)
    assert w.answered == {"r": 1}


def with_a_process_that_does_not_die(**kw) -> SlotWorld:
    """Model a is on runner a. Its slot is evicted for a request for b, and nobody hears of its end."""
    w = world(A, **kw)
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


def test_a_slot_whose_place_does_not_become_free_is_planned_elsewhere() -> None:
    w = with_a_process_that_does_not_die()
    w.join(gpus("b", 1))
    w.settle_one()
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.DRAINING, SlotState.PLANNED]
    pass_without_deletions(w, 29)
    assert "r" not in w.answered
    pass_without_deletions(w, 5)
    assert w.answered["r"] == 1
    assert len(w.reconciler.fleet.on_runner("a")) == 1, "its first place is free for others"


def test_a_slot_whose_place_does_not_become_free_takes_a_device_of_the_same_runner() -> None:
    w = world(model("a", 50), model("huge", memory={1: 50 * GB}), gpus_each=2)
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


def test_a_slot_that_was_moved_takes_its_first_place_when_that_is_free() -> None:
    w = world(A, B, runners=2, policy=ServingPolicy())
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


def test_a_slot_that_waits_for_its_place_stays_if_there_is_no_other() -> None:
    w = with_a_process_that_does_not_die()
    pass_without_deletions(w, 200)
    (_, planned) = w.reconciler.fleet.slots.values()
    assert (planned.slot_id, planned.state) == ("slot-2", SlotState.PLANNED)
    w.run(20)
    assert w.answered["r"] == 1


def test_reports_do_not_make_slots_twice() -> None:
    """The reconciler's own books count; a report that does not know a new slot yet changes nothing."""
    w = world(A, runners=3)
    before = w.now
    w.now += 1.0
    w.ask("r", A.identity)
    for name in "abc":
        w.hear(ev.RunnerReported(name, before, {}))
        w.tick()
    assert len(w.reconciler.fleet.slots) == 1


def test_a_model_that_loads_holds_nobody_up() -> None:
    w = world(A, B, gpus_each=2)
    w.ask("warm", B.identity)
    w.settle()
    w.ask("cold", A.identity)
    w.ask("next", B.identity)
    orders = [order.request.request_id for order in w.orders["a"] if isinstance(order, StartRequest)]
    assert orders == ["next"]


def test_a_model_in_constant_use_gives_way_after_a_while() -> None:
    policy = ServingPolicy(placement=Policy(stale_at=IdleFor(10.0), min_residency_s=5.0), ageing_s=20.0)
    w = world(A, B, policy=policy)
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
    w = world(A, B, policy=ServingPolicy())
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


def test_a_model_that_fits_only_on_a_runner_without_a_host_waits_for_it_and_what_fits_on_none_is_refused() -> None:
    w = world(A, model("large", 70), model("huge", 90))
    w.lose("a")
    w.join(gpus("small", 1, gigabytes=60))
    w.hear(ev.RunnersExpected((gpus("small", 1, gigabytes=60), gpus("large", 1))))
    w.settle()
    w.ask("waits", model("large", 70).identity)
    w.ask("never", model("huge", 90).identity)
    assert w.refused.keys() == {"never"}
    assert w.refused["never"].refusal is Refusal.FITS_NOWHERE
    w.join(gpus("large", 1))
    w.settle()
    assert w.answered == {"waits": 1}


def test_what_is_due_is_done_though_events_leave_no_pause_for_a_tick() -> None:
    w = world(A)
    asked = 0
    for second in range(60):
        w.now = float(second)
        arrived = ev.RequestArrived(Request(f"r{second}", A.identity, w.now))
        asked += w.reconciler.handle(arrived, w.now).count(AskRunner("a"))
    assert asked == 11  # every five seconds, and once before
    assert w.reconciler.models[A.identity].demand > 0


@pytest.mark.parametrize("runner", [gpus, chips])
def test_runner_that_comes_back_with_fewer_devices_is_used_as_it_is(runner: Callable[..., Runner]) -> None:
    """A GPU has fallen off the bus; and nobody has looked between the two."""
    spec = model("m", 10, kind=runner().kind)
    w = world()
    w.join(runner("again", 4))
    w.hear(ev.ModelRegistered(spec))
    for number in range(5):
        w.ask(f"r{number}", spec.identity)
    w.settle()
    w.lose("again")
    w.join(runner("again", 1))
    w.ask("later", spec.identity)
    w.settle()
    assert w.answered["later"] == 1


def test_request_that_is_cut_off_goes_to_a_warm_slot_at_once() -> None:
    w = world(A, runners=2, replicas=2, policy=ServingPolicy(drain_s=1.0))
    w.tick()
    first, second = w.ready("a")
    w.ask("r", A.identity)
    (busy,) = (name for name in (first, second) if w.reconciler.fleet.slots[name].active)
    w.hear(ev.SlotEviction(busy))
    w.now += 1.5
    w.hear(ev.Tick())
    (free,) = {first, second} - {busy}
    assert w.reconciler.fleet.slots[free].active == {"r"}
