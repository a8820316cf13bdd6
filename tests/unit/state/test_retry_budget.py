"""What an attempt's end costs: budgets of retries for failures and for preemptions."""

from typing import Any

import pytest

from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.state.events import TaskStateChangedEvent
from iris_ray.state.instructions import StopAttempt
from tests.support.worlds import World, charged

S = TaskState


def test_one_crash_without_retries_fails_job(world: World) -> None:
    job = world.start(max_retries_preemption=10)
    world.report(job, S.FAILED)
    assert job.state is JobState.FAILED


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


def test_host_lost_before_any_task_started_charges_nothing(world: World) -> None:
    job = world.submit()
    world.schedule()
    instructions = world.lose("a-0")
    assert instructions.stop == [StopAttempt(AttemptId("job", 1), "the host died")]
    assert (job.state, charged(job)) == (JobState.PENDING, (0, 0))


def test_host_lost_after_the_start_charges_the_preemption_budget(world: World) -> None:
    job = world.start(max_retries_preemption=1)
    world.lose("a-0")
    assert (job.state, charged(job)) == (JobState.PENDING, (0, 1))


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


def test_repeated_uncharged_attempts_back_off(world: World) -> None:
    """An attempt that charged no budget looped for ever (defect 8): each one charges something or backs off."""
    job = world.submit()
    for _ in range(3):
        world.schedule()
        if job.state is not JobState.RUNNING:
            break
        world.report(job, S.WORKER_FAILED, 0)
        world.confirm(job)
    assert job.state.finished or charged(job) != (0, 0) or job.gang.not_before > world.now
