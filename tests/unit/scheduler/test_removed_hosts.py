"""Hosts promised to a job that is not to run there: their slices are to be removed, and it gets others instead."""

import pytest

from iris_ray.model.jobs import Job
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    JobCancelledEvent,
    LimitsSetEvent,
    PromiseEvent,
    SliceReleasedEvent,
    WorkerFailedEvent,
)
from tests.support.worlds import MANY, PlannedWorld, World, add_slices, is_told_to_leave, promised

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
HOSTS = ("a-0", "a-1", "b-0", "b-1")
LATER = 200.0


@pytest.fixture
def world() -> PlannedWorld:
    """Two v4-16, on which BATCH jobs run, and a job that waits for a v4-32."""
    world = PlannedWorld("a", "b")
    world.run("first", priority=BATCH)
    world.run("second", priority=BATCH)
    world.submit("large", tpu_type="v4-32", owner="pool-b", priority=INTERACTIVE)
    world.turn()
    return world


def large(world: World) -> Job:
    return world.state.jobs["large"]


def remove(world: World, *victims: str, node_ids: tuple[str, ...] = HOSTS) -> None:
    jobs = [world.state.jobs[job_id] for job_id in victims or ("first", "second")]
    leave = tuple(job.current_attempt(job.gang) for job in jobs)
    world.do(PromiseEvent("large", node_ids, leave, world.now + 30.0, removed_by=world.now + LATER))


def leave_all(world: PlannedWorld) -> None:
    """Both victims heed their notices, their ends are confirmed, and their pools keep nothing."""
    for job_id, name in (("first", "a"), ("second", "b")):
        job = world.state.jobs[job_id]
        attempt = job.current_attempt(job.gang)
        world.leave(job)
        world.do(AttemptEndConfirmedEvent(attempt))
        world.do(SliceReleasedEvent(name, "pool-a"))


def test_victims_get_notice_with_the_reason_and_leave_by_the_deadline(world: PlannedWorld) -> None:
    remove(world)
    first = world.state.jobs["first"]
    assert is_told_to_leave(first)
    assert first.gang.notice is not None
    assert "INTERACTIVE job large of" in first.gang.notice.reason
    assert "takes its chips from BATCH" in first.gang.notice.reason
    world.turn(10.0)
    assert promised(large(world)) == HOSTS, "a plan keeps it, although the job can't run there"
    world.turn(25.0)
    assert not first.gang.placed
    assert first.evictions == 1
    world.check()


def test_no_job_of_the_band_or_a_lower_one_gets_the_hosts(world: PlannedWorld) -> None:
    remove(world)
    leave_all(world)
    world.submit("same", priority=INTERACTIVE)
    world.turn(10.0, times=5)
    waiting = world.state.jobs["same"], world.state.jobs["first"]
    assert not any(job.gang.placed for job in waiting)
    assert "is kept for large" in str(world.planner.pending_reasons["same"])
    assert world.planner.pending_reasons["large"].kept == (), "it does not get these slices itself"
    world.submit("higher", priority=PRODUCTION)
    world.turn()
    assert world.state.jobs["higher"].gang.placed
    assert promised(large(world)) == ()


def test_victims_continue_if_the_job_is_gone_or_the_promise_is_revoked(world: PlannedWorld) -> None:
    remove(world)
    world.do(JobCancelledEvent("large", "enough"))
    world.turn(60.0)
    first = world.state.jobs["first"]
    assert first.gang.placed
    assert not is_told_to_leave(first)


def test_job_that_gets_room_elsewhere_needs_no_removal(world: PlannedWorld) -> None:
    remove(world)
    add_slices(world, "roomy", tpu_type="v4-32")
    world.turn()
    assert large(world).gang.placed
    world.turn(60.0)
    assert world.state.jobs["first"].gang.placed


def test_promise_ends_when_its_time_is_over_and_hosts_are_ordinary_again(world: PlannedWorld) -> None:
    remove(world)
    leave_all(world)
    world.turn(LATER - 1.0)
    assert promised(large(world)) == HOSTS
    world.turn(1.0)
    assert promised(large(world)) == ()
    assert world.state.jobs["first"].gang.placed


def test_promise_ends_with_the_first_removed_host(world: PlannedWorld) -> None:
    remove(world)
    leave_all(world)
    world.do(WorkerFailedEvent("a-0", "its slice was deleted"))
    assert promised(large(world)) == ()
    world.check()


def test_promise_counts_the_chips_that_the_job_gets_not_those_of_the_hosts() -> None:
    """A large slice goes for a small one. The user may have 12 chips, and has another job of four."""
    world = PlannedWorld()
    add_slices(world, "wide", tpu_type="v4-32")
    add_slices(world, "tiny", tpu_type="v4-8")
    batch = world.run("batch", tpu_type="v4-32", priority=BATCH)
    world.do(LimitsSetEvent("u", INTERACTIVE, Limits(chips=12)))
    about = {"priority": INTERACTIVE, "user": "u", "owner": "pool-b"}
    world.submit("small", tpu_type="v4-16", **about)
    world.turn()
    hosts = tuple(host.node_id for host in world.state.fleet.slice_workers("wide"))
    attempt = batch.current_attempt(batch.gang)
    world.do(PromiseEvent("small", hosts, (attempt,), world.now + 30.0, removed_by=world.now + LATER))
    other = world.submit("other", tpu_type="v4-8", **about)
    world.turn(1.0)
    assert promised(world.state.jobs["small"]) == hosts
    assert other.gang.placed


def test_promise_of_a_job_beyond_its_limit_is_revoked(world: PlannedWorld) -> None:
    remove(world)
    world.do(LimitsSetEvent(large(world).spec.user, INTERACTIVE, Limits(chips=4)))
    world.turn(1.0)
    assert promised(large(world)) == ()
    assert not is_told_to_leave(world.state.jobs["first"])


def test_successor_keeps_the_promise(world: PlannedWorld) -> None:
    remove(world)
    new = PlannedWorld("a", "b")
    new.now = world.now
    new.restore(world)
    assert large(new).promise == large(world).promise
    new.turn(10.0)
    assert promised(large(new)) == HOSTS
    assert is_told_to_leave(new.state.jobs["first"])


@pytest.fixture
def held() -> PlannedWorld:
    """Two v4-16, of which one is idle and an INTERACTIVE job has begun on the other one, both held for a v4-32."""
    world = PlannedWorld("a", "b")
    world.start("second", priority=INTERACTIVE)
    world.submit("large", tpu_type="v4-32", owner="pool-b", priority=INTERACTIVE)
    world.turn(1000.0)
    world.do(PromiseEvent("large", HOSTS, removed_by=world.now + 5000.0))
    world.turn()
    return world


def test_held_slice_is_lent_and_kept_from_jobs_that_stay(held: PlannedWorld) -> None:
    stays = held.submit("stays", priority=INTERACTIVE)
    held.turn()
    assert not stays.gang.placed
    borrower = held.submit("borrower", priority=BATCH, **MANY)
    held.turn()
    assert borrower.gang.placed
    promise = large(held).promise
    assert promise is not None
    assert promise.lent == ("borrower",)
    held.check()


def test_idle_held_slices_are_lent_no_more(held: PlannedWorld) -> None:
    second = held.state.jobs["second"]
    held.finish(second)
    late = held.submit("late", priority=BATCH, **MANY)
    held.turn()
    assert not late.gang.placed
    assert promised(large(held)) == HOSTS


def test_held_slices_that_idle_for_too_long_are_held_no_more(held: PlannedWorld) -> None:
    stays = held.submit("stays", priority=INTERACTIVE)
    held.state.jobs["second"].gang.running_since -= 5000.0
    held.turn(1.0, times=2)
    assert promised(large(held)) == ()
    assert stays.gang.placed


def test_job_that_needs_held_slices_no_more_loses_them(held: PlannedWorld) -> None:
    held.do(LimitsSetEvent(large(held).spec.user, INTERACTIVE, Limits(chips=8)))
    held.turn()
    assert promised(large(held)) == ()
