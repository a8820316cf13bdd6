"""Growth in random worlds in virtual time: what it costs, what it wins, and no move to and fro."""

import itertools
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.model.options import PriorityBand
from iris_ray.study import SimulatedJob, Simulation, slice_spec
from iris_ray.study.history import AttemptHistory

HOUR = 3600.0
SHARE = 0.05
"""Of the time of the slices that growth has won, the moves cost at most so much if slices stay for hours."""
MOVE = 3 * 15.0
"""The slice-seconds that a move from three slices costs at most, with the timings of a study."""


def grown(simulation: Simulation, job_id: str) -> list[tuple[AttemptHistory, AttemptHistory]]:
    """The pairs of attempts between which the job moved to more slices."""
    own = [one for one in simulation.history.attempts if one.id.job_id == job_id and one.began_at is not None]
    return [(a, b) for a, b in itertools.pairwise(own) if len(b.groups) > len(a.groups) and a.outcome == "moved"]


def lost_and_won(simulation: Simulation, job_id: str) -> tuple[float, float]:
    """The slice-seconds that the moves to more slices have cost, and the slice-seconds of the further slices."""
    lost = won = 0.0
    for before, after in grown(simulation, job_id):
        assert before.ended_at is not None
        assert after.began_at is not None
        lost += len(before.groups) * (after.began_at - before.ended_at)
        ended_at = simulation.now if after.ended_at is None else after.ended_at
        won += (len(after.groups) - len(before.groups)) * (ended_at - after.began_at)
    return lost, won


def among_others(chance: Random, stays_s: float, hours: float) -> Simulation:
    """A run on one to four slices for days, beside jobs that come at random and stay for some time."""
    simulation = Simulation(look_again_s=600.0)
    simulation.hosts.add_slices("v4-16", 4)
    spec = slice_spec("grows", "v4-16", [1, 2, 3, 4], user="ann", priority=PriorityBand.BATCH)
    simulation.submit(SimulatedJob(spec, run_s=1000 * HOUR, save_every_s=600.0))
    at = 0.0
    for number in itertools.count():
        at += chance.expovariate(1 / (2 * stays_s))
        if at > hours * HOUR:
            break
        other = slice_spec(f"other-{number}", "v4-16", chance.choice((1, 1, 2)), user="bob")
        simulation.submit(SimulatedJob(other, run_s=chance.expovariate(1 / stays_s)), at=at)
    simulation.run_until(hours * HOUR)
    return simulation


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_growth_costs_small_share_of_what_it_wins(seed: int) -> None:
    simulation = among_others(Random(seed), stays_s=4 * HOUR, hours=48.0)
    lost, won = lost_and_won(simulation, "grows")
    assert lost <= SHARE * won + 2 * MOVE, "the last moves may not have paid yet"


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([20.0, 60.0, 300.0, 900.0]))
def test_crowd_of_short_jobs_causes_few_moves(seed: int, stays_s: float) -> None:
    """Each move that is undone too early doubles the wait. So the moves are few, however short the others stay."""
    hours = stays_s / 60.0
    simulation = among_others(Random(seed), stays_s, hours)
    lost, _ = lost_and_won(simulation, "grows")
    assert lost <= SHARE * hours * HOUR * 4 + MOVE
