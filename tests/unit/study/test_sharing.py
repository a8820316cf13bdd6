"""Sharing in virtual time: evictions, fair shares, spares and limits."""

from collections import Counter
from typing import Any

import pytest

from iris_ray.model.lifecycle import JobState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.scheduler.victims import EvictionRules
from iris_ray.state.events import LimitsSetEvent
from iris_ray.study import Simulation
from iris_ray.study.report import report_on
from tests.support.simulations import DAY, HOUR, MINUTE, TIMINGS, attempts, endless, gang, slices, tasks, waited

# -- evictions --------------------------------------------------------------------------------------------------------


PRODUCTION, INTERACTIVE, BATCH = PriorityBand


def outcomes(simulation: Simulation, job_id: str) -> list[str]:
    return [one.outcome for one in attempts(simulation, job_id)]


def began(simulation: Simulation, job_id: str) -> float | None:
    return attempts(simulation, job_id)[0].began_at


@pytest.mark.parametrize(("heeds", "moved_after"), [(True, 10.0), (False, 35.0)])
def test_production_gets_slice_after_grace_or_early_save(heeds: bool, moved_after: float) -> None:
    """A regular save is due after 30 s, and may be late."""
    simulation = slices()
    simulation.submit(gang("batch", priority=BATCH, heeds_notices=heeds, save_every_s=MINUTE))
    simulation.submit(gang("prod", priority=PRODUCTION, run_s=MINUTE), at=1000.0)
    simulation.run_until(3 * HOUR)
    stop_s, launch_s = TIMINGS.stop, TIMINGS.launch + TIMINGS.reclaim
    assert attempts(simulation, "prod")[0].assigned_at == 1000.0 + moved_after + stop_s
    assert began(simulation, "prod") == 1000.0 + moved_after + stop_s + launch_s
    assert outcomes(simulation, "batch") == ["evicted", "success"]
    assert attempts(simulation, "batch")[0].lost_s <= (0.0 if heeds else MINUTE)
    job = simulation.state.jobs["batch"]
    assert (job.state, job.failures, job.preemptions, job.evictions) == (JobState.SUCCEEDED, 0, 0, 1)


@pytest.mark.parametrize(
    ("old", "victim"),
    [
        ({"heeds_notices": True}, "old"),
        ({"heeds_notices": False, "save_every_s": 2 * MINUTE}, "old"),
        ({"heeds_notices": False, "save_every_s": 9 * HOUR}, "young"),
        ({"heeds_notices": False}, "young"),
    ],
    ids=str,
)
def test_victim_is_the_gang_that_has_less_to_do_again(old: dict[str, Any], victim: str) -> None:
    simulation = slices(2)
    simulation.submit(gang("old", priority=BATCH, run_s=9 * HOUR, **old))
    simulation.submit(gang("young", priority=BATCH, run_s=9 * HOUR, heeds_notices=False), at=HOUR)
    simulation.submit(gang("prod", priority=PRODUCTION, run_s=MINUTE), at=2 * HOUR)
    simulation.run_until(3 * HOUR)
    assert [job_id for job_id in ("old", "young") if "evicted" in outcomes(simulation, job_id)] == [victim]
    assert attempts(simulation, victim)[0].lost_s <= (2 * MINUTE if victim == "old" else HOUR + MINUTE)


def test_storm_of_evictions_ends_at_the_budget_of_the_job() -> None:
    """A PRODUCTION job comes every five minutes, and finds no other hosts."""
    simulation = slices(evictions=EvictionRules(per_job=4))
    simulation.submit(gang("batch", priority=BATCH, run_s=DAY, save_every_s=MINUTE))
    for number in range(36):
        simulation.submit(gang(f"prod-{number}", priority=PRODUCTION, run_s=MINUTE), at=HOUR + number * 5 * MINUTE)
    simulation.run_until(5 * HOUR)
    ends = [one.ended_at or 0.0 for one in attempts(simulation, "batch") if one.outcome == "evicted"]
    assert len(ends) >= 8
    for number, end in enumerate(ends):
        assert sum(end <= other < end + HOUR for other in ends[number:]) <= 4
    assert not simulation.state.pending()


def test_nothing_is_evicted_if_switched_off() -> None:
    simulation = slices(evictions=None)
    simulation.submit(gang("batch", priority=BATCH))
    simulation.submit(gang("prod", priority=PRODUCTION), at=1000.0)
    simulation.run_until(3 * HOUR)
    assert outcomes(simulation, "batch") == ["success"]
    assert attempts(simulation, "prod")[0].assigned_at > HOUR


def test_grace_comes_from_the_rules() -> None:
    simulation = slices(evictions=EvictionRules(grace_s=300.0))
    simulation.submit(gang("batch", priority=BATCH, heeds_notices=False))
    simulation.submit(gang("prod", priority=PRODUCTION), at=1000.0)
    simulation.run_until(HOUR)
    assert attempts(simulation, "batch")[0].ended_at == 1300.0


def test_eviction_is_called_off_when_other_room_appears() -> None:
    simulation = slices(2)
    simulation.submit(gang("short", run_s=1000.0))
    simulation.submit(gang("batch", priority=BATCH, heeds_notices=False, run_s=2 * HOUR))
    simulation.submit(gang("prod", priority=PRODUCTION), at=1000.0)  # "short" ends within the grace
    simulation.run_until(4 * HOUR)
    assert outcomes(simulation, "batch") == ["success"]
    assert attempts(simulation, "prod")[0].assigned_at < 1000.0 + 30.0


def test_fewest_and_cheapest_victims_are_chosen() -> None:
    """Two slices are needed: one gang of two slices goes rather than two of one, and the younger gang of two."""
    simulation = slices(6)
    work: dict[str, Any] = {"priority": BATCH, "run_s": 9 * HOUR, "heeds_notices": False}
    simulation.submit(gang("old-pair", 2, **work))
    simulation.submit(gang("young-pair", 2, **work), at=HOUR)
    for name in ("one", "two"):
        simulation.submit(gang(name, **work), at=HOUR)
    simulation.submit(gang("prod", 2, priority=PRODUCTION), at=2 * HOUR)
    simulation.run_until(2.5 * HOUR)
    assert [job.evictions for job in simulation.state.jobs.values()] == [0, 1, 0, 0, 0]


def test_lowest_band_goes_first_however_far_its_progress() -> None:
    simulation = slices(2)
    simulation.submit(gang("batch", priority=BATCH, run_s=9 * HOUR))
    simulation.submit(gang("inter", priority=INTERACTIVE, run_s=9 * HOUR), at=HOUR)
    simulation.submit(gang("prod", priority=PRODUCTION), at=2 * HOUR)
    simulation.run_until(2.5 * HOUR)
    assert {job_id: job.evictions for job_id, job in simulation.state.jobs.items()} == {
        "batch": 1,
        "inter": 0,
        "prod": 0,
    }


def test_gang_that_would_not_fit_evicts_nobody() -> None:
    simulation = slices(3)
    simulation.submit(gang("peer", 1, priority=PRODUCTION, run_s=9 * HOUR))
    simulation.submit(gang("batch", 2, priority=BATCH, run_s=9 * HOUR))
    simulation.submit(gang("prod", 3, priority=PRODUCTION), at=HOUR)
    simulation.run_until(5 * HOUR)
    assert outcomes(simulation, "batch") == [""]


def test_tasks_on_shared_hosts_give_way_singly() -> None:
    simulation = Simulation(TIMINGS, check_every=1)
    simulation.hosts.add_hosts(2, cpus=8.0)
    simulation.submit(tasks("batch", replicas=16, cpus=1.0, priority=BATCH, run_s=9 * HOUR))
    simulation.submit(tasks("prod", replicas=1, cpus=3.0, priority=PRODUCTION), at=HOUR)
    simulation.run_until(1.5 * HOUR)
    assert simulation.state.jobs["batch"].evictions == 3
    assert attempts(simulation, "prod")[0].assigned_at < HOUR + MINUTE


def test_crowd_neither_thrashes_nor_starves_production() -> None:
    """Whoever is evicted has run for the minimum time, and PRODUCTION never waits for longer than that takes."""
    results: dict[bool, Any] = {}
    for on in (True, False):
        simulation = slices(8, check_every=500, evictions=EvictionRules() if on else None)
        for user, band in (("ann", BATCH), ("bob", BATCH), ("cy", INTERACTIVE)):
            simulation.keep_waiting(endless(user, (1, 2), (30, 90), priority=band, save_every_s=5 * MINUTE), 3)
        for hour in range(1, 24):
            simulation.submit(gang(f"prod-{hour}", 4, 0.5 * HOUR, priority=PRODUCTION), at=hour * HOUR)
        simulation.run_until(24 * HOUR)
        simulation.state.check()
        evicted = [one for one in simulation.history.attempts if one.outcome == "evicted"]
        for one in evicted:
            band = simulation.history.jobs[one.id.job_id].band
            assert one.began_at is not None
            assert one.ended_at is not None
            assert one.ended_at - one.began_at >= EvictionRules().least_run_s[band]
        waits = [simulation.history.jobs[f"prod-{hour}"].waited_s(simulation.now) for hour in range(1, 24)]
        results[on] = max(waits), len(evicted), Counter(simulation.history.jobs[one.id.job_id].band for one in evicted)
    assert results[True][0] < 11 * MINUTE < results[False][0]
    assert results[True][1] > 10
    assert results[False][1] == 0


# -- fair shares ------------------------------------------------------------------------------------------------------


Sizes = dict[str, tuple[int, ...]]


def shares(simulation: Simulation) -> dict[str, float]:
    """Each user's part of what all held in a day, as a multiple of an equal share."""
    simulation.run_until(DAY)
    simulation.state.check()
    found = report_on(simulation.history, DAY).shares
    return {user: share * len(found) for user, share in found.items()}


@pytest.mark.parametrize(
    ("count", "waiting", "users"),
    [
        (2, 1, {"ann": (2,), "bob": (1,)}),
        (4, 3, {"ann": (2,), "bob": (1,)}),
        (8, 3, {"ann": (1,), "bob": (2,), "cleo": (1, 2, 3), "dan": (4,)}),
    ],
    ids=["two slices or one, of two", "two slices or one, of four", "mixed sizes"],
)
def test_users_with_endless_queues_share_equally(count: int, waiting: int, users: Sizes) -> None:
    simulation = slices(count, check_every=0)  # the invariants are checked at the end
    for user, sizes in users.items():
        simulation.keep_waiting(endless(user, sizes, minutes=(20, 100)), waiting=waiting)
    assert all(0.8 <= share <= 1.2 for share in shares(simulation).values())


def test_large_task_behind_small_ones_starts_within_bound() -> None:
    simulation = Simulation(TIMINGS)
    simulation.hosts.add_hosts(2, cpus=8.0)
    for user in ("ann", "bob"):
        stream = (tasks(f"{user}-{n}", cpus=1.0, run_s=(20 + 7 * n % 40) * MINUTE, user=user) for n in range(10_000))
        simulation.keep_waiting(stream, waiting=5)
    simulation.submit(tasks("large", cpus=8.0, user="cleo"), at=HOUR)
    simulation.run_until(4 * HOUR)
    assert BACKFILL_BOUND_S / 2 < waited(simulation, "large") <= BACKFILL_BOUND_S + HOUR + 2 * MINUTE
    simulation.state.check()


# -- spares and limits ------------------------------------------------------------------------------------------------


def test_slice_held_by_spare_goes_to_new_job() -> None:
    simulation = slices(2)
    simulation.submit(gang("first", spares=1, run_s=2 * HOUR))
    simulation.submit(gang("other", user="other"), at=1000.0)
    simulation.run_until(HOUR)
    assert waited(simulation, "other") == 0.0


def test_spares_slice_is_not_given_to_avoiding_job() -> None:
    simulation = slices(3)
    simulation.submit(gang("first", spares=2, run_s=2 * HOUR))
    simulation.submit(gang("other", user="other", launch_fails=True), at=1000.0)
    simulation.run_until(1000.0 + 4 * MINUTE)
    assert simulation.history.plans < 100


def test_job_over_users_limit_lets_others_pass() -> None:
    simulation = slices(2)
    simulation.apply([LimitsSetEvent("ann", PriorityBand.INTERACTIVE, Limits(chips=8))])
    for name in ("first", "second"):
        simulation.submit(gang(name, user="ann"))
    simulation.submit(gang("other", user="bob"))
    simulation.run_until(0.5 * HOUR)
    assert "limit" in simulation.why("second")
    assert waited(simulation, "other") == 0.0
    simulation.run_until(1.5 * HOUR)
    assert HOUR <= waited(simulation, "second") <= HOUR + MINUTE
