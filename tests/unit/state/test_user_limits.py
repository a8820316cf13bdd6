"""What counts towards the limits of users, which limits hold, and which jobs are refused."""

from collections.abc import Iterator

import pytest

from iris_ray.errors import InvalidRequestError, LimitReachedError
from iris_ray.model.limits import DEFAULT_LIMITS, EVERYBODY, Limits
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import JobCancelledEvent, JobRestoredEvent, LimitsSetEvent
from iris_ray.state.records import JobRecord
from iris_ray.state.user_limits import Held
from tests.support.worlds import S, World, gang_spec, tasks_spec

BAND, BATCH = PriorityBand.INTERACTIVE, PriorityBand.BATCH


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    for name in "ab":
        world.add_slice(name)
    yield world
    world.check()


def held(world: World) -> Held:
    world.state.check()
    return world.state.limits.held("ann", BAND)


def test_what_counts_follows_a_job_to_its_end(world: World) -> None:
    job = world.submit(user="ann", slices=(1, 2), max_retries_preemption=5)
    assert held(world) == Held(queued={"job"}, tasks=4)
    world.schedule()
    assert held(world) == Held(chips=16, running={"job"}, tasks=4)
    world.lose("a-0")
    assert held(world) == Held(chips=12, running={"job"}, tasks=4)  # its end is not confirmed
    world.confirm(job, 1)
    assert held(world) == Held(queued={"job"}, tasks=4)
    world.now += 100
    world.schedule()
    assert held(world) == Held(chips=8, running={"job"}, tasks=4)
    world.report_all(job, S.SUCCEEDED)
    assert held(world) == Held(chips=8)
    world.confirm(job)
    assert held(world) == Held()
    assert not world.state.limits.accounts


def test_job_that_is_cancelled_while_it_waits_counts_no_more(world: World) -> None:
    world.submit_tasks(user="ann", replicas=3)
    assert held(world) == Held(queued={"job"}, tasks=3)
    world.do(JobCancelledEvent("job", "enough"))
    assert held(world) == Held()


def test_spares_count_with_their_chips_only(world: World) -> None:
    world.start(user="ann", spares=1)
    world.schedule()
    assert held(world) == Held(chips=16, running={"job"}, tasks=2)


@pytest.mark.parametrize("life", ["waits", "runs", "is over"])
def test_a_successor_counts_the_same(world: World, life: str) -> None:
    job = world.submit(user="ann", spares=1) if life == "waits" else world.start(user="ann", spares=1)
    if life == "is over":
        world.report_all(job, S.SUCCEEDED)
    world.schedule()
    new = World()
    for name in "ab":
        new.add_slice(name)
    for job_id in world.state.jobs:
        record = world.state.record(job_id)
        assert record is not None
        new.do(JobRestoredEvent(JobRecord.joined(record.to_bytes())))
    assert held(new) == held(world)


def test_own_limits_come_before_those_of_everybody_and_these_before_the_defaults(world: World) -> None:
    limits = world.state.limits
    assert limits.of("ann", BAND) == DEFAULT_LIMITS
    world.do(LimitsSetEvent(EVERYBODY, BAND, Limits(chips=64, tasks=10)))
    world.do(LimitsSetEvent("ann", BAND, Limits(chips=8)))
    assert limits.of("ann", BAND) == Limits(8, DEFAULT_LIMITS.running_jobs, DEFAULT_LIMITS.queued_jobs, 10)
    assert limits.of("bob", BAND).chips == 64
    assert limits.of("ann", BATCH) == DEFAULT_LIMITS
    world.do(LimitsSetEvent("ann", BAND, Limits()))
    assert limits.of("ann", BAND).chips == 64
    assert list(limits.table) == [(EVERYBODY, BAND)]
    world.state.check()


def test_job_over_the_limit_on_queued_jobs_is_refused_with_the_numbers(world: World) -> None:
    world.do(LimitsSetEvent("ann", BAND, Limits(queued_jobs=2)))
    for number in range(2):
        world.submit(f"job-{number}", user="ann", slices=(2,))
    with pytest.raises(LimitReachedError, match="interactive is 2 queued jobs; there are 2, and the job adds 1"):
        world.state.limits.require_room(gang_spec("more", user="ann"))
    for other in (gang_spec("more", user="bob"), gang_spec("more", user="ann", priority=BATCH)):
        world.state.limits.require_room(other)
    world.schedule()
    world.state.limits.require_room(gang_spec("more", user="ann"))
    world.state.check()


def test_job_over_the_limit_on_tasks_is_refused_with_the_numbers(world: World) -> None:
    world.do(LimitsSetEvent("ann", BAND, Limits(tasks=10)))
    world.submit_tasks(user="ann", replicas=7)
    world.state.limits.require_room(tasks_spec("more", 3, user="ann"))
    with pytest.raises(LimitReachedError, match="is 10 tasks; there are 7, and the job adds 4"):
        world.state.limits.require_room(gang_spec("more", user="ann", slices=(1, 2)))
    world.state.check()


@pytest.mark.parametrize("limits", [{"chips": -1}, {"tasks": 1.5}, {"running_jobs": True}, {"chips": float("nan")}])
def test_limit_that_is_no_number_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]
