"""Whole jobs with random faults: see `random_stories`. ``python -m tests.proofs.random_stories`` plays more of them."""

from typing import Any
from unittest import mock

import pytest

from iris_ray.actors.pool.attempt_end import AttemptShutdown
from iris_ray.model import verdict
from tests.proofs.random_stories.story import play
from tests.support.proofs import EXAMPLES, a_seed, examples


def play_all(first: int, count: int) -> None:
    for seed in range(first, first + count):
        play(seed)


@pytest.mark.small
def test_some_stories_have_no_finding() -> None:
    play_all(0, 20)


@pytest.mark.proof
@pytest.mark.timeout(300 * max(1.0, EXAMPLES))
def test_many_stories_have_no_finding() -> None:
    play_all(a_seed(0), examples(300))


def test_a_story_is_the_same_each_time() -> None:
    assert play(5) == play(5)


async def nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    ("where", "what", "instead"),
    [
        (verdict, "_is_lost", lambda _: False),
        (AttemptShutdown, "end_leftovers", nothing),
    ],
)
def test_a_defect_is_found(where: Any, what: str, instead: object) -> None:
    with mock.patch.object(where, what, instead), pytest.raises((AssertionError, TimeoutError)) as found:
        play_all(0, 50)
    assert "again: python -m tests.proofs.random_stories --first" in found.value.__notes__[-1]
