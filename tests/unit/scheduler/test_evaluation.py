"""What one group is to one requirement, step by step."""

from collections.abc import Callable
from typing import Any

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp, Scalar
from iris_ray.model.workers import TPU_NAME
from iris_ray.scheduler.evaluation import Evaluation, Status, evaluate
from iris_ray.state.events import WorkerDrainedEvent, WorkerSuspectedEvent
from iris_ray.state.fleet import SUSPICION_S
from iris_ray.state.groups import Group
from tests.support.worlds import World, host, tagged

LARGE_POOL = Constraint("pool", ConstraintOp.EQ, "large")
NO_POOL = Constraint("pool", ConstraintOp.NOT_EXISTS)
YOUNG = Constraint("age", ConstraintOp.LT, 3)


@pytest.fixture
def world() -> World:
    """A slice "a" of four hosts."""
    world = World()
    world.add_slice("a", "v4-32")
    return world


def slice_a(world: World) -> Group:
    group = world.state.fleet.grouping(TPU_NAME).get("a")
    assert group is not None
    return group


def evaluation(world: World, tpu_type: str = "v4-32", held: bool = False, **changes: Any) -> Evaluation:
    """What slice "a" is to a new gang of one slice."""
    job = world.submit("new", tpu_type=tpu_type, **{"constraints": (), **changes})
    return evaluate(slice_a(world), job.requirement, held, world.now)


def nothing(_: World) -> None:
    """No change to the slice."""


def tag_host_1(**attributes: Scalar) -> Callable[[World], object]:
    return lambda world: world.do(tagged(host("a", 1, "v4-32"), attributes))


STEPS: dict[str, tuple[Callable[[World], object], dict[str, Any], int, str]] = {
    "constraint, all hosts": (nothing, {"constraints": (LARGE_POOL,)}, 0, ""),
    "constraint, one host": (tag_host_1(pool="small"), {"constraints": (NO_POOL,)}, 1, "host 1 fails pool not exists"),
    "constraint, not comparable": (tag_host_1(age="old"), {"constraints": (YOUNG,)}, 4, "age < 3 can't be evaluated"),
    "taint": (tag_host_1(**{"taint:hot": True}), {}, 1, "host 1 is tainted: hot (True)"),
    "completeness": (lambda world: world.lose("a-1"), {}, 1, "host 1 of 4 is missing"),
    "size": (nothing, {"tpu_type": "v4-64"}, 4, "has 4 hosts, the job needs 8"),
    "health": (lambda world: world.do(WorkerDrainedEvent("a-1", "repair")), {}, 1, "host 1 is draining (repair)"),
    "capacity": (nothing, {"resources": {"TPU": 4.0, "CPU": 9.0}}, 4, "host 0 has 8 CPU, a task needs 9"),
    "foreign use": (lambda world: world.do(host("a", 1, "v4-32", foreign="held by 7")), {}, 1, "held by 7"),
    "suspicion": (
        lambda world: world.do(WorkerSuspectedEvent("a-1", "no answer", world.now)),
        {},
        1,
        "host 1 may be lost (no answer)",
    ),
    "capacity, no resources": (lambda world: world.do(host("a", 1, "v4-32", resources={})), {}, 1, "host 1 has 0 TPU"),
    "occupancy": (lambda world: world.start_tasks("other", replicas=1), {}, 1, "1 of 4 hosts in use by other"),
}


@pytest.mark.parametrize("step", STEPS)
def test_step_rejecting_slice_says_why_and_missing_hosts(world: World, step: str) -> None:
    prepare, changes, hosts_missing, words = STEPS[step]
    prepare(world)
    found = evaluation(world, **changes)
    assert found.status is (Status.IN_USE if step == "occupancy" else Status.UNSUITABLE)
    assert (found.hosts_missing, found.rank) == (hosts_missing, None)
    assert found.obstacle.startswith(words)
    passes_by_itself = step in ("foreign use", "suspicion", "occupancy")
    assert bool(found.later) is passes_by_itself


def test_suspicion_that_has_ended_counts_no_more(world: World) -> None:
    world.do(WorkerSuspectedEvent("a-1", "no answer", world.now))
    found = evaluation(world)
    assert found.recheck_at == world.now + SUSPICION_S
    world.now += SUSPICION_S
    group, requirement = slice_a(world), world.state.jobs["new"].requirement
    assert evaluate(group, requirement, held=False, now=world.now).status is Status.FREE
