"""What of the state becomes rows of the history."""

from dataclasses import replace

import pytest

from iris_ray.actors.protocol.status import Heard, JobFacts
from iris_ray.history.rows import CurvePoint, curve_point, is_kept, sample, stage
from iris_ray.model.goodput import Marks
from iris_ray.model.jobs import Job
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import (
    AttemptMarkedEvent,
    JobCancelledEvent,
    TaskStateChangedEvent,
    WorkerDrainedEvent,
)
from tests.support.histories import NOON, story, wall
from tests.support.worlds import S, World, attempt_id, cpu_host


def fail(world: World, job: Job, index: int, exit_code: int | None = None) -> None:
    world.do(TaskStateChangedEvent(attempt_id(job, index), index, S.FAILED, "boom", exit_code))
    world.confirm(job)


def run_again(world: World, job: Job) -> None:
    world.now += 1.0
    world.schedule()
    world.now += 1.0
    for task in job.tasks:
        world.report(job, S.RUNNING, task.index)
    world.now += 30.0


def test_story_of_gang_has_every_attempt_and_its_cause(world: World) -> None:
    job = world.submit(user="ann", max_retries_failure=3, max_retries_preemption=3)
    run_again(world, job)
    fail(world, job, 1, exit_code=3)
    run_again(world, job)
    world.do(WorkerDrainedEvent("a-0", "it is being preempted"))
    world.lose("a-0")
    world.confirm(job)
    run_again(world, job)
    world.finish(job)
    told = story(world, job)
    first, second, third = told.attempts
    assert (first.state, first.cause, first.task, first.host, first.exit_code) == ("failed", "crashed", 1, "a/1", 3)
    assert (second.state, second.cause, second.slices, second.host) == ("worker_failed", "preempted", "a", "a/0")
    assert (third.state, third.cause, third.slices, third.host, third.error) == ("succeeded", None, "b", None, None)
    assert (first.assigned_at, first.started_at, first.ended_at) == (None, NOON + 2, NOON + 32), "it is settled"
    assert (third.assigned_at, third.started_at, third.ended_at) == (NOON + 65, NOON + 66, NOON + 96)
    assert {(one.hosts, one.chips) for one in told.attempts} == {(2, 8.0)}
    assert told.job.items() >= {"state": "succeeded", "user": "ann", "band": "interactive", "type": "v4-16"}.items()
    assert told.job.items() >= {"chips": 8.0, "attempts": 3, "failures": 1, "preemptions": 1, "error": None}.items()
    assert told.job.items() >= {"submitted_at": NOON, "started_at": NOON + 2, "ended_at": NOON + 96}.items()


def test_story_of_job_with_forgotten_attempts_begins_with_its_first_one(world: World) -> None:
    job = world.submit(max_retries_failure=10)
    run_again(world, job)
    for _ in range(7):
        fail(world, job, 0)
        run_again(world, job)
    told = story(world, job)
    assert told.attempts[0].number > 1, "the first attempts are forgotten"
    assert told.job["started_at"] == NOON + 2


def test_story_sums_all_time_and_all_losses(world: World) -> None:
    job = world.submit(max_retries_failure=3)
    run_again(world, job)
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(steps=((0, 1.0), (10, 21.0)))))
    fail(world, job, 0)
    run_again(world, job)
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(steps=((5, 2.0), (15, 22.0)))))
    world.finish(job)
    told = story(world, job)
    begun, ended = told.job["submitted_at"], told.job["ended_at"]
    assert isinstance(begun, float)
    assert isinstance(ended, float)
    lived = ended - begun
    assert sum(seconds for seconds, _ in told.time.values()) == pytest.approx(lived)
    assert sum(chips for _, chips in told.time.values()) == pytest.approx(8.0 * (lived - 2.0)), "it waited twice"
    assert told.losses.keys() == {"crashed"}
    count, seconds, chip_seconds = told.losses["crashed"]
    assert (count, seconds, chip_seconds) == (1, told.attempts[0].lost_s, told.attempts[0].lost_chip_s)
    assert seconds > 0


def test_job_that_fails_names_the_task_to_blame(world: World) -> None:
    job = world.start(slices=(2,), max_retries_failure=0)
    fail(world, job, 3, exit_code=9)
    told = story(world, job)
    (last,) = told.attempts
    assert (last.state, last.cause, last.task, last.host, last.exit_code) == ("failed", "crashed", 3, "b/1", 9)
    assert (told.job["state"], told.job["error"], last.error) == ("failed", "boom", "boom")


def test_tasks_placed_alone_have_attempts_each(world: World) -> None:
    job = world.start_tasks(replicas=2, max_retries_failure=1)
    world.now += 10.0
    fail(world, job, 1)
    told = story(world, job)
    assert [(one.gang, one.number, one.state, one.chips) for one in told.attempts] == [
        (0, 1, "running", 4.0),
        (1, 1, "failed", 4.0),
    ]
    assert told.time == {}, "only the time of gangs is measured"


def test_job_is_kept_once_it_has_had_hosts(world: World) -> None:
    waits = world.submit("waits", slices=(3,))
    assert not is_kept(waits)
    world.do(JobCancelledEvent("waits", "cancelled by ann"))
    assert is_kept(waits)
    told = story(world, waits)
    assert (told.job["state"], told.job["error"], told.attempts) == ("killed", "cancelled by ann", ())
    assert is_kept(world.start("runs"))


def test_stage_changes_when_a_job_starts_restarts_or_ends(world: World) -> None:
    job = world.submit(max_retries_failure=1)
    stages = [stage(job)]
    world.schedule()
    stages.append(stage(job))
    world.report_all(job, S.RUNNING)
    stages.append(stage(job))
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(steps=((0, 1.0),))))
    assert stage(job) == stages[-1]
    fail(world, job, 0)
    stages.append(stage(job))
    world.schedule()
    world.report_all(job, S.RUNNING)
    stages.append(stage(job))
    world.finish(job)
    stages.append(stage(job))
    assert len(set(stages)) == len(stages)


@pytest.mark.parametrize(
    ("says", "numbers"),
    [
        ("loss=2.31 lr=1e-05", {"loss": 2.31, "lr": 1e-5}),
        ("ETA 3 h, loss=-2, MFU=41 %", {"loss": -2.0, "MFU": 41.0}),
        ("loss=nan step=1.2.3 a.b=1 x=1e y=1e999", {}),
        (None, {}),
    ],
)
def test_curve_has_step_and_numbers_of_status(world: World, says: str | None, numbers: dict[str, float]) -> None:
    job = world.start()
    world.now += 5.0
    heard = Heard(0, 1, world.now, None, 7, says, Marks(), (), None)
    facts = JobFacts(job, world.state, wall, heard)
    assert curve_point(facts, world.now) == CurvePoint("job", NOON, NOON + 5.0, 7, numbers)
    point = curve_point(facts._replace(heard=replace(heard, step=None)), world.now)
    assert (point is None) is not bool(numbers)


def test_sample_counts_chips_in_use_and_waiting(world: World) -> None:
    world.start("train", user="ann", slices=(1,))
    world.start("eval", user="bob", priority=PriorityBand.BATCH)
    world.submit("more", user="bob", priority=PriorityBand.BATCH, slices=(2,))
    world.do(cpu_host("gpus", gpus=8.0))
    found = sample(world.state, NOON)
    assert found.chips == {"v4-16": 16.0, "": 8.0}
    ann, bob = found.users
    assert (ann.user, ann.type, ann.band, ann.busy_chips, ann.waiting_jobs) == ("ann", "v4-16", "interactive", 8.0, 0)
    assert (bob.user, bob.band, bob.busy_chips, bob.waiting_jobs, bob.waiting_chips) == ("bob", "batch", 8.0, 1, 16.0)


def test_sample_of_no_hosts_is_a_sample(world: World) -> None:
    assert sample(World().state, NOON).chips == {"": 0.0}
