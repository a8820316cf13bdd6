"""Which attempts of lower bands leave slices of other types to a gang. The Controller's state, on paper."""

from dataclasses import replace
from itertools import combinations

import pytest

from iris_ray.capacity import lower_bands
from iris_ray.capacity.demand import WaitingGang, demand_of, slices_to_remove
from iris_ray.capacity.lower_bands import MOST_SECONDS, ChipsLeft, ChipsWanted, SharedSlice, left_for, promise_for
from iris_ray.model.jobs import Job
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU_TOPOLOGY, UNCONFIRMED_S, string_attribute
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES, GRACE_S, EvictionRules
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.state.events import (
    AttemptSavesEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    PromiseEvent,
    WorkerDrainedEvent,
    WorkerRegisteredEvent,
)
from tests.support.costs import calls
from tests.support.worlds import MANY, PlannedWorld, S, add_slices, host, is_told_to_leave, on, promised, set_teams

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
ALL = 100


def small_world(*names: str) -> PlannedWorld:
    """A world with v4-8 slices of one host and four chips."""
    world = PlannedWorld()
    add_slices(world, *names, tpu_type="v4-8")
    return world


def run(world: PlannedWorld, name: str, **changes: object) -> Job:
    """A BATCH job that has run on a slice of its name for long enough."""
    return world.run(name, **{"tpu_type": "v4-8", "priority": BATCH, **on(name), **changes})


def wait(world: PlannedWorld, tpu_type: str = "v4-16", **changes: object) -> Job:
    job = world.submit("large", **{"tpu_type": tpu_type, "priority": INTERACTIVE, "owner": "pool-b", **MANY, **changes})
    world.turn(1.0)
    return job


def ask(world: PlannedWorld, chips: int = 8, *names: str, most: int = ALL, seconds: float = 100.0) -> ChipsWanted:
    fleet = world.state.fleet
    types = {name: _type_of(world, name) for name in names or fleet.grouping("tpu-name")}
    slices = tuple(SharedSlice(name, kind, get_tpu_config(kind).chip_count) for name, kind in types.items())
    return ChipsWanted("large", chips, slices, tuple((kind, most) for kind in {*types.values()}), seconds)


def _type_of(world: PlannedWorld, name: str) -> str:
    return string_attribute(world.state.fleet.slice_workers(name)[0].attributes, TPU_TOPOLOGY) or ""


def found(
    world: PlannedWorld, wanted: ChipsWanted, rules: EvictionRules | None = DEFAULT_RULES
) -> PromiseEvent | str | None:
    return promise_for(wanted, world.state, rules, _waits(world), world.now)


def left(world: PlannedWorld, wanted: ChipsWanted) -> ChipsLeft:
    """The slices that are left to the job. Its promise is applied."""
    event = found(world, wanted)
    if isinstance(event, str):
        return ChipsLeft(why_not=event)
    if event is not None:
        world.do(event)
    return left_for("large", world.state, world.now)


def test_attempts_of_lower_bands_leave_as_many_slices_as_the_gang_lacks() -> None:
    world = small_world("a", "b", "c")
    jobs = [run(world, name) for name in "abc"]
    large = wait(world)
    answer = left(world, ask(world))
    assert (len(answer.slices), len(answer.jobs), answer.why_not) == (2, 2, "")
    assert answer.seconds == GRACE_S
    assert sum(map(is_told_to_leave, jobs)) == 2
    assert {f"{name}-0" for name in answer.slices} == {*promised(large)}
    assert large.promise is not None
    assert large.promise.removed_by == world.now + GRACE_S + UNCONFIRMED_S + 100.0
    world.check()


def test_too_few_slices_cost_nobody_anything() -> None:
    world = small_world("a", "b")
    run(world, "a")
    run(world, "b", priority=INTERACTIVE)
    wait(world)
    assert left(world, ask(world)).why_not == "jobs of lower bands hold too few of them"
    assert not is_told_to_leave(world.state.jobs["a"])


@pytest.mark.parametrize("band", [INTERACTIVE, PRODUCTION])
def test_attempts_of_the_band_or_a_higher_one_stay(band: PriorityBand) -> None:
    world = small_world("a", "b")
    run(world, "a", priority=band)
    run(world, "b", priority=band)
    wait(world)
    assert "hold too few" in left(world, ask(world)).why_not


def test_batch_takes_nothing_from_batch() -> None:
    world = small_world("a", "b")
    run(world, "a")
    run(world, "b")
    wait(world, priority=BATCH)
    assert "hold too few" in left(world, ask(world)).why_not


def test_those_who_lose_least_leave() -> None:
    world = small_world("a", "b", "c", "d")
    jobs = {name: run(world, name) for name in "abcd"}
    for name in "bd":
        world.do(AttemptSavesEvent(jobs[name].current_attempt(jobs[name].gang), world.now, 600.0))
    wait(world)
    assert {*left(world, ask(world)).slices} == {"b", "d"}


def test_larger_slice_goes_if_its_job_loses_less_than_those_of_two_small_ones() -> None:
    world = small_world("a", "b")
    add_slices(world, "c")
    for name in "ab":
        run(world, name)
    late = run(world, "c", tpu_type="v4-16")
    world.do(AttemptSavesEvent(late.current_attempt(late.gang), world.now, 600.0))
    wait(world, "v4-32", slices=(1,))
    assert left(world, ask(world, 8)).slices == ("c",)


def test_gang_on_two_slices_leaves_both_and_counts_once() -> None:
    world = small_world("a", "b", "c", "d")
    world.run("two", tpu_type="v4-8", slices=(2,), priority=BATCH)
    for name in ("c", "d"):
        run(world, name)
    wait(world)
    answer = left(world, ask(world))
    assert (answer.slices, answer.jobs) == (("a", "b"), ("two",))


def test_slices_without_tasks_come_first_and_are_reserved_as_well() -> None:
    world = small_world("a", "b", "c")
    run(world, "a")
    run(world, "b")
    wait(world)
    answer = left(world, ask(world))
    assert "c" in answer.slices
    assert len(answer.jobs) == 1
    other = world.submit("other", tpu_type="v4-8", priority=INTERACTIVE)
    world.turn(1.0)
    assert not other.gang.placed, "its slice is reserved"


def test_job_that_yields_leaves_whatever_its_band() -> None:
    world = small_world("a", "b")
    run(world, "a", priority=PRODUCTION)
    world.do(JobYieldsEvent("a", True))
    run(world, "b")
    wait(world)
    assert {*left(world, ask(world)).jobs} == {"a", "b"}


def test_no_more_slices_of_a_type_go_than_the_provisioner_allows() -> None:
    world = small_world("a", "b", "c")
    for name in "abc":
        run(world, name)
    wait(world)
    assert "hold too few" in left(world, ask(world, most=1)).why_not
    assert left(world, ask(world, most=2)).slices


def test_minimum_time_protects_and_the_answer_says_until_when() -> None:
    world = small_world("a", "b")
    run(world, "a")
    job = world.submit("b", tpu_type="v4-8", priority=BATCH, **MANY)
    world.turn()
    world.report_all(job, S.RUNNING)
    wait(world)
    assert left(world, ask(world)).why_not == "a, b may not be evicted yet for 2 min"
    world.turn(121.0)
    assert left(world, ask(world)).slices


def test_eviction_budgets_of_jobs_and_users_hold() -> None:
    world = small_world("a", "b")
    run(world, "a", user="u")
    job = run(world, "b", user="v")
    job.gang.evicted_at = tuple(world.now - n for n in range(6, 0, -1))
    wait(world)
    assert "may not be evicted yet for 60 min" in left(world, ask(world)).why_not
    job.gang.evicted_at = ()
    assert isinstance(found(world, ask(world), EvictionRules(per_user=1)), PromiseEvent), "one of each"


def test_user_at_the_eviction_budget_is_spared_if_others_suffice() -> None:
    world = small_world("a", "b", "c", "d")
    for name in "abc":
        run(world, name, user="u")
    run(world, "d", user="v")
    wait(world)
    event = found(world, ask(world), EvictionRules(per_user=1))
    assert isinstance(event, PromiseEvent)
    users = sorted(world.state.jobs[attempt.job_id].spec.user for attempt in event.leave)
    assert users in (["u", "v"], ["u", "u"])


def test_job_beyond_its_limit_or_without_the_right_evicts_nobody() -> None:
    world = small_world("a", "b")
    run(world, "a")
    run(world, "b")
    large = wait(world)
    world.do(LimitsSetEvent(large.spec.user, INTERACTIVE, Limits(chips=4)))
    assert "may not have them now" in left(world, ask(world)).why_not
    world.do(LimitsSetEvent(large.spec.user, INTERACTIVE, Limits(chips=8)))
    world.turn(1.0)
    assert found(world, ask(world), None) == "the cluster evicts no jobs"
    assert left(world, ask(world)).slices


BY_SIZE = "[teams.ads]\nquota.v4-8 = 8\nquota.v4-16 = 0\n[teams.vision]\nquota.v4-16 = 16"
LARGE_ONLY = "[teams.ads]\nquota.v4-16 = 0\n[teams.vision]\nquota.v4-16 = 16"


@pytest.mark.parametrize(("quotas", "of"), [(BY_SIZE, "ads"), (LARGE_ONLY, "ads"), (LARGE_ONLY, "")])
def test_job_that_borrows_takes_nothing_from_jobs_that_come_before_it_once_they_have_left(quotas: str, of: str) -> None:
    """They would get their slices again at once."""
    world = small_world("a", "b")
    set_teams(world, quotas)
    jobs = [run(world, name, team=of) for name in "ab"]
    wait(world, team="ads")
    (gang,) = demand_of(world.state, _waits(world), world.now)
    assert gang.may_reserve
    assert left(world, ask(world)).why_not == "jobs of lower bands behind it, as it borrows quota, hold too few of them"
    assert not any(map(is_told_to_leave, jobs))


def test_job_that_borrows_takes_slices_from_lower_bands_that_borrow_as_well() -> None:
    world = small_world("a", "b")
    set_teams(world, "[teams.ads]\nquota.v4 = 0\n[teams.vision]\nquota.v4 = 32")
    jobs = [run(world, name, team="ads") for name in "ab"]
    add_slices(world, "c", "d", tpu_type="v4-8")
    large = wait(world, team="ads")
    assert left(world, ask(world, 12)).slices
    for job in filter(is_told_to_leave, jobs):
        world.leave(job)
        world.confirm(job)
    world.turn(1.0, times=3)
    assert promised(large)


def test_job_that_must_not_evict_does_not() -> None:
    world = small_world("a", "b")
    run(world, "a")
    run(world, "b")
    wait(world, may_evict=False)
    assert left(world, ask(world)).why_not == "it may not evict jobs"


def test_slices_stay_that_a_waiting_job_of_a_higher_band_would_get() -> None:
    world = small_world("a", "b", "c")
    for name in "abc":
        run(world, name)
    world.submit("first", tpu_type="v4-8", slices=(4,), priority=PRODUCTION, owner="pool-c")
    wait(world)
    assert "hold too few" in left(world, ask(world)).why_not


@pytest.mark.parametrize("what", ["promised", "draining", "foreign", "incomplete"])
def test_slices_stay_that_are_reserved_or_in_other_use_or_not_whole(what: str) -> None:
    world = small_world("a")
    add_slices(world, "b")
    run(world, "a")
    run(world, "b", tpu_type="v4-16")
    large = wait(world, "v4-32")
    match what:
        case "promised":
            other = world.submit("other", tpu_type="v4-64", priority=INTERACTIVE)
            world.do(PromiseEvent(other.spec.job_id, ("b-1",), removed_by=world.now + 500.0))
        case "draining":
            world.do(WorkerDrainedEvent("b-1", "maintenance"))
        case "foreign":
            registered = host("b", 1)
            world.do(
                WorkerRegisteredEvent(
                    "b-1", registered.address, registered.attributes, registered.resources, foreign="a notebook"
                )
            )
        case "incomplete":
            world.lose("b-1")
    assert "hold too few" in left(world, ask(world, 12)).why_not
    assert not promised(large)


def test_repeated_question_changes_nothing_and_the_last_one_ends_the_promise() -> None:
    world = small_world("a", "b")
    jobs = [run(world, name) for name in "ab"]
    large = wait(world)
    first = left(world, ask(world))
    world.turn(10.0)
    again = left(world, ask(world))
    assert (again.slices, again.jobs, again.seconds) == (first.slices, first.jobs, first.seconds - 10.0)
    left(world, ChipsWanted("large", 0))
    assert not promised(large)
    assert not any(map(is_told_to_leave, jobs))
    assert all(job.gang.placed for job in jobs)


def test_provisioner_has_bounded_time_to_delete_slices() -> None:
    world = small_world("a", "b")
    run(world, "a")
    run(world, "b")
    large = wait(world)
    left(world, ask(world, seconds=1e9))
    assert large.promise is not None
    assert large.promise.removed_by == world.now + GRACE_S + UNCONFIRMED_S + MOST_SECONDS


def with_own_slice(priority: PriorityBand | None = None) -> PlannedWorld:
    """A v4-16, in use or not, is one of the two that a job needs, and two v4-8 in use have the chips of the other."""
    world = small_world("a", "b")
    run(world, "a")
    run(world, "b")
    add_slices(world, "own")
    if priority is not None:
        run(world, "own", tpu_type="v4-16", priority=priority)
    wait(world, slices=(2,))
    return world


def demand(world: PlannedWorld) -> WaitingGang:
    return next(one for one in demand_of(world.state, _waits(world), world.now) if one.job_id == "large")


def test_slice_of_its_type_that_is_free_is_reserved_with_those_that_jobs_leave_for_the_rest_of_a_job() -> None:
    world = with_own_slice()
    gang = demand(world)
    assert (gang.there, gang.missing, gang.may_reserve) == (1, 1, True)
    assert {*left(world, ask(world, 8)).slices} == {"a", "b"}
    later = world.submit("later", priority=INTERACTIVE, owner="pool-c", **MANY)
    world.turn(1.0)
    assert not later.gang.placed
    gang = demand(world)
    assert (gang.there, gang.missing, {*gang.removes}, gang.kept) == (1, 1, {"a", "b"}, ("own",))
    assert {*slices_to_remove(world.state.jobs["large"], world.state.fleet)} == {"a", "b"}
    world.check()


def test_job_of_a_lower_band_leaves_the_slice_of_its_type_together_with_others() -> None:
    world = with_own_slice(BATCH)
    gang = demand(world)
    assert (gang.there, gang.missing) == (0, 2)
    answer = left(world, ask(world, 16))
    assert ({*answer.slices}, {*answer.jobs}) == ({"own", "a", "b"}, {"own", "a", "b"})
    for name in ("own", "a", "b"):
        world.leave(world.state.jobs[name])
        world.confirm(world.state.jobs[name])
    world.turn(1.0)
    gang = demand(world)
    assert (gang.there, gang.missing, {*gang.removes}, gang.kept) == (1, 1, {"a", "b"}, ("own",))
    world.check()


def test_nobody_leaves_others_while_a_job_of_the_band_uses_the_slice_of_its_type() -> None:
    world = with_own_slice(INTERACTIVE)
    assert left(world, ask(world, 16)).why_not == "jobs of lower bands hold too few of them"


def test_slice_of_its_type_that_goes_to_another_job_at_this_moment_is_missed() -> None:
    world = with_own_slice()
    world.submit("other", owner="pool-c", **MANY)
    waits = _waits(world)
    world.turn(1.0)
    event = promise_for(ask(world, 8), world.state, DEFAULT_RULES, waits, world.now)
    assert event == "others use slices of its type that were free"


def test_gang_that_may_take_slices_of_its_type_later_evicts_nobody_elsewhere() -> None:
    world = small_world("a", "b")
    run(world, "a")
    run(world, "b")
    add_slices(world, "own")
    young = world.submit("young", priority=BATCH, **MANY)
    world.turn(1.0)
    world.report_all(young, S.RUNNING)
    world.submit("one", priority=INTERACTIVE, owner="pool-b")
    world.turn(1.0)
    gangs = {one.job_id: one for one in demand_of(world.state, _waits(world), world.now)}
    assert not gangs["one"].may_reserve, "it may take the hosts of a young job soon"


def test_demand_names_the_slices_to_be_removed_and_keeps_them_apart_from_those_that_the_job_gets() -> None:
    world = small_world("a", "b")
    run(world, "a")
    run(world, "b")
    wait(world)
    (gang,) = demand_of(world.state, _waits(world), world.now)
    assert (gang.may_take, gang.may_reserve, gang.removes) == (True, True, ())
    left(world, ask(world))
    world.turn(1.0)
    (gang,) = demand_of(world.state, _waits(world), world.now)
    assert (gang.may_take, gang.may_reserve, gang.removes, gang.kept) == (True, False, ("a", "b"), ())


def _waits(world: PlannedWorld) -> list[tuple[Job, PendingReason]]:
    return [(world.state.jobs[i], why) for i, why in world.planner.pending_reasons.items()]


@pytest.mark.parametrize("seed", range(12))
def test_victims_of_equal_slices_lose_the_least_work(seed: int) -> None:
    """Compared with all sets of slices."""
    names = [f"s{n}" for n in range(6)]
    world = small_world(*names)
    lost: dict[str, float] = {}
    for n, name in enumerate(names):
        job = run(world, name)
        saved = (seed * 37 + n * 101) % 400
        world.do(AttemptSavesEvent(job.current_attempt(job.gang), world.now - saved, 1e9))
    for name in names:
        gang = world.state.jobs[name].gang
        lost[name] = world.now - gang.loses_since(world.now, world.now + GRACE_S)
    wait(world, "v4-32")
    chosen = left(world, ask(world, 16)).slices
    assert sum(lost[name] for name in chosen) == min(
        sum(lost[name] for name in some) for some in combinations(names, 4)
    )


def test_slices_of_lower_bands_are_found_behind_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_bands, "MOST_SLICES", 3)
    world = small_world(*"abcdef")
    for name in "abcd":
        run(world, name, priority=PRODUCTION)
    for name in "ef":
        run(world, name)
    wait(world)
    assert left(world, ask(world)).slices == ("e", "f")


def test_cheap_slices_that_may_not_go_hide_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_bands, "MOST_SLICES", 1)
    world = small_world("a", "b", "c")
    add_slices(world, "large-one")
    run(world, "large-one", tpu_type="v4-16")
    for name in "abc":
        job = run(world, name)
        world.do(AttemptSavesEvent(job.current_attempt(job.gang), world.now, 600.0))
    wait(world, "v4-32", slices=(1,))
    wanted = replace(ask(world, 8), most_of_type=(("v4-8", 1), ("v4-16", 1)))
    assert left(world, wanted).slices == ("large-one",)


def test_gang_that_needs_more_slices_than_a_search_considers_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_bands, "MOST_SLICES", 1)
    world = small_world(*"abcd")
    for name in "abcd":
        run(world, name)
    wait(world)
    assert len(left(world, ask(world)).slices) == 2


def test_search_among_many_slices_is_bounded() -> None:
    names = [f"s{n}" for n in range(200)]
    world = small_world(*names)
    for name in names:
        world.submit(name, tpu_type="v4-8", priority=BATCH, **on(name), **MANY)
    world.turn()
    for name in names:
        world.report_all(world.state.jobs[name], S.RUNNING)
    world.now += 1000.0
    wait(world, "v4-1024")
    assert calls(lambda: found(world, ask(world, 400))) < 5_000_000
