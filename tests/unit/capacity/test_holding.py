"""Which slices of other types are held for a gang until enough of them are idle. The Controller's state, on paper."""

from dataclasses import replace

import pytest

from iris_ray.capacity.demand import WaitingGang, demand_of
from iris_ray.capacity.holding import MOST_BESIDES
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted, SharedSlice, left_for, promise_for
from iris_ray.model.jobs import Job
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import UNCONFIRMED_S
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES, EvictionRules
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import LimitsSetEvent, SliceReleasedEvent
from tests.support.worlds import MANY, PlannedWorld, S, add_slices, is_told_to_leave, on, promised

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
SECONDS = 120.0


def start(world: PlannedWorld, job_id: str, **changes: object) -> Job:
    """A job that begins to run on a v4-8."""
    job = small(world, job_id, **changes)
    assert job.gang.placed, job_id
    world.report_all(job, S.RUNNING)
    return job


def small(world: PlannedWorld, job_id: str, **changes: object) -> Job:
    """A job that waits for a v4-8, unless one is free."""
    values = {"tpu_type": "v4-8", "priority": INTERACTIVE, "owner": f"pool-{job_id}", **MANY, **changes}
    job = world.submit(job_id, **values)
    world.turn(1.0)
    return job


def busy(*names: str, **changes: object) -> PlannedWorld:
    """A world in which a job of INTERACTIVE has begun to run on each of some v4-8, with a v4-16 that is waited for."""
    world = PlannedWorld()
    add_slices(world, *names, tpu_type="v4-8")
    for name in names:
        start(world, name, **on(name))
    world.submit("large", **{"tpu_type": "v4-16", "priority": INTERACTIVE, "owner": "pool-large", **MANY, **changes})
    world.turn(1.0)
    return world


def wanted(world: PlannedWorld, job_id: str = "large", chips: int = 8) -> ChipsWanted:
    names = [*world.state.fleet.grouping("tpu-name")]
    slices = tuple(SharedSlice(name, "v4-8", 4) for name in names)
    return ChipsWanted(job_id, chips, slices, (("v4-8", 100),), SECONDS)


def ask(
    world: PlannedWorld, question: ChipsWanted | None = None, rules: EvictionRules | None = DEFAULT_RULES
) -> ChipsLeft:
    """What the Controller answers a provisioner now."""
    question = question or wanted(world)
    waits = [(world.state.jobs[i], why) for i, why in world.planner.pending_reasons.items()]
    event = promise_for(question, world.state, rules, waits, world.now)
    if isinstance(event, str):
        return ChipsLeft(why_not=event)
    if event is not None:
        world.do(event)
        world.turn(1.0)
    return left_for(question.job_id, world.state, world.now)


def past_the_bound(world: PlannedWorld) -> PlannedWorld:
    world.turn(BACKFILL_BOUND_S)
    return world


def demand(world: PlannedWorld, job_id: str = "large") -> WaitingGang:
    waits = [(world.state.jobs[i], why) for i, why in world.planner.pending_reasons.items()]
    return next(one for one in demand_of(world.state, waits, world.now) if one.job_id == job_id)


def end(world: PlannedWorld, name: str) -> None:
    """A job ends, and its pool keeps its slice for nobody."""
    world.finish(world.state.jobs[name])
    for held, holder in [*world.state.holders.items()]:
        if not any(one.occupants for one in world.state.fleet.slice_workers(held)):
            world.do(SliceReleasedEvent(held, holder))
    world.turn(1.0)


def why(world: PlannedWorld, job: Job) -> str:
    return str(world.planner.pending_reasons[job.spec.job_id])


def test_idle_slices_are_held_for_a_job_past_the_bound_and_go_to_no_later_job_of_its_band() -> None:
    world = past_the_bound(busy("a", "b"))
    answer = ask(world)
    assert ({*answer.slices}, answer.is_held, answer.jobs) == ({"a", "b"}, True, ())
    gang = demand(world)
    assert (gang.holds, gang.removes, gang.may_take, gang.may_reserve) == (answer.slices, (), True, True)
    end(world, "a")
    later = small(world, "later")
    assert not later.gang.placed
    assert "a: is kept for large; b: in use by b, then kept for large" in why(world, later)
    end(world, "b")
    world.turn(1.0)
    assert not later.gang.placed
    assert {*ask(world).slices} == {"a", "b"}
    world.check()


def test_nothing_is_held_before_the_bound() -> None:
    world = busy("a", "b")
    assert ask(world).why_not == "jobs of lower bands hold too few of them"
    assert not promised(world.state.jobs["large"])


def test_slices_are_held_for_production_at_once() -> None:
    assert ask(busy("a", "b", priority=PRODUCTION)).is_held


def test_no_more_is_held_than_the_job_lacks_and_what_is_idle_first() -> None:
    world = busy("a", "b", "c", "d")
    end(world, "c")
    assert ask(past_the_bound(world)).slices == ("c", "d"), "d has run for the shortest time"
    end(world, "a")
    assert {*ask(world).slices} == {"c", "a"}


def test_slices_with_jobs_that_may_run_for_hours_are_not_held() -> None:
    world = busy("a", "b")
    for _ in range(8):
        world.turn(BACKFILL_BOUND_S)
    end(world, "a")
    world.state.jobs["large"].gang.waiting_since = world.now - BACKFILL_BOUND_S
    assert "may run for hours more" in ask(world).why_not
    assert small(world, "later").gang.placed


def test_held_slice_is_lent_to_a_job_that_ends_in_time() -> None:
    world = past_the_bound(busy("a", "b"))
    ask(world)
    end(world, "a")
    assert not small(world, "long", max_runtime=400.0).gang.placed
    assert small(world, "short", max_runtime=200.0).gang.placed
    assert {*ask(world).slices} == {"a", "b"}


def test_held_slice_is_lent_to_a_lower_band_which_leaves_it_once_the_others_are_idle() -> None:
    """Whatever its minimum runtime."""
    world = past_the_bound(busy("a", "b"))
    ask(world)
    end(world, "a")
    borrower = start(world, "borrower", priority=BATCH)
    assert ask(world).is_held
    assert not is_told_to_leave(borrower)
    end(world, "b")
    answer = ask(world)
    assert (answer.jobs, {*answer.slices}, answer.is_held) == (("borrower",), {"a", "b"}, False)
    assert is_told_to_leave(borrower)
    assert demand(world).removes == answer.slices
    world.check()


def test_few_slices_are_held_of_a_large_fleet() -> None:
    """All jobs have run for the same time."""
    names = [f"s{number}" for number in range(2 * MOST_BESIDES)]
    world = PlannedWorld()
    add_slices(world, *names, tpu_type="v4-8")
    for name in names:
        world.submit(name, tpu_type="v4-8", priority=INTERACTIVE, owner=f"pool-{name}", **{**MANY, **on(name)})
    world.turn(1.0)
    for name in names:
        world.report_all(world.state.jobs[name], S.RUNNING)
    world.submit("large", tpu_type="v4-16", priority=INTERACTIVE, owner="pool-large", **MANY)
    world.turn(1.0)
    assert len(ask(past_the_bound(world)).slices) == 2 + MOST_BESIDES


def test_batch_is_lent_what_is_held_for_batch() -> None:
    world = past_the_bound(busy("a", "b", priority=BATCH))
    assert ask(world).is_held
    end(world, "a")
    borrower = start(world, "borrower", priority=BATCH)
    end(world, "b")
    assert ask(world).jobs == ("borrower",)
    assert is_told_to_leave(borrower)


@pytest.mark.parametrize(("holder", "other"), [(BATCH, INTERACTIVE), (INTERACTIVE, PRODUCTION)])
def test_higher_band_takes_a_held_slice(holder: PriorityBand, other: PriorityBand) -> None:
    world = past_the_bound(busy("a", "b", priority=holder))
    ask(world)
    end(world, "a")
    assert small(world, "other", priority=other).gang.placed
    assert not promised(world.state.jobs["large"])
    assert demand(world).holds == ()


def test_higher_band_has_slices_held_that_are_held_for_a_lower_one() -> None:
    world = past_the_bound(busy("a", "b"))
    ask(world)
    end(world, "a")
    world.submit("first", tpu_type="v4-16", priority=PRODUCTION, owner="pool-first", **MANY)
    world.turn(1.0)
    assert {*ask(world, wanted(world, "first")).slices} == {"a", "b"}
    assert demand(world).holds == ()
    world.check()


def test_hold_ends_unless_it_is_renewed() -> None:
    world = past_the_bound(busy("a", "b"))
    ask(world)
    end(world, "a")
    for _ in range(3):
        world.turn(SECONDS / 2 + UNCONFIRMED_S)
        assert ask(world).is_held
    later = small(world, "later")
    assert not later.gang.placed
    world.turn(SECONDS + UNCONFIRMED_S + 1.0)
    world.turn(1.0)
    assert later.gang.placed


def test_hold_ends_when_the_job_may_not_start() -> None:
    world = past_the_bound(busy("a", "b"))
    ask(world)
    end(world, "a")
    user = world.state.jobs["large"].spec.user
    world.do(LimitsSetEvent(user, INTERACTIVE, Limits(chips=4)))
    world.turn(1.0)
    assert not promised(world.state.jobs["large"])


def test_hold_ends_when_the_provisioner_needs_it_no_more_or_another_job_is_first() -> None:
    world = past_the_bound(busy("a", "b"))
    ask(world)
    assert ask(world, replace(wanted(world), may_hold=False)).slices == ()
    assert ask(world).is_held
    assert ask(world, ChipsWanted("large", 0)).slices == ()
    assert not promised(world.state.jobs["large"])


def test_slices_are_held_on_a_cluster_without_evictions() -> None:
    world = past_the_bound(busy("a", "b"))
    assert ask(world, rules=None).is_held


def test_slices_reserved_for_later_jobs_are_held_only_if_the_others_do_not_suffice() -> None:
    world = past_the_bound(busy("a", "b", "c"))
    world.submit("later", tpu_type="v4-8", owner="pool-later", **MANY)
    world.turn(1.0)
    past_the_bound(world)
    world.turn(1.0)
    (kept,) = (world.state.fleet.workers[node_id].slice_name for node_id in promised(world.state.jobs["later"]))
    assert {*ask(world).slices} == {"a", "b", "c"} - {kept}
    assert ask(world, ChipsWanted("large", 0)).slices == ()
    assert {*ask(world, wanted(world, chips=12)).slices} == {"a", "b", "c"}
    assert not promised(world.state.jobs["later"])


def test_held_slices_stay_held_although_jobs_on_others_have_just_begun() -> None:
    """Otherwise another slice would be held at each look, the one with the youngest job, and none would become idle."""
    world = busy("a", "b", "c")
    held = ask(past_the_bound(world)).slices
    (other,) = {"a", "b", "c"} - {*held}
    world.submit("young", tpu_type="v4-8", owner="pool-young", **MANY)
    world.finish(world.state.jobs[other])
    world.turn(1.0)
    young = world.state.jobs["young"]
    assert young.gang.placed
    assert {*ask(world).slices} == {*held, other}, "before the young job runs"
    world.report_all(young, S.RUNNING)
    world.turn(1.0)
    assert {*ask(world).slices} == {*held, other}


def test_slices_with_younger_jobs_are_held_besides_that_of_a_job_that_does_not_end() -> None:
    """It has begun after the large job was submitted, so it would be waited for, and an idle slice kept, for ever."""
    world = PlannedWorld()
    add_slices(world, "a", "b", "c", tpu_type="v4-8")
    for name in ("b", "c"):
        start(world, name, **on(name))
    world.submit("large", tpu_type="v4-16", priority=INTERACTIVE, owner="pool-large", **MANY)
    world.turn(1.0)
    start(world, "service", **on("a"))
    past_the_bound(world)
    end(world, "b")
    assert {*ask(world).slices} == {"a", "b"}
    end(world, "c")
    start(world, "young", **on("c"))
    for _ in range(5):
        world.turn(SECONDS)
        assert {*ask(world).slices} == {"a", "b", "c"}
    assert not small(world, "long", max_runtime=500.0).gang.placed, "it is not lent for as long as that job may run"
    end(world, "young")
    later = small(world, "later", priority=BATCH)
    assert not later.gang.placed, "it would have to leave at once"
    assert {*ask(world).slices} == {"b", "c"}, "no more than it lacks once they are idle"
    world.check()
