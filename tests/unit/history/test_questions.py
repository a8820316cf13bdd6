"""What the command line, the dashboard and reports ask the history."""

import pytest

from iris_ray.history import questions
from iris_ray.history.rows import EventRow, Sample, UserSample
from iris_ray.model.options import PriorityBand
from tests.support.histories import NOON, History, story
from tests.support.worlds import S, World


def asked(history: History, question: questions.Question) -> list[dict[str, object]]:
    return [dict(row) for row in history.ask(question.sql, **question.parameters).as_dicts()]


@pytest.fixture
def told(history: History, world: World) -> History:
    """A job of ann that crashes after an hour and runs for two more, and one of bob that runs on."""
    ann = world.submit("train-1", name="train", user="ann", max_retries_failure=1, slices=(1,))
    world.schedule()
    world.report_all(ann, S.RUNNING)
    world.now += 3600.0
    world.report(ann, S.FAILED, 1)
    world.confirm(ann)
    world.schedule()
    world.report_all(ann, S.RUNNING)
    bob = world.start("eval-1", user="bob", priority=PriorityBand.BATCH)
    world.now += 7200.0
    world.finish(ann)
    history.file.write([story(world, ann), story(world, bob)])
    history.file.write([EventRow(NOON + 3600, "host blamed", "a/1", "train-1", "crash: boom")])
    return history


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (questions.Wanted(), ["eval-1", "train-1"]),
        (questions.Wanted(user="ann"), ["train-1"]),
        (questions.Wanted(state="running"), ["eval-1"]),
        (questions.Wanted(cause="crashed"), ["train-1"]),
        (questions.Wanted(cause="preempted"), []),
        (questions.Wanted(type="v4-16", name="ain"), ["train-1"]),
        (questions.Wanted(name="eval-1"), ["eval-1"]),
        (questions.Wanted(since=NOON + 10_800, until=NOON + 3601), ["eval-1", "train-1"]),
        (questions.Wanted(until=NOON + 1), ["train-1"]),
        (questions.Wanted(since=NOON + 10_801), []),
    ],
)
def test_jobs_are_found_newest_first(told: History, wanted: questions.Wanted, found: list[str]) -> None:
    assert [row["job_id"] for row in asked(told, questions.jobs_question(wanted, NOON + 10_800, 50))] == found


def test_job_that_runs_is_found_since_a_time_after_it_was_last_seen(told: History) -> None:
    question = questions.jobs_question(questions.Wanted(since=NOON + 12_000), NOON + 12_600, 50)
    assert [row["job_id"] for row in asked(told, question)] == ["eval-1"]


def test_chip_hours_of_jobs_are_those_of_attempts(told: History) -> None:
    rows = asked(told, questions.jobs_question(questions.Wanted(), NOON + 10_800, 50))
    assert [row["chip_hours"] for row in rows] == pytest.approx([16.0, 24.0])
    hours_later = asked(told, questions.jobs_question(questions.Wanted(), NOON + 864_000, 1))
    assert hours_later[0]["chip_hours"] == pytest.approx(24.0), "an hour more than it was seen"


def test_all_of_one_job_is_found(told: History) -> None:
    found = {name: asked(told, question) for name, question in questions.job_questions("train-1").items()}
    assert [row["state"] for row in found["job"]] == ["succeeded"]
    assert [(row["number"], row["cause"], row["host"]) for row in found["attempts"]] == [
        (1, "crashed", "a/1"),
        (2, None, None),
    ]
    assert [row["seconds"] for row in found["time"]] == [10_800.0]
    assert [(row["cause"], row["failures"]) for row in found["losses"]] == [("crashed", 1)]
    assert [row["what"] for row in found["events"]] == ["crash: boom"]
    assert asked(told, questions.LATEST_IDS) == [{"job_id": "eval-1"}, {"job_id": "train-1"}]
    assert [row["subject"] for row in asked(told, questions.events_question(None, None))] == ["a/1"]
    assert asked(told, questions.events_question(NOON + 3601, None)) == []


def test_report_counts_the_part_of_a_month(told: History) -> None:
    since, until = NOON + 1800, NOON + 5400
    held, kinds, lost = questions.report_questions(since, until, "2026-11-01", "2026-12-01", "user", NOON + 10_800)
    assert asked(told, held) == [
        {"who": "ann", "jobs": 1, "chip_hours": 8.0},
        {"who": "bob", "jobs": 1, "chip_hours": 4.0},
    ]
    assert {(row["who"], row["kind"], row["chip_hours"]) for row in asked(told, kinds)} == {
        ("ann", "unmeasured", 24.0),
        ("bob", "unmeasured", 16.0),
    }
    assert [(row["who"], row["cause"], row["failures"]) for row in asked(told, lost)] == [("ann", "crashed", 1)]
    _, kinds, lost = questions.report_questions(since, until, "2026-12-01", "2027-01-01", "band", NOON)
    assert (asked(told, kinds), asked(told, lost)) == ([], [])


def test_utilisation_is_mean_over_samples(history: History) -> None:
    def taken(minute: int, **busy: float) -> Sample:
        users = tuple(UserSample("v4-16", "batch", user, "", chips, 1.0, 8.0) for user, chips in busy.items())
        return Sample(NOON + 60 * minute, {"v4-16": 16.0, "v4-32": 32.0}, users)

    history.file.write([taken(0, ann=8.0), taken(1, ann=16.0, bob=8.0), taken(2), taken(60, bob=4.0)])
    fleet = asked(history, questions.fleet_question(NOON, NOON + 7200, 3600))
    assert fleet == [{"at": NOON, "chips": 48.0}, {"at": NOON + 3600, "chips": 48.0}]
    assert asked(history, questions.fleet_question(NOON, NOON + 3600, 3600, "v4-16")) == [{"at": NOON, "chips": 16.0}]
    users = asked(history, questions.users_question(NOON, NOON + 7200, 3600, "user"))
    assert [(row["at"], row["who"], row["busy_chips"]) for row in users] == [
        (NOON, "ann", 8.0),
        (NOON, "bob", pytest.approx(8.0 / 3)),
        (NOON + 3600, "bob", 4.0),
    ]
    assert users[0]["waiting_jobs"] == pytest.approx(2 / 3)
    bands = asked(history, questions.users_question(NOON, NOON + 3600, 3600, "band", "v4-32"))
    assert bands == []


@pytest.mark.parametrize(
    ("seconds", "step"), [(3600, 60), (86400, 1800), (7 * 86400, 3 * 3600), (90 * 86400, 2 * 86400)]
)
def test_steps_are_whole_minutes_or_hours(seconds: float, step: int) -> None:
    assert questions.step_for(seconds, 60) == step
