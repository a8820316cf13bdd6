"""Plans that were wrong once. Comparisons with the reference scheduler found them."""

from dataclasses import replace
from typing import Any

import pytest

from iris_ray.model.constraints import AttributeValue as V
from iris_ray.model.constraints import Constraint, Scalar
from iris_ray.model.constraints import ConstraintOp as Op
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.jobs import Job
from iris_ray.scheduler.fair_queue import WAITS_FOR_MORE_S
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import JobSubmittedEvent, TasksAssignedEvent, WorkerRegisteredEvent
from tests.support.worlds import S, World, gang_spec, host, one_by_one

LONG = BACKFILL_BOUND_S + 1


def labelled(slice_name: str, number: int, tpu_type: str = "v4-16", **labels: Scalar) -> WorkerRegisteredEvent:
    plain = host(slice_name, number, tpu_type)
    return replace(plain, attributes={**plain.attributes, **{k: V(v) for k, v in labels.items()}})


def cpu(node_id: str, **labels: Scalar) -> WorkerRegisteredEvent:
    return WorkerRegisteredEvent(node_id, "10.0.0.9", {k: V(v) for k, v in labels.items()}, {"CPU": 8.0})


def submit_tasks(world: World, job_id: str, age: float = 0.0, **changes: Any) -> Job:
    spec = JobSpec(**({"job_id": job_id, "owner": "pool-a", "resources": {"CPU": 8.0}} | changes))
    world.do(JobSubmittedEvent(spec, world.now - age))
    return world.state.jobs[job_id]


def submit_gang(world: World, job_id: str, age: float = 0.0, **changes: Any) -> Job:
    world.do(JobSubmittedEvent(gang_spec(job_id, **({"constraints": ()} | changes)), world.now - age))
    return world.state.jobs[job_id]


def placed(world: World) -> dict[str, object]:
    assignments = one_by_one(world.plan().assignments)
    return {a.job_id: a.node_id if isinstance(a, TasksAssignedEvent) else a.groups for a in assignments}


@pytest.mark.parametrize("swap", [False, True])
def test_plan_gives_up_job_whose_constraint_no_host_evaluates(
    swap: bool,
) -> None:
    world = World()
    for number in range(4):
        world.do(labelled("a", number, "v4-32", pool="x"))
    constraints = (Constraint("pool", Op.EXISTS), Constraint("tpu-topology", Op.GT, 4))
    submit_gang(world, "job", constraints=constraints[::-1] if swap else constraints)
    assert [event.job_id for event in world.plan().unschedulable] == ["job"]


def test_plan_keeps_own_slice_beside_larger_one_kept_for_another() -> None:
    """'second' uses slices of two hosts, of which there is one; the slice of four that is kept does not affect it."""
    world = World()
    world.add_slice("large", "v4-32")
    world.add_slice("small")
    world.start("on-large", tpu_type="v4-32")
    world.start("on-small")
    submit_gang(world, "first", LONG, tpu_type="v4-32")
    submit_gang(world, "second", LONG)
    assert {i: w.kept for i, w in world.plan().pending_reasons.items()} == {"first": ("large",), "second": ("small",)}


def test_plan_flexible_count_ignores_slice_kept_for_another() -> None:
    world = World(*"ab")
    over = world.start("over")
    world.report_all(over, S.SUCCEEDED)  # a is about to be free
    submit_gang(world, "starving", LONG, constraints=(Constraint("tpu-name", Op.EQ, "a"),))
    submit_gang(world, "flexible", slices=(1, 2))
    assert placed(world) == {"flexible": (("b-0", "b-1"),)}


def test_plan_group_with_enough_ending_hosts_counts_as_ending() -> None:
    """Rack r2 has a host that stays in use, but the other one is about to be free, and one is enough."""
    world = World()
    for node_id, rack in (("a", "r1"), ("b", "r2"), ("c", "r2")):
        world.do(cpu(node_id, rack=rack))
    submit_tasks(world, "long", constraints=(Constraint("rack", Op.EQ, "r2"),))
    submit_tasks(world, "over", constraints=(Constraint("rack", Op.EQ, "r2"),))
    world.schedule()
    world.report_all(world.state.jobs["over"], S.SUCCEEDED)
    config = CoschedulingConfig("rack", (1, 2))
    submit_gang(world, "flexible", tpu_type="v4-8", coscheduling=config, resources={"CPU": 8.0})
    assert placed(world) == {}


def test_plan_keeps_slices_that_job_would_choose() -> None:
    world = World(*"abcd")
    world.start("other", slices=(1,))
    world.state.fleet.hold("d", "me")
    over = world.state.jobs["other"]
    world.report_all(over, S.SUCCEEDED)
    submit_gang(world, "large", LONG, slices=(4,), owner="me")
    assert world.plan().pending_reasons["large"].kept == ("d", "b", "c", "a")


def test_plan_keeps_whole_groups_of_sufficient_size_despite_free_others() -> None:
    """Two slices of one host are free, but there is no third. There are three of two hosts, all in use."""
    world = World()
    for name in ("one-a", "one-b"):
        world.add_slice(name, "v4-8")
    for name in "abc":
        world.add_slice(name)
        world.start(f"on-{name}")
    submit_gang(world, "whole", LONG, whole_groups=True, slices=(3,))
    assert world.plan().pending_reasons["whole"].kept == ("a", "b", "c")


def test_plan_job_waiting_for_more_slices_lets_equal_job_start() -> None:
    """The first one's pause has just ended, so it hopes. The second one has waited for too long to hope."""
    world = World(*"ab")
    over = world.start("over")
    world.report_all(over, S.SUCCEEDED)  # a is about to be free
    submit_gang(world, "first", WAITS_FOR_MORE_S + 1, slices=(1, 2))
    submit_gang(world, "second", WAITS_FOR_MORE_S + 1, slices=(1, 2))
    world.state.jobs["first"].gang.not_before = world.now
    assert placed(world) == {"second": (("b-0", "b-1"),)}


@pytest.mark.parametrize("special", ["starves", "has lost its hosts"])
def test_plan_keeps_room_for_one_of_many_equal_jobs_that_wait(special: str) -> None:
    world = World(*"ab")
    world.start("running", slices=(1,))
    for name in ("before", "special", "behind"):
        submit_gang(world, name, LONG if (name, special) == ("special", "starves") else 1.0, slices=(2,))
    if special == "has lost its hosts":
        world.state.jobs["special"].gang.returning_until = world.now + 60
        world.state.jobs["special"].attempt = 1
    reasons = world.plan().pending_reasons
    assert [name for name, reason in reasons.items() if reason.kept] == ["special"]
