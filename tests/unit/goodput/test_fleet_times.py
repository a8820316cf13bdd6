"""What the chips of a cluster were in."""

import pytest

from iris_ray.model.goodput_sums import DAYS_KEPT, ChipState, FleetTimes


def test_chip_seconds_add_up_by_day_across_restart() -> None:
    times = FleetTimes()
    times.add("2026-11-22", {ChipState.BUSY: 8.0, ChipState.FREE: 4.0}, 10.0)
    times.add("2026-11-23", {ChipState.BUSY: 8.0}, 10.0)
    times.add("2026-11-23", {ChipState.BUSY: 4.0, ChipState.QUARANTINED: 4.0}, 5.0)
    successor = FleetTimes()
    successor.restore(times.to_json())
    assert successor.since("2026-01-01") == times.since("2026-01-01")
    assert successor.since("2026-11-23") == {"2026-11-23": {"busy": 100.0, "quarantined": 20.0}}


def test_only_the_latest_days_are_kept() -> None:
    times = FleetTimes()
    for day in range(10 * DAYS_KEPT):
        times.add(f"{day:010}", {ChipState.FREE: 1.0}, 1.0)
    assert len(times.since("")) == DAYS_KEPT
    assert f"{10 * DAYS_KEPT - 1:010}" in times.since("")


@pytest.mark.parametrize("damaged", [b"", b"[]", b'{"2026-11-23": {"tea": 1}}', b'{"2026-11-23": 7}'])
def test_damaged_record_is_refused(damaged: bytes) -> None:
    with pytest.raises((ValueError, AttributeError)):
        FleetTimes().restore(damaged)
