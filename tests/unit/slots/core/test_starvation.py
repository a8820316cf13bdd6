"""No model starves: who has waited for long gets room, the right slot gives way, and what is needed no more stops."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.slot import SlotState
from tests.support.proofs import examples
from tests.support.slot_world import A, B, C, TimedWorld, serving_world
from tests.support.slots import GB, gpus, in_state, model

POLICY = ServingPolicy()
BOUND_S, RESIDENCY_S = POLICY.ageing_s, POLICY.placement.min_residency_s
FOREVER = 10.0**6


def timed_world(
    *models: ModelSpec,
    load_s: float = 1.0,
    answer_s: float = 0.1,
    runners: int = 1,
    gpus_each: int = 1,
    **answers_s: float,
) -> TimedWorld:
    """Runners with devices of 80 GB, and models that take so long to load and to answer."""
    loads = {spec.name: load_s for spec in models}
    world = TimedWorld(POLICY, loads, {spec.name: answers_s.get(spec.name, answer_s) for spec in models})
    for number in range(runners):
        world.join(gpus(f"r{number}", gpus_each))
    for spec in models:
        world.hear(ev.ModelRegistered(spec, load_s=load_s))
    return world


# -- models of several devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("narrow", "gpus_each", "load_s"), [(3, 2, 20.0), (8, 2, 5.0), (6, 4, 20.0)])
def test_wide_model_among_narrow_ones_is_served(narrow: int, gpus_each: int, load_s: float) -> None:
    wide = model("wide", memory={gpus_each: 60 * GB})
    others = [model(f"m{number}", 60) for number in range(narrow)]
    w = timed_world(wide, *others, gpus_each=gpus_each, load_s=load_s)
    for place, spec in enumerate(others):
        w.ask_every(5.0, spec.name, spec, first=0.1 * place)
    w.ask_every(5.0, "wide", wide)
    w.run_until(1_000.0)
    turns = 1 + -(-narrow // gpus_each)  # models take turns: as many at a time as there are GPUs, or the wide one
    for spec in (wide, *others):
        assert w.longest_wait(spec.name) <= BOUND_S + (turns + 1) * (load_s + RESIDENCY_S + 1.0), spec.name


@st.composite
def mixes(draw) -> tuple[int, int, list[ModelSpec]]:
    """Runners, their devices, and models of any width that fit there."""
    runners, devices = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    widths = st.integers(1, devices)
    sizes = st.lists(st.tuples(widths, st.sampled_from([20, 45, 60, 80])), min_size=2, max_size=6)
    return (
        runners,
        devices,
        [model(f"m{n}", memory={w: size * GB}, concurrency=1 + n % 2) for n, (w, size) in enumerate(draw(sizes))],
    )


@settings(max_examples=examples(12), deadline=None)
@given(mixes(), st.sampled_from([0.5, 5.0, 20.0]), st.sampled_from([0.1, 3.0, 40.0]), st.randoms(use_true_random=False))
def test_starving_model_is_served_within_its_bound(mix, load_s: float, answer_s: float, chance) -> None:
    """All others have all they want, until one more model is asked for."""
    runners, devices, specs = mix
    w = timed_world(*specs, load_s=load_s, answer_s=answer_s, runners=runners, gpus_each=devices)
    first, *others = specs
    for spec in others:
        w.ask_every(chance.choice([0.3, 2.0, 5.0]), spec.name, spec, first=chance.random())
    w.run_until(120.0)
    w.ask("late", first.name)
    # a load that has begun there ends, and its slot serves for a while
    most = BOUND_S + (load_s + RESIDENCY_S) + answer_s + w.end_s + load_s
    older = 1 + sum(w.reconciler.queue.waiting(spec.name) > 0 for spec in others)
    w.run_until(w.now + older * (most + load_s + answer_s) + 1.0)
    assert w.waits.get(first.name), w.reconciler.fleet.slots
    if older == 1:
        assert w.waits[first.name][0] <= most


# -- which slot gives way ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runners", "gpus_each"), [(1, 2), (2, 1)])
def test_idle_slot_gives_way_before_a_busy_one(runners: int, gpus_each: int) -> None:
    w = timed_world(A, B, C, runners=runners, gpus_each=gpus_each, a=FOREVER)
    w.ask("endless", A.name)
    w.ask_every(8.0, "b", B)
    w.run_until(20.0)
    w.ask("c", C.name)
    w.run_until(20.0 + BOUND_S + RESIDENCY_S + 5.0)
    assert w.waits["c"]
    assert w.reconciler.fleet.slots["slot-1"].state is SlotState.READY
    w.run_until(200.0)
    assert w.longest_wait("b") <= BOUND_S + RESIDENCY_S + 5.0
    assert w.reconciler.fleet.slots["slot-1"].state is SlotState.READY


def test_drain_is_called_off_when_its_reason_moves() -> None:
    w = timed_world(A, B, C, runners=2, answer_s=60.0, b=FOREVER, a=FOREVER)
    w.ask("endless", A.name)
    w.run_until(5.0)
    w.ask("long", B.name)
    w.run_until(10.0)
    w.ask("c", C.name)
    w.run_until(10.0 + BOUND_S + 1.0)
    (draining,) = in_state(w.reconciler.fleet, SlotState.DRAINING)
    other = {"slot-1": "slot-2", "slot-2": "slot-1"}[draining.slot_id]
    (request_id,) = w.reconciler.fleet.slots[other].active
    w.end_request(request_id, other)
    w.run_until(10.0 + 2 * BOUND_S + 20.0)
    assert w.waits["c"]
    assert draining.state is SlotState.READY


@pytest.mark.parametrize("answer_s", [40.0, 100.0])
def test_late_slot_leaves_no_place_about_to_be_free(answer_s: float) -> None:
    """There is always another slot whose request began later."""
    others = [model(f"m{number}", 60) for number in range(4)]
    w = timed_world(A, *others, gpus_each=4, answer_s=answer_s, load_s=0.5)
    for place, spec in enumerate(others):
        w.ask_every(answer_s, spec.name, spec, first=place * answer_s / 4)
    w.run_until(4 * answer_s)
    w.ask("late", A.name)
    w.run_until(w.now + BOUND_S + RESIDENCY_S + answer_s + 2.0)
    assert w.waits["a"]


def test_slot_behind_endless_request_moves_to_another_busy_one() -> None:
    w = serving_world(A, B, C, gpus_each=2, policy=POLICY)
    w.ask("b0", B.name)
    w.settle(serve=False)
    w.tick(1.0)
    w.ask("endless", A.name)
    w.settle(serve=False)
    w.ask("c", C.name)
    for second in range(180):
        w.ask(f"b{second + 1}", B.name)
        for process in list(w.processes.values()):
            for request_id in sorted(process.requests - {"endless"}):
                w.end_request(request_id, process.slot_id)
        w.tick(1.0)
        w.settle(serve=False)
    assert w.answered["c"] == 1
    assert [slot.state for slot in w.reconciler.fleet.slots_of(A.name)] == [SlotState.READY]


# -- without demand ---------------------------------------------------------------------------------------------------


def test_cancelled_request_frees_what_was_planned_for_it() -> None:
    pair = model("pair", 60, concurrency=4)
    w = serving_world(pair, B, policy=POLICY)
    w.ask("long", pair.name)
    w.settle(serve=False)
    w.ask("b", B.name)
    w.run(40, serve=False)
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.DRAINING, SlotState.PLANNED]
    w.hear(ev.RequestCancelled("b"))
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.READY]
    for number in range(3):
        w.ask(f"next {number}", pair.name)
    assert len(w.reconciler.active.by_id) == 4


def test_slot_that_was_to_end_before_it_was_loaded_never_serves() -> None:
    w = serving_world(A, B, policy=POLICY)
    w.ask("a", A.name)
    (slot,) = w.reconciler.fleet.slots.values()
    w.hear(ev.RequestCancelled("a"))
    w.reconciler._endings.give_way(slot, "its memory is needed for a plan that is called off in the same event", w.now)
    w.tick()
    assert slot.state is SlotState.DRAINING
    w.ask("next", A.name)
    w.settle()
    assert w.answered == {"next": 1}


def test_expired_request_frees_what_was_planned_for_it() -> None:
    w = serving_world(A, B, policy=POLICY)
    w.ask("long", A.name)
    w.settle(serve=False)
    w.ask("b", B.name, deadline=45.0)
    w.run(40, serve=False)
    assert in_state(w.reconciler.fleet, SlotState.PLANNED)
    w.run(10, serve=False)
    assert [slot.state for slot in w.reconciler.fleet.slots.values()] == [SlotState.READY]
