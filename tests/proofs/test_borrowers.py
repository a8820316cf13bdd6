"""Random lenders and borrowers: borrowers keep at least half of their work, and lenders wait briefly."""

from random import Random

import pytest

from iris_ray.model.teams import Quota, Team
from iris_ray.study import Simulation
from tests.proofs.test_adversary import CHIPS, NOTICE_S, TYPE, cluster, job
from tests.support.proofs import examples, in_proofs
from tests.support.simulations import DAY, HOUR, MINUTE, waited

IMPOSSIBLE = {14: "its only slice is needed every 27 minutes, and the borrower saves every hour"}
SEEDS = (*range(2), *in_proofs(*range(2, 2 + examples(20))))
LASTS_S = DAY / 2


def lending(seed: int) -> Simulation:
    """Half a day of a lender who needs some slices now and then, and of borrowers who save now and then, or heed."""
    chance = Random(seed)
    slices = chance.randint(1, 6)
    quota = chance.randint(1, slices)
    borrowers = [f"borrower-{n}" for n in range(chance.randint(1, 3))]
    teams = [Team("lender", {TYPE: Quota(quota * CHIPS)}), *(Team(name, {TYPE: Quota(0.0)}) for name in borrowers)]
    simulation = cluster(slices, *teams)
    for n in range(slices):
        saves_every_s = chance.choice((5 * MINUTE, 20 * MINUTE, HOUR))
        team = borrowers[n % len(borrowers)]
        simulation.submit(job(f"borrows-{n}", user=team, team=team, save_every_s=saves_every_s), 0.0)
    every_s, lasts_s = chance.uniform(15, 60) * MINUTE, chance.uniform(1, 5) * MINUTE
    for n in range(int(LASTS_S / every_s)):
        one = job(f"short-{n}", chance.randint(1, quota), lasts_s, user="ann", team="lender", max_runtime=2 * lasts_s)
        simulation.submit(one, 25 * MINUTE + n * every_s)
    simulation.run_until(LASTS_S)
    simulation.state.check()
    return simulation


@pytest.mark.parametrize("seed", SEEDS)
def test_borrowers_keep_half_of_their_work_and_lenders_wait_two_notices(
    seed: int, request: pytest.FixtureRequest
) -> None:
    if seed in IMPOSSIBLE:
        request.applymarker(pytest.mark.xfail(strict=True, reason=IMPOSSIBLE[seed]))
    simulation = lending(seed)
    began = [one for one in simulation.history.attempts if one.team.startswith("borrower") and one.began_at is not None]
    for team in {one.team for one in began}:
        own = [one for one in began if one.team == team]
        done_s = sum((one.ended_at or LASTS_S) - (one.began_at or 0.0) for one in own)
        lost_s = sum(one.lost_s for one in own)
        assert lost_s <= done_s / 2, f"{team} keeps {1 - lost_s / done_s:.0%} of {done_s / HOUR:.1f} h"
    waits = [waited(simulation, name) for name in simulation.history.jobs if name.startswith("short")]
    assert max(waits) <= 2 * NOTICE_S
