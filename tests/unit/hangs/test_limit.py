"""After how long without a heartbeat a gang counts as hung."""

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.hangs.limit import FACTOR, FLOOR_S, StallLimit
from iris_ray.model.rhythm import ENOUGH_STEPS, FIRST_STEPS, Rhythm, RhythmMeter

LOOK_S = 5.0

Part = tuple[str | None, float]
"""A declared pause or a part of a step, and its seconds."""


class Gang:
    """One process and the pool that looks at it, in simulated time.

    Attributes:
        limit: the gang's; several attempts may share it.
        alarm: at which step the gang was ended, or None.
    """

    def __init__(self, limit: StallLimit) -> None:
        self.limit = limit
        self.limit.attempt_begins()
        self.meter = RhythmMeter()
        self.now = self.looked_at = self.alive_at = 0.0
        self.has_beaten = False
        self.step = 0
        self.alarm: int | None = None

    def run(self, steps: Iterable[Iterable[Part]]) -> int | None:
        """Take these steps, and return the one at which the gang was ended."""
        for self.step, parts in enumerate(steps):
            if self.meter.beat(self.now):
                self.limit.note([self.meter.told])
            self.alive_at, self.has_beaten = self.now, True
            for what, seconds in parts:
                if what is not None:
                    self.meter.pause_begins(what, self.now)
                self._pass(seconds)
                if self.alarm is not None:
                    return self.alarm
                if what is not None:
                    self.meter.pause_ends(what, seconds, self.now)
                    self.alive_at = self.now
        return None

    def _pass(self, seconds: float) -> None:
        """Let time pass with no heartbeat and no change, and look every `LOOK_S`."""
        end, told = self.now + seconds, self.meter.told
        self.limit.note([told])
        allowed = self.limit.seconds({told.pause} if told.pause else set(), self.step)
        self.now = end
        if self.has_beaten and allowed is not None:
            looked_at = LOOK_S * math.floor((self.alive_at + allowed) / LOOK_S + 1)  # the first look that is too late
            if looked_at <= end:
                self.now = self.looked_at = looked_at
                self.limit.alarmed(self.step, self.now - self.alive_at)
                self.alarm = self.step


def train(*seconds: float, then: Iterable[Iterable[Part]] = ()) -> list[Iterable[Part]]:
    return [*([(None, one)] for one in seconds), *then]


STEADY = [1.0] * (FIRST_STEPS + 1 + ENOUGH_STEPS)
FOR_EVER = 1e6


@given(st.integers(0, 2**32), st.floats(0.01, 2000.0))
def test_thousand_steps_varying_fivefold_raise_no_alarm(seed: int, shortest: float) -> None:
    chance = random.Random(seed)
    steps = [shortest * chance.uniform(1.0, 5.0) for _ in range(1000)]
    assert Gang(StallLimit(None)).run(train(*steps)) is None


@pytest.mark.parametrize(("step_s", "limit_s"), [(1.0, FLOOR_S), (90.0, 90.0 * FACTOR)])
def test_hang_after_enough_steps_is_found_in_time(step_s: float, limit_s: float) -> None:
    gang = Gang(StallLimit(None))
    steps = [step_s] * len(STEADY)
    assert gang.run(train(300.0, *steps, FOR_EVER)) == len(steps) + 1
    assert limit_s < gang.looked_at - gang.alive_at <= limit_s + LOOK_S


@pytest.mark.parametrize(
    "steps",
    [
        [FOR_EVER],
        [1.0, 1.0, FOR_EVER],
        [1.0] * (FIRST_STEPS + ENOUGH_STEPS - 1) + [FOR_EVER],
    ],
    ids=["compilation", "second compilation", "before enough steps"],
)
def test_gang_without_known_rhythm_is_never_ended(steps: list[float]) -> None:
    assert Gang(StallLimit(None)).run(train(*steps)) is None
    assert StallLimit(None).seconds() is None, "nor one without heartbeats"


def test_compilation_of_next_attempt_is_not_limited() -> None:
    limit = StallLimit(None)
    assert Gang(limit).run(train(*STEADY)) is None
    assert Gang(limit).run(train(FOR_EVER, *STEADY)) is None
    later = Gang(limit)
    assert later.run(train(*[1.0] * (FIRST_STEPS + 2), FOR_EVER)) is not None, "what was learned stays known"
    assert later.limit.seconds() == FLOOR_S, "without what compilations took"


@pytest.mark.parametrize("what", ["evaluation", "checkpoint_save"])
def test_declared_pause_fifty_times_a_step_raises_no_alarm(what: str) -> None:
    pause: list[Part] = [(None, 40.0), (what, 50 * 90.0), (None, 50.0)]
    steps = [pause if number % 100 == 50 else [(None, 90.0)] for number in range(1000)]
    gang = Gang(StallLimit(None))
    assert gang.run(steps) is None
    assert gang.limit.seconds() == FACTOR * 90.0, "a pause is no long step"
    assert gang.limit.seconds({what}) == FACTOR * 50 * 90.0
    assert gang.limit.seconds({"data_loading"}) is None, "nothing is known of that kind"


def test_hang_in_known_pause_is_found() -> None:
    saves: list[Part] = [("checkpoint_save", 100.0)]
    hangs: list[Part] = [("checkpoint_save", FOR_EVER)]
    gang = Gang(StallLimit(None))
    assert gang.run(train(*STEADY, then=[saves, [(None, 1.0)], hangs])) == len(STEADY) + 2
    assert FACTOR * 100.0 < gang.looked_at - gang.alive_at <= FACTOR * 100.0 + LOOK_S


def test_undeclared_pause_costs_one_attempt_and_is_known_then() -> None:
    limit = StallLimit(None)
    steps = [50 * 90.0 if number % 100 == 50 else 90.0 for number in range(1000)]
    assert Gang(limit).run(train(*steps)) == 50
    assert Gang(limit).run(train(*steps)) is None
    assert Gang(limit).run(train(*steps)) is None


def test_hang_elsewhere_after_alarm_has_same_limit() -> None:
    limit = StallLimit(None)
    limit.note([Rhythm(ENOUGH_STEPS, 1.0)])
    limit.alarmed(7, 700.0)
    assert limit.seconds(step=8) == FLOOR_S
    assert limit.seconds(step=7) == FACTOR * 700.0


@pytest.mark.parametrize(("option", "limit_s"), [(30.0, 30.0), (0, None)])
def test_users_limit_holds_from_the_start(option: float, limit_s: float | None) -> None:
    limit = StallLimit(option)
    assert limit.seconds() == limit_s
    limit.note([Rhythm(1000, 9.0)])
    assert limit.seconds({"checkpoint_save"}, 5) == limit_s
    assert limit.in_words() == (None if limit_s is None else "30 s (stall_timeout)")


def test_job_that_must_not_lose_an_attempt_has_no_learned_limit() -> None:
    limit = StallLimit(None, learns=False)
    limit.note([Rhythm(1000, 9.0)])
    assert limit.seconds() is None


def test_limit_says_where_it_comes_from() -> None:
    limit = StallLimit(None)
    assert limit.in_words() is None
    limit.note([Rhythm(ENOUGH_STEPS, 2.5, None, {"evaluation": 300.0})])
    assert limit.in_words() == "600 s (learned: the longest step took 2.5 s)"
    assert limit.in_words({"evaluation"}) == "3000 s (learned: 10 times the longest step or pause, 300 s)"


def test_pauses_of_several_threads_may_overlap() -> None:
    meter = RhythmMeter()
    for number in range(FIRST_STEPS + 2):
        meter.beat(10.0 * number)
    began = 10.0 * (FIRST_STEPS + 1)
    meter.pause_begins("checkpoint_save", began + 1.0)
    meter.pause_begins("evaluation", began + 2.0)
    meter.pause_ends("checkpoint_save", 4.0, began + 5.0)
    assert meter.told.pause == "evaluation"
    meter.pause_ends("evaluation", 7.0, began + 9.0)
    meter.beat(began + 30.0)
    assert meter.told == Rhythm(2, 22.0, None, {"checkpoint_save": 4.0, "evaluation": 7.0})
