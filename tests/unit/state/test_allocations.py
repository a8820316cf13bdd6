"""What attempts hold until their end is confirmed, early or late."""

from collections.abc import Callable

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangMovedEvent,
    JobCancelledEvent,
    PoolRestartedEvent,
)
from tests.support.worlds import S, World

# -- confirmed after the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["failed", "failed for good", "succeeded", "cancelled", "dispatch failed"])
def test_capacity_of_ended_attempt_is_held_until_confirmation(world: World, end: str) -> None:
    job = world.start(max_retries_failure=0 if end == "failed for good" else 1)
    ends: dict[str, Callable[[], object]] = {
        "succeeded": lambda: world.report_all(job, S.SUCCEEDED),
        "cancelled": lambda: world.do(JobCancelledEvent("job", "enough")),
        "dispatch failed": lambda: world.dispatch_fails(job),
    }
    ends.get(end, lambda: world.report(job, S.FAILED))()
    assert world.busy() == {"a-0", "a-1"}
    assert world.state.holds_capacity(AttemptId("job", 1))
    assert world.state.attempts_of("pool-a") == [AttemptId("job", 1)]
    world.confirm(job)
    assert world.busy() == set()
    assert not world.state.holds_capacity(AttemptId("job", 1))
    assert world.state.attempts_of("pool-a") == []


def test_capacity_confirmed_twice_is_freed_once(world: World) -> None:
    first = world.start("first", max_retries_failure=1)
    world.report(first, S.FAILED)
    world.confirm(first, 1)
    second = world.submit("second")
    world.do(JobCancelledEvent("first", "enough"))
    world.schedule()
    assert second.gang.groups == ("a",)
    world.confirm(first, 1)
    assert world.busy() == {"a-0", "a-1"}


# -- confirmed before the pool has reported the end -------------------------------------------------------------------


HOSTS = {"a-0", "a-1"}


def test_hosts_are_held_until_last_report(world: World) -> None:
    job = world.start()
    world.report(job, S.SUCCEEDED, 0)
    for _ in range(2):
        world.confirm(job)
    assert world.busy() == HOSTS
    world.check()
    world.report(job, S.SUCCEEDED, 1)
    assert (job.state, world.busy()) == (JobState.SUCCEEDED, set())
    assert not world.state.usage


@pytest.mark.parametrize("end", ["failed", "failed for good", "moved", "launch failed", "cancelled", "host lost"])
def test_hosts_are_freed_however_the_attempt_ends(world: World, end: str) -> None:
    job = world.submit(max_retries_failure=int(end != "failed for good"), max_retries_preemption=5)
    world.schedule()
    if end != "launch failed":
        world.report_all(job, S.RUNNING)
    world.confirm(job)
    match end:
        case "failed" | "failed for good":
            world.report(job, S.FAILED)
        case "moved":
            world.do(GangMovedEvent(job.current_attempt(job.gang), "elsewhere"))
        case "launch failed":
            world.dispatch_fails(job)
        case "cancelled":
            world.do(JobCancelledEvent("job", "enough"))
        case "host lost":
            world.lose("a-1")
    assert world.busy() == set()
    assert not world.state.usage


def test_confirmation_of_unknown_attempt_is_refused(world: World) -> None:
    job = world.start()
    with pytest.raises(IllegalTransitionError, match="can't be over"):
        world.do(AttemptEndConfirmedEvent(AttemptId("job", 2)))
    world.report_all(job, S.SUCCEEDED)
    assert world.busy() == HOSTS


def test_successor_knows_early_confirmation(world: World) -> None:
    """Nobody would tell it: the pool's report was acknowledged."""
    job = world.start()
    world.state.unrecorded.clear()
    world.confirm(job)
    assert "job" in world.state.unrecorded
    new = World("a")
    new.restore(world)
    assert new.busy() == HOSTS
    new.report_all(new.state.jobs["job"], S.SUCCEEDED)
    assert new.busy() == set()


def test_pool_dying_after_confirmation_leaves_nothing(world: World) -> None:
    job = world.start(max_retries_preemption=5)
    world.confirm(job)
    world.do(PoolRestartedEvent("pool-a"))
    assert world.busy() == set()
    assert not job.gang.end_confirmed
