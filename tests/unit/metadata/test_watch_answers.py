"""What a host's metadata server says: where it is, and what it announces about maintenance."""

import json
from datetime import UTC, datetime

import pytest

from iris_ray.metadata.watch import (
    WELL_KNOWN_HOSTS,
    Answer,
    CalledOff,
    MaintenanceNews,
    denies_maintenance,
    maintenance_notice,
    metadata_hosts,
)
from iris_ray.model.notices import HostNotice, NoticeKind


def test_metadata_address_comes_from_environment_or_is_well_known() -> None:
    assert metadata_hosts({"GCE_METADATA_HOST": "10.0.0.1:80"}) == ("10.0.0.1:80",)
    ours = {"IRIS_RAY_TEST_METADATA_HOST": "127.1.1.1:5", "GCE_METADATA_HOST": "10.0.0.1:80"}
    assert metadata_hosts(ours) == ("127.1.1.1:5",)
    assert metadata_hosts({"GCE_METADATA_HOST": ""}) == WELL_KNOWN_HOSTS


# -- one answer about maintenance -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nothing",
    [
        "",
        "{ }",
        "NONE",
        '"NONE"',
        '{ "error": "no notifications have been received yet, try again later" }',
        "[1]",
        '{"window_start_time": 17}',
        "<html>",
    ],
)
def test_unplanned_maintenance_is_none(nothing: str) -> None:
    assert maintenance_notice(nothing) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"window_start_time": "2026-01-02T03:04:05Z", "maintenance_type": "SCHEDULED", "can_reschedule": "true"},
        {"windowStartTime": "2026-01-02T04:04:05+01:00", "type": "SCHEDULED"},
    ],
)
def test_planned_maintenance_has_its_deadline(fields: dict[str, str]) -> None:
    notice = maintenance_notice(json.dumps(fields))
    assert notice is not None
    assert (notice.kind, notice.deadline) == (NoticeKind.MAINTENANCE, 1_767_323_045.0)
    assert "SCHEDULED" in notice.reason
    assert "2026-01-02T0" in notice.reason


def test_maintenance_at_senseless_time_has_no_deadline() -> None:
    notice = maintenance_notice('{"window_start_time": "soon"}')
    assert notice is not None
    assert notice.deadline is None


@pytest.mark.parametrize(
    ("status", "body", "denied"),
    [
        (200, "NONE", True),
        (200, '"NONE"', True),
        (200, "{ }", True),
        (200, '{ "error": "no notifications have been received yet, try again later" }', True),
        (503, '{ "error": "no notifications have been received yet, try again later" }', True),
        (404, "<html>not found</html>", True),
        (503, "Service Unavailable", False),
        (503, "", False),
        (500, '{ "error": "internal" }', False),
        (429, "NONE", False),
        (200, "", False),
        (200, "<html>", False),
        (200, "[1]", False),
        (200, '{"window_start_time": 17}', False),
        (200, "[" * 60_000, False),
    ],
)
def test_denial_of_maintenance_differs_from_no_answer(status: int, body: str, denied: bool) -> None:
    assert denies_maintenance(Answer(status, body, "")) is denied


# -- a series of answers ----------------------------------------------------------------------------------------------


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
