"""What people are told of the slices that provisioners have asked for."""

from types import SimpleNamespace

import pytest

from iris_ray.capacity.board import KEPT_S, MISSED_S, MOST_BATCHES, CapacityBoard, capacity_rows
from iris_ray.capacity.core import CapacityReport, SliceBatch, Trouble
from iris_ray.errors import InvalidRequestError, ProvisionerTakenError
from iris_ray.model.plain_values import plain

EPOCH = 1.7e9
WAITING = SliceBatch("v6e-16", "us-east5-a", "spot", False, 2, 32, EPOCH, 25.6)
HELD = SliceBatch("v6e-16", "res in us-east5-a", "reserved", True, 1, 16, EPOCH - 3600, 19.2)
FULL = CapacityReport(
    "iris",
    ("v6e-16", "v6e-32"),
    (WAITING, HELD),
    (Trouble("v6e-16", "res in us-east5-a", 3, "reservation res is full"),),
    (("v6e-32", "2 more wanted, but the budget is spent"),),
    undeleted=(("iris-v6e-16-1", "no role"), ("iris-v6e-16-2", "no role")),
)


def board_with(*reports: CapacityReport) -> tuple[CapacityBoard, list[float]]:
    times = [720.0]
    board = CapacityBoard(SimpleNamespace(now=lambda: times[0], wall=lambda at: EPOCH + at))  # type: ignore[arg-type]
    for report in reports:
        board.take(report)
    return board, times


def test_words_say_where_since_when_and_at_what_price() -> None:
    board, _ = board_with(FULL)
    assert board.words().get("v6e-16", ()) == (
        "provisioner iris has asked for 2 in us-east5-a (spot, for 12 min, 25.60 USD an hour)",
        "res in us-east5-a is not asked now: reservation res is full",
    )
    assert board.words()["v6e-32"] == ("provisioner iris asks for no more: 2 more wanted, but the budget is spent",)
    assert "v5p-16" not in board.words()


def test_words_say_for_whom_chips_are_taken_back() -> None:
    text = "takes 32 chips back for 1 v6e-32 for job: once a, b are deleted, res in us-east5-a is asked"
    board, _ = board_with(CapacityReport("iris", ("v6e-16", "v6e-32"), taken_back=(("v6e-32", text),)))
    assert board.words()["v6e-32"] == (f"provisioner iris {text}",)
    assert board.words()["v6e-16"] == ("provisioner iris has asked for none",)


def test_chip_hour_is_mean_price_of_slices_that_are_held() -> None:
    batches = (
        SliceBatch("v6e-16", "a", "spot", joined=True, slices=1, chips=16, since=0.0, hourly=16.0),
        SliceBatch("v6e-16", "b", "reserved", joined=True, slices=1, chips=16, since=0.0, hourly=48.0),
        SliceBatch("v6e-16", "b", "spot", joined=False, slices=9, chips=144, since=0.0, hourly=1.0),
        SliceBatch("v6e-16", "c", "spot", joined=True, slices=1, chips=16, since=0.0),
        SliceBatch("v6e-32", "c", "spot", joined=True, slices=1, chips=32, since=0.0, hourly=3.2),
    )
    board, times = board_with(CapacityReport("p", ("v6e-16",), batches, currency="EUR"))
    assert board.prices()["v6e-16"] == (2.0, "EUR")
    assert "v5p-16" not in board.prices()
    times[0] += KEPT_S
    assert board.prices() == {}


def test_report_replaces_earlier_one_and_silent_provisioner_is_dropped() -> None:
    board, times = board_with(FULL, CapacityReport("iris", ("v6e-16",)))
    assert board.words().get("v6e-16", ()) == ("provisioner iris has asked for none",)
    times[0] += KEPT_S
    assert (board.words(), board.reports()) == ({}, [])


def test_report_survives_the_check_of_messages() -> None:
    assert plain(CapacityReport, FULL, "report") == FULL


def test_provisioners_name_belongs_to_process_until_silence_or_end() -> None:
    board, times = board_with()
    board.lease("iris", "process 1 of a", 180.0)
    times[0] += 100.0
    board.lease("iris", "process 1 of a", 180.0)
    board.lease("another", "process 2 of b", 180.0)
    times[0] += 179.0
    with pytest.raises(ProvisionerTakenError, match=r"named iris: process 1 of a\..* silent for 1 s more.*--name"):
        board.lease("iris", "process 2 of b", 180.0)
    times[0] += 1.0
    board.lease("iris", "process 2 of b", 180.0)
    board.lease("iris", "process 2 of b", 0.0)
    board.lease("iris", "process 3 of c", 180.0)


@pytest.mark.parametrize("seconds", [1e300, float("inf"), float("nan"), -1.0])
def test_name_is_not_leased_for_ever(seconds: float) -> None:
    board, _ = board_with()
    with pytest.raises(InvalidRequestError, match="give seconds, 0 or more, 259200 at most"):
        board.lease("iris", "process 1 of a", seconds)
    board.lease("iris", "process 2 of b", 180.0)


def test_report_of_any_length_is_kept_short() -> None:
    why = ("no role",)
    long = CapacityReport("iris", ("v6e-16",) * 1000, waits=(("v6e-16", *why),) * 1000, undeleted=(("a", *why),) * 1000)
    (kept,) = board_with(long)[0].reports()
    assert {len(part) for part in (kept.tpu_types, kept.waits, kept.undeleted)} == {MOST_BATCHES}


def test_provisioner_is_overdue_unless_it_ended_in_order() -> None:
    """Also one that works and never gets to a report, as when no zone answers."""
    board, times = board_with()
    for owner in ("crashed", "ended", "failing"):
        board.lease(owner, "process 1", 180.0)
    for owner in ("crashed", "ended"):
        board.take(CapacityReport(owner))
    times[0] += 170.0
    board.lease("failing", "process 1", 180.0)
    board.lease("ended", "process 1", 0.0)
    assert board.overdue() == {"crashed": 0.0, "failing": 0.0}
    times[0] += 400.0
    assert board.overdue() == {"crashed": 390.0, "failing": 390.0}
    assert [report.owner for report in board.reports()] == ["crashed", "ended"], "what it asked for may still come"
    board.take(CapacityReport("failing"))
    times[0] += MISSED_S
    assert list(board.overdue()) == ["failing"]


def test_gauges_show_chips_wait_cost_and_failures_until_silence() -> None:
    board, times = board_with()
    board.lease("iris", "process 1", 60.0)
    board.take(FULL)
    spot, reserved = ("v6e-16", "us-east5-a"), ("v6e-16", "res in us-east5-a")
    shown = {
        ("iris_provisioned_chips", (*spot, "spot", "asked")): 32,
        ("iris_provisioned_chips", (*reserved, "reserved", "held")): 16,
        ("iris_provisioning_oldest_request", spot): 720.0,
        ("iris_provisioned_cost_per_hour", (*reserved, "reserved", "USD")): 19.2,
        ("iris_provisioner_failures", ("iris", "res in us-east5-a")): 3,
        ("iris_provisioner_undeleted_slices", ("iris",)): 2,
        ("iris_provisioner_overdue_seconds", ("iris",)): 0,
    }
    assert sorted(board.gauges()) == sorted((*named, value) for named, value in shown.items())
    times[0] += KEPT_S + 60.0
    assert board.gauges() == [("iris_provisioner_overdue_seconds", ("iris",), KEPT_S)]


def test_dashboard_has_a_row_for_each_lot_and_each_wait() -> None:
    rows = list(capacity_rows([FULL]).values())
    assert [(row["type"], row["source"], row["slices"], row["note"]) for row in rows] == [
        ("v6e-16", "us-east5-a", 2, ""),
        ("v6e-16", "res in us-east5-a", 1, ""),
        ("v6e-32", "", 0, "2 more wanted, but the budget is spent"),
    ]
