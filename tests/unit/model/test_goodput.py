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
    JobTimes,
    Marks,
    Span,
    StepTime,
    TimeKind,
    Totals,
    failures,
    measure,
    settle,
    time_lost,
    with_step,
)
from iris_ray.model.time_lost import LATEST_KEPT, Failure, FailureCause, TimeLost, move_s

K = TimeKind
C = FailureCause
RECOVERY = K.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION


def seconds(spans: list[Span]) -> dict[TimeKind, float]:
    found: dict[TimeKind, float] = {}
    for span in spans:
        found[span.kind] = found.get(span.kind, 0.0) + span.seconds
    return {kind: round(amount, 6) for kind, amount in found.items()}


def steps(first: int, count: int, at: float, each: float, startup: float = 0.0) -> tuple[StepTime, ...]:
    """The first step takes longer by some startup."""
    return tuple((first + i, at + i * each + (startup if i else 0.0)) for i in range(count))


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
def histories(draw: st.DrawFn, saves: bool = True) -> tuple[JobTimes, float]:
    """Attempts one after another, some of which make steps and save, and now."""
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
        if not saves:
            before.pop("checkpoint_save", None)
            during = {}
        cause = draw(st.sampled_from(FailureCause))
        times.attempts.append(AttemptTimes(index + 1, 4.0, assigned, began, at, Marks(made, before, during), cause))
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


# -- time lost per failure ---------------------------------------------------------------------------------------------


def test_failure_costs_repeated_steps_and_time_to_next_step() -> None:
    """Steps of 2 s from 0 to 9; the slice is lost 1 s into step 9, and the next attempt goes on from step 6."""
    first = AttemptTimes(1, 8.0, 100.0, 101.0, 125.0, Marks(steps(0, 10, 4.0, 2.0, startup=1.0)), C.LOST)
    second = AttemptTimes(2, 8.0, 130.0, 131.0, None, Marks(steps(6, 4, 3.0, 2.0, startup=1.0)))
    assert failures(JobTimes([first, second]), 999.0) == [
        Failure(1, C.LOST, 6.0, 1.0 + 5.0 + 1.0, 3.0 + 1.0, 5.0, 1.0 + 3.0, chip_seconds=8 * 12.0, is_over=True)
    ]


def test_planned_move_loses_no_step() -> None:
    first = AttemptTimes(1, 8.0, 100.0, 100.0, 130.0, Marks(steps(0, 10, 0.0, 2.0)), C.GROWN)
    second = AttemptTimes(2, 16.0, 130.0, 132.0, None, Marks(steps(10, 5, 3.0, 1.0)))
    found = failures(JobTimes([first, second]), 999.0)
    assert found == [Failure(1, C.GROWN, 0.0, 12.0, 3.0, 0.0, 5.0, chip_seconds=8 * 10.0 + 16 * 5.0, is_over=True)]
    assert move_s(time_lost(JobTimes([first, second]), 999.0)) == 15.0


def test_failure_costs_until_there_is_new_step() -> None:
    """A launch that fails in between is part of the way back, and so is the step that broke off."""
    first = AttemptTimes(1, 8.0, 100.0, 100.0, 120.0, Marks(steps(0, 10, 0.0, 2.0)), C.CRASHED)
    failed_launch = AttemptTimes(2, 8.0, 125.0, None, 128.0)
    so_far = {
        "waits": ([], 5.0 + 12.0, 0.0, 3.0),
        "is launched": ([AttemptTimes(3, 8.0, 130.0)], 5.0 + 2.0, 0.0, 3.0 + 10.0),
        "starts": ([AttemptTimes(3, 8.0, 130.0, 136.0)], 5.0 + 2.0, 4.0, 3.0 + 6.0 + 4.0),
    }
    for later, waited_s, start_s, held_s in so_far.values():
        times = JobTimes([first, failed_launch, *later])
        away_s = 2.0 + waited_s + held_s - start_s
        wanted = Failure(1, C.CRASHED, 0.0, away_s, start_s, waited_s, held_s, 8 * (2.0 + held_s), is_over=False)
        assert failures(times, 140.0) == [wanted]
        assert time_lost(times, 140.0) == {}, "the sums have failures that are over"


def test_broken_off_step_counts_while_waiting() -> None:
    """It hung in its last step for 600 s."""
    first = AttemptTimes(1, 8.0, 100.0, 100.0, 718.0, Marks(steps(0, 10, 0.0, 2.0)), C.HUNG)
    waits = JobTimes([first])
    assert seconds(measure(waits, 100.0, 740.0)) == {K.PRODUCTIVE: 18.0, RECOVERY: 600.0 + 22.0}
    assert failures(waits, 740.0) == [Failure(1, C.HUNG, 0.0, 622.0, 0.0, 22.0, 0.0, 8 * 600.0, is_over=False)]
    gives_up = JobTimes([first], ended_at=740.0)
    assert seconds(measure(gives_up, 100.0, 740.0))[K.OTHER] == 600.0


def test_two_failures_before_new_step_count_each() -> None:
    """The second attempt fails before its first step: the 9 s of user code are its own loss."""
    first = AttemptTimes(1, 8.0, 100.0, 100.0, 120.0, Marks(steps(0, 10, 0.0, 2.0)), C.LOST)
    second = AttemptTimes(2, 8.0, 121.0, 122.0, 131.0, Marks((), {"tpu_init": 4.0}), C.CRASHED)
    third = AttemptTimes(3, 8.0, 131.0, 132.0, None, Marks(steps(5, 5, 4.0, 2.0)))
    found = failures(JobTimes([first, second, third]), 999.0)
    assert [(one.cause, one.again_s, one.away_s, one.start_s) for one in found] == [
        (C.LOST, 8.0, 2.0 + 2.0, 0.0),
        (C.CRASHED, 0.0, 1.0, 9.0 + 4.0),
    ]


def test_failure_without_heartbeats_costs_time_away_only() -> None:
    times = JobTimes()
    for number, (assigned, began, ended) in enumerate(((100.0, 101.0, 120.0), (123.0, 124.0, None)), start=1):
        times.assigned(number, 8.0, assigned)
        settle(times, 100.0)
        times.began(began)
        if ended is not None:
            times.failed(C.LOST)
            times.ended(ended)
    assert failures(times, 999.0) == [Failure(1, C.LOST, 0.0, 4.0, 0.0, 3.0, 1.0, chip_seconds=8.0, is_over=True)]


AT_FAULT = K.WASTED_PROGRESS_FROM_DISRUPTION, RECOVERY
STARTS = K.TPU_INITIALIZATION, K.TRAINING_PREP, K.PROGRAM_STARTUP


@given(histories(saves=False))
def test_failures_add_up_to_badput_but_first_start(history: tuple[JobTimes, float]) -> None:
    """All wasted progress, recovery and starts belong to one failure each. The first attempt starts at once here."""
    times, now = history
    ran = [one for one in times.attempts if one.began_at is not None]
    if not ran or not ran[0].marks.steps:
        return
    (first, *_), count = ran[0].marks.steps[0], len(ran[0].marks.steps)
    ran[0].marks = Marks(steps(first, count, 0.0, 0.0))
    spent = seconds(measure(times, 0.0, now))
    lost = sum(one.lost_s for one in failures(times, now))
    assert lost == pytest.approx(sum(spent.get(kind, 0.0) for kind in (*AT_FAULT, *STARTS)), abs=1e-3)


@given(histories())
def test_settling_keeps_time_lost(history: tuple[JobTimes, float]) -> None:
    times, now = history
    before = time_lost(times, now)
    if len(times.attempts) > ATTEMPTS_KEPT or not any(one.marks.steps for one in times.attempts[:1]):
        return  # of attempts that are settled before the first step is known, less is known
    settle(times, 0.0)
    after = time_lost(times, now)
    for cause in before.keys() | after.keys():
        assert after[cause].count == before[cause].count
        assert after[cause].seconds == pytest.approx(before[cause].seconds, abs=1e-3)
        assert after[cause].worst_s == pytest.approx(before[cause].worst_s, abs=1e-3)


def test_many_failures_take_little_room_and_time() -> None:
    """Each loses 3 s, every hundredth 30 s."""
    times, now = JobTimes(), 0.0
    for number in range(1, 3_001):
        times.assigned(number, 4.0, now)
        settle(times, 0.0)
        times.began(now)
        times.attempts[-1].marks = Marks(steps(number * 5, 5, 0.0, 1.0))
        times.failed(C.LOST)
        times.ended(now := now + 5.0)
        now += 30.0 if number % 100 == 0 else 3.0
    (lost,) = time_lost(times, now).values()
    assert (lost.count, lost.median_s, lost.worst_s) == (2_999, 3.0, 30.0)
    assert lost.seconds == pytest.approx(2_970 * 3.0 + 29 * 30.0, abs=1.0)
    assert (len(times.attempts), len(lost.latest)) == (2, LATEST_KEPT)


def test_move_costs_what_planned_moves_did_without_wait() -> None:
    evicted = TimeLost(2, 80.0, worst_s=70.0, latest=((70.0, 60.0), (12.0, 0.0)))
    assert move_s({C.EVICTED: evicted, C.LOST: TimeLost(1, 99.0, latest=((99.0, 0.0),))}) == 11.0
    assert move_s({C.LOST: evicted}) == 11.0, "a failure costs more than a move"
    assert move_s({}) is None


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


def test_time_lost_is_googles_badput_of_second_attempt_on() -> None:
    first, second = (attempt(number, recorded, 1) for number, recorded in enumerate(RUN["attempts"], 1))
    (failure,) = failures(JobTimes([first, second], ended_at=RUN["ended"], succeeded=True), 1e9)
    alone = Totals.of(measure(JobTimes([first]), 0.0, first.ended_at or 0.0)).seconds
    kinds = [kind.value for kind in (*AT_FAULT, *STARTS, K.DATA_LOADING_SYNC, K.UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME)]
    starts = sum(alone.get(kind, 0.0) for kind in kinds if kind != RECOVERY.value)
    assert failure.lost_s == pytest.approx(sum(THEIRS[kind] for kind in kinds) - starts, abs=0.1)
