"""Jobs with ``max_retries_preemption=0`` run once: no growth, no move, and no second attempt after an eviction."""

from collections.abc import Callable

import pytest

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.model.time_lost import FailureCause
from iris_ray.state.events import GangMovedEvent, TimePassedEvent, WorkerDrainedEvent
from iris_ray.state.growth import MOST_S
from tests.support.worlds import S, World, add_slices, asked_to_leave, charged, promised, task_states

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand


@pytest.fixture
def world() -> World:
    """Two slices, "a" and "b"."""
    return World("a", "b")


def run(world: World, job_id: str, retries: int, band: PriorityBand = BATCH, slices: int = 1) -> Job:
    """A gang that has run for longer than the minimum time of its band."""
    job = world.start(job_id, priority=band, slices=(slices,), max_retries_preemption=retries)
    world.now += 1000.0
    return job


def evicted(world: World) -> set[str]:
    return {attempt.job_id for event in asked_to_leave(world.plan()) for attempt in event.leave}


def at_the_deadline(world: World, job: Job) -> None:
    assert job.gang.eviction is not None
    world.now = job.gang.eviction.deadline
    world.do(TimePassedEvent(world.now))


def by_itself(world: World, job: Job) -> None:
    world.do(GangMovedEvent(job.current_attempt(job.gang), "it has saved its state"))


@pytest.mark.parametrize("leaves", [at_the_deadline, by_itself])
def test_evicted_single_run_ends_as_preempted(world: World, leaves: Callable[[World, Job], None]) -> None:
    job = run(world, "once", retries=0, slices=2)
    taker = world.submit("prod", priority=PRODUCTION, owner="pool-b")
    world.schedule()
    leaves(world, job)
    assert (job.state, job.gang.attempt, charged(job), job.evictions) == (JobState.WORKER_FAILED, 1, (0, 1), 1)
    assert task_states(job) == [S.WORKER_FAILED] + [S.COSCHED_FAILED] * 3
    assert "evicted: PRODUCTION job prod" in (job.error or "")
    assert job.times.attempts[-1].cause is FailureCause.EVICTED
    assert promised(taker), "the hosts are still its"
    world.confirm(job)
    world.schedule()
    assert taker.gang.placed


@pytest.mark.parametrize("grow_after", ["auto", 0.0])
def test_single_run_never_grows(world: World, grow_after: float | str) -> None:
    other = world.start("other")
    job = world.start(slices=(1, 2), grow_after=grow_after)
    assert job.gang.groups == ("b",)
    world.finish(other)
    for _ in range(2):
        world.now += MOST_S
        world.do(TimePassedEvent(world.now))
        world.schedule()
    assert [*world.state.jobs] == ["other", "job"]
    assert job.gang.notice is None


def test_slice_about_to_go_is_not_replaced_for_single_run(world: World) -> None:
    job = world.start()
    world.do(WorkerDrainedEvent("a-0", "maintenance", NoticeKind.MAINTENANCE, 5000.0))
    assert job.gang.notice is not None, "its tasks hear of it"
    assert [*world.state.jobs] == ["job"]


# -- as victims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["once", "often"])
def test_single_runs_are_evicted_last_of_their_band(world: World, first: str) -> None:
    """Whichever of the two is younger."""
    for job_id in (first, "often" if first == "once" else "once"):
        run(world, job_id, retries=0 if job_id == "once" else 9)
    world.submit("prod", priority=PRODUCTION)
    assert evicted(world) == {"often"}


def test_two_gangs_are_evicted_before_one_single_run(world: World) -> None:
    add_slices(world, "c", "d")
    for job_id in ("one", "two"):
        run(world, job_id, retries=9)
    run(world, "once", retries=0, slices=2)
    world.submit("prod", slices=(2,), priority=PRODUCTION)
    assert evicted(world) == {"one", "two"}


def test_many_single_runs_do_not_hide_the_others() -> None:
    """A search compares a bounded number of groups in use, the newest first."""
    world = World()
    names = [f"s{number:03}" for number in range(130)]
    add_slices(world, *names, tpu_type="v4-8")
    for number in range(len(names)):
        world.start(f"job-{number}", priority=BATCH, tpu_type="v4-8", max_retries_preemption=0 if number else 9)
    world.now += 1000.0
    world.submit("prod", tpu_type="v4-8", priority=PRODUCTION)
    assert evicted(world) == {"job-0"}
