"""A short run of `tests.proofs.chaos`; a long one is a command."""

from pathlib import Path

import pytest

from tests.proofs.chaos.run import Chaos
from tests.support.proofs import EXAMPLES, a_seed

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800 * max(1.0, EXAMPLES)),
    pytest.mark.usefixtures("no_shared_cluster"),
]


def test_jobs_survive_a_minute_of_chaos(tmp_path: Path) -> None:
    seed = a_seed(7)
    print(f"seed {seed}: python -m tests.proofs.chaos --minutes {EXAMPLES:g} --gap 8 --seed {seed}")
    chaos = Chaos(seed, tmp_path)
    chaos.run(60 * EXAMPLES, mean_gap_s=8)
    print(f"{chaos.jobs_done} jobs, {dict(chaos.faults)}, {chaos.redone} steps again, {chaos.false_alarms}")
    assert chaos.faults.total() >= 3
    assert chaos.jobs_done >= 3
