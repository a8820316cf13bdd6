"""Quotas of teams: who goes first, who may borrow, and who gives back what was lent."""

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.jobs import Job
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import LEAST_RUN_S, EvictionRules
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import GangMovedEvent, LimitsSetEvent
from tests.support.worlds import S, World, add_slices, gang_spec, promised, set_teams, submit_group

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
TWO_TEAMS = """
    [teams.ads]
    quota.v4-16 = {ads}
    [teams.vision]
    quota.v4-16 = {vision}
"""


@pytest.fixture
def world() -> World:
    """Four slices of eight chips each."""
    return World(*"abcd")


def two_teams(world: World, ads: str = "16", vision: str = "16") -> None:
    set_teams(world, TWO_TEAMS.format(ads=ads, vision=vision))


def start(world: World, *job_ids: str, team: str = "", **changes: object) -> list[Job]:
    """Jobs that run; they may be preempted and retried."""
    jobs = [world.submit(job_id, team=team, max_retries_preemption=100, **changes) for job_id in job_ids]
    world.schedule()
    for job in jobs:
        world.report_all(job, S.RUNNING)
    world.check()
    return jobs


def submit(world: World, job_id: str, team: str = "", **changes: object) -> Job:
    return world.submit(job_id, team=team, max_retries_preemption=100, **changes)


def leaving(world: World) -> set[str]:
    """Commit a plan; the ids of the jobs that have to leave."""
    world.schedule()
    world.check()
    return {attempt.job_id for attempt in world.state.evicted}


# -- the order ---------------------------------------------------------------------------------------------------------


def test_jobs_within_quota_precede_borrowers_of_any_band(world: World) -> None:
    two_teams(world)
    for number in range(4):
        submit(world, f"ads-{number}", "ads", priority=PRODUCTION)
    for number in range(4):
        submit(world, f"vision-{number}", "vision", priority=BATCH)
    assert set(world.schedule()) == {"ads-0", "ads-1", "vision-0", "vision-1"}


def test_between_teams_that_borrow_the_smaller_share_by_weight_goes_first(world: World) -> None:
    set_teams(world, "[teams.ads]\nweight = 3\nquota.v4-16 = 0\n[teams.vision]\nquota.v4-16 = 0")
    for number in range(4):
        submit(world, f"ads-{number}", "ads", user="ann")
        submit(world, f"vision-{number}", "vision", user="bob")
    assert set(world.schedule()) == {"ads-0", "ads-1", "ads-2", "vision-0"}


def test_lower_bands_of_its_team_leave_a_large_job_the_quota(world: World) -> None:
    two_teams(world)
    (young,) = start(world, "young", team="ads", priority=BATCH)
    start(world, "one", "two", team="vision")
    submit(world, "large", "ads", slices=(2,), priority=PRODUCTION)
    submit(world, "small", "ads", priority=BATCH)
    assert world.schedule() == {}
    world.finish(young)
    assert set(world.schedule()) == {"large"}


def test_satisfied_job_has_no_quota_kept(world: World) -> None:
    set_teams(world, "[teams.ads]\nquota.v4-16 = { chips = 20, borrow = 0 }")
    start(world, "batch", team="ads", priority=BATCH)
    submit(world, "first", "ads", priority=PRODUCTION)
    world.submit_tasks("small", 1, device="v4-16", team="ads", priority=INTERACTIVE)
    world.schedule()
    assert not world.state.jobs["small"].pending


def test_rest_of_shared_quota_is_kept_for_waiting_large_job(world: World) -> None:
    set_teams(
        world,
        """
        [teams.ml]
        quota.v4-16 = { chips = 32, borrow = 0 }
        [teams."ml/ads"]
        quota.v4-16 = 16
        [teams."ml/vision"]
        quota.v4-16 = 16
        """,
    )
    (young,) = start(world, "young", team="ml/ads", priority=BATCH)
    lent, *_ = start(world, "lent", "one", "two", team="ml/vision", priority=BATCH)
    submit(world, "large", "ml/ads", slices=(2,), priority=PRODUCTION)
    submit(world, "small", "ml/ads", priority=BATCH)
    submit(world, "more", "ml/vision", priority=BATCH)
    world.finish(lent)
    assert world.schedule() == {}
    world.finish(young)
    assert set(world.schedule()) == {"large"}


def test_part_of_team_gets_sisters_unused_quota_first(world: World) -> None:
    set_teams(
        world,
        """
        [teams.research]
        quota.v4-16 = 32
        [teams."research/vision"]
        quota.v4-16 = 16
        [teams."research/audio"]
        quota.v4-16 = 16
        [teams.ads]
        quota.v4-16 = 0
        """,
    )
    submit(world, "ads", "ads", priority=PRODUCTION)
    for number in range(4):
        submit(world, f"vision-{number}", "research/vision", priority=BATCH)
    assert set(world.schedule()) == {f"vision-{number}" for number in range(4)}


def test_job_without_team_uses_chips_beyond_all_quotas(world: World) -> None:
    two_teams(world, ads="8", vision="8")
    for number in range(4):
        submit(world, f"ads-{number}", "ads", priority=PRODUCTION)
        submit(world, f"none-{number}", priority=BATCH)
    assert set(world.schedule()) == {"ads-0", "none-0", "none-1", "ads-1"}


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_team_borrows_no_more_than_it_may(world: World) -> None:
    two_teams(world, ads="{ chips = 8, borrow = 8 }", vision="24")
    for number in range(3):
        submit(world, f"ads-{number}", "ads")
    assert set(world.schedule()) == {"ads-0", "ads-1"}
    assert world.why("ads-2") == (
        "waiting for the limit of team ads: 16 v4-16 chips, of which 16 are taken or kept, and it needs 8;"
        " iris-ray team show has all"
    )


def test_what_a_team_does_not_lend_stays_free_for_it(world: World) -> None:
    two_teams(world, ads="8", vision="{ chips = 24, lend = 8 }")
    for number in range(4):
        submit(world, f"ads-{number}", "ads", priority=PRODUCTION)
    assert set(world.schedule()) == {"ads-0", "ads-1"}
    assert world.why("ads-2") == (
        "waiting for chips that teams lend: 32 v4-16 chips, of which 32 are taken or kept, and it needs 8;"
        " iris-ray team show has all"
    )
    submit(world, "vision", "vision", slices=(2,))
    assert set(world.schedule()) == {"vision"}


def test_flexible_gang_stays_in_quota_until_others_have_theirs(world: World) -> None:
    two_teams(world)
    submit(world, "ads", "ads", slices=(2, 4))
    submit(world, "vision", "vision", slices=(2,))
    assert {job_id: len(world.state.jobs[job_id].gang.groups) for job_id in world.schedule()} == {"ads": 2, "vision": 2}


# -- taking back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("band", PriorityBand)
def test_job_within_quota_reclaims_at_once_from_any_band(world: World, band: PriorityBand) -> None:
    two_teams(world)
    start(world, *(f"ads-{number}" for number in range(4)), team="ads", priority=PRODUCTION)
    vision = submit(world, "vision", "vision", priority=band, slices=(2,))
    assert len(leaving(world)) == 2
    assert len(promised(vision)) == 4


def test_no_more_is_taken_back_than_what_was_lent(world: World) -> None:
    two_teams(world)
    start(world, "ads-0", "ads-1", "ads-2", team="ads")
    start(world, "vision-0", team="vision", priority=PRODUCTION)
    for number in (1, 2):
        submit(world, f"vision-{number}", "vision", priority=PRODUCTION)
    world.now += BACKFILL_BOUND_S * 10
    assert len(leaving(world)) == 1
    assert [number for number in (1, 2) if promised(world.state.jobs[f"vision-{number}"])] == [1]


def test_team_at_limit_evicts_its_own_lower_bands(world: World) -> None:
    two_teams(world, ads="{ chips = 16, borrow = 0 }", vision="16")
    start(world, "ads-0", "ads-1", team="ads", priority=BATCH)
    world.now += BACKFILL_BOUND_S
    urgent = submit(world, "urgent", "ads", priority=PRODUCTION)
    assert len(leaving(world)) == 1
    assert promised(urgent)


@pytest.mark.parametrize(("quota", "leave"), [(24, 1), (16, 2)])
def test_no_more_leave_for_a_quota_than_free_slices_need(world: World, quota: int, leave: int) -> None:
    """Two slices are free; only the quota is missing."""
    set_teams(world, f"[teams.ads]\nquota.v4-16 = {{ chips = {quota}, borrow = 0 }}")
    start(world, "ads-0", "ads-1", team="ads", priority=BATCH)
    world.now += BACKFILL_BOUND_S
    urgent = submit(world, "urgent", "ads", priority=PRODUCTION, slices=(2,))
    gone = leaving(world)
    assert len(gone) == leave
    world.now += 31.0
    world.schedule()
    for job_id in gone:
        world.confirm(world.state.jobs[job_id], 1)
    world.schedule()
    assert urgent.gang.placed


@pytest.mark.parametrize(("quota", "leave"), [(32, 1), (24, 0), (8, 0)])
def test_running_jobs_continue_if_a_lowered_quota_is_exceeded_by_more_than_a_job_takes(
    world: World, quota: int, leave: int
) -> None:
    set_teams(world, "[teams.ads]\nquota.v4-16 = { chips = 32, borrow = 0 }")
    start(world, "ads-0", "ads-1", "ads-2", "ads-3", team="ads", priority=BATCH)
    world.now += BACKFILL_BOUND_S
    set_teams(world, f"[teams.ads]\nquota.v4-16 = {{ chips = {quota}, borrow = 0 }}")
    submit(world, "urgent", "ads", priority=PRODUCTION)
    assert len(leaving(world)) == leave
    assert leave or "waiting for the limit of team ads" in world.why("urgent")


def test_job_within_quota_reclaims_from_every_team_above_that_is_full(world: World) -> None:
    """The jobs of one of them would not suffice for the other."""
    set_teams(
        world,
        """
        [teams.ml]
        quota.v4-16 = { chips = 24, borrow = 0 }
        [teams."ml/vision"]
        quota.v4-16 = { chips = 24, borrow = 0 }
        [teams."ml/vision/night"]
        quota.v4-16 = 24
        """,
    )
    above, beside = (*start(world, "above", team="ml"), *start(world, "beside", team="ml/vision"))
    submit(world, "night", "ml/vision/night", slices=(3,))
    assert leaving(world) == {"above", "beside"}
    for job in (above, beside):
        assert not world.schedule()
        world.report_all(job, S.FAILED)
        world.confirm(job)
    assert set(world.schedule()) == {"night"}


@pytest.mark.parametrize("limit", ["24", "{ chips = 24, borrow = 0 }"])
def test_job_within_quota_reclaims_from_other_teams_what_its_sisters_do_not_suffice_for(limit: str) -> None:
    """Only without its sisters' jobs is the team above within its quota."""
    world = World(*"abc")
    set_teams(
        world,
        f"""
        [teams.ads]
        [teams.ml]
        quota.v4-16 = 24
        [teams."ml/vision"]
        quota.v4-16 = {limit}
        [teams."ml/vision/night"]
        quota.v4-16 = 24
        """,
    )
    jobs = [*start(world, "beside", "too", team="ml/vision"), *start(world, "other", team="ads", priority=PRODUCTION)]
    submit(world, "night", "ml/vision/night", slices=(3,))
    assert leaving(world) == {"beside", "too", "other"}
    for job in jobs:
        assert not world.schedule()
        world.report_all(job, S.FAILED)
        world.confirm(job)
    assert set(world.schedule()) == {"night"}


def test_a_sister_within_its_quota_stays_while_others_leave_for_a_job_of_a_team_above() -> None:
    world = World(*"abcde")
    set_teams(
        world,
        """
        [teams.ads]
        [teams.ml]
        quota.v4-16 = 32
        [teams."ml/day"]
        quota.v4-16 = 8
        [teams."ml/night"]
        quota.v4-16 = 24
        """,
    )
    start(world, "day-0", "day-1", team="ml/day")
    start(world, "ml", team="ml")
    start(world, "other-0", "other-1", team="ads")
    world.now += BACKFILL_BOUND_S
    submit(world, "night", "ml/night", slices=(3,))
    gone = leaving(world)
    assert len(gone & {"day-0", "day-1"}) == 1
    assert {"ml"} < gone
    assert len(gone) == 3


def test_nobody_leaves_for_a_quota_that_a_team_above_does_not_have() -> None:
    world = World(*"abc")
    set_teams(
        world,
        """
        [teams.ads]
        quota.v4-16 = 8
        [teams.ml]
        quota.v4-16 = 16
        [teams."ml/vision"]
        quota.v4-16 = 16
        """,
    )
    start(world, "one", "two", team="ml")
    start(world, "own", team="ads")
    submit(world, "large", "ml/vision", slices=(3,))
    assert leaving(world) == set()


def test_who_has_borrowed_most_in_the_past_hours_gives_first(world: World) -> None:
    set_teams(
        world,
        "[teams.ads]\nquota.v4-16 = 0\n[teams.audio]\nquota.v4-16 = 0\n[teams.vision]\nquota.v4-16 = 16",
    )
    start(world, "ads-0", "ads-1", team="ads", priority=PRODUCTION)
    world.now += 3600.0
    start(world, "audio-0", "audio-1", team="audio", priority=BATCH)
    world.now += BACKFILL_BOUND_S
    submit(world, "vision", "vision", slices=(2,))
    assert leaving(world) == {"ads-0", "ads-1"}


def test_what_was_taken_back_is_left_alone_for_the_minimum_time(world: World) -> None:
    two_teams(world)
    ads = start(world, "ads-0", "ads-1", "ads-2", "ads-3", team="ads", priority=BATCH)
    for job in ads:
        job.gang.evicted_at = (world.now - 10.0,)
    submit(world, "vision", "vision")
    assert leaving(world) == set()
    assert "may take the hosts of ads-" in world.why("vision")
    world.now += 121.0
    assert len(leaving(world)) == 1


@pytest.mark.parametrize(("spared_s", "leaves"), [(1.0, "ads-1"), (0.0, "ads-0")])
def test_borrower_that_lost_work_is_spared_for_as_long(world: World, spared_s: float, leaves: str) -> None:
    two_teams(world)
    ads = start(world, "ads-0", "ads-1", "ads-2", "ads-3", team="ads")
    world.now += 1200.0
    for number, job in enumerate(ads):
        job.gang.saved_at = world.now - 60.0 * (1 + number)
    ads[0].gang.spared_until = world.now + spared_s
    submit(world, "vision", "vision")
    assert leaving(world) == {leaves}


def test_evicted_borrower_is_spared_for_as_long_as_its_lost_work_took(world: World) -> None:
    two_teams(world)
    start(world, "ads-0", "ads-1", "ads-2", "ads-3", team="ads")
    world.now += 900.0
    submit(world, "vision", "vision")
    (job_id,) = leaving(world)
    job = world.state.jobs[job_id]
    world.now += 30.0
    world.do(GangMovedEvent(job.current_attempt(job.gang), "grace"))
    assert job.gang.evictions == 1
    assert job.gang.spared_until == world.now + 930.0


def test_of_teams_that_borrowed_about_the_same_the_job_that_loses_least_leaves(world: World) -> None:
    set_teams(
        world,
        "[teams.ads]\nquota.v4-16 = 0\n[teams.audio]\nquota.v4-16 = 0\n[teams.vision]\nquota.v4-16 = 16",
    )
    start(world, "ads-0", "ads-1", team="ads")
    world.now += 600.0
    start(world, "audio-0", "audio-1", team="audio")
    world.now += 3000.0
    world.state.jobs["audio-1"].gang.saved_at = world.now
    submit(world, "vision", "vision")
    assert leaving(world) == {"audio-1"}


def test_teams_budget_bounds_evictions_of_team_and_parts(world: World) -> None:
    world.scheduler.evictions = EvictionRules(per_team=1)
    set_teams(world, "[teams.ads]\nquota.v4-16 = 32\n[teams.vision]\n[teams.'vision/night']")
    start(world, "one", "two", "three", "four", team="vision/night")
    world.now += 3600.0
    submit(world, "first", "ads")
    assert len(leaving(world)) == 1
    submit(world, "second", "ads")
    assert len(leaving(world)) == 1
    assert "since jobs of team vision, jobs of team vision/night had enough evictions" in world.why("second")


def test_band_reclaims_only_its_part_of_quota(world: World) -> None:
    two_teams(world, ads="16", vision="{ chips = 16, production = 8 }")
    start(world, *(f"ads-{number}" for number in range(4)), team="ads")
    submit(world, "vision-0", "vision", priority=PRODUCTION)
    submit(world, "vision-1", "vision", priority=PRODUCTION)
    assert len(leaving(world)) == 1
    assert [number for number in (0, 1) if promised(world.state.jobs[f"vision-{number}"])] == [0]


def test_band_beyond_its_part_evicts_no_lower_band(world: World) -> None:
    """They would go before it, and take the hosts back."""
    set_teams(world, "[teams.ads]\nquota.v4-16 = { chips = 32, interactive = 8 }")
    start(world, "full", team="ads")
    start(world, "one", "two", "three", team="ads", priority=BATCH)
    world.now += 3600.0
    submit(world, "more", "ads")
    assert not leaving(world)


def test_borrower_loses_promise_to_equal_job_within_quota(world: World) -> None:
    two_teams(world, ads="24", vision="8")
    start(world, "one", "two", team="ads")
    start(world, "batch", team="vision", priority=BATCH)
    world.now += 3600.0
    borrows = submit(world, "borrows", "vision", slices=(2,))
    assert leaving(world) == {"batch"}
    submit(world, "own", "ads")
    assert set(world.schedule()) == {"own"}
    assert borrows.promise is None
    assert not world.state.evicted


# -- changes -----------------------------------------------------------------------------------------------------------


def test_jobs_of_a_deleted_team_count_for_the_team_above_it(world: World) -> None:
    set_teams(world, '[teams.research]\nquota.v4-16 = 16\n[teams."research/vision"]\nquota.v4-16 = 16')
    start(world, "job", team="research/vision")
    set_teams(world, "[teams.research]\nquota.v4-16 = 16")
    assert world.state.teams.usage["research"]["v4-16"] == 8
    set_teams(world, "[teams.ads]\nquota.v4-16 = 16")
    assert "research" not in world.state.teams.usage
    assert world.state.teams.usage[""]["v4-16"] == 8


def test_without_teams_nothing_is_counted(world: World) -> None:
    start(world, "job", user="ann")
    assert world.state.teams.usage == {}
    set_teams(world, "")
    assert world.state.teams.usage == {}


def test_types_without_any_quota_are_shared_as_without_teams(world: World) -> None:
    set_teams(world, "[teams.ads]\nquota.v5p-16 = 8\n[teams.vision]\nquota.v5p-16 = 8")
    start(world, *(f"ads-{number}" for number in range(4)), team="ads", priority=BATCH)
    world.now += BACKFILL_BOUND_S
    submit(world, "vision", "vision", priority=PRODUCTION)
    assert len(leaving(world)) == 1


# -- a plan counts what leaves and what is promised --------------------------------------------------------------------

ML = """
    [teams.ml]
    quota.v4-16 = { chips = 24, borrow = 0 }
    [teams."ml/ads"]
    quota.v4-16 = 16
"""


def held_by(world: World, team: str) -> float:
    return world.state.teams.usage[team]["v4-16"]


def test_victims_other_chips_count_until_it_has_left() -> None:
    world = World(*"cd")
    add_slices(world, "a", "b", rack="one")
    on_rack = (*gang_spec().constraints, Constraint("rack", ConstraintOp.EQ, "one"))
    set_teams(world, ML)
    (large,) = start(world, "large", team="ml", slices=(2,), constraints=on_rack)
    world.now += BACKFILL_BOUND_S
    taker = submit(world, "taker", "ml/ads", priority=PRODUCTION, constraints=on_rack)
    submit(world, "first", "ml/ads")
    submit(world, "second", "ml/ads")
    assert leaving(world) == {"large"}, "for the one slice that its own part of the team has lent"
    assert (len(promised(taker)), held_by(world, "ml")) == (2, 24), "large has two slices until it leaves"
    assert set(world.schedule()) == set()
    world.report_all(large, S.FAILED)
    world.confirm(large)
    assert set(world.schedule()) == {"taker", "second"}
    assert held_by(world, "ml") == 24


def test_job_that_runs_before_its_victim_has_left_counts_beside_it() -> None:
    """The victim leaves for two jobs of its team. One of them finds another slice, which the team may not have yet."""
    world = World(*"cd")
    add_slices(world, "a", "b", rack="one")
    on_rack = (*gang_spec().constraints, Constraint("rack", ConstraintOp.EQ, "one"))
    set_teams(world, "[teams.ads]\nquota.v4-16 = { chips = 16, borrow = 0 }")
    start(world, "large", team="ads", slices=(2,), constraints=on_rack, priority=BATCH)
    (other,) = start(world, "other", slices=(2,), priority=PRODUCTION)
    world.now += BACKFILL_BOUND_S
    submit(world, "first", "ads", constraints=on_rack, priority=PRODUCTION)
    submit(world, "second", "ads", priority=PRODUCTION)
    world.schedule()
    assert leaving(world) == {"large"}
    assert all(map(promised, map(world.state.jobs.__getitem__, ("first", "second"))))
    world.finish(other)
    assert set(world.schedule()) == set()
    assert held_by(world, "ads") == 16


def test_promise_to_a_group_and_what_leaves_for_it_count_once() -> None:
    world = World(*"cd")
    add_slices(world, "a", "b", rack="one")
    on_rack = (*gang_spec().constraints, Constraint("rack", ConstraintOp.EQ, "one"))
    set_teams(world, "[teams.ads]\nquota.v4-16 = 32")
    start(world, "large", team="ads", slices=(2,), constraints=on_rack, priority=BATCH)
    world.now += BACKFILL_BOUND_S
    both = (gang_spec(job_id, constraints=on_rack, team="ads", priority=PRODUCTION) for job_id in ("one", "two"))
    submit_group(world, *both)
    assert leaving(world) == {"large"}
    submit(world, "other", "ads", priority=BATCH)
    assert set(world.schedule()) == {"other"}


def test_spare_that_leaves_for_its_users_limit_gives_its_chips_once(world: World) -> None:
    set_teams(world, "[teams.ads]\nquota.v4-16 = { chips = 16, borrow = 0 }")
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=16.0)))
    start(world, "gang", team="ads", user="ann", spares=1)
    world.schedule()
    assert held_by(world, "ads") == 16
    submit(world, "job", "ads", user="ann")
    submit(world, "other", "ads", user="bob", priority=BATCH)
    assert set(world.schedule()) == set(), "the spare's chips are for job"
    assert set(world.schedule()) == {"job"}


def test_no_spare_leaves_for_its_users_limit_if_the_jobs_team_is_at_its_quota(world: World) -> None:
    set_teams(world, "[teams.ads]\nquota.v4-16 = { chips = 8, borrow = 0 }\n[teams.vision]\nquota.v4-16 = 16")
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=16.0)))
    start(world, "other", team="ads", user="bob")
    start(world, "gang", team="vision", user="ann", spares=1)
    world.schedule()
    submit(world, "job", "ads", user="ann")
    assert not world.plan().promises


def test_spare_of_another_team_leaves_for_its_users_limit(world: World) -> None:
    two_teams(world)
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(chips=16.0)))
    start(world, "gang", team="vision", user="ann", spares=1)
    world.schedule()
    submit(world, "job", "ads", user="ann")
    world.schedule()
    assert set(world.schedule()) == {"job"}


def test_group_with_a_reservation_takes_hosts_within_the_quota_that_is_left(world: World) -> None:
    """The chips that are reserved for the group's jobs don't count beside those that they would get."""
    two_teams(world, ads="64", vision="0")
    victims = start(world, *"wxyz", team="ads", priority=BATCH)
    specs = [gang_spec(name, team="ads", priority=PRODUCTION, slices=(2,)) for name in ("trainer", "sampler")]
    trainer, _ = submit_group(world, *specs)
    assert (leaving(world), len(promised(trainer))) == (set(), 8)
    world.now += LEAST_RUN_S[BATCH] + 1.0
    assert leaving(world) == {job.spec.job_id for job in victims}
