"""What attempts hold until their end is confirmed."""

from collections.abc import Callable

import pytest

from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.state.events import JobCancelledEvent
from tests.support.worlds import World, host

S = TaskState


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


def test_capacity_of_live_attempt_cannot_be_freed(world: World) -> None:
    job = world.start()
    world.confirm(job)
    assert world.busy() == {"a-0", "a-1"}


def test_capacity_of_older_attempt_is_freed_while_next_runs(world: World) -> None:
    job = world.start(max_retries_failure=1)
    world.report(job, S.FAILED)
    world.schedule()
    assert job.gang.groups == ("b",)
    world.confirm(job, 1)
    assert world.busy() == {"b-0", "b-1"}


def test_capacity_of_dead_host_returns_empty(world: World) -> None:
    job = world.start()
    world.lose("a-1")
    world.do(host("a", 1))
    assert not world.state.workers["a-1"].occupants
    world.confirm(job)
    assert world.busy() == set()


def test_capacity_survives_reregistration_of_worker(world: World) -> None:
    world.start()
    world.do(host("a", 0, draining="Ray is draining it"))
    assert world.busy() == {"a-0", "a-1"}
