"""Spares and room to grow give their slices back as soon as somebody who waits could use them."""

from collections.abc import Collection

import pytest

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evictions import SEARCHES, Evictor
from iris_ray.scheduler.fair_queue import WAITS_FOR_MORE_S
from iris_ray.scheduler.planner import Planner
from iris_ray.state.events import (
    JobYieldsEvent,
    LimitsSetEvent,
    TaskDispatchFailedEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.support.worlds import World, asked_to_leave

S = TaskState


@pytest.fixture
def world() -> World:
    """Three slices: a gang on one, its two spares on the others."""
    world = World(*"abc")
    world.start(spares=2, max_retries_preemption=5)
    world.schedule()
    assert world.busy() == {f"{name}-{number}" for name in "abc" for number in range(2)}
    return world


def given_back(world: World) -> list[str]:
    return [attempt.job_id for event in asked_to_leave(world.plan()) for attempt in event.leave]


def plan(world: World) -> tuple[list[str], Instructions]:
    """Plan and commit as the Controller does; the jobs that get hosts, in order."""
    instructions = Instructions()
    placements = Planner(world.state, look_again_s=0.5).plan(world.now, instructions)
    return [placement.job.spec.job_id for placement in placements], instructions


def limit(world: World, chips: float, user: str = "") -> None:
    world.do(LimitsSetEvent(user, PriorityBand.INTERACTIVE, Limits(chips=chips)))


def test_waiting_job_gets_spares_slice_and_new_spare_waits(world: World) -> None:
    world.submit("other", user="other", priority=PriorityBand.BATCH)
    placed, instructions = plan(world)
    assert placed == ["other"]
    assert [dropped.job_id for dropped in instructions.dropped] == ["job/spare-1"]
    waiting = [job.spec.job_id for job in world.state.pending()]
    assert waiting == ["job/spare-3"]
    assert plan(world)[0] == []


def test_limited_job_gets_slice_of_own_users_spare(world: World) -> None:
    """The spare counts towards the limit, and comes after every job that waits."""
    world.add_slice("d")
    limit(world, 24)
    world.submit("other")
    assert plan(world)[0] == ["other"]
    assert plan(world)[0] == []
    assert given_back(world) == [], "the new spare waits"


def test_job_over_limit_takes_no_useless_spare(world: World) -> None:
    """Otherwise the next spare took the slice, and gave it back again, plan after plan."""
    world.add_slice("large", "v4-32")
    limit(world, 24)
    world.submit("too-large", tpu_type="v4-32")
    assert "waiting for the limit" in world.why("too-large")
    assert given_back(world) == []
    limit(world, 16)
    world.submit("other")
    assert given_back(world) == [], "the user has more than the limit without one of them, too"


def test_limit_of_one_user_takes_no_spares_of_others(world: World) -> None:
    world.add_slice("d")
    limit(world, 8, "ann")
    world.start("of-ann", user="ann")
    world.submit("next", user="ann")
    assert "waiting for the limit" in world.why("next")
    assert given_back(world) == []


def test_limited_job_gets_hosts_of_own_users_yielding_job() -> None:
    world = World("a", "b")
    idle = world.start("idle")
    world.do(JobYieldsEvent("idle", True))
    limit(world, 8)
    world.submit("other")
    assert plan(world)[0] == []
    assert idle.gang.eviction is not None
    assert given_back(world) == []
    world.now += 60.0
    world.do(TimePassedEvent(world.now))
    world.confirm(idle)
    assert plan(world)[0] == ["other"]


def test_spares_give_back_as_many_slices_as_the_waiting_job_needs(world: World) -> None:
    world.submit("other", slices=(2, 3))
    assert given_back(world) == ["job/spare-1", "job/spare-2"]
    assert plan(world)[0] == ["other"]


def test_spare_stays_if_the_waiting_job_could_not_run_anyway(world: World) -> None:
    world.submit("too-large", slices=(3,))
    world.submit("elsewhere", tpu_type="v4-32")
    assert given_back(world) == []
    assert plan(world)[0] == []


def test_spare_on_hosts_that_the_waiting_job_avoids_stays(world: World) -> None:
    """Otherwise the next spare took it, and gave it back again, plan after plan."""
    other = world.submit("other", user="other", max_retries_failure=5)
    for slice_name in "bc":
        assert plan(world)[0] == ["other"]
        assert other.gang.groups == (slice_name,)
        attempt = other.current_attempt(other.gang)
        world.do(TaskDispatchFailedEvent(attempt, "no answer", world.now, (slice_name,)))
        world.confirm(other)
        world.schedule()  # a spare takes the slice
        world.now = other.gang.not_before
    assert given_back(world) == []
    assert "it avoids" in world.why("other")


def test_unplaced_job_lets_others_of_kind_take_spares(world: World) -> None:
    world.do(LimitsSetEvent("limited", PriorityBand.INTERACTIVE, Limits(chips=1)))
    world.submit_tasks("limited", replicas=1, user="limited", resources={"TPU": 1.0})
    world.submit_tasks("task", replicas=1, user="other", resources={"TPU": 1.0})
    assert given_back(world) == ["job/spare-1"]


def test_jobs_of_one_plan_get_different_spares(world: World) -> None:
    for name in ("one", "two", "three"):
        world.submit(name)
    assert given_back(world) == ["job/spare-1", "job/spare-2"]
    assert plan(world)[0] == ["one", "two"]


def test_flexible_gang_gets_spare_only_if_it_takes_it() -> None:
    """Otherwise the next spare took what it left alone, and gave it back again, plan after plan."""
    world = World(*"ab")
    ending = world.start("ending")
    world.start(spares=1)
    world.add_slice("c")
    world.schedule()
    world.report_all(ending, S.SUCCEEDED)  # its hosts are still to be confirmed free
    world.submit("flexible", slices=(1, 2))
    assert (plan(world)[0], given_back(world)) == ([], [])
    world.now += WAITS_FOR_MORE_S + 1
    assert plan(world)[0] == ["flexible"]


def test_job_unhelped_by_spares_lets_next_job_take_one(world: World) -> None:
    """They are of more kinds than a plan looks at."""
    for number in range(2 * SEARCHES):
        world.submit(f"odd-{number}", user="odd", slices=(9 + number,))
    wants = world.submit("last", user="other")
    for _ in range(4):
        world.schedule()
    assert wants.gang.placed


def test_spares_give_no_slice_back_to_other_spares(world: World) -> None:
    job = world.state.jobs["job"]
    world.lose("a-0")
    world.confirm(job, 1)
    world.schedule()
    world.schedule()
    assert [job.spec.job_id for job in world.state.pending()] == ["job/spare-4"]
    assert len(world.state.spares()) == 1
    assert given_back(world) == []


def test_returned_room_to_grow_calls_off_gangs_move(world: World) -> None:
    world = World(*"ab")
    world.submit("first", slices=(1,))
    world.schedule()
    grows = world.start("grows", slices=(1, 2), grow_after=0.0, max_retries_preemption=5)
    world.finish(world.state.jobs["first"])
    world.schedule()
    (room,) = world.state.spares()
    world.report_all(room, S.RUNNING)
    assert grows.gang.is_to_grow
    world.submit("other")
    assert plan(world)[0] == ["other"]
    assert not grows.gang.is_to_grow


def test_replacement_for_leaving_slice_is_not_given_back(world: World) -> None:
    """Otherwise a replacement took the slice, the next spare made it superfluous, and so on, plan after plan."""
    job = world.state.jobs["job"]
    world.submit("other", user="other", slices=(2,))
    world.do(WorkerDrainedEvent("a-1", "Ray is draining it"))
    assert plan(world)[0] == []
    assert job.spares_made == 2
    world.add_slice("d")
    assert plan(world)[0] == ["other"]  # one of the spares is enough for the gang
    assert plan(world)[0] == []


def test_job_that_makes_the_choice_of_spares_fail_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner once looked for it among plans without spares, for ever."""

    def fails(_: Evictor, job: Job, available: Availability, own: Collection[str], placed: int) -> None:
        raise ValueError(f"a defect, met by {job.spec.job_id}")

    monkeypatch.setattr(Evictor, "find", fails)
    world.submit("other")
    planner = Planner(world.state, look_again_s=0.5)
    assert planner.plan(world.now, Instructions()) == []
    assert "a defect, met by other" in planner.left_out["other"].why
