"""A short run of `tests.proofs.soak`, and what its meter says of made-up figures; a long run is a command."""

import random
from pathlib import Path

import pytest

from tests.proofs.soak.meter import Point, slope
from tests.proofs.soak.run import HEAD, Soak
from tests.support.proofs import EXAMPLES, a_seed

MINUTES = 4.0


@pytest.mark.proof
@pytest.mark.way_in
@pytest.mark.timeout(1800 * max(1.0, EXAMPLES))
@pytest.mark.usefixtures("no_shared_cluster")
def test_nothing_grows_within_minutes(tmp_path: Path) -> None:
    seed = a_seed(7)
    print(f"seed {seed}: python -m tests.proofs.soak --minutes {MINUTES:g} --seed {seed}")
    soak = Soak(60 * MINUTES, tmp_path, seed)
    soak.run(mean_gap_s=30)
    print(HEAD, *soak.rows, sep="\n")
    assert not [str(row) for row in soak.rows if row.fails]
    assert not soak.troubles
    assert sum(soak.done.values()) >= 20


def figures(per_1000: float, processes: int = 1, points: int = 200, noise: float = 0.5) -> list[list[Point]]:
    """What the meter reads of processes that begin at different levels, with noise that lasts for some points."""
    chance, found = random.Random(1), []
    for process in range(processes):
        off, series = 0.0, []
        for jobs in range(0, points * 10, 10):
            off = 0.8 * off + chance.gauss(0, noise)
            series.append(Point(jobs, 50 * process + per_1000 * jobs / 1000 + off))
        found.append(series)
    return found


@pytest.mark.parametrize("per_1000", [0.0, 5.0, 30.0])
def test_slope_of_made_up_figures_is_within_three_errors(per_1000: float) -> None:
    found = slope(figures(per_1000, processes=3))
    assert abs(found.value - per_1000) < 3 * found.error
    assert found.error < 1.0
    assert found.exceeds(1.0) is (per_1000 > 1)


def test_error_knows_that_neighbouring_points_depend_on_each_other() -> None:
    points = figures(0.0, points=100)[0]
    independent = [Point(point.jobs, random.Random(point.jobs).gauss(0, 0.8)) for point in points]
    assert slope([points]).error > 1.5 * slope([independent]).error


def test_few_jobs_and_a_rise_below_one_unit_prove_nothing() -> None:
    assert not slope(figures(50.0, points=19, noise=0.0)).exceeds(1.0)
    assert not slope(figures(4.0, points=24, noise=0.0)).exceeds(1.0)
    assert slope(figures(50.0, points=24, noise=0.0)).exceeds(1.0)
