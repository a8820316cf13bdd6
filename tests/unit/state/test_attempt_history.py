"""When attempts began, held chips and ended, and how."""

import dataclasses

import pytest

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.views import job_events, task_status
from iris_ray.actors.protocol.status import TaskAttempt
from iris_ray.model.goodput import MOST_STEPS, Marks, TimeKind, Totals, failures, measure, time_lost
from iris_ray.model.jobs import ATTEMPT_ERROR_CHARACTERS, ATTEMPTS_KEPT, Job
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import EACH_SLICE
from iris_ray.model.time_lost import FailureCause
from iris_ray.state.events import (
    AttemptMarkedEvent,
    GangMovedEvent,
    GangReturnedEvent,
    JobCancelledEvent,
    PoolRestartedEvent,
    TaskStateChangedEvent,
    WorkerDrainedEvent,
)
from tests.support.worlds import S, World, attempt_id

# -- attempts as they are shown ---------------------------------------------------------------------------------------


def attempts(world: World, job: Job, index: int = 0) -> list[TaskAttempt]:
    return list(task_status(job, index, world.state, Clock()).attempts)


def run_for(world: World, job: Job, seconds: float) -> None:
    """The gang is placed and runs for so long."""
    world.schedule()
    world.now += 1.0
    for task in job.tasks:
        world.report(job, S.RUNNING, task.index)
    world.now += seconds


def fail(world: World, job: Job, index: int, exit_code: int | None, error: str = "boom") -> None:
    world.do(TaskStateChangedEvent(attempt_id(job, index), index, S.FAILED, error, exit_code))
    world.confirm(job)


def test_events_of_gangs_name_their_first_processes_as_logs_do(world: World) -> None:
    job = world.submit(slices=(2,), processes_per_host=2, failure_domain=EACH_SLICE)  # two hosts each
    run_for(world, job, 30.0)
    first = {task_status(job, gang.tasks[0].index, world.state, Clock()).indices[0] for gang in job.gangs}
    assert {event.task_index for event in job_events(job, Clock())} == {None, *first} == {None, 0, 4}


def test_gang_attempts_are_listed_for_each_task(world: World) -> None:
    job = world.submit(max_retries_failure=3, max_retries_preemption=3)
    run_for(world, job, 30.0)
    fail(world, job, 1, exit_code=3)
    run_for(world, job, 50.0)
    world.lose("a-0")
    world.confirm(job)
    run_for(world, job, 20.0)
    one, two, three = attempts(world, job, 1)
    assert one == TaskAttempt(1, S.FAILED, "a", 101.0, 131.0, 3, "boom")
    assert two == TaskAttempt(2, S.COSCHED_FAILED, "a", 132.0, 182.0, None, "the host died")
    assert three == TaskAttempt(3, S.RUNNING, "b", 183.0, None, None, None)
    assert [attempt.state for attempt in attempts(world, job, 0)] == [S.COSCHED_FAILED, S.WORKER_FAILED, S.RUNNING]
    for index in (0, 1):
        world.report(job, S.SUCCEEDED, index)
    status = task_status(job, 0, world.state, Clock())
    assert (status.started_at, status.ended_at, status.exit_code) == (183.0, 203.0, 0)
    assert (status.failures, status.preemptions) == (1, 1)
    assert len(status.attempts) == 3


def test_uncharged_attempts_are_listed_too(world: World) -> None:
    job = world.submit()
    world.schedule()
    world.dispatch_fails(job)
    world.confirm(job)
    world.now += 10.0
    run_for(world, job, 5.0)
    world.do(GangMovedEvent(attempt_id(job), "it moves to more slices"))
    assert [(a.state, a.started_at, a.error) for a in attempts(world, job)] == [
        (S.KILLED, None, "no answer"),
        (S.KILLED, 111.0, "it moves to more slices"),
    ]
    assert task_status(job, 0, world.state, Clock()).started_at is None, "it waits"


def test_withdrawn_attempt_that_returned_has_succeeded(world: World) -> None:
    job = world.submit(max_retries_preemption=3)
    run_for(world, job, 5.0)
    world.lose("a-0")
    world.do(GangReturnedEvent(attempt_id(job, 0, 1)))
    assert [(a.attempt, a.state) for a in attempts(world, job)] == [(1, S.SUCCEEDED)]
    assert task_status(job, 0, world.state, Clock()).exit_code == 0


def test_withdrawn_attempt_with_lost_results_is_listed_once(world: World) -> None:
    """Only a job with other tasks still waits for its end by then."""
    job = world.submit_tasks(max_retries_preemption=5)
    run_for(world, job, 5.0)
    lost = job.gangs[0].tasks[0]
    world.lose(lost.node_id or "")
    world.do(GangReturnedEvent(attempt_id(job, 0, 1)))
    assert lost.state is S.SUCCEEDED
    world.do(PoolRestartedEvent("pool-a"))
    (only,) = attempts(world, job)
    assert (only.attempt, only.state) == (1, S.WORKER_FAILED)
    assert only.error == "its results were lost: the process of its SlicePoolManager died"


@pytest.mark.parametrize("coscheduled", [True, False])
def test_latest_attempts_are_kept_with_shortened_errors(world: World, coscheduled: bool) -> None:
    submit = world.submit if coscheduled else world.submit_tasks
    job = submit(max_retries_failure=100)
    for number in range(20):
        run_for(world, job, 100.0)
        fail(world, job, 0, exit_code=number, error="x" * 100_000)
    past = job.gangs[0].past
    assert [attempt.number for attempt in past] == list(range(21 - ATTEMPTS_KEPT, 21))
    assert [attempt.exit_code for attempt in past] == list(range(20 - ATTEMPTS_KEPT, 20))
    assert {len(attempt.error) for attempt in past} == {ATTEMPT_ERROR_CHARACTERS}


# -- times as goodput measures them -----------------------------------------------------------------------------------


K = TimeKind


def seconds(world: World, job: Job) -> dict[str, float]:
    return Totals.of(measure(job.times, job.submitted_at, world.now)).seconds


def run(world: World, job: Job, waits: float, starts: float, runs: float) -> None:
    """The gang waits, is placed, starts and runs for so long each."""
    world.now += waits
    world.schedule()
    world.now += starts
    for task in job.tasks:
        world.report(job, S.RUNNING, task.index)
    world.now += runs


def test_job_losing_a_host_has_complete_times(world: World) -> None:
    job = world.submit(max_retries_preemption=3)
    run(world, job, 5.0, 1.0, 30.0)
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(((0, 10.0), (1, 12.0), (8, 26.0)))))
    world.lose("a-0")
    world.confirm(job)
    run(world, job, 10.0, 2.0, 20.0)
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(((5, 10.0), (6, 12.0), (9, 18.0)))))
    world.report_all(job, S.SUCCEEDED)
    world.now += 1000.0
    assert seconds(world, job) == {
        K.QUEUEING.value: 5.0,
        K.LAUNCH.value: 1.0,
        K.TRAINING_PREP.value: 20.0,
        K.PRODUCTIVE.value: 10.0 + 10.0,
        K.WASTED_PROGRESS_FROM_DISRUPTION.value: 6.0,
        K.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION.value: 4.0 + 10.0 + 2.0,
    }
    held = Totals.of(measure(job.times, job.submitted_at, world.now)).chip_seconds
    assert sum(held.values()) == 8 * (1.0 + 30.0 + 2.0 + 20.0), "it holds nothing while it waits"


def took(world: World, job: Job, how: str) -> None:
    """The running attempt of a job ends in one of several ways."""
    attempt, lost = attempt_id(job), TaskStateChangedEvent(attempt_id(job), 0, S.WORKER_FAILED, "it is gone")
    match how:
        case "lost":
            world.lose("a-0")
        case "lost while its host drains":
            world.do(WorkerDrainedEvent("a-0", "preempted"))
            world.lose("a-0")
        case "moved after a notice":
            world.do(WorkerDrainedEvent("a-0", "maintenance", NoticeKind.MAINTENANCE))
            world.do(lost)
        case "failed":
            world.report(job, S.FAILED)
        case "hung":
            world.do(TaskStateChangedEvent(attempt, 0, S.FAILED, "no task has made progress", is_hang=True))
        case "hung beyond a learned limit":
            world.do(dataclasses.replace(lost, is_hang=True))
        case "moved to more slices":
            world.do(GangMovedEvent(attempt, "to more slices"))
        case "its pool died":
            world.do(PoolRestartedEvent("pool-a"))


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("lost", FailureCause.LOST),
        ("lost while its host drains", FailureCause.PREEMPTED),
        ("moved after a notice", FailureCause.PREEMPTED),
        ("failed", FailureCause.CRASHED),
        ("hung", FailureCause.HUNG),
        ("hung beyond a learned limit", FailureCause.HUNG),
        ("moved to more slices", FailureCause.GROWN),
        ("its pool died", FailureCause.LOST),
    ],
)
def test_time_lost_has_cause_of_attempts_end(world: World, how: str, cause: FailureCause) -> None:
    job = world.submit(max_retries_failure=3, max_retries_preemption=3)
    run(world, job, 5.0, 1.0, 30.0)
    took(world, job, how)
    (failure,) = failures(job.times, world.now)
    assert (failure.cause, failure.is_over) == (cause, False)
    world.confirm(job, 1)
    run(world, job, 5.0, 2.0, 30.0)
    assert [(one, lost.count) for one, lost in time_lost(job.times, world.now).items()] == [(cause, 1)]


def test_start_that_a_hosts_notice_ends_is_preempted_and_has_not_grown(world: World) -> None:
    job = world.submit(max_retries_preemption=3)
    world.schedule()
    node_id = job.gang.tasks[0].node_id
    assert node_id is not None
    world.do(WorkerDrainedEvent(node_id, "preempted", NoticeKind.PREEMPTION, world.now + 30.0))
    world.do(GangMovedEvent(job.current_attempt(job.gang), "preempted", started=False))
    assert job.times.attempts[-1].cause is FailureCause.PREEMPTED
    assert job.preemptions == 0


def disrupted(world: World, job: Job) -> tuple[int, float]:
    """The attempt that failed last, and how long the gang was away."""
    found = failures(job.times, world.now)[-1]
    return found.attempt, found.away_s


def test_failed_launch_after_disruption_is_no_disruption(world: World) -> None:
    job = world.submit(max_retries_failure=3)
    run(world, job, 5.0, 1.0, 30.0)
    world.report(job, S.FAILED)
    world.confirm(job)
    world.now += 10.0
    world.schedule()
    world.dispatch_fails(job)
    world.confirm(job)
    assert disrupted(world, job) == (1, 10.0)
    run(world, job, 5.0, 2.0, 30.0)
    assert disrupted(world, job) == (1, 10.0 + 5.0 + 2.0)


def test_disruption_before_cancellation_while_waiting_is_the_last(world: World) -> None:
    job = world.submit(max_retries_failure=3)
    for waits in (5.0, 10.0):
        run(world, job, waits, 1.0, 30.0)
        world.report(job, S.FAILED)
        world.confirm(job)
    assert disrupted(world, job) == (2, 0.0)
    world.now += 7.0
    world.do(JobCancelledEvent("job", "enough"))
    world.now += 1000.0
    assert disrupted(world, job) == (2, 7.0)


def test_late_times_count_and_senseless_ones_do_not(world: World) -> None:
    job = world.start()
    world.now += 10.0
    world.do(JobCancelledEvent("job", "enough"))
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(((1, 1.0), (2, 3.0)))))
    for nonsense in (
        Marks(((2, 1.0), (1, 3.0))),
        Marks(before={"tea": 1.0}),
        Marks(tuple((i, float(i)) for i in range(MOST_STEPS + 1))),
    ):
        world.do(AttemptMarkedEvent(attempt_id(job), nonsense))
    assert seconds(world, job)[K.PRODUCTIVE.value] == 2.0
    world.do(AttemptMarkedEvent(attempt_id(job)._replace(job_id="nobody"), Marks()))


def test_few_attempts_are_kept_without_losing_time(world: World) -> None:
    job = world.submit(max_retries_failure=50)
    for number in range(30):
        run(world, job, 100.0 if number else 0.0, 1.0, 10.0)
        world.do(AttemptMarkedEvent(attempt_id(job), Marks(((number, 4.0), (number + 1, 6.0)))))
        world.report(job, S.FAILED)
        world.confirm(job)
    assert len(job.times.attempts) <= 3
    assert sum(seconds(world, job).values()) == world.now - job.submitted_at
    assert seconds(world, job)[K.PRODUCTIVE.value] == 30 * 2.0
