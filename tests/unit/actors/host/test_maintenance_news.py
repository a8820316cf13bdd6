"""What is new in a series of answers about a host's maintenance."""

import json
from datetime import UTC, datetime

import pytest

from iris_ray.actors.host.metadata import Answer, CalledOff, MaintenanceNews, maintenance_notice
from iris_ray.model.notices import HostNotice

NOW, LEAD_S = 1_000_000.0, 600.0
NOTHING = Answer(503, '{"error": "no notifications have been received yet, try again later"}', "")
NONSENSE = Answer(200, "<html>", "")


def planned(in_s: float) -> Answer:
    start = datetime.fromtimestamp(NOW + in_s, UTC).isoformat()
    return Answer(200, json.dumps({"window_start_time": start}), "")


def notice(answer: Answer) -> HostNotice:
    found = maintenance_notice(answer.body)
    assert found is not None
    return found


def news(*answers: Answer | None, announced: HostNotice | None = None) -> list[HostNotice | CalledOff | None]:
    """Return what is new with each answer; None stands for no answer."""
    series, found = MaintenanceNews(LEAD_S, announced), []
    for answer in answers:
        if answer is None:
            series.heard_nothing()
        found.append(None if answer is None else series.heard(answer, NOW))
    return found


def test_maintenance_is_told_once_and_again_when_moved() -> None:
    near, moved = planned(300), planned(60)
    assert news(near, near, moved, moved) == [notice(near), None, notice(moved), None]


def test_distant_maintenance_is_told_when_near() -> None:
    week, near = planned(7 * 86_400), planned(LEAD_S)
    assert news(week, near) == [None, notice(near)]


def test_undated_maintenance_is_near() -> None:
    soon = Answer(200, '{"window_start_time": "soon"}', "")
    assert news(soon) == [notice(soon)]


@pytest.mark.parametrize("denial", [NOTHING, planned(7 * 86_400)], ids=["none planned", "put off"])
def test_maintenance_is_called_off_after_two_consecutive_denials(denial: Answer) -> None:
    near = planned(300)
    assert news(near, denial, denial, denial, denial) == [notice(near), None, CalledOff.CALLED_OFF, None, None]


@pytest.mark.parametrize("between", [None, NONSENSE, planned(300)], ids=["no answer", "no sense", "still planned"])
def test_interrupted_denials_call_nothing_off(between: Answer | None) -> None:
    assert news(planned(300), NOTHING, between, NOTHING)[1:] == [None, None, None]


def test_earlier_announced_maintenance_is_only_called_off() -> None:
    near = planned(300)
    assert news(near, NOTHING, NOTHING, announced=notice(near)) == [None, None, CalledOff.CALLED_OFF]


def test_unannounced_maintenance_is_not_called_off() -> None:
    assert news(NOTHING, NOTHING, NOTHING) == [None, None, None]
