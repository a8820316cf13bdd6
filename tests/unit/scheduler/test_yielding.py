"""Jobs that yield hold hosts that their owner can do without: whoever waits gets them, without thrashing."""

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import GRACE_S
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S, Scheduler
from iris_ray.state.events import (
    GangMovedEvent,
    JobCancelledEvent,
    JobYieldsEvent,
    PromiseEvent,
    TimePassedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.support.worlds import World, asked_to_leave, cpu_host, promised

S = TaskState
SLOTS = {"resources": {"CPU": 8.0}, "may_evict": False, "user": "slots"}


@pytest.fixture
def world() -> World:
    """Two hosts, each with a job of slots that takes all of it."""
    world = World()
    for name in ("one", "two"):
        world.do(cpu_host(name))
        world.start_tasks(f"slots-{name}", 1, **SLOTS)
    return world


def plan(world: World) -> tuple[list[str], Instructions]:
    """Plan and commit as the Controller does; the jobs that get hosts, in order."""
    instructions = Instructions()
    placements = Planner(world.state, look_again_s=0.5).plan(world.now, instructions)
    return [placement.job.spec.job_id for placement in placements], instructions


def given_way(world: World) -> list[str]:
    return [attempt.job_id for event in asked_to_leave(world.plan()) for attempt in event.leave]


def waiting(world: World, job_id: str = "other", replicas: int = 1, **changes: object) -> Job:
    changes = {"resources": {"CPU": 8.0}, "priority": PriorityBand.BATCH, "user": "other", **changes}
    return world.submit_tasks(job_id, replicas, **changes)


def moves(world: World, job_id: str) -> None:
    """The job has heard the notice, and leaves."""
    job = world.state.jobs[job_id]
    attempt = job.current_attempt(job.gang)
    world.do(GangMovedEvent(attempt, "saved"))
    world.confirm(job)


def test_busy_jobs_keep_their_hosts_from_their_own_band(world: World) -> None:
    waiting(world, priority=PriorityBand.INTERACTIVE)
    assert plan(world)[0] == []
    assert given_way(world) == []


def test_yielding_job_gets_notice_and_leaves_for_a_waiting_job(world: World) -> None:
    world.do(JobYieldsEvent("slots-two", True))
    other = waiting(world)
    placed, instructions = plan(world)
    assert placed == []
    (told,) = instructions.notices
    assert (told.attempt.job_id, told.notice.kind) == ("slots-two", NoticeKind.EVICTION)
    assert told.notice.deadline == world.now + GRACE_S
    moves(world, "slots-two")
    assert plan(world)[0] == ["other"]
    assert other.tasks[0].node_id == "two"
    slots = world.state.jobs["slots-two"]
    assert (slots.preemptions, slots.evictions, slots.gang.pending) == (0, 1, True)


def test_waiting_job_gets_later_yielders_hosts_with_next_plan(world: World) -> None:
    planner, waits = Planner(world.state, look_again_s=60.0), waiting(world)
    planner.plan(world.now, Instructions())
    world.do(JobYieldsEvent("slots-one", True))
    world.now += 0.1
    planner.plan(world.now, Instructions())
    assert [attempt.job_id for attempt in world.state.evicted] == ["slots-one"]
    assert waits.pending


def test_repeated_plans_have_no_more_yielding_jobs_leave_than_are_needed(world: World) -> None:
    for name in ("one", "two"):
        world.do(JobYieldsEvent(f"slots-{name}", True))
    waiting(world)
    for _ in range(3):
        plan(world)
        world.now += 1.0
    assert len(world.state.evicted) == 1


def test_two_waiting_jobs_get_the_hosts_of_two_yielding_jobs(world: World) -> None:
    for name in ("one", "two"):
        world.do(JobYieldsEvent(f"slots-{name}", True))
    waiting(world, replicas=1)
    waiting(world, "another")
    plan(world)
    assert len(world.state.evicted) == 2


def test_yielding_job_stays_away_while_others_leave_for_gang(world: World) -> None:
    """Otherwise it took the first host again while the second was being freed, and so on."""
    world.do(JobYieldsEvent("slots-one", True))
    world.do(JobYieldsEvent("slots-two", True))
    for number in range(2):
        waiting(world, f"other-{number}")
    plan(world)
    moves(world, "slots-one")
    world.now += 10.0
    assert plan(world)[0] == ["other-0"]
    moves(world, "slots-two")
    world.now += 10.0
    assert plan(world)[0] == ["other-1"]


def test_yielding_job_that_waits_while_others_leave_says_why(world: World) -> None:
    world.submit_tasks("more-slots", 1, **SLOTS)
    for job_id in ("slots-one", "more-slots"):
        world.do(JobYieldsEvent(job_id, True))
    waiting(world)
    plan(world)
    assert world.state.jobs["slots-one"].gang.eviction is not None
    assert "then kept for other" in world.why("more-slots")


def test_yielding_job_comes_back_when_no_job_waits(world: World) -> None:
    world.do(JobYieldsEvent("slots-two", True))
    other = waiting(world)
    plan(world)
    moves(world, "slots-two")
    assert plan(world)[0] == ["other"]
    world.report(other, S.RUNNING, 0)
    world.report(other, S.SUCCEEDED, 0)
    world.confirm(other)
    world.now += 10.0
    assert plan(world)[0] == ["slots-two"]


def test_yielding_job_that_has_not_left_at_the_deadline_is_stopped(world: World) -> None:
    world.do(JobYieldsEvent("slots-one", True))
    waiting(world)
    plan(world)
    world.now += GRACE_S
    (stop,) = world.state.handle_event(TimePassedEvent(world.now)).stop
    assert stop.attempt.job_id == "slots-one"


def test_eviction_takes_fresh_yielding_job_before_working_jobs(world: World) -> None:
    world.do(cpu_host("three"))
    world.start_tasks("batch", 1, resources={"CPU": 8.0}, priority=PriorityBand.BATCH)
    world.do(cpu_host("four"))
    world.start_tasks("idle", 1, **{**SLOTS, "priority": PriorityBand.BATCH})
    world.do(JobYieldsEvent("idle", True))
    waiting(world, priority=PriorityBand.PRODUCTION)
    (eviction,) = asked_to_leave(world.plan())
    assert [victim.job_id for victim in eviction.leave] == ["idle"]


def test_jobs_of_slots_take_nothing_from_lower_bands(world: World) -> None:
    world.do(cpu_host("three"))
    world.start_tasks("batch", 1, resources={"CPU": 8.0}, priority=PriorityBand.BATCH)
    world.now += 1000.0
    world.submit_tasks("more", 1, **SLOTS)
    assert asked_to_leave(world.plan()) == []
    world.submit_tasks("gang", 1, resources={"CPU": 8.0})
    assert [eviction.job_id for eviction in asked_to_leave(world.plan())] == ["gang"]


def test_job_that_no_longer_yields_gives_no_hosts_away(world: World) -> None:
    world.do(JobYieldsEvent("slots-one", True))
    world.do(JobYieldsEvent("slots-one", False))
    waiting(world)
    assert given_way(world) == []
    attempt = AttemptId("slots-one", 1)
    with pytest.raises(IllegalTransitionError, match="no lower band"):
        world.do(PromiseEvent("other", ("one",), (attempt,), world.now))


def test_only_a_job_of_one_gang_can_yield(world: World) -> None:
    world.submit_tasks("many", 2)
    with pytest.raises(IllegalTransitionError, match="2 gangs"):
        world.do(JobYieldsEvent("many", True))


def test_spare_beside_leaving_yielder_is_given_back_once() -> None:
    """Its slice is promised to the job that waits. The next spare once got it again with each plan."""
    world = World("a", "b", "c")
    job = world.start("job", spares=1)
    plan(world)
    world.start("slots", may_evict=False, user="slots")
    world.do(JobYieldsEvent("slots", True))
    world.submit("other", slices=(2,), user="other")
    for _ in range(3):
        assert plan(world)[0] == []
        world.now += 1.0
    assert job.spares_made == 2
    moves(world, "slots")
    assert plan(world)[0] == ["other"]


def test_new_yielders_kept_room_is_free_for_waiting_jobs(world: World) -> None:
    """It has waited for so long that hosts were kept for it; then its owner had no use for them any more."""
    world.submit_tasks("slots-three", 1, **SLOTS)
    plan(world)
    world.now += BACKFILL_BOUND_S + 1.0
    plan(world)
    late = world.state.jobs["slots-three"]
    assert promised(late)
    world.do(JobYieldsEvent("slots-three", True))
    waiting(world)
    holder = world.state.jobs[f"slots-{promised(late)[0]}"]
    world.do(JobCancelledEvent(holder.spec.job_id, "enough"))
    world.confirm(holder)
    assert plan(world)[0] == ["other"]
    assert promised(late) == ()


def three_that_yield() -> World:
    world = World()
    for name in ("one", "two", "three"):
        world.do(cpu_host(name))
        world.start_tasks(f"slots-{name}", 1, **SLOTS)
        world.do(JobYieldsEvent(f"slots-{name}", True))
    waiting(world)
    return world


@pytest.mark.parametrize("leaves", ["by itself", "at the deadline"])
def test_ending_host_counts_as_free_until_end_is_confirmed(leaves: str) -> None:
    world = three_that_yield()
    plan(world)
    (attempt,) = world.state.evicted
    if leaves == "by itself":
        world.do(GangMovedEvent(attempt, "saved"))
    else:
        world.now += GRACE_S
        world.do(TimePassedEvent(world.now))
    for _ in range(3):  # its processes are being ended
        world.now += 1.0
        placed, instructions = plan(world)
        assert (placed, instructions.notices) == ([], [])
    world.confirm(world.state.jobs[attempt.job_id])
    assert plan(world)[0] == ["other"]


def test_without_evictions_only_needed_yielders_leave_after_grace() -> None:
    world = three_that_yield()
    planner = Planner(world.state, look_again_s=0.5, scheduler=Scheduler(evictions=None))
    notices = []
    for _ in range(3):
        instructions = Instructions()
        planner.plan(world.now, instructions)
        notices += instructions.notices
        world.now += 1.0
    (told,) = notices
    assert told.notice.deadline == world.now - 3.0 + GRACE_S


def test_spare_that_yields_is_forgotten_with_its_job() -> None:
    world = World("a", "b")
    world.start("job", spares=1)
    world.schedule()
    (spare,) = (job for job in world.state.jobs.values() if job.spec.spare_for)
    world.do(JobYieldsEvent(spare.spec.job_id, True))
    world.do(JobCancelledEvent("job", "enough"))
    assert spare.spec.job_id not in world.state.jobs
    assert list(world.state.yielding()) == []
