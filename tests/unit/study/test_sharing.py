"""Sharing in virtual time: evictions, fair shares, spares and limits."""

from typing import Any

import pytest

from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import EvictionRules
from iris_ray.study import Simulation
from iris_ray.study.report import report_on
from tests.support.simulations import DAY, HOUR, MINUTE, TIMINGS, attempts, endless, gang, slices

# -- evictions --------------------------------------------------------------------------------------------------------


_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand


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
            band = simulation.history.jobs[one.id.job_id].spec.priority
            assert one.began_at is not None
            assert one.ended_at is not None
            assert one.ended_at - one.began_at >= EvictionRules().least_run_s[band]
        waits = [simulation.history.jobs[f"prod-{hour}"].waited_s(simulation.now) for hour in range(1, 24)]
        results[on] = max(waits), len(evicted)
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
