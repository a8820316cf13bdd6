"""A plan as a whole: who comes first, who is tried again, and which hosts are out of the question."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_TOPOLOGY
from iris_ray.scheduler import SchedulingResult
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    TimePassedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S
from tests.support.worlds import World, add_slices, assigned_gangs, host, placed, tagged

# -- who comes first ------------------------------------------------------------------------------------------------


def test_own_warm_slices_come_before_unheld_ones_before_those_of_others(world: World) -> None:
    add_slices(world, "a", "b", "c")
    job = world.submit("one", owner="me")

    def choice(holders: dict[str, str], count: int = 1) -> tuple[str, ...]:
        for name in "abc":
            world.state.fleet.hold(name, holders.get(name))
        job.spec = replace(job.spec, coscheduling=CoschedulingConfig(num_groups=count))
        (assignment,) = assigned_gangs(world.plan())
        return assignment.group_names

    assert choice({"a": "you", "c": "me"}) == ("c",)
    assert choice({"a": "you", "c": "me"}, 2) == ("b", "c")
    assert choice({"a": "you"}) == ("b",)
    assert choice(dict.fromkeys("abc", "you")) == ("a",)


@given(st.permutations(range(8)))
def test_plan_does_not_depend_on_the_order_of_the_fleet(order: list[int]) -> None:
    def plan(order: Sequence[int]) -> SchedulingResult:
        world = World()
        for number in order:
            world.do(host("abcd"[number // 2], number % 2))
        world.submit("first", slices=(1, 2))
        world.submit("second")
        world.submit("third", slices=(2,))
        return world.plan()

    assert plan(order) == plan(range(8))


# -- who is tried again ---------------------------------------------------------------------------------------------


def test_new_job_that_finds_room_causes_no_full_plan(world: World) -> None:
    add_slices(world, "a")
    world.add_slice("small", "v4-8")
    running = world.start("running")
    world.submit("waits")
    waiting = world.plan().pending_reasons
    assert waiting.keys() == {"waits"}
    world.report_all(running, TaskState.SUCCEEDED)
    world.do(AttemptEndConfirmedEvent(AttemptId("running", 1)))
    world.submit("new", tpu_type="v4-8")
    assert [a.job_id for a in world.plan(waiting).assignments] == ["new"], "the caller says that nothing has changed"
    assert world.plan(waiting).pending_reasons == waiting
    assert {a.job_id for a in world.plan().assignments} == {"waits", "new"}


@pytest.mark.parametrize("tpu_type", ["v4-16", "v4-32"])
def test_new_job_without_room_causes_full_plan(world: World, tpu_type: str) -> None:
    add_slices(world, "a")
    world.start("running")
    world.submit("waits")
    waiting = world.plan().pending_reasons
    world.submit("new", tpu_type=tpu_type, priority=PriorityBand.PRODUCTION)
    assert world.plan(waiting).pending_reasons == world.plan().pending_reasons
    assert world.plan(waiting).pending_reasons["waits"].ahead == (tpu_type == "v4-16")


# -- hosts that may be lost -----------------------------------------------------------------------------------------


def test_end_of_a_suspicion_is_a_change_to_the_fleet(world: World) -> None:
    """Otherwise a job that comes later could overtake one that waits for that host."""
    add_slices(world, "a")
    world.do(WorkerSuspectedEvent("a-0", "no answer", world.now))
    world.do(WorkerSuspectedEvent("a-0", "still none", world.now + 1.0))
    version = world.state.fleet.version
    for seconds, changes in ((SUSPICION_S - 0.1, 0), (0.2, 0), (1.0, 1), (1.0, 0)):
        world.now += seconds
        world.do(TimePassedEvent(world.now))
        assert world.state.fleet.version == version + changes
        version += changes


# -- constraints ----------------------------------------------------------------------------------------------------


def test_constraint_without_evaluation_stops_its_job_and_says_why(world: World) -> None:
    add_slices(world, "a")
    world.submit("odd", constraints=(Constraint(TPU_TOPOLOGY, ConstraintOp.GT, AttributeValue(4)),))
    world.submit("plain")
    assert placed(world) == {"plain": ("a",)}
    (given_up,) = world.plan().unschedulable
    assert "can't be evaluated" in given_up.reason
    assert world.do(given_up).finished == ["odd"]
    assert world.state.jobs["odd"].state is JobState.UNSCHEDULABLE


def test_constraint_unevaluable_on_other_type_does_not_end_job(world: World) -> None:
    """A constraint is impossible only if no host can evaluate it that satisfies the job's other constraints."""
    world.do(host("cpu", 0, "v4-8", attributes={"gen": AttributeValue("none")}))
    of_type = Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, "v4-16")
    world.submit(constraints=(of_type, Constraint("gen", ConstraintOp.GE, 4)))
    plan = world.plan()
    assert (plan.unschedulable, set(plan.pending_reasons)) == ([], {"job"})
    for number in range(2):
        event = host("a", number)
        world.do(replace(event, attributes={**event.attributes, "gen": AttributeValue("new")}))
    (given_up,) = world.plan().unschedulable
    assert "gen >= 4 can't be evaluated" in given_up.reason


# -- what the scheduler keeps from plan to plan --------------------------------------------------------------------


def test_worker_registered_again_has_its_new_attributes_and_no_old_ones(world: World) -> None:
    world.do(tagged(host("a", 0, "v4-8"), {"old": 1, "pool": "small"}))
    world.do(tagged(host("a", 0, "v4-8"), {"pool": "large"}))
    attributes = world.state.workers["a-0"].attributes
    assert "old" not in attributes
    assert attributes["pool"] == AttributeValue("large")
    world.submit(tpu_type="v4-8", constraints=(Constraint("pool", ConstraintOp.EQ, "large"),))
    assert [a.groups for a in assigned_gangs(world.plan())] == [(("a-0",),)]


def test_changed_large_fleet_answers_like_new_one(world: World) -> None:
    """The evaluations that the scheduler keeps between plans follow every event."""
    names = [f"s{i:03}" for i in range(250)]
    for name in names:
        world.add_slice(name, pool="large")
    asked: dict[str, Any] = {"constraints": (Constraint("pool", ConstraintOp.EQ, "large"),)}
    for name in names[:-3]:
        world.start(f"busy-{name}", **asked)
    world.submit(slices=(2,), **asked)
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("s247", "s248")]
    world.do(tagged(host("s247", 1), {"pool": "small"}))
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("s248", "s249")]
    world.lose("s249-0")
    assert world.plan().assignments == []
    world.finish(world.state.jobs["busy-s100"])
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("s100", "s248")]
    world.do(tagged(host("s247", 1), {"pool": "large"}))
    world.do(tagged(host("s100", 0), {"pool": "large", "taint:hot": False}))
    assert [a.group_names for a in assigned_gangs(world.plan())] == [("s247", "s248")]
