"""A refused event is explained by what happened to its job before."""

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Job
from iris_ray.state import job_table
from iris_ray.state.events import JobCancelledEvent, PoolRestartedEvent
from iris_ray.state.job_table import EVENTS_KEPT
from tests.support.worlds import S, World, attempt_id, cpu_host


def test_refused_event_raises_with_jobs_story(world: World) -> None:
    job = world.start()
    world.start("other")
    world.report(job, S.SUCCEEDED)
    with pytest.raises(IllegalTransitionError, match="SUCCEEDED → FAILED") as refused:
        world.report(job, S.FAILED)
    assert refused.value.__notes__ == [
        "before: 100.000 JobSubmittedEvent",
        "before: 100.000 GangAssignedEvent, group_names=('a',)",
        "before: 100.000 TaskStateChangedEvent, attempt 1 of job, task_index=0, new_state=RUNNING",
        "before: 100.000 TaskStateChangedEvent, attempt 1 of job, task_index=1, new_state=RUNNING",
        "before: 100.000 TaskStateChangedEvent, attempt 1 of job, task_index=0, new_state=SUCCEEDED",
    ]


def test_story_holds_only_the_latest_events(world: World) -> None:
    job = world.start(max_retries_failure=1000)
    for _ in range(2 * EVENTS_KEPT):
        world.now += 1.0
        world.report(job, S.RUNNING)
    story = world.state.story("job")
    assert len(story) == EVENTS_KEPT
    assert story[-1].startswith(f"{world.now:.3f} ")


def test_lost_host_and_dead_pool_appear_in_affected_stories(world: World) -> None:
    world.start(max_retries_preemption=5)
    world.start("other", owner="pool-b")
    world.lose("a-1")
    world.do(PoolRestartedEvent("pool-b"))
    assert world.state.story("job")[-1].endswith("WorkerFailedEvent, node_id=a-1")
    assert world.state.story("other")[-1].endswith("PoolRestartedEvent, owner=pool-b")


def test_story_contains_no_user_text(world: World) -> None:
    job = world.submit(user="TOKEN-secret", name="TOKEN-secret", max_retries_failure=2)
    world.schedule()
    world.report(job, S.FAILED, error="KeyError: TOKEN=secret")
    world.confirm(job, 1)
    world.dispatch_fails(job)
    world.do(JobCancelledEvent("job", "TOKEN-secret"))
    story = world.state.story("job")
    assert [line.split()[1].strip(",") for line in story] == [
        "JobSubmittedEvent",
        "GangAssignedEvent",
        "TaskStateChangedEvent",
        "AttemptEndConfirmedEvent",
        "TaskDispatchFailedEvent",
        "JobCancelledEvent",
    ]
    assert "secret" not in str(story)


def test_late_report_about_forgotten_job_begins_no_story(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 0)
    job = world.start()
    late = attempt_id(job)
    world.do(JobCancelledEvent("job", "enough"))
    world.confirm(job)
    world.do(JobCancelledEvent(world.submit("next").spec.job_id, "enough"))
    assert "job" not in world.state.jobs
    world.report(job, S.RUNNING, attempt=late.number)
    assert world.state.story("job") == ()


def with_tasks(world: World, count: int) -> Job:
    """A job of independent tasks that all run on one host."""
    world.do(cpu_host("h", cpus=count))
    return world.start_tasks("many", count, resources={"CPU": 1.0})


def test_refused_event_raises_with_its_gangs_story(world: World) -> None:
    job = with_tasks(world, 40)
    for index in range(4, 40):
        world.report(job, S.SUCCEEDED, index)
    with pytest.raises(IllegalTransitionError, match="does not report PENDING") as refused:
        world.report(job, S.PENDING, 3)
    assert refused.value.__notes__ == [
        "before: 100.000 JobSubmittedEvent",
        "before: 100.000 TasksAssignedEvent, node_id=h",
        "before: 100.000 TaskStateChangedEvent, attempt 1 of many/task-3, task_index=3, new_state=RUNNING",
    ]


def test_stories_of_latest_active_gangs_are_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "GANGS_KEPT", 10)
    world.report(with_tasks(world, 40), S.SUCCEEDED, 3)
    with_own = [gang for gang in range(40) if len(world.state.story("many", gang)) > 1]
    assert with_own == [3, *range(31, 40)]


def test_gang_stories_of_forgotten_job_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 0)
    job = with_tasks(world, 3)
    for index in range(3):
        world.report(job, S.SUCCEEDED, index)
        world.confirm(job, index=index)
    assert world.state.story("many", 2)
    world.finish(world.start())
    assert "many" not in world.state.jobs
    assert world.state.story("many", 2) == ()
