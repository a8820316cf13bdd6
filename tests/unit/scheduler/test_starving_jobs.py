"""Room for jobs that have waited too long: who gets it, what it is, who may pass, and when it is given up."""

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    JobCancelledEvent,
    PromiseEvent,
    WorkerDrainedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.support.worlds import World, add_slices, assigned_tasks, cpu_host, host, promised

S = TaskState
LATE = BACKFILL_BOUND_S + 1


@pytest.fixture
def world() -> World:
    """Two slices in use, and a gang for which both are kept."""
    return World(*"ab")


def crowded(world: World) -> tuple[Job, Job, Job]:
    """Two jobs that run, and a gang that waits for their slices, which are kept for it."""
    busy = world.start("busy-a", user="other"), world.start("busy-b", user="other")
    large = world.submit("large", user="me", slices=(2,))
    world.now += LATE
    world.schedule()
    assert promised(large) == ("a-0", "a-1", "b-0", "b-1")
    return large, *busy


@pytest.mark.parametrize(
    ("band", "bound_s"),
    [(PriorityBand.SYSTEM, 0.0), (PriorityBand.PRODUCTION, 0.0), (PriorityBand.INTERACTIVE, BACKFILL_BOUND_S)],
)
def test_large_gang_waits_for_small_batch_jobs_until_bound(world: World, band: PriorityBand, bound_s: float) -> None:
    """Each small job runs too short to be evicted, and another one waits to take its place."""
    running = [world.start(name, priority=PriorityBand.BATCH, user="batch") for name in ("one", "two")]
    large = world.submit("large", priority=band, slices=(2,))
    while large.gang.pending:
        world.submit(f"small-{world.now}", priority=PriorityBand.BATCH, user="batch")
        if running:
            world.finish(running.pop(0))
        running += [world.state.jobs[job_id] for job_id in world.schedule()]
        world.now += 5.0
    assert bound_s < world.now - large.submitted_at <= bound_s + 20.0


def test_room_stays_from_plan_to_plan_until_the_job_runs(world: World) -> None:
    large, a, b = crowded(world)
    world.finish(a)
    world.submit("small", user="new")  # has nothing, and comes first
    for _ in range(3):
        assert world.schedule() == {}
        world.now += 100.0
    assert promised(large) == ("a-0", "a-1", "b-0", "b-1")
    assert "gets a, b; waits for the end of" in world.why("large")
    assert "a: is kept for large; b: in use by busy-b, then kept for large" in world.why("small")
    world.submit("greedy", user="new", resources={"TPU": 4.0, "CPU": 10**6})
    world.schedule()
    why = world.why("greedy")
    assert "CPU, a task needs 1,000,000" in why
    assert "kept for large" not in why, "it can't run there afterwards either"
    world.finish(b)
    assert world.schedule().keys() == {"large"}
    assert not promised(large)


def test_room_is_kept_for_first_in_fair_order(world: World) -> None:
    world.start("busy-a", user="hog")
    world.start("busy-b", user="hog")
    old, young = world.submit("old", user="hog", slices=(2,)), world.submit("young", user="modest", slices=(2,))
    world.now += LATE
    world.schedule()
    assert (promised(old), promised(young)) == ((), ("a-0", "a-1", "b-0", "b-1"))


def test_released_room_goes_to_queues_first_job_next_plan(world: World) -> None:
    """When the job runs, the plan goes on behind it. Somebody before it may be due."""
    large, a, b = crowded(world)
    first = world.submit("first", user="new", slices=(2,))
    last = world.submit("last", user="other", slices=(2,))
    world.now += LATE
    world.finish(a)
    world.finish(b)
    assert world.schedule().keys() == {"large"}
    assert (promised(first), promised(last)) == ((), ())
    world.schedule()
    assert (len(promised(first)), promised(last)) == (4, ())
    assert large.gang.placed


def test_new_job_after_release_does_not_pass_starving_one(world: World) -> None:
    """The plan that places 'large' keeps nothing for 'next'. With the fleet unchanged, it must be looked at again."""
    world.add_slice("c")
    busy_c = world.start("busy-c", user="other")
    large, a, b = crowded(world)
    following = world.submit("next", user="new", slices=(2,))
    world.now += LATE
    planner, instructions = Planner(world.state, look_again_s=1.0), Instructions()
    for busy in (a, b, busy_c):
        world.finish(busy)
    assert [placement.job for placement in planner.plan(world.now, instructions)] == [large]
    late = world.submit("late", user="other")
    assert planner.plan(world.now + 0.1, instructions) == []
    assert len(promised(following)) == 4
    assert not late.gang.placed


def test_free_slice_replaces_a_slice_in_use_in_the_room(world: World) -> None:
    world.add_slice("c")
    world.start("busy-c", user="other")
    busy = [world.start(f"busy-{name}", user="other") for name in "ab"]
    large = world.submit("large", user="me", slices=(2,))
    world.now += LATE
    world.schedule()
    assert promised(large) == ("a-0", "a-1", "b-0", "b-1")
    (on_c,) = (job for job in busy if job.gang.groups == ("c",))
    world.finish(on_c)
    world.schedule()
    assert promised(large) == ("c-0", "c-1", "a-0", "a-1")


def test_large_task_keeps_host_from_small_tasks(world: World) -> None:
    """Small tasks fill every gap before it."""
    for name in ("x", "y"):
        world.do(cpu_host(name, cpus=8.0))
    on_cpu = {"constraints": (Constraint("tpu-name", ConstraintOp.NOT_EXISTS),), "user": "crowd"}
    small = world.start_tasks("small", replicas=16, resources={"CPU": 1.0}, **on_cpu)
    large = world.submit_tasks("large", replicas=1, resources={"CPU": 8.0}, **on_cpu | {"user": "me"})
    world.now += LATE
    world.schedule()
    assert len(promised(large)) == 1
    (kept,) = promised(large)
    more = world.submit_tasks("more", replicas=100, resources={"CPU": 1.0}, **on_cpu)
    for task in list(small.tasks):
        world.report(small, S.SUCCEEDED, task.index)
        world.confirm(small, index=task.index)
        world.schedule()
    assert large.tasks[0].node_id == kept
    assert sum(task.state is S.ASSIGNED for task in more.tasks) == 8


def test_room_is_for_one_task_wherever_it_then_runs(world: World) -> None:
    """The job's other tasks wait for their turn: the room goes to the first in the fair order."""
    for name in ("x", "y"):
        world.do(cpu_host(name, cpus=8.0))
    cpus = {"constraints": (Constraint("tpu-name", ConstraintOp.NOT_EXISTS),), "resources": {"CPU": 8.0}}
    busy = world.start_tasks("busy", replicas=2, user="other", **cpus)
    mine = world.submit_tasks("mine", replicas=2, user="me", **cpus)
    world.submit_tasks("yours", replicas=1, user="you", **cpus)
    world.now += LATE
    world.schedule()
    assert promised(mine) == ("x",)
    world.report(busy, S.SUCCEEDED, 1)
    world.confirm(busy, index=1)
    plan = world.plan()
    assert [(task.job_id, task.node_id) for task in assigned_tasks(plan)] == [("mine", "y")]
    assert not plan.starving
    world.schedule()
    assert not promised(mine)
    assert world.plan().starving == ["yours"]
    world.schedule()
    assert promised(world.state.jobs["yours"]) == ("y",), "the younger task there is expected to end first"


def test_higher_band_passes_and_the_job_gets_other_room(world: World) -> None:
    large, a, b = crowded(world)
    world.finish(a)
    urgent = world.submit("urgent", user="third", priority=PriorityBand.PRODUCTION)
    world.submit("later", user="new", priority=PriorityBand.BATCH)
    assert world.schedule().keys() == {"urgent"}
    assert promised(large) == ("a-0", "a-1", "b-0", "b-1")  # it was lost, and kept anew
    world.finish(b)
    assert world.schedule() == {}
    world.finish(urgent)
    assert world.schedule().keys() == {"large"}


def test_higher_band_that_has_waited_as_long_gets_the_room(world: World) -> None:
    large, _, _ = crowded(world)
    urgent = world.submit("urgent", user="third", priority=PriorityBand.PRODUCTION, slices=(2,))
    world.now += LATE
    for _ in range(2):
        world.schedule()
        assert (len(promised(urgent)), promised(large)) == (4, ())


def test_gang_returns_to_its_own_hosts_though_they_are_kept(world: World) -> None:
    busy = world.start("busy", user="other", slices=(2,), max_retries_preemption=5)
    large = world.submit("large", user="me", slices=(2,))
    world.now += LATE
    world.schedule()
    world.report(busy, S.WORKER_FAILED)
    world.confirm(busy)
    assert world.schedule().keys() == {"busy"}
    assert promised(large) == ("a-0", "a-1", "b-0", "b-1")


def test_returning_gang_leaves_slice_kept_for_another_job(world: World) -> None:
    add_slices(world, "c", "d")
    busy = world.start("busy", user="other", slices=(2,), max_retries_preemption=5)
    other = world.start("other", user="other")
    world.start("one-more", user="other")
    large = world.submit("large", user="me", constraints=(Constraint("tpu-name", ConstraintOp.EQ, "c"),))
    world.now += LATE
    world.schedule()
    assert promised(large) == ("c-0", "c-1")
    world.finish(other)
    assert other.gang.groups == ("c",)
    world.do(PromiseEvent("large", ("c-0", "c-1")))
    world.lose("a-0")
    world.confirm(busy)
    assert world.schedule().keys() == {"large"}


@pytest.mark.parametrize("how", ["cancelled", "host lost", "host drains"])
def test_room_is_released_when_job_or_host_is_gone(world: World, how: str) -> None:
    large, a, _ = crowded(world)
    world.finish(a)
    world.submit("small", user="new")
    match how:
        case "cancelled":
            world.do(JobCancelledEvent("large", "enough"))
        case "host lost":
            world.lose("b-0")
        case "host drains":
            world.do(WorkerDrainedEvent("b-0", "it goes"))
    world.schedule()
    assert promised(large) == ()
    world.schedule()
    assert world.busy() >= {"a-0", "a-1"}


def test_task_that_pauses_has_no_room(world: World) -> None:
    world.start("busy-a", user="other")
    world.start("busy-b", user="other")
    one = world.submit_tasks("one", replicas=1, user="me")
    world.now += LATE
    world.schedule()
    assert len(promised(one)) == 1
    one.gangs[0].not_before = world.now + 30.0
    world.schedule()
    assert not promised(one)


def test_room_outlives_the_controller(world: World) -> None:
    crowded(world)
    for without, kept in (((), ("a-0", "a-1", "b-0", "b-1")), (("b-1",), ())):
        new = World()
        for name in "ab":
            for number in range(2):
                if f"{name}-{number}" not in without:
                    new.do(host(name, number))
        new.restore(world, "large", "busy-a", "busy-b")
        assert promised(new.state.jobs["large"]) == kept
        new.state.check()


def test_room_is_refused_without_waiting_job_or_on_lost_hosts(world: World) -> None:
    world.start("runs")
    with pytest.raises(IllegalTransitionError, match="does not wait"):
        world.do(PromiseEvent("runs", ("a-0",)))
    world.submit("waits", slices=(2,))
    with pytest.raises(IllegalTransitionError, match="are gone"):
        world.do(PromiseEvent("waits", ("z-0",)))


def test_host_is_kept_for_one_job(world: World) -> None:
    one, other = (world.submit(name, slices=(2,)) for name in ("one", "other"))
    for job in (one, other):
        world.do(PromiseEvent(job.spec.job_id, ("a-0", "a-1")))
    assert (promised(one), promised(other)) == ((), ("a-0", "a-1"))
