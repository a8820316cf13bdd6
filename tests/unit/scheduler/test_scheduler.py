"""A plan as a whole: who comes first, who is tried again, and which hosts are out of the question."""

from collections.abc import Sequence
from dataclasses import replace

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
from tests.support.worlds import World, add_slices, assigned_gangs, host, placed

# -- who comes first ------------------------------------------------------------------------------------------------


def test_older_job_comes_first(world: World) -> None:
    add_slices(world, "a")
    world.submit("first")
    world.submit("second")
    assert placed(world) == {"first": ("a",)}
    assert world.why("second").endswith("a: goes to first")


def test_unfittable_job_at_the_head_does_not_block_those_behind_it(world: World) -> None:
    add_slices(world, "a")
    world.submit("impossible", tpu_type="v4-512")
    world.submit("possible")
    assert placed(world) == {"possible": ("a",)}
    assert world.plan().pending_reasons.keys() == {"impossible"}


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


def test_jobs_with_different_groupings_get_distinct_hosts_in_cycle(world: World) -> None:
    """One by slice, one by rack, where the rack holds exactly that slice."""
    for number in (0, 1):
        plain = host("a", number)
        world.do(replace(plain, attributes={**plain.attributes, "rack": AttributeValue("rack-1")}))
    world.submit("by-slice")
    world.submit("by-rack", coscheduling=CoschedulingConfig("rack"))
    assert len(placed(world)) == 1


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


def test_planning_changes_nothing(world: World) -> None:
    add_slices(world, "a", "b")
    world.submit(slices=(2,))
    assert world.plan() == world.plan()
    assert world.busy() == set()


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


def test_suspected_host_gets_no_tasks_until_the_suspicion_ends(world: World) -> None:
    add_slices(world, "a", "b")
    world.do(WorkerSuspectedEvent("a-0", "no answer", world.now))
    world.submit("first")
    world.submit("second")
    assert placed(world) == {"first": ("b",)}
    assert "a: host 0 may be lost (no answer)" in world.why("second")


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


def test_constraint_counts_on_every_host_of_the_slice(world: World) -> None:
    add_slices(world, "a", "b")
    plain = host("a", 1)
    world.do(replace(plain, attributes={**plain.attributes, "taint:hot": AttributeValue(True)}))
    world.submit(constraints=(Constraint("taint:hot", ConstraintOp.NOT_EXISTS),))
    assert placed(world) == {"job": ("b",)}


def test_constraint_that_one_host_fails_is_named_as_the_reason(world: World) -> None:
    """The slice that only lacks one suitable host is the closest one."""
    add_slices(world, "a")
    plain = host("a", 1)
    world.do(replace(plain, attributes={**plain.attributes, "taint:hot": AttributeValue(True)}))
    world.submit(
        constraints=(
            Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue("v4-16")),
            Constraint("taint:hot", ConstraintOp.NOT_EXISTS),
        )
    )
    assert "taint:hot not exists" in world.why("job")


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
