"""Durations as people write them."""

import pytest

from iris_ray.model.durations import parse_duration, written_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("0", 0.0),
        ("0.5", 0.5),
        ("90s", 90.0),
        ("15m", 900.0),
        ("1.5h", 5400.0),
        (" 7D ", 604_800.0),
        ("2w", 1_209_600.0),
        ("1h30m", 5400.0),
        ("2d05h", 190_800.0),
    ],
)
def test_duration_in_any_unit_is_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "1y", "5 m", "h", "1e3", "m5", "٣", "9" * 400])
def test_text_without_a_unit_of_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="90, 90s, 15m, 2h, 7d or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0s", "90s", "1m", "15m", "36h", "1d", "2w", "0.5s"])
def test_written_duration_is_read_as_itself(text: str) -> None:
    assert written_duration(parse_duration(text)) == text
