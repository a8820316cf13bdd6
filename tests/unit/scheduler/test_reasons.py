"""The reasons of jobs that fare alike are made when somebody reads them, and move from plan to plan by kind."""

import pytest

from iris_ray.model.jobs import Job
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.scheduler.reasons import Reasons
from tests.support.worlds import World


@pytest.fixture
def jobs() -> list[Job]:
    world = World()
    return [world.submit(name, user="ann") for name in ("a", "b", "c")] + [world.submit("other", user="bob")]


def why(job: Job, ahead: int = 0) -> PendingReason:
    return PendingReason(job.spec.job_id, PendingKind.IN_USE, job.requirement, (1,), ahead=ahead)


def noted(jobs: list[Job]) -> Reasons:
    reasons = Reasons()
    reasons.note(jobs[0], why(jobs[0]))
    reasons.note_shared(jobs[1:3], why(jobs[0]), 1, jobs[0].spec.job_id)
    reasons.note(jobs[3], why(jobs[3]))
    return reasons


def test_jobs_that_fare_alike_are_counted_one_after_the_other(jobs: list[Job]) -> None:
    reasons = noted(jobs)
    assert {job_id: (reason.job_id, reason.ahead) for job_id, reason in reasons.items()} == {
        "a": ("a", 0),
        "b": ("b", 1),
        "c": ("c", 2),
        "other": ("other", 0),
    }
    assert reasons["c"] is reasons["c"]
    assert reasons["c"].first_ahead == "a"
    assert (reasons.is_shared("c"), reasons.is_shared("a"), "d" in reasons) == (True, False, False)
    assert [reason.job_id for reason in reasons.apart()] == ["a", "other"]


def test_reasons_of_a_kind_move_as_a_whole(jobs: list[Job]) -> None:
    reasons, limited = noted(jobs), Reasons()
    both = Reasons(beside=limited)
    assert not both
    assert len(reasons) == 4
    reasons.note(jobs[0], why(jobs[0]))
    limited.take(reasons, jobs[0].kind)
    assert ([*reasons], {*limited}) == (["other"], {"a", "b", "c"})
    both.replace(reasons)
    assert len(both) == 4
    assert both["b"].ahead == 1
    reasons.take(limited, jobs[0].kind)
    assert (len(reasons), len(limited), len(both)) == (4, 0, 1)


def test_later_reasons_are_in_the_place_of_earlier_ones(jobs: list[Job]) -> None:
    reasons, later = noted(jobs), Reasons()
    later.note(jobs[1], why(jobs[1], ahead=7))
    later.note_shared(jobs[2:3], why(jobs[1]), 8, "b")
    reasons.replace(later)
    assert [reasons[name].ahead for name in ("a", "b", "c", "other")] == [0, 7, 8, 0]
    kept = Reasons()
    kept.note(jobs[0], why(jobs[0], ahead=3))
    kept.keep(reasons, ["b", "c", "gone"])
    assert {name: reason.ahead for name, reason in kept.items()} == {"a": 3, "b": 7, "c": 8}
