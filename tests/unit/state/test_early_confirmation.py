"""That nothing of an attempt is left may be heard before how it ended. Then its hosts are free with its last report."""

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangMovedEvent,
    JobCancelledEvent,
    JobRestoredEvent,
    PoolRestartedEvent,
    TaskStateChangedEvent,
)
from iris_ray.state.records import JobRecord
from tests.support.worlds import World, host

S = TaskState
HOSTS = {"a-0", "a-1"}


def test_hosts_are_held_until_the_last_report_and_free_with_it(world: World) -> None:
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
def test_hosts_are_free_however_the_attempt_ends(world: World, end: str) -> None:
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


def test_confirmation_counts_for_its_attempt_alone(world: World) -> None:
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


def test_attempt_that_there_has_not_been_can_not_be_over(world: World) -> None:
    job = world.start()
    with pytest.raises(IllegalTransitionError, match="can't be over"):
        world.do(AttemptEndConfirmedEvent(AttemptId("job", 2)))
    world.report_all(job, S.SUCCEEDED)
    assert world.busy() == HOSTS
    world.check()


def test_task_by_itself_is_confirmed_early_too(world: World) -> None:
    job = world.start_tasks(replicas=2)
    world.confirm(job, index=1)
    world.do(TaskStateChangedEvent(AttemptId("job", 1, 1), 1, S.SUCCEEDED))
    assert len(world.busy()) == 1
    world.check()


def test_successor_knows_that_the_end_is_confirmed(world: World) -> None:
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


def test_pool_that_dies_after_the_confirmation_leaves_nothing(world: World) -> None:
    job = world.start(max_retries_preemption=5)
    world.confirm(job)
    world.do(PoolRestartedEvent("pool-a"))
    assert world.busy() == set()
    assert not job.gang.end_confirmed
    world.check()


def test_lost_host_ends_a_job_of_which_another_task_there_was_confirmed_early(world: World) -> None:
    job = world.start_tasks(replicas=2, resources={"CPU": 1.0}, max_retries_preemption=0)
    assert len({task.node_id for task in job.tasks}) == 1
    world.confirm(job, index=1)
    world.lose(job.tasks[0].node_id or "")
    assert (job.state, world.busy()) == (JobState.WORKER_FAILED, set())
    assert not world.state.usage
    world.check()
