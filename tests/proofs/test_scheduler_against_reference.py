"""The scheduler proven against a slow, obvious one on random worlds. `make test` takes some, `make proofs` more."""

from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given, settings

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler import SchedulingResult
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import AttemptEndConfirmedEvent, GangMovedEvent, PromiseEvent, SliceHeldEvent
from tests.proofs.drawn_worlds import LONG, WORLDS, RandomWorld, Shape
from tests.proofs.reference.plan import ReferencePlan
from tests.support.proofs import examples
from tests.support.worlds import World, asked_to_leave, one_by_one, promised

MOST_LENT = 4
"""For so many jobs it is tried whether their rooms are lent."""


def commit_what_both_plan(world: World) -> None:
    """Plan twice, compare, commit. The reference gives nothing back, so a plan that does is committed instead."""
    state = world.state
    result, full = world.plan(gives_back=False), world.plan()
    before = {account: state.limits.held(*account).chips for account in state.limits.accounts}
    seen = state.fleet, state.usage, state.past_usage, world.now, BACKFILL_BOUND_S, state.limits, state.jobs
    reference = closest(result, state.pending(), *seen)
    require_same(result, reference)
    world.scheduler.check(world.now)
    asked = asked_to_leave(full)
    if not asked:
        assert (full.assignments, full.promises) == (result.assignments, result.promises)
    for event in (*full.assignments, *full.promises, *full.timed_out, *full.unschedulable):
        state.handle_event(event)
    if asked:
        check_taken(world, asked)
    else:
        open_to = set(reference.lent)
        given_up = reference.timed_out | reference.unschedulable | open_to
        kept = {i: promised(job) for i, job in state.jobs.items() if promised(job) and i not in open_to}
        assert kept == {job_id: tuple(hosts) for job_id, hosts in reference.rooms.items() if job_id not in given_up}
    for account in state.limits.accounts:
        most, held = state.limits.of(*account).chips, state.limits.held(*account).chips
        assert most is not None
        assert held <= max(most, before.get(account, 0.0)), f"{account} holds more than the limit"
    state.check()


def require_same(result: SchedulingResult, reference: ReferencePlan) -> None:
    """Raise AssertionError if the scheduler's plan is not this one of the reference's."""
    assert one_by_one(result.assignments) == reference.assignments
    assert {event.job_id for event in result.timed_out} == reference.timed_out
    assert {event.job_id for event in result.unschedulable} == reference.unschedulable
    assert result.pending_reasons.keys() == reference.pending_reasons
    reasons = result.pending_reasons
    limited = {job_id for job_id, reason in reasons.items() if reason.limit}
    assert limited <= reference.limited
    for job_id in reference.limited - limited:  # it is told the reason of one before it, as of then
        assert reasons.is_shared(job_id) or reasons[job_id].ahead, reasons[job_id]
    open_to = set(reference.lent)  # of their rooms, any part may be kept
    assert {*result.starving} - open_to == reference.starving - open_to
    assert {i: sorted(r.kept) for i, r in reasons.items() if r.kept and i not in open_to} == {
        job_id: sorted(names) for job_id, names in reference.kept.items() if names and job_id not in open_to
    }


def closest(result: SchedulingResult, *seen: Any) -> ReferencePlan:
    """Return the plan that the scheduler made, of those that the rules allow; the strictest one if it made none.

    The rules leave open which part is kept of room whose completion nothing bounds: see `ReferencePlan`.
    """
    reference: Any = partial(ReferencePlan, *seen)
    strictest = reference()
    for returns_larger in (True, False):
        first = reference(lent=(), returns_larger=returns_larger)
        jobs = sorted(first.may_be_lent)[:MOST_LENT]
        for lent in chain.from_iterable(combinations(jobs, size) for size in range(len(jobs) + 1)):
            plan = reference(lent=lent, returns_larger=returns_larger) if lent else first
            with suppress(AssertionError):
                require_same(result, plan)
                return plan
    return strictest


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


def check_random_world(drawn: dict) -> None:
    """Cycle after cycle the same assignments, the same jobs that wait, time out, are given up, and get groups kept.

    Between the cycles jobs end, return and move, and hosts change, so the fleet's indexes have catching up to do. Jobs
    have spares, get replacements, and grow.
    """
    world = RandomWorld(drawn["slices"], drawn["cpu_hosts"], drawn["kinds"], drawn["jobs"])
    for pick in drawn["limits"]:
        world.limit(pick)
    for _ in range(drawn["at_first"]):
        world.happen("submit", 0)
    commit_what_both_plan(world)
    for happenings in drawn["cycles"]:
        for what, pick in happenings:
            world.happen(what, pick)
        commit_what_both_plan(world)


@settings(max_examples=examples(120))
@given(WORLDS)
def test_scheduler_in_random_worlds_plans_what_the_reference_plans(drawn: dict) -> None:
    check_random_world(drawn)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=examples(190))
@given(drawn=WORLDS)
def test_scheduler_in_many_random_worlds_plans_what_the_reference_plans(part: int, drawn: dict) -> None:
    check_random_world(drawn)


def test_room_is_kept_where_least_is_missing_also_for_a_job_that_avoids_a_host() -> None:
    kind: dict[str, Any] = {
        "typed": False,
        "constraints": (),
        "preferences": (),
        "tolerations": (),
        "owner": "pool-a",
        "priority": PriorityBand.INTERACTIVE,
        "scheduling_timeout": None,
        "spares": 0,
        "grow_after": None,
    }
    kinds = [kind | {"shape": Shape("gang", device, (1,), 4.0, 0.0)} for device in ("v4-16", "v4-8")]
    slices = [{"tpu_type": "v4-16", "rack": "r1", "pool": None, "flaw": None, "at": 0}] * 6
    jobs = [*[(0, "ann", 0.0)] * 6, (1, "cem", LONG)]
    cycles = [[("submit", 0), ("blame", 8)]]  # e-0
    check_random_world(
        {"slices": slices, "cpu_hosts": [], "kinds": kinds, "jobs": jobs, "at_first": 6, "limits": [], "cycles": cycles}
    )


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
        commit_what_both_plan(world)
        world.report_all(job, TaskState.RUNNING)
    assert job.gang.groups == ("a", "b", "e")
    world.add_slice("c")
    world.do(SliceHeldEvent("c", "pool-a"))
    world.do(GangMovedEvent(job.current_attempt(job.gang), "it moves"))
    world.confirm(job)
    commit_what_both_plan(world)
    assert job.gang.groups == ("a", "b", "e")


def reference_of(world: World, **changes: Any) -> ReferencePlan:
    state = world.state
    seen = state.fleet, state.usage, state.past_usage, world.now, BACKFILL_BOUND_S, state.limits, state.jobs
    return ReferencePlan(state.pending(), *seen, **changes)


def room_for_two(**of_the_long_one: Any) -> World:
    """A job for both slices has waited too long, and a short one wants the free slice."""
    world = World("a", "b")
    world.start("long", **of_the_long_one)
    world.submit("large", slices=(2,))
    world.now += LONG
    world.submit("short", max_runtime=60.0)
    return world


def test_reference_lends_bounded_room_only_to_a_job_that_is_gone_in_time() -> None:
    bounded = reference_of(room_for_two(max_runtime=LONG + 61.0))
    assert [event.job_id for event in bounded.assignments] == ["short"]
    assert not bounded.may_be_lent
    too_late = reference_of(room_for_two(max_runtime=LONG + 59.0))
    assert not too_late.assignments


def test_reference_keeps_or_lends_room_whose_completion_nothing_bounds() -> None:
    world = room_for_two()
    kept = reference_of(world)
    assert (kept.assignments, kept.may_be_lent) == ([], {"large"})
    lent = reference_of(world, lent=["large"])
    assert [event.job_id for event in lent.assignments] == ["short"]
