"""Sums of time: of the chips of a cluster, and of jobs that are forgotten."""

import json
import math

import pytest

from iris_ray.errors import InvalidRequestError
from iris_ray.goodput.calls import UserDay
from iris_ray.goodput.sums import (
    DAY_S,
    DAYS_KEPT,
    ENTRIES_KEPT,
    ChipState,
    FleetTimes,
    Sums,
    UserTimes,
)
from iris_ray.model.goodput import ForgottenJob, Totals

# -- chips ------------------------------------------------------------------------------------------------------------


def test_chip_seconds_add_up_by_day() -> None:
    times = FleetTimes()
    times.add("2026-11-22", {ChipState.BUSY: 8.0, ChipState.FREE: 4.0}, 10.0)
    times.add("2026-11-23", {ChipState.BUSY: 8.0}, 10.0)
    times.add("2026-11-23", {ChipState.BUSY: 4.0, ChipState.QUARANTINED: 4.0}, 5.0)
    assert times.since("2026-11-23") == {"2026-11-23": {"busy": 100.0, "quarantined": 20.0}}
    assert times.since("2026-01-01").keys() == {"2026-11-22", "2026-11-23"}


def test_only_the_latest_days_are_kept() -> None:
    times = FleetTimes()
    for day in range(10 * DAYS_KEPT):
        times.add(f"{day:010}", {ChipState.FREE: 1.0}, 1.0)
    assert len(times.since("")) == DAYS_KEPT
    assert f"{10 * DAYS_KEPT - 1:010}" in times.since("")


# -- forgotten jobs ---------------------------------------------------------------------------------------------------


def job(user: str, day: float, productive: float) -> ForgottenJob:
    return ForgottenJob(user, day * DAY_S, Totals({"productive": productive, "queueing": 1.0}, {"productive": 8.0}))


def test_user_times_add_up_by_day() -> None:
    times = UserTimes()
    for one in (job("ann", 3.1, 10.0), job("ann", 3.9, 20.0), job("bob", 3.5, 5.0), job("ann", 4.0, 1.0)):
        times.add(one)
    assert times.since(4.5 * DAY_S) == [UserDay(4, "ann", 1, {"productive": 1.0, "queueing": 1.0}, {"productive": 8.0})]
    first = times.since(3.2 * DAY_S)[0]
    assert (first.user, first.jobs, first.seconds) == ("ann", 2, {"productive": 30.0, "queueing": 2.0})


def test_earliest_days_are_dropped_to_keep_record_small() -> None:
    sums = Sums()
    for day in range(3 * ENTRIES_KEPT):
        sums.users.add(job("a user with a name of some length", day, 123456.789))
    assert len(sums.users.since(0.0)) == ENTRIES_KEPT
    assert sums.users.since(0.0)[-1].day == 3 * ENTRIES_KEPT - 1
    assert len(sums.to_json()) < 100_000


@pytest.mark.parametrize("damaged", [b"", b"7", b'{"users": 7}', b'[{"kind": "user_day"}]'])
def test_damaged_record_is_refused(damaged: bytes) -> None:
    with pytest.raises((ValueError, TypeError, InvalidRequestError)):
        Sums.read(damaged)


def test_user_times_are_kept_apart_by_team() -> None:
    times = UserTimes()
    for team in ("ads", "", "ads"):
        times.add(ForgottenJob("ann", DAY_S, Totals({"productive": 1.0}, {}), team))
    assert [(one.team, one.jobs) for one in times.since(0.0)] == [("", 1), ("ads", 2)]


# -- both together -----------------------------------------------------------------------------------------------------


def both() -> Sums:
    sums = Sums()
    sums.users.add(job("ann", 3.1, 10.0))
    sums.users.add(ForgottenJob("ann", DAY_S, Totals({"productive": 1.0}, {}), "ads"))
    sums.fleet.add("2026-11-22", {ChipState.BUSY: 8.0}, 10.0)
    return sums


def test_sums_are_the_same_after_record_and_after_export() -> None:
    exported, merged = Sums(), Sums()
    for line in both().lines():
        exported.add_line(line)
    merged.include(Sums.read(both().to_json()))
    assert exported.lines() == merged.lines() == both().lines()


def test_finished_jobs_of_an_export_are_summed() -> None:
    sums = Sums()
    line = {"kind": "finished", "user": "ann", "ended_at": 3.1 * DAY_S, "seconds": {"productive": 10.0}}
    sums.add_line({**line, "chip_seconds": {}})
    sums.add_line({**line, "seconds": {}, "chip_seconds": {}})
    sums.add_line({"kind": "setting"})
    assert sums.users.since(0.0) == [UserDay(3, "ann", 1, {"productive": 10.0})]


DAY = {"kind": "user_day", "day": 3, "user": "ann", "jobs": 1, "seconds": {}, "chip_seconds": {}}
FINISHED = {"kind": "finished", "user": "ann", "ended_at": DAY_S, "seconds": {"productive": 1.0}, "chip_seconds": {}}


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "user_day"},
        {"kind": "fleet_day", "day": "x", "chip_seconds": {"tea": 1}},
        {"kind": "fleet_day", "day": "2026-11-22", "chip_seconds": {"busy": math.nan}},
        DAY | {"jobs": math.inf},
        DAY | {"day": 10**30},
        DAY | {"seconds": {"productive": math.nan}},
        DAY | {"user": "x" * 1_000_000},
        FINISHED | {"ended_at": math.inf},
        FINISHED | {"chip_seconds": {"productive": math.inf}},
        FINISHED | {"team": "x" * 1_000_000},
    ],
)
def test_line_that_makes_no_sense_is_refused(line: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="can't be read"):
        Sums.of_export(json.dumps([DAY, line]).encode())


@pytest.mark.parametrize("lines", [b"", b"[" * 1_000_000, b"\xff", b"7"])
def test_lines_that_are_no_export_are_refused(lines: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"not JSON|can't be read"):
        Sums.of_export(lines)
