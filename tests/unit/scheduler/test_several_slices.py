"""Gangs of several slices: how many they take if they may choose, and what they wait for."""

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.lifecycle import TaskState
from iris_ray.scheduler.fair_queue import WAITS_FOR_MORE_S
from iris_ray.state.events import Event, WorkerDrainedEvent, WorkerFailedEvent, WorkerSuspectedEvent
from tests.support.worlds import World, add_slices, placed


@pytest.mark.parametrize(
    ("counts", "free", "got"),
    [
        ((1, 3), 2, 1),
        ((1, 3), 3, 3),
        ((1, 2, 3), 2, 2),
        ((2, 4), 3, 2),
        ((2, 4), 1, 0),
        ((2,), 3, 2),
        ((3,), 2, 0),
    ],
)
def test_flexible_counts_start_at_the_largest_that_can_run_now(
    world: World, counts: tuple[int, ...], free: int, got: int
) -> None:
    """``[1, 3]`` with two slices free once waited a week for the third (defect 3)."""
    add_slices(world, *"abc"[:free])
    world.submit(slices=counts)
    assert len(placed(world).get("job", ())) == got


def test_flexible_counts_wait_for_slice_of_ended_attempt(world: World) -> None:
    add_slices(world, "a", "b")
    over = world.start("over")
    world.report_all(over, TaskState.SUCCEEDED)
    world.submit(slices=(1, 2))
    assert placed(world) == {}
    assert "a: about to be freed by over" in world.why("job")
    world.confirm(over)
    assert placed(world) == {"job": ("a", "b")}


def test_flexible_counts_wait_for_a_slice_for_seconds_only(world: World) -> None:
    """Its process may take its time to end. Meanwhile others may have what is free."""
    add_slices(world, "a", "b")
    over = world.start("over")
    world.report_all(over, TaskState.SUCCEEDED)
    world.submit(slices=(1, 2))
    world.now += WAITS_FOR_MORE_S - 0.1
    assert placed(world) == {}
    world.submit("other")
    assert placed(world) == {"other": ("b",)}
    world.now += 0.2
    assert placed(world) == {"job": ("b",)}


@pytest.mark.parametrize("trouble", ["draining", "suspected", "incomplete"])
def test_flexible_counts_do_not_wait_for_unusable_slice(world: World, trouble: str) -> None:
    """The gang gets the largest count that can run now (defect 3). A slice that drains does not become usable."""
    add_slices(world, "a", "b")
    over = world.start("over")
    troubles: dict[str, Event] = {
        "draining": WorkerDrainedEvent("a-1", "preemption"),
        "suspected": WorkerSuspectedEvent("a-1", "no answer", world.now),
        "incomplete": WorkerFailedEvent("a-1", "gone"),
    }
    world.do(troubles[trouble])
    world.report(over, TaskState.WORKER_FAILED)
    assert over.state.finished
    world.submit(slices=(1, 2), job_id="flexible", constraints=(Constraint("tpu-name", ConstraintOp.EXISTS),))
    assert placed(world) == {"flexible": ("b",)}
