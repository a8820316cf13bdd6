"""The limits that a job sets itself: `max_runtime` and `stop_without_progress`."""

import math
from typing import Any

import pytest

from iris_ray.errors import InvalidJobError
from iris_ray.model.goodput import Marks
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.state.events import AttemptMarkedEvent, GangMovedEvent, TimePassedEvent
from iris_ray.state.instructions import Instructions
from iris_ray.state.runtime_limits import RUNTIME_NOTICE_S
from tests.support.worlds import S, World, attempt_id, tasks_spec


def passes(world: World, seconds: float) -> Instructions:
    world.now += seconds
    return world.state.handle_event(TimePassedEvent(world.now))


# -- max_runtime -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "notice"), [(600.0, RUNTIME_NOTICE_S), (40.0, 20.0)])
def test_job_has_notice_and_ends_at_its_time(world: World, limit: float, notice: float) -> None:
    job = world.start(max_runtime=limit)
    assert passes(world, limit - notice - 1).notices == []
    (told,) = passes(world, 1).notices
    assert (told.notice.kind, told.notice.deadline) == (NoticeKind.TIME_LIMIT, world.now + notice)
    assert passes(world, notice - 1).stop == []
    ended = passes(world, 1)
    assert [stop.attempt for stop in ended.stop] == [attempt_id(job)]
    assert ended.finished == ["job"]
    assert (job.state, job.failures, job.preemptions) == (JobState.KILLED, 0, 0)
    assert job.error == f"its max_runtime of {limit:g} s is over"


def test_job_that_has_saved_ends_before_its_time(world: World) -> None:
    job = world.start(max_runtime=600.0)
    passes(world, 550)
    world.do(GangMovedEvent(attempt_id(job), "all its tasks have saved"))
    assert (job.state, job.error) == (JobState.KILLED, "its max_runtime of 600 s is nearly over")
    world.confirm(job)


def test_time_counts_from_first_start_through_waits(world: World) -> None:
    job = world.submit(max_runtime=600.0, max_retries_preemption=9)
    passes(world, 1000)
    world.schedule()
    world.report_all(job, S.RUNNING)
    passes(world, 300)
    world.lose("a-0")
    world.lose("b-0")
    world.confirm(job)
    assert job.state is JobState.PENDING
    assert passes(world, 299).finished == []
    assert passes(world, 1).finished == ["job"]


def test_gang_placed_near_the_end_is_told_at_once(world: World) -> None:
    job = world.start(max_runtime=600.0, max_retries_preemption=9)
    passes(world, 550)
    world.report(job, S.WORKER_FAILED)
    world.confirm(job)
    (done,) = world.schedule().values()
    assert [told.notice.kind for told in done.notices] == [NoticeKind.TIME_LIMIT]


def test_slice_that_has_saved_waits_for_the_others(world: World) -> None:
    job = world.submit(slices=(2,), max_runtime=600.0, failure_domain="slice", max_retries_preemption=9)
    world.schedule()
    for task in job.tasks:
        world.report(job, S.RUNNING, task.index)
    passes(world, 550)
    world.do(GangMovedEvent(attempt_id(job, 0), "saved"))
    world.confirm(job, index=0)
    assert world.schedule() == {}, "it does not run again"
    assert not job.state.finished
    world.do(GangMovedEvent(attempt_id(job, 2), "saved"))
    assert job.state is JobState.KILLED


# -- stop_without_progress ---------------------------------------------------------------------------------------------


def dies(world: World, job: Job, step: int | None, how: S = S.FAILED, error: str = "boom") -> None:
    """The job's next attempt runs, names a step and dies."""
    world.now += 60.0
    world.schedule()
    world.report_all(job, S.RUNNING)
    if step is not None:
        world.do(AttemptMarkedEvent(attempt_id(job), Marks(steps=((step, 1.0),))))
    world.long_run()
    world.report(job, how, error=error)
    world.confirm(job)


def looping(world: World, **changes: Any) -> Job:
    return world.submit(max_retries_failure=99, max_retries_preemption=99, stop_without_progress=3, **changes)


@pytest.mark.parametrize("how", [S.FAILED, S.WORKER_FAILED])
def test_attempts_without_new_step_end_job_with_report(world: World, how: S) -> None:
    job = looping(world)
    for step, error in ((500, "one"), (700, "two"), (700, "three"), (None, "four"), (650, "five")):
        assert job.state is JobState.PENDING
        dies(world, job, step, how, error)
    assert job.state is JobState.FAILED
    assert job.error == (
        "3 attempts in a row have not made a step beyond 700, as many as stop_without_progress allows."
        " attempt 3: three; attempt 4: four; attempt 5: five"
    )


def test_moves_are_no_attempts_without_progress(world: World) -> None:
    job = looping(world)
    dies(world, job, 5)
    for _ in range(5):
        world.now += 60.0
        world.schedule()
        world.report_all(job, S.RUNNING)
        world.do(GangMovedEvent(attempt_id(job), "more slices are free"))
        world.confirm(job)
    assert (job.state, job.fruitless) == (JobState.PENDING, 0)


def test_only_one_gang_can_be_without_progress() -> None:
    with pytest.raises(InvalidJobError, match="a single gang"):
        tasks_spec(stop_without_progress=3)
    spec: dict[str, Any] = {"coscheduling": CoschedulingConfig("rack"), "resources": {"CPU": 1.0}}
    assert tasks_spec(stop_without_progress=3, **spec).stop_without_progress == 3
    assert tasks_spec(max_runtime=math.pi).max_runtime == math.pi
