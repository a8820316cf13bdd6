"""Reserved hosts are lent: to whom, until when, and how the job with the reservation gets them back."""

import pytest

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.calendar import HORIZON_S
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S, Scheduler
from tests.support.worlds import (
    MANY,
    PlannedWorld,
    gang_spec,
    is_told_to_leave,
    on,
    promised,
    set_teams,
    submit_group,
)

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
LATE = BACKFILL_BOUND_S + 1


def reserved(world: PlannedWorld, band: PriorityBand = INTERACTIVE, max_runtime: float | None = 3000.0) -> Job:
    """A job with a reservation of both slices, of which "a" is free and "b" in use for 3,000 s more, or unknown."""
    one, _ = (world.submit(name, user="other", priority=band, max_runtime=max_runtime) for name in ("one", "other"))
    world.turn()
    world.now += 1.0
    for name in ("one", "other"):
        world.report_all(world.state.jobs[name], TaskState.RUNNING)
    large = world.submit("large", user="me", slices=(2,), priority=band)
    world.turn(LATE)
    assert len(promised(large)) == 4
    world.finish(one)
    world.turn()
    return large


@pytest.fixture
def world() -> PlannedWorld:
    return PlannedWorld(*"ab")


@pytest.mark.parametrize(
    ("options", "is_lent"),
    [
        ({"max_runtime": 300.0}, True),
        ({"max_runtime": 400.0}, False),
        ({}, False),
        ({"priority": BATCH, "max_retries_preemption": 3}, True),
        ({"priority": BATCH}, False),  # it would end for good
    ],
)
def test_reserved_host_runs_jobs_that_surely_leave_in_time(
    world: PlannedWorld, options: dict[str, object], is_lent: bool
) -> None:
    large = reserved(world)  # expected to be complete in 600 s
    small = world.submit("small", user="new", **options)
    world.turn()
    assert small.gang.placed == is_lent
    assert len(promised(large)) == 4
    assert not large.gang.placed
    if is_lent and "max_runtime" in options:
        world.report_all(small, TaskState.RUNNING)
        world.turn(100.0)
        reason = str(world.planner.pending_reasons["large"])
        assert "small, to which it is lent, in 200 s at the latest" in reason


@pytest.mark.parametrize(("max_runtime", "is_lent"), [(300.0, True), (400.0, False)])
def test_attempts_that_can_only_be_evicted_late_are_expected_to_end_before(
    world: PlannedWorld, max_runtime: float, is_lent: bool
) -> None:
    """Their eviction budgets are used up for most of an hour, and they are expected to run for ten more minutes."""
    one, other = (world.submit(name, user="other", priority=BATCH, **MANY) for name in ("one", "other"))
    world.turn()
    for job in (one, other):
        world.report_all(job, TaskState.RUNNING)
        job.gang.evicted_at = (world.now,) * 6
    large = world.submit("large", user="me", slices=(2,))
    world.turn(LATE)
    world.finish(one)
    world.turn()
    assert len(promised(large)) == 4
    small = world.submit("small", user="new", max_runtime=max_runtime)
    world.turn()
    assert small.gang.placed == is_lent


def test_nothing_is_lent_until_a_notice_while_evictions_are_off(world: PlannedWorld) -> None:
    world.planner = Planner(world.state, 0.5, Scheduler(evictions=None))
    reserved(world)
    small = world.submit("small", user="new", priority=BATCH, max_retries_preemption=3)
    world.turn()
    assert small.gang.pending


@pytest.mark.parametrize("band", [INTERACTIVE, BATCH])
def test_lent_host_is_given_back_within_a_notice_once_the_job_can_run(world: PlannedWorld, band: PriorityBand) -> None:
    large = reserved(world, band)
    small = world.submit("small", user="new", priority=BATCH, max_retries_preemption=3)
    world.turn()
    world.report_all(small, TaskState.RUNNING)
    world.turn(1.0)
    assert not is_told_to_leave(small), "the other slice is still in use"
    world.finish(world.state.jobs["other"])
    world.turn(1.0)
    assert is_told_to_leave(small)
    world.turn(31.0)
    world.confirm(small, 1)
    world.turn(1.0)
    assert large.gang.placed
    assert small.gang.pending
    assert small.evictions == 1


def test_lent_job_of_the_same_band_is_not_evicted(world: PlannedWorld) -> None:
    large = reserved(world)
    small = world.submit("small", user="new", max_runtime=300.0)
    world.turn()
    world.finish(world.state.jobs["other"])
    world.turn(1.0)
    assert small.gang.placed
    assert not is_told_to_leave(small)
    assert len(promised(large)) == 4


def test_nothing_is_reserved_if_nothing_bounds_the_wait(world: PlannedWorld) -> None:
    """A service runs on "b" for ever. Whatever comes free is for others."""
    large = reserved(world, max_runtime=None)
    world.turn(HORIZON_S)
    assert not promised(large), "the service is older than the job's wait"
    small = world.submit("small", user="new")
    world.turn()
    assert small.gang.placed
    world.finish(small)
    world.finish(world.state.jobs["other"])
    world.turn(1.0)
    assert large.gang.placed


def test_time_of_earlier_attempts_is_no_wait(world: PlannedWorld) -> None:
    """A gang of both slices has run for a day. Beside a service of two hours it then reserves nothing."""
    large = world.submit("large", user="me", slices=(2,), max_retries_failure=1)
    world.turn()
    world.report_all(large, TaskState.RUNNING)
    world.now += 86_400.0
    service = world.submit("service", user="other")
    world.report(large, TaskState.FAILED)
    world.confirm(large)
    large.gang.not_before = world.now + 60.0
    world.turn()
    assert service.gang.placed
    world.report_all(service, TaskState.RUNNING)
    world.turn(2 * HORIZON_S)
    world.turn(2 * HORIZON_S)
    assert large.gang.pending
    assert len(promised(large)) == 4, "it has waited for as long as the service has run"
    large.gang.waiting_since = world.now
    world.turn(LATE)
    assert not promised(large)


def test_loans_end_with_the_jobs_that_had_them(world: PlannedWorld) -> None:
    large = reserved(world)
    for number in range(3):
        small = world.submit(f"small-{number}", user="new", max_runtime=60.0)
        world.turn()
        assert large.promise is not None
        assert large.promise.lent == (f"small-{number}",)
        world.finish(small)
        world.turn(1.0)


def test_loans_outlive_the_controller(world: PlannedWorld) -> None:
    reserved(world)
    world.submit("small", user="new", priority=BATCH, max_retries_preemption=3)
    world.turn()
    new = PlannedWorld(*"ab")
    new.restore(world)
    promise = new.state.jobs["large"].promise
    assert promise is not None
    assert promise == world.state.jobs["large"].promise
    assert promise.lent == ("small",)


def test_loans_end_once_a_higher_band_takes_a_reserved_host(caplog: pytest.LogCaptureFixture) -> None:
    """The plan in which that happens asks nobody to leave because of a loan: it would be refused."""
    world = PlannedWorld(*"abc")
    third = world.run("third", user="third", priority=BATCH, **on("c"))
    large = reserved(world, BATCH)
    small = world.submit("small", user="new", priority=BATCH, max_retries_preemption=3)
    world.turn()
    assert large.promise is not None
    assert large.promise.lent == ("small",)
    world.report_all(small, TaskState.RUNNING)
    urgent = world.submit("urgent", user="urgent", **on("b"))
    world.finish(third)
    world.finish(world.state.jobs["other"])
    world.turn(1.0)
    assert urgent.gang.placed
    assert not is_told_to_leave(small)
    assert "refused" not in caplog.text


def test_job_that_comes_first_by_its_quota_takes_a_reserved_host_for_good() -> None:
    """No host is lent to it, although it is of a lower band than the job with the reservation."""
    world = PlannedWorld(*"abcd")
    set_teams(world, "[teams.ml]\nquota.v4-16 = 32\n[teams.'ml/vision']\nquota.v4-16 = 8\n[teams.'ml/audio']")
    world.submit("own", team="ml", priority=PRODUCTION, **on("c"))
    others = [world.submit(f"other-{name}", **MANY, **on(name)) for name in "bd"]
    world.turn()
    for job in world.state.jobs.values():
        world.report_all(job, TaskState.RUNNING)
    for job in others:
        job.gang.evicted_at = (world.now,)  # so that it is left alone for ten minutes
    large = world.submit("large", team="ml/audio", priority=PRODUCTION, slices=(2,))
    world.turn(5.0)
    assert "a-0" in promised(large)
    small = world.submit("small", team="ml/vision")
    world.turn(1.0)
    assert small.gang.placed
    assert promised(large), "it is made again around the host"
    world.report_all(small, TaskState.RUNNING)
    world.finish(others[0])
    world.turn(1.0)
    assert not is_told_to_leave(small), "its team is within its quota"


@pytest.mark.parametrize("band", [INTERACTIVE, BATCH])
def test_host_lent_by_a_group_is_given_back_once_its_jobs_can_run(world: PlannedWorld, band: PriorityBand) -> None:
    one, other = (world.run(name, user="other", priority=band) for name in ("one", "other"))
    trainer, _ = submit_group(world, *(gang_spec(name, user="me", priority=band) for name in ("trainer", "sampler")))
    world.turn(LATE)
    assert len(promised(trainer)) == 4
    world.finish(one)
    small = world.submit("small", user="new", priority=BATCH, max_retries_preemption=3)
    world.turn()
    world.report_all(small, TaskState.RUNNING)
    world.turn(1.0)
    assert not is_told_to_leave(small), "the other slice is still in use"
    world.finish(other)
    world.turn(1.0)
    assert is_told_to_leave(small)
