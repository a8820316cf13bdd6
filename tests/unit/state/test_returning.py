"""Gangs that ran a moment ago and lost a host: no other job takes the surviving hosts before they are back."""

import pytest

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.fair_queue import WAITS_FOR_OWN_S
from iris_ray.state.attempt_ends import RETURNING_S
from iris_ray.state.events import WorkerSuspectedEvent
from tests.support.worlds import S, World, add_slices, asked_to_leave


@pytest.fixture
def slices() -> str:
    return "abc"


def lose_slice(world: World, name: str) -> None:
    for number in range(2):
        world.lose(f"{name}-{number}")


def rival(world: World, job_id: str = "rival", **changes: object) -> Job:
    """Somebody who uses nothing yet, and comes before others of the band by all other rules."""
    return world.submit(job_id, owner="pool-b", user="somebody", **changes)


def running(world: World) -> dict[str, tuple[str, ...]]:
    jobs = world.state.jobs.values()
    return {job.spec.job_id: job.gang.groups for job in jobs if job.state is JobState.RUNNING}


def test_returning_gang_precedes_band_once_old_attempt_is_gone(world: World) -> None:
    world.submit("other")
    job = world.start(slices=(2,), max_retries_preemption=5)
    other = rival(world, slices=(2,))
    world.add_slice("d")
    lose_slice(world, "b")
    for _ in range(3):  # the survivor is not free yet, and what is free is kept for the gang
        assert world.schedule() == {}
        world.now += 5.0
    assert world.plan().pending_reasons["job"].kept[0] == "d"
    world.confirm(job, 1)
    world.schedule()
    assert job.gang.groups == ("d", "c")
    assert other.state is JobState.PENDING


def test_returning_gang_does_not_precede_higher_band(world: World) -> None:
    job = world.start(max_retries_preemption=5)
    world.start("other", slices=(2,))
    urgent = rival(world, "urgent", priority=PriorityBand.PRODUCTION)
    rival(world, "rival")
    world.report(job, S.WORKER_FAILED)
    assert {i: why.kept for i, why in world.plan().pending_reasons.items()} == {
        "urgent": ("a",),
        "job": ("b",),
        "rival": (),
    }
    world.confirm(job)
    assert world.schedule().keys() == {"urgent"}
    world.finish(urgent)
    assert world.schedule().keys() == {"job"}


def test_pausing_gang_keeps_nothing(world: World) -> None:
    job = world.start(slices=(1, 2, 3), max_retries_preemption=5)
    for _ in range(2):  # the second quick end: now it pauses
        world.report(job, S.WORKER_FAILED)
        world.confirm(job)
        if job.gang.attempt < 2:
            world.schedule()
            world.report_all(job, S.RUNNING)
    assert job.gang.not_before > world.now
    other = rival(world)
    assert world.plan().pending_reasons["job"].kept == ()
    assert list(world.schedule()) == ["rival"]
    world.now = job.gang.not_before
    assert other.gang.groups == ("a",)
    world.schedule()
    assert running(world) == {"job": ("c", "b"), "rival": ("a",)}


def test_returning_gang_keeps_no_more_than_it_had(world: World) -> None:
    world.start("other", slices=(2,))
    job = world.start(slices=(1, 2, 3), max_retries_preemption=5)
    assert job.gang.groups == ("c",)
    world.finish(world.state.jobs["other"])
    rival(world)
    world.report(job, S.WORKER_FAILED)
    world.schedule()
    assert running(world) == {"rival": ("b",)}  # two were free for the gang, but it had one


def test_returning_gang_keeps_nothing_twice(world: World) -> None:
    """What is kept for one that returns, too, is of no use to the next, however near to being free."""
    add_slices(world, "d", "e")
    first = world.start("first", slices=(2,), max_retries_preemption=5)
    second = world.start("second", slices=(2,), max_retries_preemption=5)
    world.start("other")
    lose_slice(world, "d")
    world.report(first, S.WORKER_FAILED)
    world.confirm(second, 1)
    waiting = world.plan().pending_reasons
    assert (waiting["first"].kept, waiting["second"].kept) == (("c", "a"), ("b", "e"))


def test_gang_not_returning_in_time_delays_no_job(world: World) -> None:
    """One of its hosts does not answer and may be back at any time; what is left is kept for it meanwhile."""
    job = world.start(slices=(3,), max_retries_preemption=5)
    rival(world)
    world.report(job, S.WORKER_FAILED)
    world.confirm(job)
    for seconds in (0.0, 15.0, RETURNING_S - 15.1):
        world.now += seconds
        world.do(WorkerSuspectedEvent("c-0", "no answer", world.now))
        assert world.schedule() == {}
        assert world.plan().pending_reasons["job"].kept == ("a", "b")
    world.now += 0.1
    world.schedule()
    assert running(world) == {"rival": ("a",)}


def test_spare_is_kept_until_survivors_are_free(world: World) -> None:
    """A host fails before the pool has reported it: the spare is dropped at once, but no other job gets it."""
    job = world.start(slices=(2,), spares=1, max_retries_preemption=5)
    world.schedule()
    other = rival(world)
    world.lose("b-0")
    assert list(world.state.jobs) == ["job", "rival"]
    assert world.schedule() == {}
    assert world.plan().pending_reasons["job"].kept == ("c", "a")
    world.confirm(job, 1)
    world.schedule()
    assert job.gang.groups == ("a", "c")
    assert other.state is JobState.PENDING


def test_returning_gang_awaits_its_own_slice_though_others_are_free(world: World) -> None:
    """Its hosts have the checkpoints in memory. With two other slices free, the gang once moved there at once."""
    add_slices(world, "d", "e")
    job = world.start(slices=(2,), max_retries_preemption=5)
    assert job.gang.groups == ("a", "b")
    lose_slice(world, "a")
    assert world.schedule() == {}
    world.confirm(job, 1)
    world.schedule()
    assert job.gang.groups == ("c", "b")


def test_returning_gang_awaits_its_own_slice_for_seconds_only(world: World) -> None:
    add_slices(world, "d", "e")
    job = world.start(slices=(2,), max_retries_preemption=5)
    lose_slice(world, "a")
    world.now += WAITS_FOR_OWN_S
    assert world.schedule() == {}
    world.now += 0.1
    world.schedule()
    assert job.gang.groups == ("c", "d")


def test_returning_gang_evicts_nobody_when_own_slice_is_ending(world: World) -> None:
    """A crash of a PRODUCTION job once gave notice to a BATCH job on another slice."""
    job = world.start(priority=PriorityBand.PRODUCTION, slices=(2,), max_retries_preemption=5)
    world.start("batch", priority=PriorityBand.BATCH)
    world.now += 1000.0
    world.report(job, S.WORKER_FAILED)
    assert asked_to_leave(world.plan()) == []
