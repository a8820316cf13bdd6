"""Jobs without coscheduling: every task is placed, fails and is retried by itself."""

import pytest

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.state.events import (
    TasksAssignedEvent,
    WorkerFailedEvent,
)
from iris_ray.state.instructions import Instructions, StopAttempt
from tests.support.worlds import S, World, attempts, charged, task_states

# -- attempts and budgets -------------------------------------------------------------------------------------------


def test_default_budgets_are_no_failures_and_100_preemptions() -> None:
    spec = JobSpec(job_id="job", owner="pool")
    assert (spec.max_retries_failure, spec.max_retries_preemption, spec.max_task_failures) == (0, 100, None)


def test_failing_task_with_retries_touches_no_sibling(world: World) -> None:
    job = world.start_tasks(replicas=3, max_retries_failure=1)
    before = [(task.state, task.node_id, task.error) for task in job.tasks]
    assert world.report(job, S.FAILED, 1) == Instructions(stop=[StopAttempt(AttemptId("job", 1, 1), "boom")])
    after = [(task.state, task.node_id, task.error) for task in job.tasks]
    assert after == [before[0], (S.PENDING, None, "boom"), before[2]]
    assert (job.state, charged(job)) == (JobState.RUNNING, (1, 0))
    world.schedule()
    assert attempts(world) == [1, 2, 1]


def test_finally_failed_task_fails_job_and_names_trigger(world: World) -> None:
    """One runs, one has succeeded, two wait: those that run are stopped, what is over stays."""
    job = world.submit_tasks(replicas=6)
    world.schedule()
    for index in range(4):
        world.report(job, S.RUNNING, index)
    world.report(job, S.SUCCEEDED, 3)
    instructions = world.report(job, S.FAILED, 1, error="OOM")
    assert sorted(stop.attempt.gang for stop in instructions.stop) == [0, 1, 2]
    assert all(stop.attempt[:2] == ("job", 1) for stop in instructions.stop)
    assert instructions.finished == ["job"]
    assert task_states(job) == [S.KILLED, S.FAILED, S.KILLED, S.SUCCEEDED, S.KILLED, S.KILLED]
    assert (job.state, job.error, job.tasks[1].error) == (JobState.FAILED, "OOM", "OOM")
    assert all("job/task-1" in (job.tasks[index].error or "") for index in (0, 2, 4, 5))
    assert world.plan().assignments == []


def test_job_succeeds_with_its_last_task(world: World) -> None:
    job = world.start_tasks()
    assert (world.report(job, S.SUCCEEDED, 1), job.state) == (Instructions(), JobState.RUNNING)
    assert (world.report(job, S.SUCCEEDED, 0), job.state) == (Instructions(finished=["job"]), JobState.SUCCEEDED)


# -- max_task_failures ----------------------------------------------------------------------------------------------


def test_tolerated_task_failures_let_job_succeed(world: World) -> None:
    job = world.start_tasks(replicas=3, max_task_failures=1)
    instructions = world.report(job, S.FAILED, 0)
    assert instructions == Instructions(stop=[StopAttempt(AttemptId("job", 1, 0), "boom")])
    assert (job.state, task_states(job)) == (JobState.RUNNING, [S.FAILED, S.RUNNING, S.RUNNING])
    world.report(job, S.SUCCEEDED, 1)
    assert world.report(job, S.SUCCEEDED, 2).finished == ["job"]
    assert job.state is JobState.SUCCEEDED


def test_excess_task_failures_fail_job_whichever_task(world: World) -> None:
    job = world.start_tasks(replicas=3, max_task_failures=1)
    world.report(job, S.FAILED, 0)
    instructions = world.report(job, S.FAILED, 2)
    assert instructions.finished == ["job"]
    assert (job.state, task_states(job)) == (JobState.FAILED, [S.FAILED, S.KILLED, S.FAILED])
    assert "job/task-2" in (job.tasks[1].error or "")
    assert job.error == "boom (attempts of the job failed 2 times; max_task_failures=1)"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_retried_task_failures_count(world: World, limit: int) -> None:
    job = world.start_tasks(max_retries_failure=9, max_task_failures=limit)
    for failure in range(1, limit + 2):
        assert job.state is JobState.RUNNING
        world.report(job, S.FAILED, failure % 2)
        world.confirm(job, index=failure % 2)
        world.schedule()
        if not job.state.finished:
            world.report(job, S.RUNNING, failure % 2)
    assert (job.state, job.failures) == (JobState.FAILED, limit + 1)


@pytest.mark.parametrize("started", [False, True])
def test_lost_hosts_are_no_task_failures(world: World, started: bool) -> None:
    job = world.start_tasks(max_task_failures=0) if started else world.submit_tasks(max_task_failures=0)
    world.schedule()
    world.lose("a-0")
    assert (job.state, job.failures, task_states(job)[0]) == (JobState.RUNNING, 0, S.PENDING)


# -- lost hosts -----------------------------------------------------------------------------------------------------


def test_lost_host_requeues_task_without_resources(world: World) -> None:
    """Its user's usage is none already when it ends."""
    idle = world.submit_tasks("idle", replicas=1, resources={}, max_retries_preemption=0)
    busy = world.submit_tasks("busy", replicas=1)
    world.schedule()
    world.finish(busy)
    assert world.state.usage == {}
    world.do(WorkerFailedEvent(str(idle.tasks[0].node_id), "the host died"))
    assert (idle.state, charged(idle)) == (JobState.PENDING, (0, 0))


# -- capacity -------------------------------------------------------------------------------------------------------


# -- placing --------------------------------------------------------------------------------------------------------


def test_job_with_more_tasks_than_hosts_starts_in_part(world: World) -> None:
    job = world.submit_tasks(replicas=6)
    plan = world.plan()
    assert plan.assignments == [
        TasksAssignedEvent("job", (index,), node_id) for index, node_id in enumerate(["a-0", "a-1", "b-0", "b-1"])
    ]
    assert plan.pending_reasons.keys() == {"job"}
    world.schedule()
    assert task_states(job) == [S.ASSIGNED] * 4 + [S.PENDING] * 2
    assert job.state is JobState.RUNNING
    assert world.plan().assignments == []
    world.report(job, S.SUCCEEDED, 2)
    world.confirm(job, index=2)
    assert world.plan().assignments == [TasksAssignedEvent("job", (4,), "b-0")]


@pytest.mark.parametrize("chips", [0.5, 1.0, 4.0])
def test_chip_tasks_never_share_a_host(world: World, chips: float) -> None:
    """libtpu allows one gang a host, however few chips it asks for."""
    job = world.start_tasks(replicas=3, resources={"TPU": chips})
    world.start_tasks("other", replicas=1, resources={"TPU": chips})
    assert len(world.busy()) == 4
    assert all(worker.free["TPU"] == 0.0 for worker in world.state.workers.values())
    world.submit_tasks("third", resources={"TPU": chips})
    assert world.plan().assignments == []
    assert job.state is JobState.RUNNING
