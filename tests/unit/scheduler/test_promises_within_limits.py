"""What a waiting job is promised counts towards the limits of its user, and lasts within them."""

import pytest

from iris_ray.model.lifecycle import TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import UNCONFIRMED_S
from iris_ray.scheduler.eviction_costs import GRACE_S
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import JobYieldsEvent, LimitsSetEvent, WorkerDrainedEvent
from tests.support.worlds import (
    LONG,
    MANY,
    PlannedWorld,
    add_slices,
    asked_to_leave,
    gang_spec,
    host,
    hosts_of,
    is_told_to_leave,
    on,
    promised,
    set_teams,
    submit_group,
)

S = TaskState
_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
LATE = BACKFILL_BOUND_S + 1


@pytest.fixture
def world() -> PlannedWorld:
    """Two slices."""
    return PlannedWorld("a", "b")


@pytest.mark.parametrize("limits", [{"chips": 8}, {"running_jobs": 1}], ids=str)
def test_hosts_of_a_stopped_victim_count_against_the_takers_limit(world: PlannedWorld, limits: dict[str, int]) -> None:
    """The victim's end is not confirmed yet. Its job would start again, with nothing gained."""
    busy = world.run("busy", user="bob", priority=PRODUCTION, **on("b"))
    victim = world.run("batch", priority=BATCH, **on("a"))
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(**limits)))
    takes = world.submit("takes", user="ann", priority=PRODUCTION, **on("a"))
    other = world.submit("other", user="ann", priority=PRODUCTION, **on("b"))
    world.turn()
    assert is_told_to_leave(victim)
    world.turn(GRACE_S)
    assert victim.gang.pending
    world.finish(busy)
    world.turn()
    assert not other.gang.placed
    assert "waiting for the limit of ann" in str(world.planner.pending_reasons["other"])
    world.confirm(victim, 1)
    world.turn()
    assert (takes.gang.placed, other.gang.placed, victim.gang.placed) == (True, False, False)


@pytest.mark.parametrize(("most", "leaves"), [(2, True), (1, False)])
def test_nobody_leaves_for_a_job_that_runs_only_by_an_attempt_that_has_ended(
    world: PlannedWorld, most: int, leaves: bool
) -> None:
    """Once the end is confirmed, another job of the user would be too many, by the limit that was lowered."""
    add_slices(world, "c")
    victim = world.run("victim", priority=BATCH, **on("c"))
    world.run("other", user="ann", **on("a"))
    takes = world.run("takes", user="ann")
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(running_jobs=most)))
    world.report(takes, S.FAILED)
    world.turn(UNCONFIRMED_S + 1.0)
    assert is_told_to_leave(victim) == leaves


def test_nobody_leaves_while_a_slice_is_kept_for_a_job_past_its_limit(world: PlannedWorld) -> None:
    """The job lost its promise later in the same plan."""
    add_slices(world, "c")
    world.run("batch", user="bob", priority=BATCH, **on("b"))
    world.run("first", user="ann", **on("c"))
    over = world.run("over", user="bob", **on("a"))
    world.submit("starving", user="ann", **on("a"))
    world.turn(LATE)
    world.report_all(over, S.SUCCEEDED)
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=8)))
    world.submit("takes", user="cy", priority=INTERACTIVE)
    assert not asked_to_leave(world.plan())


def test_nobody_leaves_for_tasks_that_others_of_their_job_keep_from_running(world: PlannedWorld) -> None:
    """A slice comes that nobody expected. With the tasks there, the job has all that its user may have."""
    for name in "ab":
        world.run(f"batch-{name}", priority=BATCH, **on(name))
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(chips=12)))
    tasks = world.submit_tasks("tasks", 6, user="ann", priority=PRODUCTION)
    world.turn()
    assert len(promised(tasks)) == 3
    add_slices(world, "c")
    world.turn()
    assert hosts_of(tasks) == ("c-0", "c-1")
    assert len(promised(tasks)) == 1
    world.turn(1.0)
    assert len(promised(tasks)) == 1


def test_nobody_leaves_for_tasks_that_a_lower_limit_keeps_from_running(world: PlannedWorld) -> None:
    """What the first victim has left is enough for all tasks that may run."""
    first, second = (world.run(f"batch-{name}", priority=BATCH, **on(name)) for name in "ab")
    tasks = world.submit_tasks("tasks", 4, user="ann", priority=PRODUCTION)
    world.turn()
    assert len(promised(tasks)) == 4
    world.leave(second)
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(chips=8)))
    world.turn()
    assert promised(tasks) == ("b-0", "b-1")
    assert not is_told_to_leave(first)


def test_promise_to_a_task_lasts_when_another_task_runs_again_elsewhere(world: PlannedWorld) -> None:
    """What is left of the limit was kept for an older job, as if the task had used up what is reserved for it."""
    world.run("batch", priority=BATCH, **on("a"))
    world.run("busy", user="bob", priority=PRODUCTION, **on("b"))
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=8)))
    add_slices(world, "c")
    world.submit("large", user="ann", priority=INTERACTIVE, **on("b"))
    tasks = world.start_tasks("tasks", 2, user="ann", priority=INTERACTIVE)
    world.turn(5.0)  # sooner than the bound
    world.lose("c-0")
    world.turn()
    assert promised(tasks) == ("a-0",)
    world.report(tasks, S.WORKER_FAILED, 1)
    world.confirm(tasks, index=1)
    world.turn(BACKFILL_BOUND_S)
    assert "the rest is kept for it" in str(world.planner.pending_reasons["large"])
    assert (hosts_of(tasks), promised(tasks)) == (("c-1",), ("a-0",))


def test_promise_to_tasks_lasts_beside_a_reservation_of_their_user_without_victims(world: PlannedWorld) -> None:
    """A host comes that nobody expected. The victim would leave in vain for the tasks that do not run there."""
    world.run("batch", user="cy", priority=BATCH, **on("a"))
    world.run("busy", user="bob", priority=PRODUCTION, **on("b"))
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=16)))
    large = world.submit("large", user="ann", priority=INTERACTIVE, **on("b"))
    world.turn(LATE)
    assert promised(large) == ("b-0", "b-1")
    tasks = world.submit_tasks("tasks", 3, user="ann", priority=INTERACTIVE)
    world.turn()
    assert promised(tasks) == ("a-0", "a-1")
    world.do(host("c", 0))
    world.turn()
    assert (hosts_of(tasks), promised(tasks)) == (("c-0",), ("a-0", "a-1"))


def test_promise_to_tasks_lasts_until_the_end_of_their_users_job_is_confirmed(world: PlannedWorld) -> None:
    """Its chips count until then, though nobody leaves them for the tasks."""
    add_slices(world, "c")
    victim = world.run("batch", user="cy", priority=BATCH, **on("a"))
    world.run("busy", user="bob", priority=PRODUCTION, **on("b"))
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=16)))
    short = world.run("short", user="ann", priority=INTERACTIVE, **on("c"))
    tasks = world.submit_tasks("tasks", 3, user="ann", priority=INTERACTIVE)
    world.turn()
    assert is_told_to_leave(victim)
    world.report_all(short, S.SUCCEEDED)
    world.do(host("d", 0))
    world.turn()
    assert (hosts_of(tasks), promised(tasks)) == (("d-0",), ("a-0", "a-1"))


def test_promise_lasts_until_the_yielding_job_of_its_user_has_left(world: PlannedWorld) -> None:
    """Its chips count still, and those of its hosts do when it has ended before its time."""
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=8)))
    idle = world.run("idle", user="ann", **on("a"))
    world.run("busy", user="bob", **on("b"))
    world.do(JobYieldsEvent("idle", True))
    waits = world.submit("waits", user="ann")
    world.turn()
    for _ in range(10):
        assert is_told_to_leave(idle)
        world.turn(1.0)
    world.report(idle, S.FAILED)
    world.turn(1.0)
    world.confirm(idle, 1)
    world.turn()
    assert (waits.gang.placed, idle.gang.placed) == (True, False)


def test_promise_lasts_while_a_yielding_job_of_its_user_leaves_to_another_job(
    world: PlannedWorld,
) -> None:
    """Else the first job would be over the limit until then: it lost its hosts, and who had left them left in vain."""
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=16)))
    add_slices(world, "c")
    idle = world.run("idle", user="ann", **on("a"))
    batch = world.run("batch", user="bob", priority=BATCH, **on("b"))
    world.do(JobYieldsEvent("idle", True))
    first = world.submit("first", user="ann", **on("b"))
    world.turn()
    world.leave(batch)
    second = world.submit("second", user="ann", **on("a"))
    world.turn(1.0, times=10)
    assert (promised(first), promised(second), is_told_to_leave(idle)) == (("b-0", "b-1"), ("a-0", "a-1"), True)
    world.confirm(batch, 1)
    world.leave(idle)
    world.turn(1.0, times=10)  # its end is not confirmed yet
    assert (promised(first), promised(second)) == (("b-0", "b-1"), ("a-0", "a-1"))
    world.confirm(idle, 1)
    world.turn()
    assert (hosts_of(first), hosts_of(second)) == (("b-0", "b-1"), ("a-0", "a-1"))


@pytest.mark.parametrize("is_confirmed", [True, False])
def test_promise_outlasts_a_lowered_limit_for_as_long_as_an_end_of_its_user_may_be_confirmed(
    world: PlannedWorld, is_confirmed: bool
) -> None:
    """Else who had left for it would have left in vain, seconds before its job could run."""
    victim = world.run("batch", user="bob", priority=BATCH, **on("a"))
    ended = world.run("ended", user="ann", priority=PRODUCTION, **on("b"))
    takes = world.submit("takes", user="ann", priority=PRODUCTION, **on("a"))
    world.turn()
    world.leave(victim)
    world.report_all(ended, S.SUCCEEDED)
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(chips=8)))
    world.turn(1.0, times=10)
    assert promised(takes) == ("a-0", "a-1")
    world.confirm(victim, 1)
    world.turn(1.0)
    assert (hosts_of(takes), promised(takes)) == ((), ("a-0", "a-1")), "the limit counts what has not left"
    if is_confirmed:
        world.confirm(ended)
    world.turn(UNCONFIRMED_S)
    assert bool(takes.gang.placed) is is_confirmed
    assert not promised(takes)


def test_spare_that_takes_hosts_is_no_running_job_of_its_user(world: PlannedWorld) -> None:
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(running_jobs=2)))
    job = world.run("job", user="ann")
    add_slices(world, "c")
    for number in range(2):
        world.run(f"idle-{number}", user="slots", may_evict=False)
        world.do(JobYieldsEvent(f"idle-{number}", True))
    world.do(WorkerDrainedEvent(f"{job.gang.groups[0]}-0", "notice", NoticeKind.PREEMPTION, world.now + 60.0))
    waits = world.submit("waits", user="ann")
    world.turn()
    assert promised(world.state.jobs["job/replacement-1"])
    assert promised(waits)


def test_nobody_leaves_for_a_returning_gang_that_a_lower_limit_keeps_from_running(world: PlannedWorld) -> None:
    victim = world.run("batch", priority=BATCH, **on("b"))
    job = world.submit("job", priority=PRODUCTION, user="ann", slices=(2,), **MANY)
    world.turn()
    assert is_told_to_leave(victim)
    job.gang.returning_until = world.now + LONG
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(chips=8)))
    world.turn()
    assert (promised(job), is_told_to_leave(victim)) == ((), False)


def test_job_of_the_same_user_leaves_the_limit_to_the_group_that_victims_leave_for(world: PlannedWorld) -> None:
    """Otherwise the victims would leave in vain: the group would exceed the limit."""
    add_slices(world, "c")
    victims = [world.run(f"batch-{name}", priority=BATCH, **on(name)) for name in "ab"]
    busy = world.run("busy", user="bob", priority=PRODUCTION, **on("c"))
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(chips=16)))
    group = submit_group(world, *(gang_spec(name, user="ann", priority=PRODUCTION) for name in ("trainer", "sampler")))
    world.turn()
    assert all(map(is_told_to_leave, victims))
    world.finish(busy)
    later = world.submit("later", user="ann", priority=PRODUCTION, **on("c"))
    world.turn()
    assert not later.gang.placed
    for victim in victims:
        world.finish(victim)
    world.turn()
    assert all(job.gang.placed for job in group)


def test_returning_gang_over_its_teams_quota_keeps_nothing(world: PlannedWorld) -> None:
    """It would not run even once its own last attempt has left."""
    quotas = "[teams.ads]\nquota.v4-16 = {{ chips = {}, borrow = 0 }}\n[teams.vision]\nquota.v4-16 = 0"
    set_teams(world, quotas.format(8))
    gang = world.run("gang", team="ads")
    set_teams(world, quotas.format(4))
    world.report(gang, S.WORKER_FAILED)
    other = world.submit("other", team="vision", **on("b"))
    world.turn()
    assert "the limit of team ads" in str(world.planner.pending_reasons["gang"])
    assert other.gang.placed
