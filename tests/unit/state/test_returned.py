"""A gang has returned all its results, but a host was lost between the first of them and the last."""

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.state.events import GangReturnedEvent, JobCancelledEvent, WorkerFailedEvent
from iris_ray.state.instructions import StopAttempt
from tests.support.worlds import World

S = TaskState


def taken_back(world: World) -> Job:
    """Task 0 returned, its host was lost; task 1 returned before anybody stopped it."""
    job = world.start(max_retries_preemption=5)
    world.report(job, S.SUCCEEDED, 0)
    world.do(WorkerFailedEvent("a-0", "gone"))
    assert job.gang.pending
    return job


def test_late_success_ends_queued_job(world: World) -> None:
    job = taken_back(world)
    instructions = world.do(GangReturnedEvent(AttemptId("job", 1)))
    assert (job.state, instructions.finished, instructions.stop) == (JobState.SUCCEEDED, ["job"], [])
    assert world.state.pending() == []
    world.confirm(job, 1)
    world.state.check()


def test_late_success_stops_next_attempt_and_frees_slice(world: World) -> None:
    job = taken_back(world)
    world.schedule()
    assert job.gang.groups == ("b",)
    instructions = world.do(GangReturnedEvent(AttemptId("job", 1)))
    assert job.state is JobState.SUCCEEDED
    assert instructions.stop == [StopAttempt(AttemptId("job", 2, 0), "attempt 1 has returned all results")]
    assert world.state.holds_capacity(AttemptId("job", 2))
    world.confirm(job, 2)
    world.confirm(job, 1)
    assert not world.state.holds_capacity(AttemptId("job", 2))
    world.state.check()


def test_repeated_or_unknown_late_success_changes_nothing(world: World) -> None:
    job = taken_back(world)
    world.do(GangReturnedEvent(AttemptId("job", 2)))
    assert job.gang.pending
    world.do(GangReturnedEvent(AttemptId("job", 1)))
    assert not world.do(GangReturnedEvent(AttemptId("job", 1))).finished
    world.do(GangReturnedEvent(AttemptId("nobody", 1)))
    world.state.check()


def test_cancelled_job_stays_cancelled_after_late_success(world: World) -> None:
    job = taken_back(world)
    world.do(JobCancelledEvent("job", "enough"))
    world.do(GangReturnedEvent(AttemptId("job", 1)))
    assert job.state is JobState.KILLED


def test_late_success_of_one_task_spares_others(world: World) -> None:
    job = world.start_tasks(max_retries_preemption=5)
    first = job.gangs[0].tasks[0]
    world.do(WorkerFailedEvent(first.node_id or "", "gone"))
    world.do(GangReturnedEvent(AttemptId("job", 1, 0)))
    assert first.state is S.SUCCEEDED
    assert not job.state.finished
    world.state.check()
