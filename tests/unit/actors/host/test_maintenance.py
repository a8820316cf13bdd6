"""What a metadata server says about maintenance, in any form."""

import json

import pytest

from iris_ray.actors.host.metadata import Answer, denies_maintenance, maintenance_notice
from iris_ray.model.notices import NoticeKind


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
    ],
)
def test_denial_of_maintenance_differs_from_no_answer(status: int, body: str, denied: bool) -> None:
    assert denies_maintenance(Answer(status, body, "")) is denied
