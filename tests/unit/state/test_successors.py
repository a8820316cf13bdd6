"""Jobs that come after others: when they enter the queue, when they never can, and what survives the Controller."""

from typing import Any

import pytest

from iris_ray.errors import IllegalTransitionError, InvalidJobError
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import JobState
from iris_ray.scheduler.explanation import held_back
from iris_ray.state import job_table
from iris_ray.state.events import JobCancelledEvent, JobSubmittedEvent
from tests.support.worlds import S, World, gang_spec, tasks_spec


def waits(world: World, job: Job) -> bool:
    """Whether a job is in the queue."""
    return job in world.state.pending()


def test_successor_enters_queue_once_all_have_succeeded(world: World) -> None:
    first, second = world.start("first"), world.start("second")
    last = world.submit("last", after=["first", "second"])
    assert str(held_back(last)) == "waits until first has succeeded and second has succeeded"
    assert last.state is JobState.PENDING
    assert not world.plan().pending_reasons
    world.finish(first)
    assert str(held_back(last)) == "waits until second has succeeded"
    world.now += 1000.0
    world.finish(second)
    assert held_back(last) is None
    assert last.gang.waiting_since == world.now, "its waiting begins now"
    world.schedule()
    assert last.gang.placed


@pytest.mark.parametrize(
    ("word", "happens"),
    [
        ("started", lambda w, job: w.report(job, S.RUNNING)),
        ("ended", lambda w, job: w.report(job, S.FAILED)),
        ("ended", lambda w, job: w.do(JobCancelledEvent("first", "enough"))),
        ("succeeded", lambda w, job: w.finish(job)),
        ("started", lambda w, job: w.finish(job)),
    ],
)
def test_successor_waits_for_the_word_that_it_names(world: World, word: str, happens: Any) -> None:
    first, last = world.submit("first"), world.submit("last", after={"first": word})
    world.schedule()
    assert not waits(world, last)
    happens(world, first)
    assert waits(world, last)


@pytest.mark.parametrize("word", ["succeeded", "started"])
def test_successor_ends_when_its_predecessor_can_not(world: World, word: str) -> None:
    world.submit("first")
    last = world.submit("last", after={"first": word})
    world.do(JobCancelledEvent("first", "cancelled by ann"))
    assert last.state is JobState.UNSCHEDULABLE
    assert last.error == f"it was to run once first had {word}, and that has ended as killed: cancelled by ann"


def test_job_after_what_has_happened_or_failed_is_settled_at_once(world: World) -> None:
    done, failed = world.start("done"), world.start("failed")
    world.finish(done)
    world.report(failed, S.FAILED, error="boom")
    world.confirm(failed)
    assert waits(world, world.submit("good", after=["done"]))
    assert world.submit("bad", after=["done", "failed"]).state is JobState.UNSCHEDULABLE
    assert waits(world, world.submit("sweeper", after={"failed": "ended"}))


def test_end_of_first_goes_down_a_long_chain(world: World) -> None:
    world.submit("job-0")
    for number in range(1, 2000):
        world.do(JobSubmittedEvent(tasks_spec(f"job-{number}", 1, after=[f"job-{number - 1}"]), world.now))
    world.submit("sweeper", after={"job-1999": "ended"})
    assert [job.spec.job_id for job in world.state.pending()] == ["job-0"]
    ended = world.do(JobCancelledEvent("job-0", "enough"))
    assert len(ended.finished) == 2000
    assert [job.spec.job_id for job in world.state.pending()] == ["sweeper"]


def test_predecessor_may_be_forgotten_once_it_has_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 0)
    world.start("slow")
    first = world.start("first")
    last = world.submit("last", after=["first", "slow"])
    world.finish(first)
    world.submit("other")
    world.do(JobCancelledEvent("other", "enough"))
    assert "first" not in world.state.jobs
    assert last.awaits == {"slow": "succeeded"}


def test_unknown_job_and_the_job_itself_are_refused(world: World) -> None:
    with pytest.raises(IllegalTransitionError, match="comes after nobody, and there is no such job"):
        world.submit("last", after=["nobody"])
    with pytest.raises(InvalidJobError, match="the job itself"):
        gang_spec("last", after=["last"])
    for wrong in ("first", {"first": "done"}, [3], {"first": None}, ["no id!"]):
        with pytest.raises(InvalidJobError, match="after "):
            gang_spec("last", after=wrong)


def test_scheduling_timeout_counts_from_entry_into_queue(world: World) -> None:
    first = world.start("first", slices=(2,))
    last = world.submit("last", after=["first"], scheduling_timeout=60.0)
    world.now += 1000.0
    world.finish(first)
    other = world.start("other", slices=(2,))
    assert other.gang.placed or last.gang.placed
    world.now += 59.0
    assert not world.plan().timed_out


def test_restarted_controller_knows_what_jobs_await(world: World) -> None:
    done = world.start("done")
    world.submit("first", slices=(2,))
    world.submit("last", after=["done", "first"])
    world.finish(done)
    new = World()
    new.restore(world)
    assert new.state.jobs["last"].awaits == {"first": "succeeded"}
    assert [job.spec.job_id for job in new.state.pending()] == ["first"]
    new.do(JobCancelledEvent("first", "enough"))
    assert new.state.jobs["last"].state is JobState.UNSCHEDULABLE


def test_successor_of_a_job_whose_record_is_lost_ends(world: World) -> None:
    world.submit("first")
    world.submit("last", after=["first"])
    new = World()
    new.restore(world, "last")
    assert new.state.jobs["last"].error == "it comes after first, which the cluster has forgotten"
