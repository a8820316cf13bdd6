"""Jobs take hosts from lower bands: who is told, who is stopped when, what it costs, and when it is called off."""

import math

import pytest

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.state.attempt_ends import Owner
from iris_ray.state.events import (
    AttemptSavesEvent,
    GangMovedEvent,
    JobCancelledEvent,
    JobYieldsEvent,
    MaintenanceCalledOffEvent,
    PromiseEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.support.worlds import S, World, asked_to_leave, charged, hosts_of, promised, task_states

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
GRACE_S = 30.0


def batch(world: World, job_id: str = "batch", **changes: object) -> Job:
    """A BATCH job that has run for longer than its minimum time."""
    job = world.start(job_id, priority=BATCH, max_retries_preemption=3, **changes)
    world.now += 1000.0
    return job


def production(world: World, job_id: str = "prod", **changes: object) -> Job:
    return world.submit(job_id, priority=PRODUCTION, owner="pool-b", **changes)


def pass_time(world: World, seconds: float) -> Instructions:
    world.now += seconds
    return world.state.handle_event(TimePassedEvent(world.now))


def test_victim_gets_notice_and_hosts_go_to_taker(world: World) -> None:
    victim = batch(world, slices=(2,))
    taker = production(world)
    before = world.now
    plan = world.plan()
    assert [event.leave for event in asked_to_leave(plan)] == [(victim.current_attempt(victim.gang),)]
    (told,) = world.do(asked_to_leave(plan)[0]).notices
    assert (told.attempt, told.notice.kind) == (victim.current_attempt(victim.gang), NoticeKind.EVICTION)
    assert told.notice.deadline == before + GRACE_S
    assert "PRODUCTION job prod" in told.notice.reason
    assert not pass_time(world, GRACE_S - 1.0).stop
    (stop,) = pass_time(world, 1.0).stop
    assert stop.attempt == told.attempt
    assert "PRODUCTION job prod" in stop.reason
    assert (task_states(victim), charged(victim), victim.evictions) == ([S.PENDING] * 4, (0, 0), 1)
    assert victim.gang.past[-1].error.startswith("evicted: PRODUCTION job prod")
    assert not world.plan().assignments, "its processes are not gone yet"
    world.confirm(victim)
    world.schedule()
    assert taker.gang.placed
    assert not promised(taker)


# -- what victims lose -------------------------------------------------------------------------------------------------


def tells(world: World, job: Job, saved_s: float | None = None, every_s: float = math.inf, heeds: bool = False) -> None:
    saved_at = 0.0 if saved_s is None else world.now - saved_s
    world.do(AttemptSavesEvent(job.current_attempt(job.gang), saved_at, every_s, heeds))


@pytest.mark.parametrize(
    ("due_s", "heeds", "more_s"),
    [
        (10.0, False, 0.0),
        (28.0, False, 3.0),
        (55.0, False, 30.0),
        (56.0, False, 0.0),
        (-1.0, False, 0.0),
        (28.0, True, 0.0),
    ],
)
def test_victim_whose_regular_save_is_about_to_end_gets_the_seconds(
    world: World, due_s: float, heeds: bool, more_s: float
) -> None:
    victim = batch(world, slices=(2,))
    tells(world, victim, saved_s=100.0, every_s=100.0 + due_s, heeds=heeds)
    production(world)
    world.schedule()
    assert victim.gang.eviction is not None
    assert victim.gang.notice is not None
    assert victim.gang.notice.deadline == victim.gang.eviction.deadline == world.now + GRACE_S + more_s
    assert not pass_time(world, GRACE_S + more_s - 0.5).stop
    assert pass_time(world, 0.5).stop


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("heeds", [True, False])
def test_gangs_last_eviction_outweighs_its_asking_for_notices(world: World, asks: bool, heeds: bool) -> None:
    victim = batch(world, slices=(2,))
    tells(world, victim, heeds=asks)
    attempt = victim.current_attempt(victim.gang)
    assert (attempt in world.state.heeding[BATCH]) is asks
    taker = production(world)
    world.schedule()
    if heeds:
        world.do(GangMovedEvent(attempt, "all its tasks have saved"))
    else:
        pass_time(world, GRACE_S)
    world.confirm(victim)
    assert victim.gang.heeds_notices is heeds
    world.schedule()
    world.finish(taker)
    world.schedule()
    world.report_all(victim, S.RUNNING)
    tells(world, victim, heeds=True)
    assert victim.gang.heeds_notices is heeds
    assert [*world.state.heeding[BATCH]] == ([victim.current_attempt(victim.gang)] if heeds else [])


def test_attempt_that_was_never_started_says_nothing_about_heeding(world: World) -> None:
    victim = world.submit("batch", slices=(2,), priority=BATCH, max_retries_preemption=3)
    world.schedule()
    gang = victim.gang
    world.do(JobYieldsEvent("batch", True))
    production(world)
    world.schedule()
    assert gang.eviction is not None
    pass_time(world, GRACE_S)
    assert gang.heeds_notices is None
    assert gang.evicted_at == (), "its owner has offered the hosts"


def test_save_of_wrong_time_or_attempt_changes_nothing(world: World) -> None:
    job = batch(world, slices=(2,))
    tells(world, job, saved_s=50.0, every_s=300.0)
    known = job.gang.saved_at
    tells(world, job, saved_s=60.0)
    tells(world, job, saved_s=-60.0)
    world.do(AttemptSavesEvent(job.current_attempt(job.gang)._replace(number=7), world.now))
    world.do(AttemptSavesEvent(job.current_attempt(job.gang)._replace(job_id="nobody"), world.now))
    assert (job.gang.saved_at, job.gang.saves_every_s) == (known, 300.0)


def test_evictions_of_the_past_hour_are_known_by_gang_and_owner(world: World) -> None:
    victim = batch(world, slices=(2,))
    production(world)
    world.schedule()
    pass_time(world, GRACE_S)
    at = world.now
    assert victim.gang.evicted_at == (at,)
    assert world.state.evicted_at == {Owner(victim.spec.user): [at]}
    successor = World(*"ab")
    successor.now = world.now
    successor.restore(world, "batch")
    assert successor.state.evicted_at == {Owner(victim.spec.user): [at]}


# -- who is told -------------------------------------------------------------------------------------------------------


def test_nothing_is_evicted_twice_for_one_job(world: World) -> None:
    batch(world, slices=(2,))
    production(world)
    world.schedule()
    for seconds in (0.0, 5.0, 30.0):
        pass_time(world, seconds)
        assert not asked_to_leave(world.plan())


def test_gang_moving_within_grace_is_evicted_too(world: World) -> None:
    victim = batch(world, slices=(2,))
    production(world)
    world.schedule()
    assert not world.do(GangMovedEvent(victim.current_attempt(victim.gang), "all its tasks have saved")).stop
    assert (task_states(victim), charged(victim), victim.evictions) == ([S.PENDING] * 4, (0, 0), 1)
    assert not pass_time(world, GRACE_S).stop


@pytest.mark.parametrize("how", ["cancelled", "other room", "host lost"])
def test_eviction_is_called_off_if_taker_needs_nothing(world: World, how: str) -> None:
    other = world.start("other", slices=(1,), max_retries_preemption=3)
    victim = batch(world)
    production(world)
    world.schedule()
    assert victim.gang.eviction is not None
    match how:
        case "cancelled":
            world.do(JobCancelledEvent("prod", "enough"))
        case "other room":
            world.finish(other)
            world.schedule()
            assert world.state.jobs["prod"].gang.placed
        case "host lost":
            world.lose(victim.tasks[0].node_id or "")
    assert victim.gang.eviction is None
    if how != "host lost":
        assert victim.gang.notice is None
        assert not pass_time(world, 100.0).stop
        assert victim.state is JobState.RUNNING
        assert victim.evictions == 0


def test_eviction_is_told_when_nearer_maintenance_is_called_off(world: World) -> None:
    victim = batch(world, slices=(2,))
    doomed, taken = victim.gang.groups
    world.do(WorkerDrainedEvent(f"{doomed}-0", "maintenance", NoticeKind.MAINTENANCE, world.now + 10.0))
    production(world)
    world.schedule()
    assert victim.gang.eviction is not None
    assert victim.gang.notice is not None
    assert victim.gang.notice.kind is NoticeKind.MAINTENANCE, "it is the nearer one"
    assert promised(world.state.jobs["prod"]) == (f"{taken}-0", f"{taken}-1")
    (told,) = world.do(MaintenanceCalledOffEvent(f"{doomed}-0")).notices
    assert told.notice == victim.gang.notice
    assert (told.notice.kind, told.notice.deadline) == (NoticeKind.EVICTION, world.now + GRACE_S)


def test_victims_are_lower_bands_on_kept_hosts_only(world: World) -> None:
    running = world.start("running", slices=(2,), priority=INTERACTIVE, max_retries_preemption=3)
    world.now += 1000.0
    equal = world.submit("equal", priority=INTERACTIVE)
    higher = production(world)
    attempt = running.current_attempt(running.gang)
    for taker in (equal, higher):
        with pytest.raises(IllegalTransitionError, match="does not leave its hosts"):
            world.do(
                PromiseEvent(
                    taker.spec.job_id, ("z-0",) if taker is higher else hosts_of(running), (attempt,), world.now
                )
            )
    assert running.gang.eviction is None


def test_single_tasks_take_and_give_hosts(world: World) -> None:
    tasks = world.start_tasks("tasks", 4, priority=BATCH)
    world.now += 1000.0
    taker = world.submit_tasks("taker", 3, priority=INTERACTIVE)
    world.schedule()
    evicted = [gang for gang in tasks.gangs if gang.eviction is not None]
    assert len(evicted) == 3
    assert len(promised(taker)) == 3
    pass_time(world, GRACE_S)
    for gang in evicted[:2]:
        world.confirm(tasks, gang.attempt, gang.position)
    world.schedule()
    assert [gang.placed for gang in taker.gangs] == [True, True, False]
    assert len(promised(taker)) == 1, "the third one has still its host"
    world.confirm(tasks, evicted[2].attempt, evicted[2].position)
    world.schedule()
    assert all(gang.placed for gang in taker.gangs)
    assert tasks.evictions == 3
