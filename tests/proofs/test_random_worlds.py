"""Random clusters in virtual time whose Controller dies between any two writes: see `random_worlds`.

``python -m tests.proofs.random_worlds --steps 3000000`` plays more of them than a test can.
"""

import asyncio
from typing import Any
from unittest import mock

import pytest

from iris_ray.actors.controller import recovery
from iris_ray.state.fleet import Allocations
from iris_ray.state.job_table import JobTable
from tests.proofs.random_worlds.__main__ import play
from tests.support.proofs import EXAMPLES, a_seed, examples


@pytest.mark.small
def test_some_worlds_have_no_finding() -> None:
    counts = play(seed=1, steps=10_000, each=500)
    assert min(counts["killed"], counts["attempts"]) > 30


@pytest.mark.proof
@pytest.mark.timeout(900 * max(1.0, EXAMPLES))
@pytest.mark.parametrize("seed", [2, 4])
def test_many_worlds_have_no_finding(seed: int) -> None:
    play(seed=a_seed(seed), steps=examples(150_000))


def test_a_world_is_the_same_each_time() -> None:
    assert play(seed=3, steps=1, each=300) == play(seed=3, steps=1, each=300)


@pytest.mark.parametrize(
    ("where", "what", "instead"),
    [
        (Allocations, "end", lambda *_: True),
        (recovery, "repeat_orders", lambda *_: asyncio.sleep(0)),
        (JobTable, "gang_changed", lambda *_: None),
    ],
)
def test_a_defect_is_found(where: Any, what: str, instead: object) -> None:
    with mock.patch.object(where, what, instead), pytest.raises((AssertionError, KeyError)) as found:
        play(seed=5, steps=100_000, each=500)
    assert "again: python -m tests.proofs.random_worlds --seed 5" in found.value.__notes__[-1]
