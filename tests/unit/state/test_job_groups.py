"""Groups of jobs: they start in one event, restart one by one, and end as one."""

from dataclasses import replace

import pytest

from iris_ray.errors import IllegalTransitionError, InvalidJobError
from iris_ray.model.job_group import GroupSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import (
    GangAssignedEvent,
    GroupAssignedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    TasksAssignedEvent,
    TimePassedEvent,
)
from iris_ray.state.job_groups import COMPLETE_S
from tests.support.worlds import S, World, add_slices, attempts, cpu_host, gang_spec, in_group, submit_group, tasks_spec

TRAINER, SAMPLER = gang_spec("trainer", max_retries_preemption=9), gang_spec("sampler", max_retries_preemption=9)
CPU = tasks_spec("prepare", 2, resources={"CPU": 8.0})


def running_group(world: World, *main: str) -> list[Job]:
    jobs = submit_group(world, TRAINER, SAMPLER, main=main)
    world.schedule()
    for job in jobs:
        world.report_all(job, S.RUNNING)
    return jobs


def test_group_waits_until_all_its_jobs_are_submitted(world: World) -> None:
    specs = in_group(TRAINER, SAMPLER)
    world.do(JobSubmittedEvent(specs[0], world.now))
    assert not world.state.pending()
    world.do(JobSubmittedEvent(specs[1], world.now))
    assert [job.spec.job_id for job in world.state.pending()] == ["trainer"], "one stands for all"
    (start,) = world.plan().assignments
    assert isinstance(start, GroupAssignedEvent)
    world.do(start)
    assert [attempts(world, name) for name in ("trainer", "sampler")] == [[1], [1]]


def test_group_that_stays_incomplete_ends(world: World) -> None:
    (spec, _) = in_group(TRAINER, SAMPLER)
    world.do(JobSubmittedEvent(spec, world.now))
    world.now += COMPLETE_S
    world.do(TimePassedEvent(world.now))
    job = world.state.jobs["trainer"]
    assert (job.state, job.error) == (JobState.KILLED, "sampler of its group rl was not submitted in time")


def test_large_group_has_its_time_between_two_submissions(world: World) -> None:
    specs = in_group(TRAINER, SAMPLER, CPU)
    for spec in specs[:2]:
        world.do(JobSubmittedEvent(spec, world.now))
        world.now += COMPLETE_S - 1
        world.do(TimePassedEvent(world.now))
    world.do(JobSubmittedEvent(specs[2], world.now))
    assert [job.state for job in world.state.jobs.values()] == [JobState.PENDING] * 3


def test_group_that_ended_incomplete_begins_again_from_another_pool(world: World) -> None:
    first, second = in_group(TRAINER, SAMPLER)
    world.do(JobSubmittedEvent(first, world.now))
    world.do(JobCancelledEvent("trainer", "the other was refused"))
    world.do(JobSubmittedEvent(first, world.now))
    assert world.state.jobs["trainer"].state is JobState.KILLED, "a repeated call of its own pool changes nothing"
    for spec in (first, second):
        world.do(JobSubmittedEvent(replace(spec, owner="another pool"), world.now))
    world.schedule()
    assert [attempts(world, name) for name in ("trainer", "sampler")] == [[1], [1]]


def test_group_that_has_run_does_not_begin_again(world: World) -> None:
    trainer, _ = running_group(world)
    world.do(JobCancelledEvent("trainer", "enough"))
    with pytest.raises(IllegalTransitionError, match="with another spec"):
        world.do(JobSubmittedEvent(replace(trainer.spec, owner="another pool"), world.now))


def test_one_job_of_a_group_gets_no_hosts_alone(world: World) -> None:
    submit_group(world, TRAINER, SAMPLER, CPU)
    world.do(cpu_host("c"))
    alone = GangAssignedEvent("trainer", ("a",), (("a-0", "a-1"),))
    other = GangAssignedEvent("sampler", ("b",), (("b-0", "b-1"),))
    rest = TasksAssignedEvent("prepare", (0, 1), "c")
    with pytest.raises(IllegalTransitionError, match="with all of its group, or none"):
        world.do(alone)
    for some in ((alone,), (alone, other), (alone, other, replace(rest, task_indices=(0,)))):
        with pytest.raises(IllegalTransitionError, match="starts as a whole"):
            world.do(GroupAssignedEvent(some))
    with pytest.raises(IllegalTransitionError, match="c is gone or full"):
        world.do(GroupAssignedEvent((alone, other, rest)))
    with pytest.raises(IllegalTransitionError, match="a-0 is gone or full"):
        world.do(GroupAssignedEvent((alone, replace(alone, job_id="sampler"), rest)))
    assert not world.busy()


def test_lost_slice_restarts_one_job_only(world: World) -> None:
    trainer, sampler = running_group(world)
    world.long_run()
    world.lose(sampler.tasks[0].node_id or "")
    world.confirm(sampler)
    assert (trainer.state, sampler.state) == (JobState.RUNNING, JobState.PENDING)
    world.add_slice("c")
    world.schedule()
    assert (trainer.attempt, sampler.attempt) == (1, 2)


@pytest.mark.parametrize("name", ["trainer", "sampler"])
def test_job_that_fails_for_good_ends_the_others(world: World, name: str) -> None:
    jobs = {job.spec.job_id: job for job in running_group(world, "trainer")}
    failed = jobs.pop(name)
    world.do(JobCancelledEvent("nobody", "enough"))
    for _ in range(failed.spec.max_retries_failure + 1):
        world.report(failed, S.FAILED, error="boom")
    (other,) = jobs.values()
    assert (failed.state, other.state) == (JobState.FAILED, JobState.KILLED)
    assert other.error == f"{name} of its group rl has ended as failed: boom"


def test_rest_ends_once_the_main_jobs_have_succeeded(world: World) -> None:
    trainer, sampler = running_group(world, "trainer")
    for task in trainer.tasks:
        world.report(trainer, S.SUCCEEDED, task.index)
    assert (trainer.state, sampler.state) == (JobState.SUCCEEDED, JobState.KILLED)
    assert sampler.error == "the main jobs of its group rl have succeeded: trainer"


def test_job_that_comes_after_its_group_has_ended_ends(world: World) -> None:
    first, second = in_group(TRAINER, SAMPLER)
    world.do(JobSubmittedEvent(first, world.now))
    world.do(JobCancelledEvent("trainer", "enough"))
    world.do(JobSubmittedEvent(second, world.now))
    assert world.state.jobs["sampler"].error == "trainer of its group rl has ended as killed: enough"


def test_group_comes_after_what_any_of_its_jobs_awaits(world: World) -> None:
    first = world.start("first")
    trainer, sampler = submit_group(world, TRAINER, replace(SAMPLER, after={"first": "succeeded"}))
    assert not world.state.pending()
    world.now += 50.0
    world.finish(first)
    assert [*world.state.pending()] == [trainer]
    assert trainer.gang.waiting_since == sampler.gang.waiting_since == world.now


def test_jobs_that_differ_are_no_group(world: World) -> None:
    one, two = in_group(TRAINER, SAMPLER)
    world.do(JobSubmittedEvent(one, world.now))
    for other in (replace(two, user="bob"), replace(two, priority=PriorityBand.BATCH)):
        with pytest.raises(IllegalTransitionError, match="differ in group, user, team or band"):
            world.do(JobSubmittedEvent(other, world.now))
    members = (("a", "job-a"), ("b", "job-b"))
    for wrong in (
        ("g", "rl", (), ("a",)),
        ("g", "rl", members, ("c",)),
        ("g", "rl", members, ()),
        ("g", "rl", (*members, ("a", "job-c")), ("a",)),
        ("g", "no name", members, ("a",)),
    ):
        with pytest.raises(InvalidJobError, match="group "):
            GroupSpec(*wrong)
    with pytest.raises(InvalidJobError, match="has no job sampler"):
        replace(SAMPLER, group=GroupSpec("g", "rl", members, ("a",)))


@pytest.mark.parametrize("life", ["incomplete", "waiting", "running"])
def test_restarted_controller_knows_the_group(world: World, life: str) -> None:
    specs = in_group(TRAINER, SAMPLER)
    for spec in specs[: 1 if life == "incomplete" else 2]:
        world.do(JobSubmittedEvent(spec, world.now))
    if life == "running":
        world.schedule()
    new = World()
    new.now = world.now + 5.0
    add_slices(new, *"ab")
    for job_id in world.state.jobs:
        new.restore(world, job_id)
        new.state.check()
    assert len(new.state.pending()) == (life == "waiting")
    if life == "waiting":
        assert new.state.jobs["sampler"].gang.waiting_since == world.now, "it has not begun to wait anew"
    if life == "incomplete":
        new.do(JobSubmittedEvent(specs[1], new.now))
    new.schedule()
    assert new.busy() == {"a-0", "a-1", "b-0", "b-1"}
