"""What attempts hold until their end is confirmed, early or late."""

from collections.abc import Callable

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.scheduler.fair_queue import WAITS_FOR_OWN_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangMovedEvent,
    JobCancelledEvent,
    JobRestoredEvent,
    PoolRestartedEvent,
    TaskStateChangedEvent,
)
from iris_ray.state.records import JobRecord
from tests.support.worlds import S, World, host

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


def test_capacity_of_live_attempt_cannot_be_freed(world: World) -> None:
    job = world.start()
    world.confirm(job)
    assert world.busy() == {"a-0", "a-1"}


def test_capacity_of_older_attempt_is_freed_while_next_runs(world: World) -> None:
    job = world.start(max_retries_failure=1)
    world.report(job, S.FAILED)
    world.now += WAITS_FOR_OWN_S + 1.0
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
    world.check()


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
    world.check()


def test_confirmation_counts_for_its_attempt_only(world: World) -> None:
    job = world.start(max_retries_failure=5)
    world.confirm(job)
    world.report(job, S.FAILED)
    world.now += 100.0
    world.schedule()
    world.report_all(job, S.RUNNING)
    world.confirm(job, attempt=1)  # once more
    world.report(job, S.FAILED)
    assert len(world.busy()) == 2
    world.check()


def test_confirmation_of_unknown_attempt_is_refused(world: World) -> None:
    job = world.start()
    with pytest.raises(IllegalTransitionError, match="can't be over"):
        world.do(AttemptEndConfirmedEvent(AttemptId("job", 2)))
    world.report_all(job, S.SUCCEEDED)
    assert world.busy() == HOSTS
    world.check()


def test_single_task_is_confirmed_early_too(world: World) -> None:
    job = world.start_tasks(replicas=2)
    world.confirm(job, index=1)
    world.do(TaskStateChangedEvent(AttemptId("job", 1, 1), 1, S.SUCCEEDED))
    assert len(world.busy()) == 1
    world.check()


def test_successor_knows_early_confirmation(world: World) -> None:
    """Nobody would tell it: the pool's report was acknowledged."""
    job = world.start()
    world.state.unrecorded.clear()
    world.confirm(job)
    assert "job" in world.state.unrecorded
    record = world.state.record("job")
    assert record is not None
    new = World()
    for number in range(2):
        new.do(host("a", number))
    new.do(JobRestoredEvent(JobRecord.joined(record.to_bytes())))
    assert new.busy() == HOSTS
    new.report_all(new.state.jobs["job"], S.SUCCEEDED)
    assert new.busy() == set()
    new.check()


def test_pool_dying_after_confirmation_leaves_nothing(world: World) -> None:
    job = world.start(max_retries_preemption=5)
    world.confirm(job)
    world.do(PoolRestartedEvent("pool-a"))
    assert world.busy() == set()
    assert not job.gang.end_confirmed
    world.check()


def test_lost_host_ends_job_beside_early_confirmed_task(world: World) -> None:
    job = world.start_tasks(replicas=2, resources={"CPU": 1.0}, max_retries_preemption=0, task_placement="pack")
    assert len({task.node_id for task in job.tasks}) == 1
    world.confirm(job, index=1)
    world.lose(job.tasks[0].node_id or "")
    assert (job.state, world.busy()) == (JobState.WORKER_FAILED, set())
    assert not world.state.usage
    world.check()
