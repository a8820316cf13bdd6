"""Which mode a run has, and which faults happen to a simulated one; what makes no sense is refused with the nearest."""

from typing import Any

import pytest

from iris_ray import IrisClient, run_on_pod
from iris_ray.client.run_options import local_mode
from iris_ray.errors import InvalidJobError, InvalidModeError
from iris_ray.local.mode import (
    FORMS,
    Mode,
    ModeKind,
    PlannedFault,
    chosen_mode,
    parse_schedule,
    require_possible,
)
from tests.support.requests import hello


def said_by(variable: str) -> dict[str, str]:
    return {"IRIS_RAY_MODE": variable}


@pytest.mark.parametrize(
    ("mode", "variable", "kind"),
    [
        (None, "", None),
        (None, "simple", ModeKind.SIMPLE),
        (None, "Validate", ModeKind.VALIDATE),
        ("simulate", "simple", ModeKind.SIMULATE),
        ("cluster", "simple", None),
        (" Cluster", "simple", None),
    ],
)
def test_mode_argument_wins_over_variable_and_cluster_is_default(
    mode: str | None, variable: str, kind: ModeKind | None
) -> None:
    assert local_mode(mode, None, said_by(variable)) == (kind and Mode(kind))


@pytest.mark.parametrize(
    "given",
    [
        (None, "kill slice 0 after 30s", {}),
        ("simulate", "kill slice 0 after 30s", {}),
        ("simulate: Kill slice  0 after 30 s", None, {}),
        (None, None, said_by("simulate:kill slice 0 after 0.5m")),
    ],
)
def test_faults_come_from_argument_or_mode_suffix(given: Any) -> None:
    mode = chosen_mode(*given)
    assert mode.kind is ModeKind.SIMULATE
    (fault,) = mode.faults
    assert (fault.action, fault.slice_number, fault.host, fault.after_s) == ("kill", 0, None, 30.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("simpel", None, {}), "mode is 'simpel'.*did you mean 'simple'"),
        ((None, None, said_by("simulation")), "IRIS_RAY_MODE is 'simulation'.*did you mean 'simulate'"),
        (("xyz", None, {}), "give one of cluster, simple, validate, simulate"),
        ((7, None, {}), "mode is 7; give one of"),
        (("simple: kill slice 0 after 1s", None, {}), "only simulate takes faults"),
        (("simple", "kill slice 0 after 1s", {}), "leave one of them out"),
        ((None, 30, {}), 'simulate is 30; give faults, such as "kill slice 0 after 30s"'),
        ((None, "kil slice 2 after 5s", {}), "did you mean 'kill slice 2 after 5s'"),
        ((None, "kill slice 0 after 5", {}), "lacks the unit of a time; did you mean 'kill slice 0 after 5s'"),
        (
            (None, "preempt slice 0 after 5 with 2.5 notice", {}),
            "lacks the unit of a time; did you mean 'preempt slice 0 after 5s with 2.5s notice'",
        ),
        ((None, "kill the world", {}), "did you mean 'kill slice 0 after 30s'"),
        ((None, "freeze slice 1 host 1 after 2s", {}), "did you mean 'freeze host 1 of slice 1 after 2s'"),
        ((None, "preempt slice 0 after 1m with notice of 9s", {}), "'preempt slice 0 after 1m with 9s notice'"),
    ],
)
def test_invalid_mode_or_fault_is_refused_with_nearest(given: Any, said: str) -> None:
    with pytest.raises(InvalidModeError, match=said):
        chosen_mode(*given)


def test_faults_are_sorted_and_parsed_in_every_form() -> None:
    values = {"SLICE": "1", "HOST": "0", "TIME": "2s", "NOTICE": "3s"}
    for form in FORMS:
        text = form
        for place, value in values.items():
            text = text.replace(place, value)
        (fault,) = parse_schedule("simulate", text)
        assert (fault.text, fault.after_s) == (text, 2.0)
    faults = parse_schedule("simulate", "kill slice 1 after 1m, preempt slice 0 after 20s with 5s notice, ")
    assert [fault.after_s for fault in faults] == [20.0, 60.0]
    assert faults[0].notice_s == 5.0


@pytest.mark.parametrize("fault", ["kill slice 0 after 9000h", "preempt slice 0 after 1s with 10000000000s notice"])
def test_fault_too_late_to_await_is_refused(fault: str) -> None:
    with pytest.raises(InvalidModeError, match="has a time of more than a year"):
        parse_schedule("simulate", fault)


def test_fault_of_missing_slice_is_refused_unless_replacement() -> None:
    first, second = parse_schedule("simulate", "kill slice 0 after 1s, kill slice 2 after 2s")
    require_possible([first, second], slices=2, hosts=2)
    with pytest.raises(InvalidModeError, match="'kill slice 2 after 2s': by then there are only the slices 0 to 1"):
        require_possible([second], slices=2, hosts=2)
    with pytest.raises(InvalidModeError, match="a slice has the hosts 0 to 1"):
        require_possible([PlannedFault("kill host 2", "kill", 1.0, 0, 2)], slices=1, hosts=2)


def test_impossible_fault_is_refused_before_cluster_starts() -> None:
    with pytest.raises(InvalidModeError, match="only the slices 0 to 0"):
        run_on_pod(hello, "v4-16", simulate="kill slice 1 after 1s")


def test_gang_too_large_for_simulated_hosts_is_refused() -> None:
    with pytest.raises(InvalidJobError, match=r"2 slices of v4-1024 have 256 hosts.* 32 .*smaller type"):
        run_on_pod(hello, "v4-1024", num_slices=2, mode="simulate")


def test_cluster_client_is_refused_in_local_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_RAY_MODE", "simple")
    with pytest.raises(InvalidModeError, match=r"IrisClient\.local"):
        IrisClient()
