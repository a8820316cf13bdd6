"""Small clusters whose faults fall into windows: what a waiting job was promised it gets, and nobody leaves in vain.

``python -m tests.proofs.windows --steps 3000000`` plays more of them than a test can.
"""

from typing import Any
from unittest import mock

import pytest

from iris_ray.model import workers
from iris_ray.scheduler.calendar import Calendar
from iris_ray.scheduler.limits import Allowances
from iris_ray.scheduler.promises import PlannedPromises
from iris_ray.state import promises
from tests.proofs.windows.__main__ import EACH, play, play_by
from tests.proofs.windows.calm import Calm
from tests.proofs.windows.outsider import OutsidersRules
from tests.support.proofs import EXAMPLES, a_seed, examples

OUTSIDERS = play_by(OutsidersRules, "windows.outsider", Calm)


@pytest.mark.small
def test_some_windows_have_no_finding() -> None:
    counts = play(seed=3, steps=5_000)
    assert min(counts["asked"], counts["left"], counts["killed"]) > 10
    assert counts["reserved"]


@pytest.mark.proof
@pytest.mark.timeout(600 * max(1.0, EXAMPLES))
@pytest.mark.parametrize("seed", [2, 3])
def test_many_windows_have_no_finding(seed: int) -> None:
    play(seed=a_seed(seed), steps=examples(80_000))


@pytest.mark.proof
@pytest.mark.timeout(600 * max(1.0, EXAMPLES))
def test_many_windows_keep_an_outsiders_rules() -> None:
    counts = OUTSIDERS(a_seed(5), examples(40_000), 0, EACH)
    assert counts["small jobs beside a large one"]


def test_a_job_over_its_limit_by_its_own_unconfirmed_attempt_has_no_chance() -> None:
    OUTSIDERS(3142559, 1, 1, 800)


def test_an_end_that_was_unconfirmed_for_too_long_excuses_although_the_plan_was_not_over() -> None:
    OUTSIDERS(72031679, 1, 0, EACH)


def test_nobody_leaves_for_a_job_over_a_limit_once_its_own_attempt_is_gone() -> None:
    play(515195047, 1, 2, EACH)


def test_a_promise_outlasts_a_lowered_limit_while_an_end_of_its_user_is_unconfirmed() -> None:
    play(41134626, 1, 4, EACH)


def test_a_world_is_the_same_each_time() -> None:
    assert play(seed=4, steps=1, each=300) == play(seed=4, steps=1, each=300)


@pytest.mark.parametrize(
    ("where", "what", "instead"),
    [
        (workers, "UNCONFIRMED_S", 1e9),
        (PlannedPromises, "_problem", lambda *_: "no reason"),
        (PlannedPromises, "_gives_way", lambda _, one, job: one.job.spec.priority >= job.spec.priority),
        (Allowances, "promised", lambda *_: None),
        (promises.Promises, "restored", lambda _, job, workers: setattr(job, "promise", None)),
    ],
)
def test_a_defect_is_found(where: Any, what: str, instead: object) -> None:
    with mock.patch.object(where, what, instead), pytest.raises(AssertionError) as found:
        play(seed=5, steps=100_000)
    assert "again: python -m tests.proofs.windows --seed 5" in found.value.__notes__[-1]


def test_reserved_slices_that_are_lent_to_nobody_are_found() -> None:
    with mock.patch.object(Calendar, "may_lend", return_value=False), pytest.raises(AssertionError, match="idle for"):
        OUTSIDERS(5, 10_000, 0, 200)
