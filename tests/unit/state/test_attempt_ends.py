"""What an attempt's end costs: budgets, pauses after quick ends, and results that come late."""

from typing import Any

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.state.attempt_ends import QUICK_ENDS_ARE_FAILURES, QUICK_S
from iris_ray.state.events import (
    GangMovedEvent,
    GangReturnedEvent,
    JobCancelledEvent,
    TaskStateChangedEvent,
    WorkerFailedEvent,
)
from iris_ray.state.instructions import StopAttempt
from tests.support.worlds import S, World, charged, task_states

# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_run", "state"), [(False, JobState.FAILED), (True, JobState.PENDING)])
def test_job_no_host_can_set_up_ends_unless_it_ran_before(world: World, has_run: bool, state: JobState) -> None:
    job = world.submit(max_retries_failure=5, max_retries_preemption=5)
    world.schedule()
    if has_run:
        world.report_all(job, S.RUNNING)
        world.report(job, S.WORKER_FAILED)
        world.confirm(job)
        world.schedule()
    attempt = job.current_attempt(job.gang)
    world.do(TaskStateChangedEvent(attempt, 0, S.FAILED, "no such module", is_hopeless=True))
    assert (job.state, charged(job)) == (state, (1, int(has_run)))


@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize(
    ("end", "option", "final"),
    [
        (S.FAILED, "max_retries_failure", JobState.FAILED),
        (S.WORKER_FAILED, "max_retries_preemption", JobState.WORKER_FAILED),
    ],
)
def test_budget_of_n_retries_gives_n_plus_one_attempts(
    world: World, budget: int, end: TaskState, option: str, final: JobState
) -> None:
    budgets: dict[str, Any] = {"max_retries_failure": 0, "max_retries_preemption": 0, option: budget}
    job = world.submit(**budgets)
    for attempt in range(1, budget + 2):
        assert not job.state.finished
        world.schedule()
        world.report_all(job, S.RUNNING)
        world.long_run()
        world.report(job, end)
        world.confirm(job, attempt)
    assert (job.state, job.gang.attempt) == (final, budget + 1)


@pytest.mark.parametrize("by_pool", [False, True])
def test_task_lost_while_assigned_charges_nothing_whoever_reports(world: World, by_pool: bool) -> None:
    job = world.submit()
    world.schedule()
    stop = world.report(job, S.WORKER_FAILED, 0, error="the host died").stop if by_pool else world.lose("a-0").stop
    assert stop == [StopAttempt(AttemptId("job", 1), "the host died")]
    assert (task_states(job), charged(job)) == ([S.PENDING] * 2, (0, 0))


def test_host_lost_after_another_members_start_counts_as_started(world: World) -> None:
    job = world.submit(max_retries_preemption=1)
    world.schedule()
    world.report(job, S.RUNNING, 1)
    world.lose("a-0")
    assert charged(job) == (0, 1)


@pytest.mark.parametrize("order", [("a-0", "a-1"), ("a-1", "a-0")])
def test_two_hosts_lost_together_charge_once(world: World, order: tuple[str, str]) -> None:
    job = world.start(max_retries_preemption=1)
    for node_id in order:
        world.lose(node_id)
    assert (job.state, charged(job)) == (JobState.PENDING, (0, 1))


def test_lost_host_reported_by_pool_too_charges_once(world: World) -> None:
    job = world.start(max_retries_preemption=5)
    world.report(job, S.WORKER_FAILED, 0)
    world.lose("a-0")
    world.lose("a-0")
    assert charged(job) == (0, 1)


def test_failures_and_preemptions_have_separate_budgets(world: World) -> None:
    job = world.start(max_retries_failure=1, max_retries_preemption=1)
    for end in (S.FAILED, S.WORKER_FAILED):
        world.long_run()
        world.report(job, end)
        world.confirm(job)
        world.schedule()
        world.report_all(job, S.RUNNING)
    assert (job.state, charged(job)) == (JobState.RUNNING, (1, 1))
    world.report(job, S.FAILED)
    assert job.state is JobState.FAILED


@pytest.mark.parametrize("limit", [0, 2])
def test_retried_coscheduled_failure_counts_once_towards_max_task_failures(world: World, limit: int) -> None:
    world.add_slice("tpu-a", "v4-32")
    job = world.submit(tpu_type="v4-32", max_retries_failure=9, max_task_failures=limit)
    for _ in range(limit + 1):
        assert job.state is JobState.PENDING
        world.now = max(world.now, job.gang.not_before)
        world.schedule()
        for index in range(4):  # peers crash together
            world.report(job, S.FAILED, index, attempt=job.gang.attempt)
        world.confirm(job)
    assert (job.state, job.failures, job.gang.attempt) == (JobState.FAILED, limit + 1, limit + 1)
    assert f"failed {limit + 1} times; max_task_failures={limit})" in (job.error or "")


# -- attempts that are over as soon as they have begun ----------------------------------------------------------------


def run_again(world: World, job: Job, ran: float = 0.0) -> None:
    """Once its pause is over the gang runs, for some seconds."""
    world.now = max(world.now, job.gang.not_before)
    world.schedule()
    world.report_all(job, S.RUNNING)
    world.now += ran


def end(world: World, job: Job, state: TaskState = S.WORKER_FAILED) -> float:
    """A task of it ends; how long the pause is, in seconds."""
    world.report(job, state)
    world.confirm(job)
    world.state.check()
    return max(0.0, job.gang.not_before - world.now)


@pytest.mark.parametrize("how", [S.FAILED, S.WORKER_FAILED])
def test_pauses_grow_with_quick_ends_in_a_row(world: World, how: TaskState) -> None:
    job = world.submit(max_retries_failure=99, max_retries_preemption=99)
    pauses = []
    for _ in range(9):
        run_again(world, job, QUICK_S - 1)
        pauses.append(end(world, job, how))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]


def test_task_ending_before_all_have_begun_ends_quickly(world: World) -> None:
    """The first to start may crash before the last has started: it is the same crash, whichever is faster."""
    job = world.submit(max_retries_failure=99)
    pauses = []
    for _ in range(3):
        world.now = max(world.now + 100.0, job.gang.not_before)
        world.schedule()
        world.report(job, S.RUNNING, 0)
        pauses.append(end(world, job, S.FAILED))
    assert pauses == [0.0, 1.0, 2.0]


def test_long_run_forgets_the_quick_ends(world: World) -> None:
    job = world.submit(max_retries_preemption=99)
    for _ in range(4):
        run_again(world, job)
        end(world, job)
    run_again(world, job, QUICK_S)
    assert end(world, job) == 0.0
    run_again(world, job)
    assert end(world, job) == 0.0
    run_again(world, job)
    assert end(world, job) == 1.0


def test_growth_move_is_no_quick_end(world: World) -> None:
    job = world.submit(max_retries_preemption=99)
    for _ in range(4):
        run_again(world, job)
        world.do(GangMovedEvent(job.current_attempt(job.gang), "more slices"))
        world.confirm(job)
        assert job.gang.not_before <= world.now


def test_task_repeatedly_lost_on_living_host_fails(world: World) -> None:
    """Else a job that kills its own process at once would be tried as often as the preemption budget allows."""
    job = world.submit(max_retries_preemption=99)
    for _ in range(QUICK_ENDS_ARE_FAILURES):
        run_again(world, job)
        end(world, job)
    assert charged(job) == (0, QUICK_ENDS_ARE_FAILURES)
    run_again(world, job)
    world.report(job, S.WORKER_FAILED)
    assert (job.state, charged(job)) == (JobState.FAILED, (1, QUICK_ENDS_ARE_FAILURES))


def test_repeatedly_lost_hosts_are_preemptions(world: World) -> None:
    job = world.submit(max_retries_preemption=99)
    for number in range(QUICK_ENDS_ARE_FAILURES + 3):
        world.add_slice(f"new-{number}")
        run_again(world, job)
        for task in list(job.tasks):
            if task.node_id is not None:
                world.lose(task.node_id)
        world.confirm(job)
    assert charged(job) == (0, QUICK_ENDS_ARE_FAILURES + 3)


def test_returned_task_is_lost_but_never_failed(world: World) -> None:
    """SUCCEEDED → FAILED is no legal move; the host of its result is gone, whatever the reason."""
    job = world.submit(max_retries_preemption=QUICK_ENDS_ARE_FAILURES)
    for _ in range(QUICK_ENDS_ARE_FAILURES):
        run_again(world, job)
        end(world, job)
    run_again(world, job)
    world.report(job, S.SUCCEEDED, 0)
    world.report(job, S.WORKER_FAILED, 0)
    assert job.state is JobState.WORKER_FAILED


def test_spare_reporting_success_is_refused(world: World) -> None:
    world.start(spares=1)
    world.schedule()
    held = next(job for job in world.state.jobs.values() if job.spec.spare_for)
    with pytest.raises(IllegalTransitionError, match="only holds a slice"):
        world.report(held, S.SUCCEEDED)


# -- results that are complete after the loss of a host ---------------------------------------------------------------


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
    assert not world.state.pending()
    world.confirm(job, 1)


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


def test_repeated_or_unknown_late_success_changes_nothing(world: World) -> None:
    job = taken_back(world)
    world.do(GangReturnedEvent(AttemptId("job", 2)))
    assert job.gang.pending
    world.do(GangReturnedEvent(AttemptId("job", 1)))
    assert not world.do(GangReturnedEvent(AttemptId("job", 1))).finished
    world.do(GangReturnedEvent(AttemptId("nobody", 1)))


def test_cancelled_job_stays_cancelled_after_late_success(world: World) -> None:
    job = taken_back(world)
    world.do(JobCancelledEvent("job", "enough"))
    world.do(GangReturnedEvent(AttemptId("job", 1)))
    assert job.state is JobState.KILLED
