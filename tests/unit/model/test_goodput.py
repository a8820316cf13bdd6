"""What the time of a job went into. The examples are small enough to be worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.model.goodput import (
    ATTEMPTS_KEPT,
    MOST_STEPS,
    AttemptTimes,
    Disruption,
    JobTimes,
    Marks,
    Span,
    StepTime,
    TimeKind,
    Totals,
    last_disruption,
    measure,
    settle,
    with_step,
)

K = TimeKind
RECOVERY = K.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION


def seconds(spans: list[Span]) -> dict[TimeKind, float]:
    found: dict[TimeKind, float] = {}
    for span in spans:
        found[span.kind] = found.get(span.kind, 0.0) + span.seconds
    return {kind: round(amount, 6) for kind, amount in found.items()}


def steps(first: int, count: int, at: float, each: float, startup: float = 0.0) -> tuple[StepTime, ...]:
    """The first step takes longer by some startup."""
    return tuple((first + i, at + i * each + (startup if i else 0.0)) for i in range(count))


def test_waiting_job_is_queueing_and_holds_nothing() -> None:
    assert measure(JobTimes(), 100.0, 160.0) == [Span(K.QUEUEING, 60.0, 0.0)]


def test_job_without_steps_is_unmeasured_after_launch() -> None:
    times = JobTimes([AttemptTimes(1, 8.0, 110.0, 112.0, 172.0)], ended_at=173.0, succeeded=True)
    assert measure(times, 100.0, 999.0) == [
        Span(K.QUEUEING, 10.0, 0.0),
        Span(K.LAUNCH, 2.0, 8.0),
        Span(K.UNMEASURED, 60.0, 8.0),
        Span(RECOVERY, 1.0, 0.0),
    ]


def test_repeated_steps_are_wasted_and_way_back_is_recovery() -> None:
    """Steps of 2 s from 0 to 9; the slice is lost 1 s into step 9, and the next attempt goes on from step 6."""
    first = AttemptTimes(1, 8.0, 100.0, 101.0, 125.0, Marks(steps(0, 10, 4.0, 2.0, startup=1.0)))
    second = AttemptTimes(2, 8.0, 130.0, 131.0, 145.0, Marks(steps(6, 4, 3.0, 2.0, startup=1.0)))
    times = JobTimes([first, second], ended_at=145.0, succeeded=True)
    assert seconds(measure(times, 100.0, 999.0)) == {
        K.LAUNCH: 1.0,
        K.TRAINING_PREP: 4.0 + 3.0,
        K.PROGRAM_STARTUP: 1.0 + 1.0,
        K.PRODUCTIVE: 12.0 + 10.0,
        K.WASTED_PROGRESS_FROM_DISRUPTION: 6.0,
        RECOVERY: 1.0 + 5.0 + 1.0,
    }


def test_step_before_lossless_move_is_kept() -> None:
    """The gang saved at step 9, and the next attempt begins with step 10."""
    first = AttemptTimes(1, 8.0, 100.0, 100.0, 130.0, Marks(steps(0, 10, 0.0, 2.0)))
    second = AttemptTimes(2, 8.0, 130.0, 130.0, 140.0, Marks(steps(10, 5, 0.0, 2.0)))
    times = JobTimes([first, second], ended_at=140.0, succeeded=True)
    assert seconds(measure(times, 100.0, 999.0)) == {K.PRODUCTIVE: 20.0 + 10.0, RECOVERY: 10.0}


def test_save_before_first_step_counts_too() -> None:
    marks = Marks(steps(0, 6, 10.0, 2.0), {"checkpoint_save": 3.0}, {"checkpoint_save": 4.0})
    times = JobTimes([AttemptTimes(1, 4.0, 0.0, 0.0, 24.0, marks)], ended_at=24.0, succeeded=True)
    assert seconds(measure(times, 0.0, 99.0)) == {
        K.TRAINING_PREP: 7.0,
        K.UNPRODUCTIVE_CHECKPOINT_SAVE_TIME: 7.0,
        K.PRODUCTIVE: 10.0,
    }


def test_marked_time_counts_as_its_kind() -> None:
    before = {"tpu_init": 3.0, "data_loading": 2.0, "checkpoint_restore": 1.0}
    marks = Marks(steps(0, 6, 10.0, 2.0), before, {"checkpoint_save": 4.0, "data_loading": 9.0})
    times = JobTimes([AttemptTimes(1, 4.0, 0.0, 0.0, 24.0, marks)], ended_at=24.0, succeeded=True)
    assert seconds(measure(times, 0.0, 99.0)) == {
        K.TPU_INITIALIZATION: 3.0,
        K.DATA_LOADING_SYNC: 2.0,
        K.UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME: 1.0,
        K.TRAINING_PREP: 4.0,
        K.UNPRODUCTIVE_CHECKPOINT_SAVE_TIME: 4.0,
        K.PRODUCTIVE: 10.0,
    }


def test_unfinished_step_is_not_productive_yet() -> None:
    times = JobTimes([AttemptTimes(1, 4.0, 0.0, 0.0, None, Marks(steps(0, 6, 0.0, 2.0)))])
    assert seconds(measure(times, 0.0, 15.0)) == {K.PRODUCTIVE: 10.0, K.OTHER: 5.0}


def test_attempt_without_steps_between_others_is_recovery() -> None:
    made = AttemptTimes(1, 4.0, 0.0, 0.0, 10.0, Marks(steps(0, 6, 0.0, 2.0)))
    none = AttemptTimes(2, 4.0, 10.0, 11.0, 20.0)
    again = AttemptTimes(3, 4.0, 20.0, 21.0, 31.0, Marks(steps(5, 6, 0.0, 2.0)))
    times = JobTimes([made, none, again], ended_at=31.0, succeeded=True)
    assert seconds(measure(times, 0.0, 99.0)) == {K.PRODUCTIVE: 20.0, RECOVERY: 11.0}


def test_thinned_steps_keep_first_two_and_latest() -> None:
    kept: tuple[StepTime, ...] = ()
    for step in range(10_000):
        kept = with_step(kept, step, 5.0 + 0.5 * step)
    assert len(kept) <= MOST_STEPS
    assert kept[:2] == ((0, 5.0), (1, 5.5))
    assert kept[-1] == (9_999, 5.0 + 0.5 * 9_999)
    assert [Marks(kept).began(step) for step in (0, 1, 777, 9_998, 20_000)] == pytest.approx(
        [5.0, 5.5, 393.5, 5004.0, 5004.5]
    )
    assert with_step(kept, 3, 9e9) == kept, "a step does not come again"
    assert with_step(kept, 10_000, 1.0) == kept, "nor before the one before it"


@st.composite
def histories(draw: st.DrawFn) -> tuple[JobTimes, float]:
    """Attempts one after another, some of which make steps, and now."""
    number = st.floats(0.0, 100.0)
    at, times = draw(number), JobTimes()
    for index in range(draw(st.integers(0, 12))):
        assigned = at + draw(number)
        began = draw(st.none() | st.just(assigned + draw(number)))
        at = (assigned if began is None else began) + draw(number)
        count, first = draw(st.integers(0, 5)), draw(st.integers(0, 20))
        made = steps(first, count, draw(number), draw(number) + 0.1, draw(number)) if began is not None else ()
        before = {"tpu_init": draw(number), "checkpoint_save": draw(number)} if draw(st.booleans()) else {}
        during = {"checkpoint_save": draw(number)} if draw(st.booleans()) else {}
        times.attempts.append(AttemptTimes(index + 1, 4.0, assigned, began, at, Marks(made, before, during)))
    if draw(st.booleans()):
        times.ended_at = at = at + draw(number)
        times.succeeded = draw(st.booleans())
    return times, at + draw(number)


@given(histories())
def test_seconds_add_up_to_jobs_life(history: tuple[JobTimes, float]) -> None:
    times, now = history
    end = now if times.ended_at is None else times.ended_at
    assert sum(seconds(measure(times, 0.0, now)).values()) == pytest.approx(end, abs=1e-3)


@given(histories())
def test_settling_keeps_times_and_few_attempts(history: tuple[JobTimes, float]) -> None:
    times, now = history
    before = measure(times, 0.0, now)
    held = sum(span.seconds * span.chips for span in before)
    settle(times, 0.0)
    assert len(times.attempts) <= ATTEMPTS_KEPT
    after = measure(times, 0.0, now)
    assert sum(span.seconds * span.chips for span in after) == pytest.approx(held, abs=1e-3)
    for kind in (K.PRODUCTIVE, K.WASTED_PROGRESS_FROM_DISRUPTION, K.PROGRAM_STARTUP, K.QUEUEING):
        assert seconds(after).get(kind, 0.0) == pytest.approx(seconds(before).get(kind, 0.0), abs=1e-3)


def test_last_disruption_costs_repeated_steps_and_way_back() -> None:
    """Steps of 2 s from 0 to 9; the slice is lost 1 s into step 9, and the next attempt goes on from step 6."""
    first = AttemptTimes(1, 8.0, 100.0, 101.0, 125.0, Marks(steps(0, 10, 4.0, 2.0, startup=1.0)))
    second = AttemptTimes(2, 8.0, 130.0, 131.0, None, Marks(steps(6, 4, 3.0, 2.0, startup=1.0)))
    found = last_disruption(JobTimes([first, second]), 999.0)
    assert found == Disruption(1, wasted_s=6.0, recovery_s=1.0 + 5.0 + 1.0, chip_seconds=8 * 8.0, over=True)


def test_disruption_costs_until_user_code_runs_again() -> None:
    """A launch that fails in between is part of the way back, and so is the step that broke off."""
    first = AttemptTimes(1, 8.0, 100.0, 100.0, 120.0, Marks(steps(0, 10, 0.0, 2.0)))
    failed_launch = AttemptTimes(2, 8.0, 125.0, None, 128.0)
    waits = JobTimes([first, failed_launch])
    found = last_disruption(waits, 140.0)
    assert found == Disruption(1, wasted_s=0.0, recovery_s=2.0 + 20.0, chip_seconds=8 * (2.0 + 3.0), over=False)
    starts = JobTimes([first, failed_launch, AttemptTimes(3, 8.0, 130.0)])
    found = last_disruption(starts, 140.0)
    assert found == Disruption(1, wasted_s=0.0, recovery_s=2.0 + 20.0, chip_seconds=8 * (2.0 + 3.0 + 10.0), over=False)


def test_broken_off_step_counts_as_recovery_while_waiting() -> None:
    """It hung in its last step for 600 s."""
    first = AttemptTimes(1, 8.0, 100.0, 100.0, 718.0, Marks(steps(0, 10, 0.0, 2.0)))
    waits = JobTimes([first])
    assert seconds(measure(waits, 100.0, 740.0)) == {K.PRODUCTIVE: 18.0, RECOVERY: 600.0 + 22.0}
    assert last_disruption(waits, 740.0) == Disruption(1, 0.0, 600.0 + 22.0, chip_seconds=8 * 600.0, over=False)
    gives_up = JobTimes([first], ended_at=740.0)
    assert seconds(measure(gives_up, 100.0, 740.0))[K.OTHER] == 600.0


def test_jobs_end_is_no_disruption() -> None:
    only = AttemptTimes(1, 8.0, 100.0, 100.0, 120.0, Marks(steps(0, 10, 0.0, 2.0)))
    assert last_disruption(JobTimes([only], ended_at=120.0, succeeded=True), 999.0) is None
    assert last_disruption(JobTimes([AttemptTimes(1, 8.0, 100.0, 100.0)]), 999.0) is None
    assert last_disruption(JobTimes(), 999.0) is None


def test_disruption_without_steps_costs_time_away() -> None:
    times = JobTimes()
    for number, (assigned, began, ended) in enumerate(((100.0, 101.0, 120.0), (123.0, 124.0, None)), start=1):
        times.assigned(number, 8.0, assigned)
        settle(times, 100.0)
        times.began(began)
        if ended is not None:
            times.ended(ended)
    assert last_disruption(times, 999.0) == Disruption(1, 0.0, 3.0 + 1.0, 8 * 1.0, over=True)


@given(st.lists(st.tuples(*[st.floats(0.1, 50.0)] * 3), min_size=2, max_size=6), st.booleans())
def test_one_disruption_never_costs_more_than_all(runs: list[tuple[float, float, float]], ended: bool) -> None:
    times, now = JobTimes(), 0.0
    for number, (wait, launch, run) in enumerate(runs, start=1):
        times.assigned(number, 4.0, now := now + wait)
        settle(times, 0.0)
        times.began(now := now + launch)
        times.attempts[-1].marks = Marks(steps(number, 5, 0.0, run / 6))
        now += run
        if number < len(runs) or ended:
            times.ended(now)
    last = last_disruption(times, now)
    assert last is not None
    spent = seconds(measure(times, 0.0, now))
    assert last.wasted_s <= spent.get(K.WASTED_PROGRESS_FROM_DISRUPTION, 0.0) + 1e-3
    assert last.recovery_s <= spent.get(RECOVERY, 0.0) + 1e-3


# -- Google's library -------------------------------------------------------------------------------------------------


RUN = json.loads(Path(__file__).with_name("recorded_run.json").read_text())
THEIRS: dict[str, float] = RUN["by ml-goodput-measurement 0.2.3"]


def attempt(number: int, recorded: dict[str, Any], every: int) -> AttemptTimes:
    """An attempt of which every so manyth step was seen, as the pool sees them, besides the first two and the last."""
    steps: tuple[StepTime, ...] = ()
    last = len(recorded["steps"]) - 1
    for index, (step, at) in enumerate(recorded["steps"]):
        if index < 2 or index == last or index % every == 0:
            steps = with_step(steps, step, at - recorded["began"])
    before = {name: end - begin for name, (begin, end) in recorded["marks"].items()}
    during = {"checkpoint_save": sum(end - begin for _, begin, end in recorded["saves"])}
    return AttemptTimes(
        number, 8.0, recorded["began"], recorded["began"], recorded["ended"], Marks(steps, before, during)
    )


@pytest.mark.parametrize(("every", "tolerance"), [(1, 1e-3), (4, 0.5)], ids=["all steps", "every fourth step"])
@pytest.mark.parametrize("settled", [False, True])
def test_goodput_agrees_with_googles_library(every: int, tolerance: float, settled: bool) -> None:
    """Of which steps between two that were seen began when is not known exactly; they take about the same time."""
    attempts = [attempt(number, recorded, every) for number, recorded in enumerate(RUN["attempts"], 1)]
    times = JobTimes(attempts, ended_at=RUN["ended"], succeeded=True)
    if settled:
        settle(times, 0.0)
    ours = Totals.of(measure(times, 0.0, 1e9))
    assert {kind: ours.seconds.get(kind, 0.0) for kind in THEIRS if kind != "total"} == pytest.approx(
        {kind: amount for kind, amount in THEIRS.items() if kind != "total"}, abs=tolerance
    )
    assert sum(ours.seconds.values()) == pytest.approx(THEIRS["total"], abs=1e-3)
    assert ours.goodput == pytest.approx(THEIRS["productive"] / THEIRS["total"], abs=tolerance / THEIRS["total"])
