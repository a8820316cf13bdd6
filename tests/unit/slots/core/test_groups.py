"""Models of a group, models that are alone on their hosts, and limits for idle slots of one model."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy
from tests.support.proofs import examples
from tests.support.slot_world import SlotWorld, TimedWorld, serving_world
from tests.support.slots import gpus, model

POLICY = ServingPolicy()
BOUND_S, RESIDENCY_S = POLICY.ageing_s, POLICY.placement.min_residency_s
ONE, TWO, ALONE, OTHER = (
    model("one", 10, group="g"),
    model("two", 10, group="g"),
    model("x", 10, alone=True),
    model("o"),
)


def models_on(world: SlotWorld, runner_id: str = "a") -> list[str]:
    return sorted(each.model for each in world.processes.values() if each.allocation.runner_id == runner_id)


@pytest.mark.parametrize(("first", "second"), [(ONE, TWO), (ALONE, OTHER), (OTHER, ALONE), (ONE, ALONE)])
def test_model_replaces_what_it_may_not_be_beside(first: ModelSpec, second: ModelSpec) -> None:
    w = serving_world(first, second, gpus_each=4)
    for asked in (first, second, first):
        w.ask(f"to {asked.name} at {w.now}", asked.name)
        w.run(2)
        assert models_on(w) == [asked.name]


def test_replica_of_the_group_is_not_evicted() -> None:
    w = serving_world(ONE, policy=POLICY, replicas=1)
    w.hear(ev.ModelRegistered(TWO))
    w.ask("r", TWO.name)
    w.run(3 * BOUND_S)
    assert models_on(w) == ["one"]
    assert "have slots of group 'g'" in w.reconciler.models[TWO.name].waits_for
    w.hear(ev.ModelRegistered(ONE))
    w.run(2 * BOUND_S)
    assert w.answered == {"r": 1}


def test_prewarmed_models_keep_to_their_group() -> None:
    w = serving_world(ONE, TWO, OTHER, gpus_each=4, prewarm=True)
    assert len(models_on(w)) == 2
    assert "o" in models_on(w)


@st.composite
def grouped(draw) -> list[ModelSpec]:
    sizes = draw(st.lists(st.sampled_from([10, 45, 60]), min_size=2, max_size=5))
    groups, alone = st.sampled_from(["", "g", "h"]), st.sampled_from([False, False, True])
    return [model(f"m{n}", size, group=draw(groups), alone=draw(alone)) for n, size in enumerate(sizes)]


@settings(max_examples=examples(12), deadline=None)
@given(grouped(), st.integers(1, 2), st.sampled_from([1, 2]), st.sampled_from([0.1, 3.0, 25.0]))
def test_no_model_starves_however_they_are_grouped(
    specs: list[ModelSpec], runners: int, devices: int, answer_s: float
) -> None:
    """The fleet asserts after each event that nothing is beside what it may not be."""
    load_s = 2.0
    loads, answers = dict.fromkeys([each.name for each in specs], load_s), {each.name: answer_s for each in specs}
    w = TimedWorld(POLICY, loads, answers)
    for number in range(runners):
        w.join(gpus(f"r{number}", devices))
    for place, spec in enumerate(specs):
        w.hear(ev.ModelRegistered(spec, load_s=load_s))
        w.ask_every(2.0, spec.name, spec, first=0.1 * place)
    turn_s = BOUND_S + RESIDENCY_S + 2 * load_s + 2 * answer_s + w.end_s
    w.run_until(3 * len(specs) * turn_s)
    assert {each.name for each in specs} == w.waits.keys(), w.reconciler.fleet.slots


# -- idle limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("idle_s", "lives_s"), [(20.0, 25.0), (None, 630.0), (math.inf, math.inf)])
def test_idle_slot_ends_after_its_models_own_limit(idle_s: float | None, lives_s: float) -> None:
    w = serving_world(model("m", idle_s=idle_s), policy=POLICY)
    w.ask("r", model("m").name)
    w.settle()
    last, w.now = w.now, w.now + min(19.0 if idle_s else 599.0, lives_s)
    w.tick()
    assert w.processes
    while w.processes and w.now < last + 2000.0:
        w.run(5)
    assert not w.processes or lives_s == math.inf
    assert w.now <= last + lives_s
