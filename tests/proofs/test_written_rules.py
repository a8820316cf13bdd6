"""Plans judged by a referee that knows only the written rules of the queue, and defects that it finds in them."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangAssignedEvent,
    GangMovedEvent,
    LimitsSetEvent,
    PromiseEvent,
    SliceHeldEvent,
    WorkerDrainedEvent,
)
from tests.proofs.drawn_worlds import LONG, WORLDS, RandomWorld
from tests.proofs.reference.referee import Plan, Referee
from tests.support.proofs import examples
from tests.support.worlds import World, asked_to_leave


def judge(world: World, plan: Plan) -> None:
    """Raise AssertionError if a plan for this world breaks a rule of the queue."""
    Referee(world.state, plan, world.now, BACKFILL_BOUND_S).check()


def commit_what_the_rules_allow(world: World) -> None:
    """Plan, judge, commit. The referee knows nobody who leaves: it judges a plan that asks nobody to leave."""
    state, plan = world.state, world.plan()
    asked = asked_to_leave(plan)
    before = {account: state.limits.held(*account).chips for account in state.limits.accounts}
    judge(world, Plan.of(world.plan(gives_back=False) if asked else plan))
    world.scheduler.check(world.now)
    for event in (*plan.assignments, *plan.promises, *plan.timed_out, *plan.unschedulable):
        state.handle_event(event)
    if asked:
        check_taken(world, asked)
    for account in state.limits.accounts:
        most, held = state.limits.of(*account).chips, state.limits.held(*account).chips
        assert most is not None
        assert held <= max(most, before.get(account, 0.0)), f"{account} holds more than the limit"
    state.check()


def check_taken(world: World, asked: list[PromiseEvent]) -> None:
    """Each job to which spares, or jobs that yield, leave their hosts runs once they have left, and all has ended."""
    world = deepcopy(world)
    for _ in range(2):
        for attempt in list(world.state.evicted):
            world.do(GangMovedEvent(attempt, "saved"))
        for attempt in [c for owner in ("pool-a", "pool-b") for c in world.state.attempts_of(owner)]:
            with suppress(IllegalTransitionError):
                world.do(AttemptEndConfirmedEvent(attempt))
        world.schedule()
    for event in asked:
        assert any(gang.placed for gang in world.state.jobs[event.job_id].gangs), f"{event} lets nobody run"


def check_random_world(drawn: dict[str, Any]) -> None:
    """Cycle after cycle a plan that keeps the rules of the queue.

    Between the cycles jobs end, return and move, and hosts change, so the fleet's indexes have catching up to do. Jobs
    have spares, get replacements, and grow.
    """
    world = RandomWorld(drawn["slices"], drawn["cpu_hosts"], drawn["kinds"], drawn["jobs"])
    for pick in drawn["limits"]:
        world.limit(pick)
    for _ in range(drawn["at_first"]):
        world.happen("submit", 0)
    commit_what_the_rules_allow(world)
    for happenings in drawn["cycles"]:
        for what, pick in happenings:
            world.happen(what, pick)
        commit_what_the_rules_allow(world)


@settings(max_examples=examples(120))
@given(WORLDS)
def test_scheduler_in_random_worlds_keeps_the_written_rules(drawn: dict[str, Any]) -> None:
    check_random_world(drawn)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=examples(190))
@given(drawn=WORLDS)
def test_scheduler_in_many_random_worlds_keeps_the_written_rules(part: int, drawn: dict[str, Any]) -> None:
    check_random_world(drawn)


def test_gang_that_comes_back_is_planned_on_the_slices_it_had() -> None:
    world = World()
    for name in "abcdef":
        world.add_slice(name)
    for name in "ab":
        world.start(name)
    job = world.start(slices=(3,), max_retries_preemption=9)
    for name in "ab":
        world.finish(world.state.jobs[name])
    for name in "cd":
        world.long_run()
        for number in range(2):
            world.lose(f"{name}-{number}")
        world.confirm(job)
        commit_what_the_rules_allow(world)
        world.report_all(job, TaskState.RUNNING)
    assert job.gang.groups == ("a", "b", "e")
    world.add_slice("c")
    world.do(SliceHeldEvent("c", "pool-a"))
    world.do(GangMovedEvent(job.current_attempt(job.gang), "it moves"))
    world.confirm(job)
    commit_what_the_rules_allow(world)
    assert job.gang.groups == ("a", "b", "e")


# -- the referee itself: it finds defects that are planted into a plan -------------------------------------------------


def room_for_two(**of_the_long_one: Any) -> World:
    """A job for both slices has waited too long, and a short one wants the free slice."""
    world = World("a", "b")
    world.start("long", **of_the_long_one)
    world.submit("large", slices=(2,))
    world.now += LONG
    return world


def get(job_id: str, *slices: str) -> GangAssignedEvent:
    return GangAssignedEvent(job_id, slices, tuple((f"{name}-0", f"{name}-1") for name in slices))


@pytest.mark.parametrize(("max_runtime", "is_lent"), [(30.0, True), (31.0, False)])
def test_reference_lends_bounded_room_only_to_a_job_that_is_gone_in_half_the_time(
    max_runtime: float, is_lent: bool
) -> None:
    """The job that runs has 61 s left."""
    world = room_for_two(max_runtime=LONG + 61.0)
    world.submit("short", max_runtime=max_runtime)
    plan = Plan.of(world.plan())
    assert bool(plan.assignments) is is_lent
    judge(world, plan)
    with pytest.raises(AssertionError, match=r"could have \['b'\]" if is_lent else "is not free for it"):
        judge(world, replace(plan, assignments=() if is_lent else (get("short", "b"),)))


def test_reference_lends_room_for_as_long_again_as_a_service_has_run() -> None:
    world = room_for_two()
    world.submit("short", max_runtime=LONG / 2)
    plan = Plan.of(world.plan())
    assert plan.assignments == (replace(get("short", "b"), lent_by=("large",)),)
    judge(world, plan)


def two_users() -> World:
    """Ann and bob both want the only free slice. Ann runs on the other one, so it is bob's turn."""
    world = World("a", "b")
    world.start("anns", user="ann")
    world.submit("anns-next", user="ann")
    world.submit("bobs", user="bob")
    return world


def after_the_bound() -> World:
    """Two large jobs compete for three slices, of which one is free."""
    world = World("a", "b", "c")
    for name in ("one", "two"):
        world.start(name)
    for name in ("large", "next"):
        world.submit(name, slices=(3,))
    world.now += LONG
    return world


def with_a_limit() -> World:
    world = World("a", "b")
    world.do(LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(chips=8)))
    for name in ("first", "second"):
        world.submit(name, user="ann")
    return world


def flexible() -> World:
    world = World("a", "b", "c")
    world.do(WorkerDrainedEvent("c-1", "notice"))
    world.submit(slices=(1, 2))
    return world


def with_a_preference() -> World:
    world = World()
    world.add_slice("a")
    world.add_slice("b", zone="near")
    world.submit(preferences=(Constraint("zone", ConstraintOp.EQ, "near"),))
    return world


def with_a_timeout() -> World:
    world = World("a")
    world.submit(slices=(2,), scheduling_timeout=10.0)
    world.now += 20.0
    return world


ROOM = ("a-0", "a-1", "b-0", "b-1", "c-0", "c-1")
DEFECTS: dict[str, tuple[Callable[[], World], Callable[[Plan], Plan], str]] = {
    "a job waits beside a free slice": (two_users, lambda plan: replace(plan, assignments=()), "could have"),
    "a larger share goes first": (
        two_users,
        lambda plan: replace(plan, assignments=(get("anns-next", "b"),)),
        "bobs/0 waits",
    ),
    "a slice that is in use": (two_users, lambda plan: replace(plan, assignments=(get("bobs", "a"),)), "not free"),
    "half a gang": (
        two_users,
        lambda plan: replace(plan, assignments=(GangAssignedEvent("bobs", ("b",), (("b-0",),)),)),
        "not as many hosts",
    ),
    "a gang on two slices": (
        flexible,
        lambda plan: replace(plan, assignments=(GangAssignedEvent("job", ("a",), (("a-0", "b-1"),)),)),
        "a group is not one",
    ),
    "fewer slices than are free": (
        flexible,
        lambda plan: replace(plan, assignments=(get("job", "a"),)),
        "could have",
    ),
    "a slice with a host that drains": (
        flexible,
        lambda plan: replace(plan, assignments=(get("job", "a", "c"),)),
        "does not suit",
    ),
    "a slice that is preferred less": (
        with_a_preference,
        lambda plan: replace(plan, assignments=(get("job", "a"),)),
        "b is better",
    ),
    "nobody says why": (two_users, lambda plan: replace(plan, explained=frozenset()), "says why"),
    "nothing is reserved": (after_the_bound, lambda plan: replace(plan, rooms={}), "nothing is reserved for large"),
    "two that compete": (
        after_the_bound,
        lambda plan: replace(plan, rooms={"large": ROOM, "next": ROOM}),
        "competes with",
    ),
    "too little is reserved": (
        after_the_bound,
        lambda plan: replace(plan, rooms={"large": ROOM[:4]}),
        "do not suffice",
    ),
    "reserved before the bound": (
        two_users,
        lambda plan: replace(plan, rooms={"anns-next": ("a-0", "a-1")}),
        "has not waited for its bound",
    ),
    "beyond a limit": (
        with_a_limit,
        lambda plan: replace(plan, assignments=(get("first", "a"), get("second", "b")), explained=frozenset()),
        "beyond the limits",
    ),
    "nobody times out": (
        with_a_timeout,
        lambda plan: replace(plan, timed_out=frozenset(), explained=frozenset({"job"})),
        "timed out",
    ),
    "given up for nothing": (
        two_users,
        lambda plan: replace(plan, unschedulable=frozenset({"anns-next"})),
        "UNSCHEDULABLE",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_referee_finds_a_planted_defect(defect: str) -> None:
    make, plant, finds = DEFECTS[defect]
    world = make()
    plan = Plan.of(world.plan())
    judge(world, plan)
    with pytest.raises(AssertionError, match=finds):
        judge(world, plant(plan))
