"""Demand that Ray's autoscaler gets to see, when Ray fails to do what it is asked."""

from typing import Any

import pytest

from iris_ray.capacity import autoscaler as autoscaler_demand
from iris_ray.capacity.autoscaler import AutoscalerDemand

MISSING = {"v4-16": [1, 1]}


class Groups:
    """Ray's placement groups, by id. Calls fail when they have been made so often."""

    def __init__(self) -> None:
        self.there: dict[str, str] = {}
        self.bundles: list[Any] = []
        self.made = 0
        self.works_until: dict[str, int] = {}

    def make(self, bundles: Any, name: str, bundle_label_selector: Any) -> str:
        self._work("make")
        self.made += 1
        self.bundles.append((bundles, bundle_label_selector))
        self.there[f"group-{self.made}"] = name
        return f"group-{self.made}"

    def table(self, group: str) -> dict[str, Any]:
        return {"state": "PENDING"} if group in self.there else {}

    def remove(self, group: str) -> None:
        self._work("remove")
        self.there.pop(group, None)

    def _work(self, what: str) -> None:
        if self.works_until.get(what) == 0:
            raise RuntimeError("There was timeout")
        if what in self.works_until:
            self.works_until[what] -= 1


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    groups = Groups()
    monkeypatch.setattr(autoscaler_demand, "placement_group", groups.make)
    monkeypatch.setattr(autoscaler_demand, "placement_group_table", groups.table)
    monkeypatch.setattr(autoscaler_demand, "placement_groups_in_use", lambda: dict(groups.there))
    monkeypatch.setattr(autoscaler_demand, "remove_placement_group", groups.remove)
    monkeypatch.setattr(autoscaler_demand, "placement_group_by_id", lambda group_id: group_id)
    monkeypatch.setattr(autoscaler_demand, "has_autoscaler_v2", lambda: True)
    return groups


@pytest.mark.parametrize("what", ["make", "remove"])
def test_demand_is_not_requested_twice_after_failed_call(groups: Groups, what: str) -> None:
    demand = AutoscalerDemand()
    demand.update(MISSING, {})
    assert len(groups.there) == 2
    groups.works_until = {what: 1}
    with pytest.raises(RuntimeError):
        demand.update(MISSING, {"a-new-one": ("v4-16", True)})  # other groups are to be made, that keep off it
    groups.works_until = {}
    demand.update(MISSING, {"a-new-one": ("v4-16", True)})
    assert len(groups.there) == 2
    demand.update({}, {"a-new-one": ("v4-16", True)})
    assert not groups.there


@pytest.mark.parametrize(
    ("setting", "has_autoscaler", "shown"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_demand_is_shown_by_setting_or_running_autoscaler(
    setting: bool | None, has_autoscaler: bool, shown: bool
) -> None:
    assert AutoscalerDemand(has_autoscaler).is_shown(setting) is shown


def test_groups_of_a_process_before_count_until_they_are_removed(groups: Groups) -> None:
    AutoscalerDemand().update(MISSING, {})
    demand = AutoscalerDemand()
    assert not demand.is_gone
    demand.update({}, {})
    assert demand.is_gone
    assert not groups.there


@pytest.mark.parametrize(("counts_hosts", "bundles"), [(False, 1), (True, 4)])
def test_group_has_one_bundle_for_each_launch(groups: Groups, counts_hosts: bool, bundles: int) -> None:
    AutoscalerDemand(counts_hosts=counts_hosts).update({"v6e-16": [1]}, {"a": ("v6e-16", True)})
    kept_off = {"ray.io/tpu-slice-name": "!in(a)"}
    assert groups.bundles == [([{"TPU-v6e-16-head": 1.0}] * bundles, [kept_off] * bundles)]


def test_request_is_told_with_what_the_autoscaler_launches(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_demand, "autoscaler_launches", lambda: ("it is launching 2 of v4-16",))
    demand = AutoscalerDemand(has_autoscaler=True)
    demand.update(MISSING, {})
    assert demand.words("v4-16") == ("Ray's autoscaler is asked for 2 more", "it is launching 2 of v4-16")
    demand.update({}, {})
    assert demand.words("v4-16") == ()
