"""A group's turn: all its jobs in one plan or none, with limits, a promise, and reasons."""

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.pending_reason import PendingKind
from iris_ray.state.events import GroupAssignedEvent, JobSubmittedEvent, JobYieldsEvent, LimitsSetEvent
from tests.support.worlds import S, World, add_slices, cpu_host, gang_spec, promised, submit_group, tasks_spec


@pytest.fixture(autouse=True)
def three_slices(world: World) -> None:
    add_slices(world, "a", "b", "c")


def started(world: World) -> bool:
    return any(isinstance(one, GroupAssignedEvent) for one in world.plan().assignments)


def test_group_holds_nothing_while_one_of_its_jobs_does_not_fit(world: World) -> None:
    world.start("other", slices=(2,))
    submit_group(world, gang_spec("trainer"), gang_spec("sampler"))
    small = world.submit("small")
    plan = world.plan()
    assert [one.job_id for one in plan.assignments] == ["small"], "a job behind it may pass"
    why = str(plan.pending_reasons["trainer"])
    assert why.startswith("group rl starts as a whole, and sampler can't start; waiting for 1 slice")
    assert "group rl starts as a whole" in plan.pending_reasons["sampler"].summary
    assert small.gang.pending


def test_job_with_few_choices_goes_first(world: World) -> None:
    world.add_slice("d", rack="one")
    world.start("other", slices=(2,))
    constraints = (*gang_spec("picky").constraints, Constraint("rack", ConstraintOp.EQ, "one"))
    picky = gang_spec("picky", constraints=constraints)
    submit_group(world, gang_spec("any"), picky)
    assert started(world)


def test_group_takes_more_slices_only_if_all_still_fit(world: World) -> None:
    submit_group(world, gang_spec("trainer", slices=(1, 2, 3)), gang_spec("sampler"))
    world.schedule()
    assert {job_id: len(job.gang.groups) for job_id, job in world.state.jobs.items()} == {"trainer": 2, "sampler": 1}


def test_tasks_share_hosts_with_gangs_of_their_group(world: World) -> None:
    submit_group(world, gang_spec("trainer", slices=(3,)), tasks_spec("prepare", 6, resources={"CPU": 8.0}))
    assert started(world)
    world.schedule()
    submit_group(world, tasks_spec("more", 1, resources={"CPU": 1.0}), name="late")
    assert not started(world)


def test_limit_counts_the_whole_group(world: World) -> None:
    world.do(LimitsSetEvent("", PriorityBand.INTERACTIVE, Limits(chips=16.0)))
    submit_group(world, gang_spec("trainer"), gang_spec("sampler", slices=(2,)))
    plan = world.plan()
    assert not plan.assignments
    assert [plan.pending_reasons[name].kind for name in ("trainer", "sampler")] == [PendingKind.LIMITED] * 2
    world.do(LimitsSetEvent("", PriorityBand.INTERACTIVE, Limits(chips=24.0, running_jobs=1)))
    assert not started(world)
    world.do(LimitsSetEvent("", PriorityBand.INTERACTIVE, Limits(chips=24.0, running_jobs=2)))
    assert started(world)
    assert world.submit("later", device="v4-16").state is not None


def test_starving_group_is_promised_all_its_hosts_at_once(world: World) -> None:
    others = [world.start(name) for name in ("one", "two", "three")]
    trainer, _ = submit_group(world, gang_spec("trainer"), gang_spec("sampler", slices=(2,)))
    world.schedule()
    assert promised(trainer) == ()
    world.now += 700.0
    world.schedule()
    assert len(promised(trainer)) == 6
    for job in others:
        world.finish(job)
        world.submit(f"small-{job.spec.job_id}", user="bob")
        if job is not others[-1]:
            assert not world.plan().assignments, "nobody passes it any more"
    assert "gets" in str(world.plan().pending_reasons.get("trainer", "gets"))
    world.schedule()
    assert len(trainer.gang.groups) == 1
    assert promised(trainer) == ()


def test_yielding_job_leaves_for_a_starving_group(world: World) -> None:
    job = world.start("held", slices=(3,), max_retries_preemption=9)
    world.do(JobYieldsEvent("held", yields=True))
    submit_group(world, gang_spec("trainer"), gang_spec("sampler"))
    world.now += 700.0
    world.schedule()
    assert job.gang.eviction is not None
    assert job.gang.eviction.job_id == "trainer"


def test_hosts_for_which_attempts_leave_for_a_group_are_not_lent(world: World) -> None:
    jobs = [world.start(name, priority=PriorityBand.BATCH) for name in ("one", "two", "three")]
    submit_group(world, gang_spec("trainer"), gang_spec("sampler", slices=(2,)))
    world.now += 700.0
    world.schedule()
    assert all(job.gang.eviction is not None for job in jobs)
    world.finish(jobs[0])
    world.submit("short", user="bob", max_runtime=1.0)
    assert not world.plan().assignments


def test_group_that_can_not_fit_keeps_nothing_from_others(world: World) -> None:
    world.start("other", slices=(2,))
    submit_group(world, gang_spec("trainer", slices=(2,)), gang_spec("sampler", slices=(2,)))
    world.now += 700.0
    waits = world.submit("waits", slices=(3,))
    waits.gang.waiting_since = 0.0
    world.schedule()
    assert len(promised(waits)) == 6


def test_timeout_of_one_job_gives_up_the_group(world: World) -> None:
    world.start("other", slices=(3,))
    submit_group(world, gang_spec("trainer"), gang_spec("sampler", scheduling_timeout=30.0))
    world.now += 31.0
    (late,) = world.plan().timed_out
    assert late.job_id == "sampler"


def test_reasons_of_a_group_outlast_a_plan_of_new_jobs(world: World) -> None:
    world.start("other", slices=(2,))
    submit_group(world, gang_spec("trainer"), gang_spec("sampler"))
    reasons = world.plan().pending_reasons
    world.do(JobSubmittedEvent(gang_spec("new", slices=(3,)), world.now))
    assert {"trainer", "sampler", "new"} <= world.plan(reasons).pending_reasons.keys()
    world.do(cpu_host("c"))
    assert S.PENDING in world.state.jobs["sampler"].counts
