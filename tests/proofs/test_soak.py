"""A short run of `tests.proofs.soak`, and what its meter says of made-up figures; a long run is a command."""

import math
import random
from pathlib import Path

import pytest

from tests.proofs.soak.meter import Point, Slope, Thing, slope
from tests.proofs.soak.run import HEAD, Row, Soak
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


def test_few_jobs_and_a_rise_of_few_units_prove_nothing() -> None:
    assert not slope(figures(50.0, points=50, noise=0.0)).exceeds(1.0)
    assert not slope(figures(7.0, points=52, noise=0.0)).exceeds(1.0)
    assert slope(figures(50.0, points=52, noise=0.0)).exceeds(1.0)


def test_what_ray_keeps_for_ever_is_no_growth_of_ours(tmp_path: Path) -> None:
    def per_1000(value: float) -> Slope:
        return Slope(value, 0.0, 60.0, 1, 5000.0)

    gcs, lost = Thing("GCS", "MB"), Thing("hosts lost", "")
    soak = Soak(60.0, tmp_path, 1)
    soak.slopes = {"jobs": {gcs: per_1000(3.0), lost: per_1000(10.0)}}
    assert [row.limit for row in soak.rows] == [1.0, None]
    soak.slopes["plain hosts"] = {gcs: per_1000(250.0)}
    limits = {(row.phase, row.thing): row.limit for row in soak.rows}
    assert limits == {("jobs", gcs): 3.5, ("jobs", lost): None, ("plain hosts", gcs): None}
    assert not any(row.fails for row in soak.rows)


def test_pool_may_grow_by_what_ray_keeps_for_lost_hosts_in_an_actor_that_starts_others(tmp_path: Path) -> None:
    pool, lost = Thing("SlicePoolManager", "MB"), Thing("hosts lost", "")
    soak = Soak(60.0, tmp_path, 1)
    soak.slopes = {"jobs": {pool: Slope(2.5, 0.0, 70.0, 3, 1250.0), lost: Slope(10.0, 0.0, 50.0, 1, 5000.0)}}
    assert soak.rows[0].limit == 1.0
    assert not soak.rows[0].fails  # a rise of 3.1 MB in all may be noise
    soak.slopes["plain hosts"] = {Thing("Holder", "MB"): Slope(50.0, 0.0, 70.0, 1, 100.0)}
    assert soak.rows[0].limit == 3.0  # 50 hosts in 1,250 jobs


@pytest.mark.parametrize(
    ("name", "unit", "last", "fails"),
    [
        ("TPUHostActor", "MB", 88.0, False),
        ("TPUHostActor", "MB", 129.0, True),
        ("SlicePoolManager", "descriptors", 129.0, True),
        ("raylet", "descriptors", 129.0, False),
        ("keys iris_ray/epoch", "", 4.0, False),
        ("keys iris_ray/epoch", "", 33.0, True),
        ("keys iris_ray/job", "", 1100.0, False),
        ("keys iris_ray/job", "", 1300.0, True),
        ("files of hosts", "MB", 600.0, False),
        ("files of hosts", "", 600.0, True),
    ],
)
def test_after_few_jobs_what_there_is_at_last_counts(name: str, unit: str, last: float, fails: bool) -> None:
    row = Row("jobs", Thing(name, unit), Slope(math.nan, math.nan, last, 0, 0.0), 1.0)
    assert row.fails is fails


def test_what_plain_ray_leaves_has_no_ceiling() -> None:
    """Each driver that comes and goes leaves a descriptor in the GCS."""
    assert not Row("plain drivers", Thing("GCS", "descriptors"), Slope(800.0, 8.0, 320.0, 1, 188.0), None).fails
