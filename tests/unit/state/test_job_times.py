"""When attempts of jobs hold chips and run, as the state notes it."""

from iris_ray.model.goodput import MOST_STEPS, Marks, TimeKind, Totals, last_disruption, measure
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.state.events import AttemptMarkedEvent, JobCancelledEvent
from tests.support.worlds import World, attempt_id

S, K = TaskState, TimeKind


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


def disrupted(world: World, job: Job) -> tuple[int, float]:
    """The attempt that the last disruption ended, and how long the way back took."""
    found = last_disruption(job.times, world.now)
    assert found is not None
    return found.attempt, found.recovery_s


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
