"""A gang takes whole slices of its size: complete ones, whose hosts have numbers of their own."""

from dataclasses import replace

import pytest

from iris_ray.model.lifecycle import TaskState
from iris_ray.model.workers import TPU_WORKER_ID
from iris_ray.state.events import WorkerFailedEvent
from tests.support.worlds import World, add_slices, assigned_gangs, host, placed


def test_gang_takes_slice_of_own_size_among_others(world: World) -> None:
    add_slices(world, "a-large", tpu_type="v4-32")
    add_slices(world, "b-small", tpu_type="v4-8")
    add_slices(world, "c-right")
    world.submit(constraints=())
    assert placed(world) == {"job": ("c-right",)}


def test_gang_waits_for_busy_slice_of_own_size(world: World) -> None:
    add_slices(world, "large", tpu_type="v4-32")
    add_slices(world, "right")
    world.start("other")
    world.submit(constraints=())
    assert placed(world) == {}
    assert "right: in use by other" in world.why("job")


def test_gang_without_own_size_takes_tightest_larger_slice(world: World) -> None:
    add_slices(world, "a-larger", tpu_type="v4-64")
    add_slices(world, "b-large", tpu_type="v4-32")
    world.submit(constraints=())
    (assignment,) = assigned_gangs(world.plan())
    assert assignment.groups == (("b-large-0", "b-large-1"),)


def test_gang_does_not_take_what_is_left_of_a_larger_slice(world: World) -> None:
    """Two live hosts of four are not a slice of two."""
    for number in (0, 1):
        world.do(host("large", number, "v4-32"))
    world.submit(constraints=())
    assert placed(world) == {}


def test_gang_of_one_host_runs_on_a_slice_of_one(world: World) -> None:
    add_slices(world, "a", tpu_type="v4-8")
    world.submit(tpu_type="v4-8")
    assert placed(world) == {"job": ("a",)}


def test_slice_lacking_host_is_passed_for_whole_one(world: World) -> None:
    """A slice fails as a whole: an idle spare host elsewhere does not make it healthy (defect 1)."""
    add_slices(world, "a", "b")
    world.do(WorkerFailedEvent("a-1", "gone"))
    world.submit("first")
    world.submit("second")
    assert placed(world) == {"first": ("b",)}
    assert "a: host 1 of 2 is missing" in world.why("second")


def test_job_that_needs_a_slice_of_its_size_speaks_for_no_other_job(world: World) -> None:
    """Each slice is a gang. A lost one must be as large as the other, and a new job takes slices of any size."""
    each = {"slices": (2,), "failure_domain": "slice", "whole_groups": True, "constraints": ()}
    add_slices(world, "a", "b")
    first = world.submit("first", max_retries_preemption=1, **each)
    world.schedule()
    for task in first.tasks:
        world.report(first, TaskState.RUNNING, task.index)
    world.lose("b-0")
    add_slices(world, "c", "d", tpu_type="v4-8")
    world.submit("second", **each)
    world.now += 60.0
    assert {one.group_names for one in assigned_gangs(world.plan())} == {("c",), ("d",)}


@pytest.mark.parametrize("user", ["ann", "bob"])
def test_job_of_several_gangs_that_waits_speaks_for_no_job_of_one(world: World, user: str) -> None:
    """It waits for the size of most slices. A job of one gang takes a free slice of any size."""
    add_slices(world, "a", "b")
    world.start("busy", slices=(2,), max_retries_preemption=1)
    add_slices(world, "c", tpu_type="v4-8")
    whole = {"whole_groups": True, "constraints": ()}
    world.submit("several", slices=(2,), failure_domain="slice", user="ann", **whole)
    world.submit("one", user=user, **whole)
    assert placed(world) == {"one": ("c",)}


def test_slice_with_hosts_that_claim_the_same_number_is_not_used(world: World) -> None:
    add_slices(world, "a")
    world.do(host("a", 1, node_id="impostor"))
    world.submit()
    assert placed(world) == {}
    assert "same worker id" in world.why("job")


def test_slice_with_a_host_beyond_its_size_is_not_used(world: World) -> None:
    add_slices(world, "a")
    world.do(host("a", 7))
    world.submit()
    assert placed(world) == {}


def test_host_without_number_is_left_out_and_others_work(world: World) -> None:
    add_slices(world, "a", "b")
    numberless = host("b", 1)
    attributes = {key: value for key, value in numberless.attributes.items() if key != TPU_WORKER_ID}
    world.do(replace(numberless, attributes=attributes))
    world.submit("first")
    world.submit("second")
    assert placed(world) == {"first": ("a",)}


def test_hosts_are_ordered_by_number_not_by_name_or_arrival(world: World) -> None:
    """Results once came in the order in which actors started (defect 5)."""
    for number in (10, 2, 0, 15, *(n for n in range(16) if n not in (10, 2, 0, 15))):
        world.do(host("a", number, "v4-128", node_id=f"node-{97 * number % 16}"))
    world.submit(tpu_type="v4-128")
    (assignment,) = assigned_gangs(world.plan())
    assert [world.state.workers[w].host_index for w in assignment.groups[0]] == list(range(16))
