"""What the state learns of what gangs say of their saves, and how often."""

import math

import pytest

from iris_ray.actors.controller.progress_board import news_of_saves
from iris_ray.actors.protocol.messages import GangProgress, Saves
from iris_ray.model.jobs import Gang
from iris_ray.model.lifecycle import AttemptId
from iris_ray.state.events import AttemptSavesEvent

NOW = 10_000.0
ATTEMPT = AttemptId("job", 2, 0)


def gang(saved_at: float = 0.0, heeds: bool | None = None, attempt: int = 2) -> Gang:
    return Gang([], attempt=attempt, saved_at=saved_at, heeds_notices=heeds)


@pytest.mark.parametrize(
    ("known", "saves", "news"),
    [
        (gang(), Saves(), None),
        (gang(), Saves(5.0), AttemptSavesEvent(ATTEMPT, NOW - 5.0)),
        (gang(), Saves(-5.0, 300.0), AttemptSavesEvent(ATTEMPT, NOW, 300.0)),
        (gang(NOW - 64.0), Saves(5.0, 10.0), None),
        (gang(NOW - 66.0), Saves(5.0, 10.0), AttemptSavesEvent(ATTEMPT, NOW - 5.0, 10.0)),
        (gang(), Saves(heeds_notices=True), AttemptSavesEvent(ATTEMPT, 0.0, math.inf, True)),
        (gang(heeds=True), Saves(heeds_notices=True), None),
        (gang(heeds=False), Saves(heeds_notices=True), None),
        (gang(attempt=3), Saves(5.0, None, True), None),
    ],
    ids=repr,
)
def test_state_learns_of_saves_once_a_minute_and_of_asking_once(
    known: Gang, saves: Saves, news: AttemptSavesEvent | None
) -> None:
    assert news_of_saves(known, GangProgress(ATTEMPT, None, None, None, saves=saves), NOW) == news
