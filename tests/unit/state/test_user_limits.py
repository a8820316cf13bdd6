"""What users have and had: the limits that hold, and the past use that counts."""

import pytest

from iris_ray.errors import InvalidRequestError, LimitReachedError
from iris_ray.model.limits import DEFAULT_LIMITS, EVERYBODY, Limits
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import LimitsSetEvent, PastUsageEvent, TimePassedEvent
from iris_ray.state.user_limits import _USERS, HALF_LIFE_S, BandUse, PastUsage
from tests.support.worlds import S, World, gang_spec, tasks_spec

# -- limits -----------------------------------------------------------------------------------------------------------


BAND, BATCH = PriorityBand.INTERACTIVE, PriorityBand.BATCH


def held(world: World) -> BandUse:
    world.state.check()
    return world.state.limits.held("ann", BAND)


def test_usage_follows_job_to_its_end(world: World) -> None:
    job = world.submit(user="ann", slices=(1, 2), max_retries_preemption=5)
    assert held(world) == BandUse(queued={"job"}, tasks=4)
    world.schedule()
    assert held(world) == BandUse(chips=16, running={"job"}, tasks=4)
    world.lose("a-0")
    assert held(world) == BandUse(chips=12, running={"job"}, tasks=4)  # its end is not confirmed
    world.confirm(job, 1)
    assert held(world) == BandUse(queued={"job"}, tasks=4)
    world.now += 100
    world.schedule()
    assert held(world) == BandUse(chips=8, running={"job"}, tasks=4)
    world.report_all(job, S.SUCCEEDED)
    assert held(world) == BandUse(chips=8)
    world.confirm(job)
    assert held(world) == BandUse()
    assert not world.state.limits.accounts


@pytest.mark.parametrize("life", ["waits", "runs", "is over"])
def test_successor_counts_the_same_usage(world: World, life: str) -> None:
    job = world.submit(user="ann", spares=1) if life == "waits" else world.start(user="ann", spares=1)
    if life == "is over":
        world.report_all(job, S.SUCCEEDED)
    world.schedule()
    new = World(*"ab")
    new.restore(world)
    assert held(new) == held(world)


def test_own_limits_precede_common_ones_and_defaults(world: World) -> None:
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


def test_job_over_queue_limit_is_refused_with_numbers(world: World) -> None:
    world.do(LimitsSetEvent("ann", BAND, Limits(queued_jobs=2)))
    for number in range(2):
        world.submit(f"job-{number}", user="ann", slices=(2,))
    with pytest.raises(LimitReachedError, match="interactive is 2 queued jobs; there are 2, and the job adds 1"):
        world.state.limits.require_room(gang_spec("more", user="ann"))
    for other in (gang_spec("more", user="bob"), gang_spec("more", user="ann", priority=BATCH)):
        world.state.limits.require_room(other)
    world.schedule()
    world.state.limits.require_room(gang_spec("more", user="ann"))


def test_job_over_task_limit_is_refused_with_numbers(world: World) -> None:
    world.do(LimitsSetEvent("ann", BAND, Limits(tasks=10)))
    world.submit_tasks(user="ann", replicas=7)
    world.state.limits.require_room(tasks_spec("more", 3, user="ann"))
    with pytest.raises(LimitReachedError, match="is 10 tasks; there are 7, and the job adds 4"):
        world.state.limits.require_room(gang_spec("more", user="ann", slices=(1, 2)))


@pytest.mark.parametrize("limits", [{"chips": -1}, {"tasks": 1.5}, {"running_jobs": True}, {"chips": float("nan")}])
def test_invalid_limit_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]


# -- past use ---------------------------------------------------------------------------------------------------------


HOUR = 3600.0


def chips(world: World, user: str) -> float:
    return world.state.past_usage.hours(user, world.now).get("TPU", 0.0)


def test_hour_of_use_counts_and_halves_after_half_life(world: World) -> None:
    job = world.start(user="ann")
    assert chips(world, "ann") == 0.0
    world.now += HOUR
    after_an_hour = chips(world, "ann")
    assert after_an_hour == pytest.approx(8.0, rel=0.1)  # a part of it has faded already
    world.do(TimePassedEvent(world.now))
    world.finish(job)
    world.now += HALF_LIFE_S
    assert chips(world, "ann") == pytest.approx(after_an_hour / 2)
    assert chips(world, "bob") == 0.0


def test_past_usage_is_independent_of_update_frequency() -> None:
    usage = {"ann": {"TPU": 8.0}}
    often, once = PastUsage(usage), PastUsage(usage)
    for past in (often, once):
        past.settle("ann")
    for now in range(60, 7261, 60):
        often.now = float(now)
        often.settle("ann")
    assert often.hours("ann", 7260.0)["TPU"] == pytest.approx(once.hours("ann", 7260.0)["TPU"])


def test_user_with_much_past_usage_comes_last(world: World) -> None:
    for user, hours in (("hog", 3), ("modest", 1)):
        job = world.start(f"of-{user}", user=user)
        world.now += hours * HOUR
        world.do(TimePassedEvent(world.now))
        world.finish(job)
    for user in ("hog", "modest"):
        world.submit(user, user=user, slices=(2,))
    assert [a.job_id for a in world.plan().assignments] == ["modest"]


def test_users_without_remaining_usage_are_forgotten() -> None:
    usage: dict[str, dict[str, float]] = {}
    past = PastUsage(usage)
    for number in range(3 * _USERS):
        user = f"user-{number}"
        past.now = number * HOUR
        past.settle(user)
        usage[user] = {"TPU": 4.0}
        past.now += 0.5 * HOUR
        past.settle(user)
        del usage[user]
    assert len(past._past) <= _USERS + 1


def test_past_usage_outlives_controller_and_keeps_fading() -> None:
    """What was held while no Controller was there is not known."""
    usage: dict[str, dict[str, float]] = {}
    old = PastUsage(usage)
    old.settle("ann")
    usage["ann"] = {"TPU": 8.0}
    old.now = HOUR
    old.settle("bob")
    snapshot = old.snapshot()
    assert snapshot.keys() == {"ann"}
    new = World()
    new.now = HOUR + HALF_LIFE_S
    new.do(PastUsageEvent(snapshot, HOUR))
    assert chips(new, "ann") == pytest.approx(snapshot["ann"]["TPU"] / 2)
