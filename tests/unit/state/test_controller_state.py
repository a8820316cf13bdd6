"""The rules of the controller's state for gangs: from the submission to the end, and what is remembered of it."""

from typing import Any

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.scheduler.fair_queue import WAITS_FOR_OWN_S
from iris_ray.state import job_table
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S
from iris_ray.state.instructions import ChangeLog, Instructions, StopAttempt
from tests.support.worlds import S, World, charged, gang_spec, host, task_states

# -- the table ------------------------------------------------------------------------------------------------------


def state_of(world: World, job_id: str = "job") -> JobState:
    return world.state.jobs[job_id].state


# -- a job's ordinary life ------------------------------------------------------------------------------------------


def test_job_runs_to_success_and_is_reported_finished_once(world: World) -> None:
    job = world.submit()
    assert state_of(world) is JobState.PENDING
    world.schedule()
    assert (job.state, job.gang.attempt, job.gang.groups) == (JobState.RUNNING, 1, ("a",))
    world.report_all(job, S.RUNNING)
    assert world.report(job, S.SUCCEEDED, 0) == Instructions()
    assert state_of(world) is JobState.RUNNING
    assert world.report(job, S.SUCCEEDED, 1) == Instructions(finished=["job"])
    assert job.state is JobState.SUCCEEDED
    assert charged(job) == (0, 0)


def test_job_submitted_twice_is_one_job(world: World) -> None:
    job = world.start()
    world.do(JobSubmittedEvent(gang_spec(), world.now + 5))
    assert world.state.jobs == {"job": job}
    assert job.state is JobState.RUNNING


@pytest.mark.parametrize(
    "changes", [{"user": "ben"}, {"owner": "pool-b"}, {"slices": (2,)}, {"replicas": 4, "tpu_type": "v4-32"}], ids=str
)
@pytest.mark.parametrize("over", [False, True])
def test_another_job_of_the_same_id_is_refused(world: World, changes: dict[str, Any], over: bool) -> None:
    job = world.start()
    if over:
        world.report_all(job, S.SUCCEEDED)
    before = job.state
    with pytest.raises(IllegalTransitionError, match="job job is there already"):
        world.do(JobSubmittedEvent(gang_spec(**changes), world.now))
    assert (world.state.jobs, job.spec, job.state) == ({"job": job}, gang_spec(), before)


def test_task_reports_out_of_order_or_twice_change_nothing(world: World) -> None:
    job = world.start()
    world.report(job, S.SUCCEEDED, 0)
    for state in (S.RUNNING, S.SUCCEEDED):
        assert world.report(job, state, 0) == Instructions()
    assert task_states(job) == [S.SUCCEEDED, S.RUNNING]


@pytest.mark.parametrize("state", [S.PENDING, S.ASSIGNED, S.KILLED, S.UNSCHEDULABLE, S.COSCHED_FAILED])
def test_task_report_of_unreportable_state_is_refused(world: World, state: TaskState) -> None:
    job = world.start()
    with pytest.raises(IllegalTransitionError):
        world.report(job, state, 0)
    assert task_states(job) == [S.RUNNING, S.RUNNING]


# -- one member's end is the gang's ---------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_gang_failure_with_retries_requeues_all_and_charges_once(world: World, culprit: int) -> None:
    job = world.start(slices=(2,), max_retries_failure=1)
    instructions = world.report(job, S.FAILED, culprit, error="ValueError: x")
    assert instructions == Instructions(stop=[StopAttempt(AttemptId("job", 1), "ValueError: x")])
    assert task_states(job) == [S.PENDING] * 4
    assert (job.state, charged(job), job.error) == (JobState.PENDING, (1, 0), "ValueError: x")
    assert all(task.node_id is None for task in job.tasks)


def test_final_gang_failure_ends_siblings_and_job(world: World) -> None:
    job = world.start()
    instructions = world.report(job, S.FAILED, 1, error="ValueError: x")
    assert instructions == Instructions(stop=[StopAttempt(AttemptId("job", 1), "ValueError: x")], finished=["job"])
    assert task_states(job) == [S.COSCHED_FAILED, S.FAILED]
    assert job.state is JobState.FAILED
    assert "job/task-1" in (job.tasks[0].error or "")
    assert job.tasks[1].error == "ValueError: x"


def test_gang_failure_ends_siblings_in_every_state(world: World) -> None:
    world.add_slice("c", "v4-32")
    job = world.submit(tpu_type="v4-32")
    world.schedule()
    world.report(job, S.RUNNING, 0)
    world.report(job, S.SUCCEEDED, 1)
    world.report(job, S.FAILED, 0)
    assert task_states(job) == [S.FAILED, S.COSCHED_FAILED, S.COSCHED_FAILED, S.COSCHED_FAILED]


# -- restarts and late reports --------------------------------------------------------------------------------------


def test_restarted_gang_includes_succeeded_member(world: World) -> None:
    """The slice is the failure unit (defect 1): one host lost, and all of the gang is on another slice."""
    job = world.start(max_retries_preemption=1)
    world.report(job, S.SUCCEEDED, 1)
    world.lose("a-0")
    assert task_states(job) == [S.PENDING] * 2
    world.schedule()
    assert (job.gang.attempt, job.gang.groups) == (2, ("b",))
    assert [task.node_id for task in job.tasks] == ["b-0", "b-1"]
    assert task_states(job) == [S.ASSIGNED] * 2


def test_restarted_gang_may_have_another_slice_count(world: World) -> None:
    job = world.start(slices=(1, 2), max_retries_preemption=9)
    assert (len(job.tasks), job.gang.groups) == (4, ("a", "b"))
    world.lose("b-1")
    world.confirm(job)
    world.schedule()
    assert (len(job.tasks), job.gang.groups, job.gang.attempt) == (2, ("a",), 2)
    world.report(job, S.FAILED, 3, attempt=1)  # there is no task 3 any more
    assert charged(job) == (0, 1)
    assert world.report_all(job, S.SUCCEEDED).finished == ["job"]


@pytest.mark.parametrize("state", [S.RUNNING, S.SUCCEEDED, S.FAILED, S.WORKER_FAILED])
@pytest.mark.parametrize("attempt", [0, 1, 3])
def test_report_for_another_attempt_changes_nothing(world: World, state: TaskState, attempt: int) -> None:
    job = world.start(max_retries_failure=1)
    world.report(job, S.FAILED)
    world.now += WAITS_FOR_OWN_S + 1.0
    world.schedule()
    assert world.report(job, state, 0, attempt=attempt) == Instructions()
    assert (job.state, task_states(job), charged(job)) == (JobState.RUNNING, [S.ASSIGNED] * 2, (1, 0))


@pytest.mark.parametrize("end", [S.SUCCEEDED, S.FAILED, S.WORKER_FAILED, S.KILLED])
def test_finished_job_never_comes_back_to_life(world: World, end: TaskState) -> None:
    job = world.start()
    if end is S.KILLED:
        world.do(JobCancelledEvent("job", "enough"))
    elif end is S.SUCCEEDED:
        world.report_all(job, end)
    else:
        world.report(job, end)
    before = (job.state, task_states(job), charged(job), job.error)
    for state in (S.RUNNING, S.SUCCEEDED, S.FAILED, S.WORKER_FAILED):
        assert world.report(job, state) == Instructions()
    assert world.dispatch_fails(job) == Instructions()
    assert world.do(JobCancelledEvent("job", "too late")) == Instructions()
    assert world.do(JobSubmittedEvent(gang_spec(), world.now)) == Instructions()
    assert world.lose("a-0") == Instructions()
    world.confirm(job)
    assert (job.state, task_states(job), charged(job), job.error) == before
    assert world.plan().assignments == []


def test_reports_about_an_unknown_job_change_nothing(world: World) -> None:
    for event in (
        TaskStateChangedEvent(AttemptId("nobody", 1), 0, S.FAILED),
        TaskDispatchFailedEvent(AttemptId("nobody", 1), "x", 0.0),
        JobCancelledEvent("nobody", "x"),
        AttemptEndConfirmedEvent(AttemptId("nobody", 1)),
        WorkerFailedEvent("nobody", "x"),
        WorkerDrainedEvent("nobody", "x"),
        WorkerSuspectedEvent("nobody", "x", 0.0),
        SliceReleasedEvent("nobody", "x"),
    ):
        assert world.do(event) == Instructions()


# -- cancelling -----------------------------------------------------------------------------------------------------


def test_cancelling_a_running_job_stops_its_attempt(world: World) -> None:
    job = world.start()
    world.report(job, S.SUCCEEDED, 0)
    instructions = world.do(JobCancelledEvent("job", "enough"))
    assert instructions == Instructions(stop=[StopAttempt(AttemptId("job", 1), "enough")], finished=["job"])
    assert (job.state, job.error) == (JobState.KILLED, "enough")


# -- workers --------------------------------------------------------------------------------------------------------


def test_draining_worker_keeps_task_and_gets_no_other(world: World) -> None:
    job = world.start()
    assert world.do(WorkerDrainedEvent("b-0", "maintenance")) == Instructions()
    told = world.do(WorkerDrainedEvent("a-0", "maintenance"))
    assert told == Instructions(notices=told.notices)
    assert job.state is JobState.RUNNING
    world.submit("next")
    assert "maintenance" in world.why("next")


def test_suspicion_outlives_reregistration_and_expires(world: World) -> None:
    for name in ("a", "b"):
        world.do(WorkerSuspectedEvent(f"{name}-1", "no answer", world.now))
        world.do(host(name, 1))
    world.submit()
    assert "no answer" in world.why("job")
    world.now += SUSPICION_S
    assert world.schedule().keys() == {"job"}


def test_registration_changing_nothing_is_recognised(world: World) -> None:
    assert world.state.knows(host("a", 0))
    assert not world.state.knows(host("a", 0, draining="x"))
    assert not world.state.knows(host("a", 0, foreign="x"))
    assert not world.state.knows(host("z", 0))


# -- memory ---------------------------------------------------------------------------------------------------------


def test_finished_jobs_are_forgotten_oldest_first_without_capacity(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 2)
    held = world.start("held")
    world.report_all(held, S.SUCCEEDED)
    for number in range(4):
        job = world.start(f"job-{number}")
        world.report_all(job, S.SUCCEEDED)
        world.confirm(job)
    assert list(world.state.jobs) == ["held", "job-2", "job-3"]


# -- the log of changes -----------------------------------------------------------------------------------------------


def test_reader_gets_changes_or_learns_it_was_away_too_long() -> None:
    log: ChangeLog[str] = ChangeLog()
    for what in "abc":
        log.note(what, most=4)
    seen = log.version
    log.note("d", most=4)
    assert log.since(seen) == ["d"]
    assert log.since(log.version) == []
    log.note("e", most=4)
    assert (log.version, log.since(seen), log.since(1)) == (5, ["d", "e"], None)
