"""What users have held in the past hours, and how long it counts."""

import pytest

from iris_ray.model.lifecycle import TaskState
from iris_ray.state.events import PastUsageEvent, TimePassedEvent
from iris_ray.state.user_limits import _USERS, HALF_LIFE_S, PastUsage
from tests.support.worlds import World

S = TaskState
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
    world.state.check()


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
        job = world.start(f"of {user}", user=user)
        world.now += hours * HOUR
        world.do(TimePassedEvent(world.now))
        world.finish(job)
    for user in ("hog", "modest"):
        world.submit(user, user=user, slices=(2,))
    assert [a.job_id for a in world.plan().assignments] == ["modest"]
    world.check()


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
    new.check()
