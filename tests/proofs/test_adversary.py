"""What an adversary did to the queue: each case is a small story over the public core, with the rule that it broke.

Rules are quoted from docs/sharing-a-cluster.md, docs/teams.md and docs/job-groups.md. Most stories run in virtual time
(`iris_ray.study.Simulation`), where the Controller's own code decides.
"""

import math
from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest

from iris_ray.handover.controller import with_remaining_budgets
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team
from iris_ray.model.workers import TPU
from iris_ray.state.events import LimitsSetEvent, TeamsSetEvent, TimePassedEvent
from iris_ray.state.instructions import Instructions
from iris_ray.study import SimulatedJob, Simulation
from iris_ray.study.history import AttemptHistory
from iris_ray.study.jobs import slice_spec
from tests.support.simulations import DAY, HOUR, MINUTE, TIMINGS, waited
from tests.support.worlds import LONG, MANY, PlannedWorld, gang_spec, in_group, submit_group

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
TYPE, CHIPS = "v4-8", 4.0
BOUND_S, LEAST_RUN_S = 10 * MINUTE, 2 * MINUTE
"""The backfill bound, and for how long a BATCH attempt runs at least."""
NOTICE_S = 60.0
"""The longest grace: 30 s, and up to 30 s more for a regular save."""
SLACK_S = 2 * MINUTE
"""For launches, exits, and until the next plan."""


def cluster(slices: int, *teams: Team) -> Simulation:
    simulation = Simulation(TIMINGS)
    simulation.hosts.add_slices(TYPE, slices)
    if teams:
        simulation.apply([TeamsSetEvent(teams)])
    return simulation


def job(
    job_id: str, slices: int | list[int] = 1, run_s: float = 1000 * DAY, save_every_s: float = math.inf, **changes: Any
) -> SimulatedJob:
    """Return a gang that heeds no notice, whose user is named like it; without an end or saves unless told."""
    spec = slice_spec(job_id, TYPE, slices, **{"user": job_id, **changes})
    return SimulatedJob(spec, run_s, save_every_s, heeds_notices=False)


def chips_held(attempts: Iterable[AttemptHistory], begin: float, end: float) -> float:
    """Return the chip-seconds that attempts have held between two times."""
    return sum(
        one.held.get(TPU, 0.0) * max(0.0, min(end, one.freed_at or end) - max(begin, one.assigned_at))
        for one in attempts
    )


def use_of(simulation: Simulation, begin: float, end: float) -> float:
    """Return the share of all chips that jobs have held between two times."""
    in_all = simulation.history.capacity[-1][1][TPU] * (end - begin)
    return chips_held(simulation.history.attempts, begin, end) / in_all


def evictions(simulation: Simulation) -> list[AttemptHistory]:
    """Return the attempts that were made to leave their hosts to another job."""
    return [one for one in simulation.history.attempts if one.outcome == "evicted"]


def most_held(simulation: Simulation, teams: Iterable[str]) -> float:
    """Return the most chips that teams have held at once."""
    held = [one for one in simulation.history.attempts if one.team in teams]
    return max(
        sum(one.held[TPU] for one in held if one.assigned_at <= at and (one.freed_at is None or at < one.freed_at))
        for at in {one.assigned_at for one in held}
    )


# -- kept room is lent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("band", [PRODUCTION, INTERACTIVE])
def test_a_job_for_the_whole_fleet_beside_a_service_without_end_idles_nobody(band: PriorityBand) -> None:
    """Room whose completion nothing bounds idles for nobody. Once the service has ended, the large job runs soon."""
    simulation = cluster(16)
    simulation.submit(job("service", priority=PRODUCTION), 0.0)
    simulation.submit(job("large", 16, HOUR, priority=band), 60.0)
    for user in "abcd":
        short = (job(f"{user}-{n}", 1, 10 * MINUTE, user=user, max_runtime=900.0) for n in count())
        simulation.keep_waiting(short, waiting=8)
    simulation.run_until(DAY)
    assert use_of(simulation, 0.0, DAY) >= 0.9
    simulation.finish("service")
    simulation.run_until(DAY + 2 * HOUR)
    simulation.state.check()
    assert waited(simulation, "large") <= DAY + 900.0 + NOTICE_S + SLACK_S


def test_kept_room_is_lent_to_jobs_that_are_gone_in_time() -> None:
    """Reserved room is lent to jobs whose max_runtime ends before it can be complete, and costs its job nothing."""
    simulation = cluster(8)
    simulation.submit(job("long", 1, 3.9 * HOUR, max_runtime=4 * HOUR), 0.0)
    simulation.submit(job("large", 8, HOUR), 60.0)
    for user in "ab":
        short = (job(f"{user}-{n}", 1, 10 * MINUTE, user=user, max_runtime=900.0) for n in count())
        simulation.keep_waiting(short, waiting=8)
    simulation.run_until(6 * HOUR)
    simulation.state.check()
    assert use_of(simulation, 0.0, 3.5 * HOUR) >= 0.9
    assert waited(simulation, "large") <= 4 * HOUR + SLACK_S


def test_kept_room_is_lent_to_lower_bands_which_leave_within_a_notice() -> None:
    """Reserved room is lent to jobs that leave within a notice: any of a lower band."""
    simulation = cluster(8)
    simulation.submit(job("long", 1, 3.9 * HOUR, max_runtime=4 * HOUR), 0.0)
    simulation.submit(job("large", 8, HOUR), 60.0)
    simulation.keep_waiting(
        (job(f"batch-{n}", 1, 30 * MINUTE, user="batch", priority=BATCH) for n in count()), waiting=8
    )
    simulation.run_until(6 * HOUR)
    simulation.state.check()
    assert use_of(simulation, 0.0, 3.5 * HOUR) >= 0.9
    assert waited(simulation, "large") <= 4 * HOUR + LEAST_RUN_S + NOTICE_S + SLACK_S


# -- a plan ends -------------------------------------------------------------------------------------------------------


def test_a_plan_ends_when_a_group_over_its_users_limit_waits_beside_a_spare() -> None:
    """Limits are reasons to wait. A plan changes a promise or a spare of a job once at most."""
    world = PlannedWorld()
    for name in "ab":
        world.add_slice(name, TYPE)
    world.do(LimitsSetEvent("ann", INTERACTIVE, Limits(running_jobs=1)))
    runs = world.submit("runs", tpu_type=TYPE, user="ann", spares=1, **MANY)
    world.turn()
    world.report_all(runs, TaskState.RUNNING)
    world.turn()
    submit_group(world, *(gang_spec(f"{name}-of-group", TYPE, user="ann") for name in "xy"))
    for seconds in (0.0, BOUND_S + 1.0, 1.0, BOUND_S):
        world.now += seconds
        world.do(TimePassedEvent(world.now))
        instructions = Instructions()
        world.planner.plan(world.now, instructions)
        assert not world.planner.left_out, [str(aside) for aside in world.planner.left_out.values()]
        assert len(instructions.dropped) <= 1
    assert "limit" in str(world.planner.pending_reasons["x-of-group"])
    world.check()


def test_a_plan_ends_when_what_is_lent_is_not_enough_for_a_job_that_a_spare_leaves_for() -> None:
    """A plan changes a promise or a spare of a job once at most: the spare does not come back for the next round."""
    simulation = cluster(3, Team("research", {TYPE: Quota(12.0, borrow=4.0, by_band={INTERACTIVE: 0.0})}))
    simulation.submit(job("upper", team="research"), 0.0)
    simulation.submit(job("lower", team="research", priority=BATCH, spares=1), 5 * MINUTE)
    simulation.submit(job("urgent", priority=PRODUCTION), 15 * MINUTE)
    simulation.submit(job("plain"), 15 * MINUTE)
    simulation.submit(job("another", team="research"), 15 * MINUTE)
    simulation.run_until(HOUR)  # raises what the Controller would contain
    simulation.state.check()


# -- nobody leaves in vain ---------------------------------------------------------------------------------------------


def test_a_band_without_a_part_of_its_teams_quota_does_not_send_the_lower_bands_away_again_and_again() -> None:
    """Nothing ends unless the job for which it ends then runs; a victim of a lower rank would come back before it."""
    research = Team("research", {TYPE: Quota(12.0, borrow=4.0, by_band={INTERACTIVE: 0.0})})
    simulation = cluster(3, research, Team("research/vision", {TYPE: Quota(4.0, borrow=0.0)}))
    for n in range(4):
        simulation.submit(job(f"upper-{n}", user="ann", team="research"), 0.0)
    simulation.submit(job("lower", team="research", priority=BATCH), 5 * MINUTE)
    simulation.submit(job("without-team", priority=PRODUCTION), 15 * MINUTE)
    simulation.submit(job("part", 1, 20 * MINUTE, team="research/vision"), 15 * MINUTE)
    simulation.run_until(3 * HOUR)
    simulation.state.check()
    again = [one for one in simulation.history.attempts if one.user == "ann" and one.assigned_at > HOUR / 2]
    sent_away = [one for one in evictions(simulation) if one.user == "lower"]
    assert len(sent_away) <= len(again), f"{len(sent_away)} evictions, and upper jobs ran {len(again)} times after them"


@pytest.mark.parametrize("gang_first", [True, False])
@pytest.mark.parametrize("service_s", [None, HOUR])
def test_what_somebody_left_for_does_not_go_to_a_gang_of_a_higher_band_that_could_not_run(
    service_s: float | None, gang_first: bool
) -> None:
    """Nothing ends unless the job for which it ends then runs: a higher band takes the slice only if it runs with it.

    Whether the gang's room is bounded by the service's end or by nothing, a slice of it is lent meanwhile.
    """
    simulation = cluster(3)
    simulation.submit(job("service", 1, service_s or 1000 * DAY, priority=PRODUCTION, max_runtime=service_s), 0.0)
    for n in range(2):
        simulation.submit(job(f"batch-{n}", priority=BATCH), 10.0)
    at = 20 * MINUTE
    simulation.submit(job("one", 1, 10 * MINUTE), at)
    simulation.submit(job("gang", 3, HOUR, priority=PRODUCTION), at - MINUTE if gang_first else at + 10.0)
    simulation.run_until(50 * MINUTE)
    simulation.state.check()
    assert waited(simulation, "one") <= NOTICE_S + SLACK_S
    assert len(evictions(simulation)) == 1


def two_teams_that_borrow(world: PlannedWorld) -> None:
    world.do(TeamsSetEvent((Team("lender", {TYPE: Quota(8.0)}), Team("borrower", {TYPE: Quota(0.0)}))))


def test_nobody_leaves_any_more_once_an_operator_has_changed_the_tree_within_the_notice() -> None:
    """What is asked before anybody leaves is asked at each plan after: here the lender's job has lost its right.

    The borrower then goes on; it does not leave and come back before the job that it left for.
    """
    world = PlannedWorld()
    for name in "ab":
        world.add_slice(name, TYPE)
    two_teams_that_borrow(world)
    victims = [world.run(f"victim-{n}", tpu_type=TYPE, user="bob", team="borrower") for n in range(2)]
    world.submit("taker", tpu_type=TYPE, user="ann", team="lender", **MANY)
    world.turn()
    asked = [victim for victim in victims if victim.gang.eviction is not None]
    assert len(asked) == 1
    world.do(TeamsSetEvent((Team("lender", {TYPE: Quota(0.0)}), Team("borrower", {TYPE: Quota(8.0)}))))
    world.turn(1.0)
    assert all(victim.gang.eviction is None for victim in victims)
    world.turn(5.0, times=30)
    assert [victim.evictions for victim in victims] == [0, 0]
    world.check()


def test_who_left_stays_behind_the_job_that_it_left_for_though_an_operator_changes_the_tree() -> None:
    """Nobody leaves in vain: either the victim stays, or the job that it left for runs."""
    world = PlannedWorld()
    for name in "ab":
        world.add_slice(name, TYPE)
    two_teams_that_borrow(world)
    victims = [world.run(f"victim-{n}", tpu_type=TYPE, user="bob", team="borrower") for n in range(2)]
    taker = world.submit("taker", tpu_type=TYPE, user="ann", team="lender", **MANY)
    world.turn()
    (asked,) = (victim for victim in victims if victim.gang.eviction is not None)
    world.leave(asked)
    world.do(TeamsSetEvent((Team("lender", {TYPE: Quota(4.0)}), Team("borrower", {TYPE: Quota(4.0)}, weight=100.0))))
    world.turn(1.0)
    world.confirm(asked)
    world.turn(1.0, times=60)
    assert taker.gang.placed
    world.check()


def test_growth_of_a_gang_that_returns_comes_after_every_job_that_waits() -> None:
    """A gang that has just lost its hosts comes first, with as many as it had. Growth comes after every waiting job."""
    world = PlannedWorld()
    for name in "abcd":
        world.add_slice(name, TYPE)
    others = [world.run(f"other-{n}", tpu_type=TYPE, user="bob") for n in range(3)]
    flexible = world.run("flexible", tpu_type=TYPE, user="ann", slices=(1, 2, 3, 4))
    assert len(flexible.gang.groups) == 1
    waiting = [world.submit(f"waits-{n}", tpu_type=TYPE, user=f"user-{n}", **MANY) for n in range(3)]
    world.turn(1.0)
    world.report(flexible, TaskState.FAILED)
    world.confirm(flexible)
    for other in others:
        world.finish(other)
    world.turn(max(0.0, flexible.gang.not_before - world.now))
    assert flexible.gang.placed
    assert len(flexible.gang.groups) == 1
    assert all(one.gang.placed for one in waiting)
    world.check()


# -- quotas ------------------------------------------------------------------------------------------------------------


def test_a_part_is_held_to_what_the_team_above_may_borrow() -> None:
    """A team uses at most its quota and what it may borrow, with all its parts; nobody of it goes beyond."""
    parent = Team("research", {TYPE: Quota(16.0, borrow=0.0)})
    simulation = cluster(8, parent, Team("research/vision", {TYPE: Quota(8.0)}))
    for n in range(4):
        simulation.submit(job(f"own-{n}", user="ann", team="research"), 0.0)
    for n in range(4):
        simulation.submit(job(f"part-{n}", user="bob", team="research/vision"), 20 * MINUTE)
    simulation.run_until(HOUR)
    simulation.state.check()
    assert most_held(simulation, ["research", "research/vision"]) <= 16.0
    own = [one for one in simulation.history.attempts if one.team == "research/vision"]
    assert chips_held(own, HOUR - 1.0, HOUR) >= 8.0, "the part does not get its quota"


def test_a_team_stays_within_its_quota_while_its_lower_band_leaves() -> None:
    """What leaves counts until it is gone: a team uses at most its quota and what it may borrow at any moment."""
    simulation = cluster(4, Team("research", {TYPE: Quota(8.0, borrow=0.0)}))
    for n in range(2):
        simulation.submit(job(f"batch-{n}", user="ann", team="research", priority=BATCH), 0.0)
    simulation.submit(job("urgent", 1, HOUR, user="ann", team="research", priority=PRODUCTION), 20 * MINUTE)
    simulation.run_until(HOUR)
    simulation.state.check()
    assert waited(simulation, "urgent") <= NOTICE_S + SLACK_S
    assert most_held(simulation, ["research"]) <= 8.0


def test_a_spare_beyond_a_quota_is_given_back_to_a_job_of_another_team() -> None:
    """Spares come after every job that waits, and are given back to it; also when what is lent would suffice then."""
    simulation = cluster(3, Team("keeps", {TYPE: Quota(CHIPS, lend=0.0)}), Team("other"))
    simulation.submit(job("has-a-spare", spares=1, priority=PRODUCTION), 0.0)
    simulation.submit(job("waits", team="other"), 10 * MINUTE)
    simulation.run_until(2 * HOUR)
    simulation.state.check()
    assert waited(simulation, "waits") <= SLACK_S


def test_a_part_within_its_quota_does_not_take_its_team_beyond_what_it_may_borrow() -> None:
    """The part reclaims a slice of its own team within a notice, instead of one that the team may not have."""
    parts = [Team(f"research/{name}", {TYPE: Quota(CHIPS)}) for name in ("speech", "vision")]
    simulation = cluster(6, Team("research", {TYPE: Quota(8.0, borrow=0.0)}), *parts)
    for n in range(2):
        simulation.submit(job(f"borrows-{n}", user="ann", team="research/speech", priority=BATCH), 0.0)
    simulation.submit(job("takes", 1, HOUR, user="bob", team="research/vision"), 20 * MINUTE)
    simulation.run_until(HOUR)
    simulation.state.check()
    assert most_held(simulation, ["research", "research/speech", "research/vision"]) <= 8.0
    assert waited(simulation, "takes") <= NOTICE_S + SLACK_S


@pytest.mark.parametrize(("slices", "save_every_s"), [(2, HOUR), (4, HOUR), (4, 15 * MINUTE)])
def test_a_borrower_keeps_half_of_its_work_and_the_lender_waits_two_notices(slices: int, save_every_s: float) -> None:
    """Unused quota comes back within a notice; who was sent away is left alone for a while, and keeps half its work.

    The lender needs a slice for two minutes of every twenty. The borrower saves hourly or so, and heeds no notice. With
    a single slice, both can't hold: every save would come after the lender's next need.
    """
    simulation = cluster(slices, Team("lender", {TYPE: Quota(CHIPS)}), Team("borrower", {TYPE: Quota(0.0)}))
    for n in range(slices):
        simulation.submit(job(f"borrows-{n}", user="bob", team="borrower", save_every_s=save_every_s), 0.0)
    short = [f"short-{n}" for n in range(3 * 24 - 1)]
    for n, name in enumerate(short):
        needs = job(name, 1, 2 * MINUTE, user="ann", team="lender", max_runtime=300.0)
        simulation.submit(needs, 25 * MINUTE + n * 20 * MINUTE)
    simulation.run_until(DAY)
    simulation.state.check()
    began = [one for one in simulation.history.attempts if one.team == "borrower" and one.began_at is not None]
    done_s = sum((one.ended_at or DAY) - (one.began_at or 0.0) for one in began)
    assert sum(one.lost_s for one in began) <= done_s / 2
    assert max(waited(simulation, name) for name in short) <= 2 * NOTICE_S


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_of_production_takes_hosts_from_lower_bands_for_its_start() -> None:
    """A higher band takes hosts from lower ones, with notice, grace and a minimum runtime, also for a group."""
    simulation = cluster(2)
    for n in range(2):
        simulation.submit(job(f"batch-{n}", 1, 4 * HOUR, priority=BATCH), 0.0)
    for spec in in_group(*(slice_spec(name, TYPE, priority=PRODUCTION, user="ann") for name in "xy")):
        simulation.submit(SimulatedJob(spec, HOUR), 20 * MINUTE)
    simulation.run_until(5 * HOUR)
    simulation.state.check()
    assert max(waited(simulation, name) for name in "xy") <= NOTICE_S + SLACK_S


# -- a new cluster -----------------------------------------------------------------------------------------------------


def test_an_export_carries_what_is_left_of_max_runtime() -> None:
    """A job ends max_runtime after its first task ran, whichever cluster it runs on."""
    world = PlannedWorld("a")
    runs = world.run("runs", max_runtime=2 * LONG)  # for 1,000 s
    assert with_remaining_budgets(runs, world.now).max_runtime == pytest.approx(LONG)
