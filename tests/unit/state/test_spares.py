"""Slices that are held ready for a gang that runs: spares, replacements of doomed slices, and room to grow."""

from collections.abc import Mapping

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.notices import GROWTH_NOTICE_S, NOTICE_S, NoticeKind
from iris_ray.model.workers import Worker
from iris_ray.state import spares as spares_module
from iris_ray.state.events import (
    GangMovedEvent,
    JobCancelledEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
)
from iris_ray.state.instructions import DropSpare, Instructions
from iris_ray.state.spares import doomed_groups
from tests.support.worlds import S, World, host, tagged


@pytest.fixture
def slices() -> str:
    return "abc"


def spares(world: World, job_id: str = "job") -> list[Job]:
    return [j for j in world.state.jobs.values() if j.spec.spare_for and j.spec.spare_for.job_id == job_id]


def spare(world: World) -> Job:
    (found,) = spares(world)
    return found


def fail_slice(world: World, name: str) -> None:
    for number in range(2):
        world.do(WorkerFailedEvent(f"{name}-{number}", "gone"))


def ready(world: World, job: Job) -> None:
    world.schedule()
    world.report_all(job, S.RUNNING)


# -- spares ------------------------------------------------------------------------------------------------------------


def test_success_of_large_gang_is_not_checked_per_task(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look goes through all tasks: one for each of 10,000 that return would take the Controller 15 s."""
    looks: list[str] = []

    def counted(job: Job, workers: Mapping[str, Worker]) -> int:
        looks.append(job.spec.job_id)
        return doomed_groups(job, workers)

    job = world.start(slices=(3,))
    world.report_all(job, S.RUNNING)
    monkeypatch.setattr(spares_module, "doomed_groups", counted)
    world.report_all(job, S.SUCCEEDED)
    assert (job.state, len(job.tasks)) == (JobState.SUCCEEDED, 6)
    assert len(looks) == 2, "the first success ends all growth, the last one ends the need for spares"


def test_gang_losing_slice_takes_its_spare_first(world: World) -> None:
    job = world.start(spares=1, max_retries_preemption=5)
    ready(world, spare(world))
    world.submit("other", owner="pool-b", user="somebody", slices=(2,))
    world.do(WorkerFailedEvent("c-0", "gone"))  # nothing is left but the spare
    fail_slice(world, "a")
    world.confirm(job, 1)
    assert spares(world) == []
    instructions = world.schedule()
    assert list(instructions) == ["job"]
    assert job.gang.groups == ("b",)
    assert instructions["job"].reclaim == []  # its pool has it already


# -- notices -----------------------------------------------------------------------------------------------------------


def test_gang_on_draining_host_is_told_once(world: World) -> None:
    world.start(slices=(2,), max_retries_preemption=5)
    instructions = world.do(WorkerDrainedEvent("a-1", "the provider takes it", NoticeKind.PREEMPTION, 130.0))
    (told,) = instructions.notices
    assert told.attempt == AttemptId("job", 1)
    assert (told.notice.kind, told.notice.deadline) == (NoticeKind.PREEMPTION, 130.0)
    assert told.notice.reason == "a host 1: the provider takes it"
    assert world.do(WorkerDrainedEvent("a-0", "the provider takes it", NoticeKind.PREEMPTION, 130.2)).notices == []
    assert world.do(WorkerDrainedEvent("a-0", "the provider takes it", NoticeKind.PREEMPTION, 130.2)).notices == []


@pytest.mark.parametrize(("told_by", "repeated"), [("pool-a", False), ("pool-b", True), (None, True)])
def test_notice_is_not_repeated_to_pool_that_has_told_running_gang(
    world: World, told_by: str | None, repeated: bool
) -> None:
    job = world.start(max_retries_preemption=5)
    event = WorkerDrainedEvent("a-1", "the provider takes it", NoticeKind.PREEMPTION, 130.0, told_by)
    assert bool(world.do(event).notices) is repeated
    assert job.gang.notice is not None
    assert job.gang.notice.deadline == 130.0


def test_notice_is_repeated_if_pool_may_have_had_no_order_yet(world: World) -> None:
    world.submit()
    world.schedule()
    assert world.do(WorkerDrainedEvent("a-1", "preempted", NoticeKind.PREEMPTION, 130.0, "pool-a")).notices


def test_gang_hears_next_notice_of_host_that_outlived_the_first(world: World) -> None:
    """The gang would lose what it has not saved, as if nobody had announced the second loss."""
    world.start(max_retries_preemption=5)
    world.do(WorkerDrainedEvent("a-1", "the pod ends", NoticeKind.PREEMPTION, 130.0))
    world.now = 200.0
    (told,) = world.do(WorkerDrainedEvent("a-1", "the provider takes it", NoticeKind.PREEMPTION, 230.0)).notices
    assert told.notice.deadline == 230.0


def test_notice_without_deadline_gets_spot_vms(world: World) -> None:
    world.start(max_retries_preemption=5)
    (told,) = world.do(WorkerDrainedEvent("a-1", "Ray is draining it")).notices
    assert told.notice.deadline == world.now + NOTICE_S


def test_doomed_slice_gets_replacement_before_its_loss(world: World) -> None:
    job = world.start(slices=(2,), max_retries_preemption=5)
    world.submit("other", owner="pool-b", user="somebody")
    world.do(WorkerDrainedEvent("a-1", "preempted"))
    world.do(WorkerDrainedEvent("a-0", "preempted"))
    assert len(spares(world)) == 1
    world.schedule()
    assert spare(world).gang.groups == ("c",)  # though the other one waits longer
    world.report(job, S.WORKER_FAILED, error="it has moved")
    world.confirm(job)
    world.schedule()
    assert (job.gang.groups, job.preemptions) == (("c", "b"), 1)
    assert spares(world) == []


def test_waiting_spare_is_no_replacement(world: World) -> None:
    """It has no place in the queue to speak of; a replacement comes before all that wait."""
    job = world.start(slices=(3,), spares=1, max_retries_preemption=5)
    world.schedule()
    world.do(WorkerDrainedEvent("a-1", "preempted"))
    world.submit("other", owner="pool-b", user="somebody")
    assert [held.spec.spare_for and held.spec.spare_for.purpose.value for held in spares(world)] == [
        "spare",
        "replacement",
    ]
    world.add_slice("d")
    world.schedule()
    assert [held.gang.groups for held in spares(world) if held.gang.placed] == [("d",)]
    world.report(job, S.WORKER_FAILED, error="it has moved")
    world.confirm(job)
    world.schedule()
    assert job.gang.groups == ("d", "b", "c")


# -- growth ------------------------------------------------------------------------------------------------------------


def test_gang_losing_slice_shrinks_and_grows_later(world: World) -> None:
    job = world.start(slices=(1, 2, 3), grow_after=9999.0, max_retries_preemption=5)
    fail_slice(world, "c")
    world.confirm(job, 1)
    world.schedule()
    world.report_all(job, S.RUNNING)
    assert list(job.gang.groups) == ["a", "b"]
    waiting = spare(world)
    assert waiting.spec.coscheduling is not None
    assert waiting.spec.coscheduling.num_groups == (1,)
    world.schedule()
    assert waiting.gang.pending
    world.add_slice("d")
    world.schedule()
    instructions = [world.report(waiting, S.RUNNING, index) for index in range(2)]
    (told,) = instructions[1].notices
    assert (told.attempt.job_id, told.notice.kind) == ("job", NoticeKind.GROWTH)
    assert told.notice.deadline == world.now + GROWTH_NOTICE_S
    world.do(GangMovedEvent(AttemptId("job", 2), "to more slices"))
    world.confirm(job, 2)
    world.schedule()
    assert job.gang.groups == ("a", "b", "d")
    assert (job.preemptions, job.failures) == (1, 0)  # moving is free
    world.report_all(job, S.RUNNING)
    assert spares(world) == []


@pytest.mark.parametrize("after", [1000.0, None])
def test_healthy_small_gang_grows_after_its_time(world: World, after: float | None) -> None:
    world.submit("other", slices=(2,))
    world.schedule()
    job = world.start(slices=(1, 2), grow_after=after, max_retries_preemption=5)
    assert job.gang.groups == ("c",)
    world.now += 900.0
    world.do(TimePassedEvent(world.now))
    assert spares(world) == []
    world.now += 200.0
    world.do(TimePassedEvent(world.now))
    assert len(spares(world)) == (after is not None)


def test_growth_is_all_or_nothing(world: World) -> None:
    world.submit("other", slices=(2,))
    world.schedule()
    world.start(slices=(1, 3), grow_after=0.0, max_retries_preemption=5)
    world.do(TimePassedEvent(world.now))
    world.add_slice("d")
    world.schedule()
    assert spare(world).gang.pending
    coscheduling = spare(world).spec.coscheduling
    assert coscheduling is not None
    assert coscheduling.num_groups == (2,)
    world.add_slice("e")
    world.schedule()
    assert spare(world).gang.groups == ("d", "e")


def told_to_grow(world: World) -> tuple[Job, Job]:
    """A gang on slice c that is to grow by a new slice d, and the job that holds it."""
    world.submit("other", slices=(2,))
    world.schedule()
    job = world.start(slices=(1, 2), grow_after=0.0, max_retries_preemption=5)
    world.add_slice("d")
    ready(world, room := spare(world))
    assert job.gang.is_to_grow
    return job, room


@pytest.mark.parametrize("how", ["lost", "drained", "not started after all"])
def test_growth_is_called_off_and_announced_with_next_slice(world: World, how: str) -> None:
    job, room = told_to_grow(world)
    if how == "lost":
        fail_slice(world, "d")
        world.confirm(room, 1)
    elif how == "drained":
        world.do(WorkerDrainedEvent("d-0", "preempted"))
    else:
        world.dispatch_fails(room)
        fail_slice(world, "d")
    world.state.check()
    assert job.gang.notice is None
    assert "job" in world.state.unrecorded
    world.now += 100.0
    world.add_slice("e")
    world.schedule()
    instructions = [world.report(spare(world), S.RUNNING, index) for index in range(2)]
    assert [told.notice.kind for told in instructions[1].notices] == [NoticeKind.GROWTH]


def test_growth_of_ending_gang_is_called_off(world: World) -> None:
    job, _ = told_to_grow(world)
    world.report(job, S.SUCCEEDED, 0)
    assert (job.gang.notice, spares(world)) == (None, [])


def test_host_notice_outlasts_cancelled_growth(world: World) -> None:
    """It takes the place of the growth's: a gang that loses a slice does not grow."""
    job, _ = told_to_grow(world)
    (told,) = world.do(WorkerDrainedEvent("c-0", "preempted", NoticeKind.PREEMPTION, 130.0)).notices
    fail_slice(world, "d")
    assert job.gang.notice == told.notice


# -- whatever happens to spares ----------------------------------------------------------------------------------------


def test_spare_on_doomed_host_is_silently_replaced(world: World) -> None:
    world.start(spares=1, max_retries_preemption=5)
    ready(world, first := spare(world))
    instructions = world.do(WorkerDrainedEvent("b-1", "preempted"))
    assert instructions == Instructions(dropped=[DropSpare(first.spec.job_id, "pool-a")])
    world.schedule()
    assert (spare(world).spec.job_id != first.spec.job_id, spare(world).gang.groups) == (True, ("c",))


def test_spare_unknown_to_its_pool_is_given_back(world: World) -> None:
    """Its order may still be on the way when it is dropped."""
    world.start(spares=1)
    world.schedule()
    held = spare(world)
    instructions = world.do(JobCancelledEvent("job", "enough"))
    assert instructions.dropped == [DropSpare(held.spec.job_id, "pool-a")]
    assert [stop.attempt.job_id for stop in instructions.stop] == ["job"]
    before = world.busy()
    for late in (S.RUNNING, S.WORKER_FAILED):
        assert world.report(held, late) == Instructions()
    assert world.dispatch_fails(held) == world.confirm(held) == Instructions()
    assert world.busy() == before == {"a-0", "a-1"}


def test_spare_that_is_dropped_while_it_ends_is_told(world: World) -> None:
    """Its pool has not confirmed the end yet, and its hosts are free for others from now on."""
    world.start(spares=1)
    world.schedule()
    held = spare(world)
    (stop,) = world.lose(held.gang.tasks[0].node_id or "").stop
    assert (stop.attempt.job_id, held.gang.pending) == (held.spec.job_id, True)
    assert world.do(JobCancelledEvent("job", "enough")).dropped == [DropSpare(held.spec.job_id, "pool-a")]


def test_spare_waits_if_constraint_cannot_be_evaluated(world: World) -> None:
    """A job that never ran would be given up; this one's ran."""
    world.add_slice("d", generation=4)
    world.start(spares=1, constraints=(Constraint("generation", ConstraintOp.GE, 4),))
    for number in range(2):
        world.do(tagged(host("d", number), {"generation": "four"}))
    assert world.plan().unschedulable == []
    assert world.plan().pending_reasons.keys() == {spare(world).spec.job_id}


def test_job_named_like_a_spare_is_left_alone(world: World) -> None:
    namesake = world.start("job/spare-1")
    world.start(spares=1)
    assert spare(world).spec.job_id == "job/spare-2"
    world.do(JobCancelledEvent("job", "enough"))
    assert namesake.state is JobState.RUNNING


# -- more about notices ------------------------------------------------------------------------------------------------


def test_only_nearer_deadline_is_news(world: World) -> None:
    """Maintenance in an hour, and then the provider takes the host at once."""
    world.start(max_retries_preemption=5)
    world.do(WorkerDrainedEvent("a-1", "maintenance", NoticeKind.MAINTENANCE, 3700.0))
    for later in (None, 3700.5, 9000.0):
        assert world.do(WorkerDrainedEvent("a-1", "something", NoticeKind.PREEMPTION, later)).notices == []
        assert world.do(host("a", 1, draining="something", deadline=later)).notices == []
    (told,) = world.do(WorkerDrainedEvent("a-1", "preempted", NoticeKind.PREEMPTION, 130.0)).notices
    assert (told.notice.kind, told.notice.deadline) == (NoticeKind.PREEMPTION, 130.0)
    assert len(spares(world)) == 1


def test_gang_sent_to_host_before_its_notice_is_told(world: World) -> None:
    world.submit()
    (assignment,) = world.plan().assignments
    world.do(WorkerDrainedEvent("a-1", "preempted", NoticeKind.PREEMPTION, 130.0))
    (told,) = world.do(assignment).notices
    assert (told.attempt, told.notice.deadline) == (AttemptId("job", 1), 130.0)
